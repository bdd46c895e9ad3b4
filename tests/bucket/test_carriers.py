"""Payloads straight from their owner: what a carrier that fails, lies or sleeps may not do, and what members save."""

import contextlib
import os
import queue
import resource
import socket
import ssl
import threading
from dataclasses import replace

import pytest

import diloco.bucket.rounds as rounds_
from diloco.bucket import Bucket, carriers
from diloco.bucket.carriers import REFUSALS, STRANGERS, STREAMS, Address, Announced, Carrier, check_announced, digest_of
from diloco.bucket.members import UPLOAD, MemberOptions, Timing
from diloco.bucket.members import Member as Entry
from diloco.bucket.run import LEAST_DEADLINE, LONGEST_UPLOAD, Session
from diloco.bucket.store import Read
from diloco.bucket.store.backend import open_store
from diloco.bucket.store.envelope import Envelope
from diloco.errors import ConfigError
from diloco.exchange.reducer import Shard
from studies.bucket import direct
from tests.support.fake_reducer import job
from tests.support.members import PATIENT, Member, agree, until

LOCAL = "127.0.0.1"
HERE = check_announced(f"{LOCAL}:0", signed=False)
PAYLOAD = bytes(range(256)) * 4096  # more than the kernel takes before anyone reads
SIZE, DIGEST = len(PAYLOAD), digest_of(PAYLOAD)


@pytest.fixture
def owner():
    with contextlib.closing(Carrier()) as carrier:
        carrier.address = carrier.listen(HERE)
        carrier.offer(0, 1, {DIGEST: PAYLOAD})
        yield carrier


@pytest.fixture
def reader():
    with contextlib.closing(Carrier()) as carrier:
        yield carrier


def fetched(carrier, address, deadline=PATIENT, digest=DIGEST, size=SIZE):
    return carrier.fetch("owner", str(address), digest, size, deadline)


def connected(address, token=None):
    """A TLS connection to an owner, with a token or without."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    connection = context.wrap_socket(socket.create_connection((LOCAL, Address.read(address).port), PATIENT))
    connection.sendall(bytes.fromhex(Address.read(address).token) if token is None else token)
    return connection


def test_a_payload_comes_from_its_owner(owner, reader):
    assert fetched(reader, owner.address) == PAYLOAD
    assert reader.received == len(PAYLOAD)


def test_many_payloads_come_at_once_over_a_few_connections(owner, reader):
    payloads = {digest_of(data): data for data in (bytes([k]) * 100_000 for k in range(32))}
    owner.offer(0, 1, payloads)
    results = {}

    def fetch(digest):
        results[digest] = fetched(reader, owner.address, digest=digest, size=100_000)

    threads = [threading.Thread(target=fetch, args=(digest,)) for digest in payloads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == payloads
    assert len(owner._server._connections) <= STREAMS


def test_payloads_of_the_last_rounds_are_offered(owner, reader):
    for index in (2, 3):
        owner.offer(0, index, {digest_of(bytes([index])): bytes([index])})
    assert fetched(reader, owner.address, digest=digest_of(b"\2"), size=1) == b"\2"
    assert fetched(reader, owner.address, digest=digest_of(b"\3"), size=1) == b"\3"
    assert fetched(reader, owner.address) is None


def test_a_member_that_lacks_payloads_is_asked_for_others(owner, reader):
    for k in range(2 * REFUSALS):
        assert fetched(reader, owner.address, digest=digest_of(bytes([k]))) is None
    (connection,) = owner._server._connections
    assert fetched(reader, owner.address) == PAYLOAD
    assert [*owner._server._connections] == [connection]


@pytest.mark.parametrize("token", [bytes(16), b"short", b""])
def test_a_stranger_learns_nothing(owner, token, monkeypatch):
    with connected(owner.address, token) as connection, contextlib.suppress(OSError):  # it may be cut off at any time
        connection.sendall(bytes.fromhex(DIGEST) + b"and more")
        connection.settimeout(PATIENT)
        assert connection.recv(1) == b""


def test_a_stranger_who_says_too_little_is_let_go(owner, monkeypatch):
    monkeypatch.setattr(carriers, "HANDSHAKE", 0.2)
    port = Address.read(owner.address).port
    with socket.create_connection((LOCAL, port), PATIENT) as silent, contextlib.suppress(ConnectionResetError):
        assert silent.recv(1) == b""


def test_nobody_is_served_without_tls(owner):
    with socket.create_connection((LOCAL, Address.read(owner.address).port), PATIENT) as plain:
        plain.sendall(bytes.fromhex(Address.read(owner.address).token) + bytes.fromhex(DIGEST))
        with contextlib.suppress(ConnectionResetError):
            received = b""
            while data := plain.recv(1 << 16):
                received += data
            assert len(received) < 100  # an alert


def test_silent_strangers_keep_no_member_out(owner, reader, monkeypatch):
    monkeypatch.setattr(carriers, "HANDSHAKE", 10 * PATIENT)
    port = Address.read(owner.address).port
    strangers = [socket.create_connection((LOCAL, port), PATIENT) for _ in range(2 * STRANGERS)]
    assert fetched(reader, owner.address) == PAYLOAD
    assert len(owner._server._connections) <= STRANGERS + 2
    for stranger in strangers:
        stranger.close()


def test_a_slow_reader_holds_up_only_itself(owner, reader):
    with connected(owner.address) as slow:
        slow.sendall(bytes.fromhex(DIGEST) * 8)
        assert fetched(reader, owner.address) == PAYLOAD


def test_bytes_after_the_token_change_nothing(owner, reader):
    with connected(owner.address) as odd:
        odd.sendall(b"\0" * 1000)
    assert fetched(reader, owner.address) == PAYLOAD


@contextlib.contextmanager
def no_more_files():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = [os.open(os.devnull, os.O_RDONLY)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (opened[0] + 1, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                opened.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for number in opened:
            os.close(number)


@contextlib.contextmanager
def no_more_threads():
    def start(thread):
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        yield


@pytest.mark.parametrize("shortage", [no_more_files, no_more_threads])
def test_a_member_serves_again_after_a_shortage(shortage, reader):
    events = queue.Queue()
    with contextlib.closing(Carrier(lambda event, **values: events.put((event, values["reason"])))) as owner:
        address = owner.listen(HERE)
        owner.offer(0, 1, {DIGEST: PAYLOAD})
        with socket.socket() as stranger, shortage():
            stranger.connect((LOCAL, Address.read(address).port))
            event, reason = events.get(timeout=PATIENT)
        assert event == "not serving"
        assert "open files" in reason or "new thread" in reason
        assert fetched(reader, address) == PAYLOAD
        assert events.empty()


class Rogue:
    """An owner that does `serve` with each connection that begins with the token."""

    def __init__(self, serve):
        self._context, fingerprint = carriers._certificate()
        self._socket = socket.create_server((LOCAL, 0))
        self._serve, self.asked, self.ended = serve, 0, threading.Event()
        self.address = Address(LOCAL, self._socket.getsockname()[1], fingerprint, "00" * 16)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                plain, _ = self._socket.accept()
                threading.Thread(target=self._answer, args=(plain,), daemon=True).start()

    def _answer(self, plain):
        self.asked += 1
        with contextlib.suppress(OSError), plain:
            if self._serve is never_shakes_hands:
                self._serve(plain, self)
                return
            with self._context.wrap_socket(plain, server_side=True) as connection:
                carriers._receive(connection, 32)
                self._serve(connection, self)

    def close(self):
        self.ended.set()
        self._socket.close()


def length_of(data):
    return carriers._LENGTH.pack(len(data))


def never_shakes_hands(connection, rogue):
    rogue.ended.wait()


def never_answers(connection, rogue):
    rogue.ended.wait()


def closes(connection, rogue):
    pass


def cuts(connection, rogue):
    connection.sendall(length_of(PAYLOAD) + PAYLOAD[: len(PAYLOAD) // 2])


def lies(connection, rogue):
    connection.sendall(length_of(PAYLOAD) + PAYLOAD[:-1] + b"x")


def promises_much(connection, rogue):
    connection.sendall(carriers._LENGTH.pack(1 << 60))
    rogue.ended.wait()


def drips(connection, rogue):
    connection.sendall(length_of(PAYLOAD))
    while not rogue.ended.wait(0.01):
        connection.sendall(b"\0")


ROGUES = [never_shakes_hands, never_answers, closes, cuts, lies, promises_much, drips]


@pytest.mark.parametrize("serve", ROGUES)
def test_what_does_not_come_in_time_and_right_is_read_from_the_store(serve, reader):
    with contextlib.closing(Rogue(serve)) as rogue:
        for _ in range(REFUSALS):
            assert fetched(reader, rogue.address, deadline=0.5) is None
        asked = rogue.asked
        assert fetched(reader, rogue.address, deadline=0.5) is None
        assert rogue.asked == asked <= REFUSALS
    assert reader.received == 0


@pytest.mark.parametrize("address", ["", "nonsense", "127.0.0.1:1 a b c", "127.0.0.1:1 a b", "127.0.0.1:99999 a b",
                                     "no.such.host.invalid:1 a b", "\udcff:1 a b", "127.0.0.1:0 a b",
                                     "::1%lo:1 a b"])  # fmt: skip
def test_an_address_may_lead_nowhere(address, reader):
    assert fetched(reader, address) is None


def test_a_name_in_an_entry_is_not_resolved(owner, reader):
    address = Address.read(owner.address)
    assert fetched(reader, Address("localhost", address.port, address.fingerprint, address.token)) is None
    assert fetched(reader, address) == PAYLOAD


def test_a_name_is_announced_as_an_address(monkeypatch):
    resolve = socket.getaddrinfo
    addresses = {"lab": ["fd00::5", "10.1.2.3"], "debian": ["127.0.1.1"]}

    def resolved(host, *given, **more):
        return [found for name in addresses.get(host, [host]) for found in resolve(name, *given, **more)]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    assert check_announced("lab:7000", signed=True).host == "10.1.2.3"
    assert check_announced("localhost:7000", signed=False).host in ("127.0.0.1", "::1")
    assert check_announced("[fd00::5]:7000", signed=True).host == "fd00::5"
    for unreachable in ("debian:7000", "0.0.0.0:7000", "[::]:7000", "224.0.0.1:7000"):
        with pytest.raises(ConfigError, match="others cannot reach"):
            check_announced(unreachable, signed=True)


def test_another_certificate_than_the_one_in_the_entry_is_refused(owner, reader):
    address = Address.read(owner.address)
    assert fetched(reader, Address(LOCAL, address.port, "0" * 64, address.token)) is None


def test_a_member_that_failed_is_asked_again_after_a_while(owner, reader):
    events = []
    reader._report = lambda event, **values: events.append((event, values["member"]))
    owner.offer(0, 1, {DIGEST: PAYLOAD[1:]})
    for _ in range(REFUSALS):
        assert fetched(reader, owner.address) is None
    owner.offer(0, 1, {DIGEST: PAYLOAD})
    assert fetched(reader, owner.address) is None
    reader._owners["owner"]._until = 0.0  # the while is over
    assert fetched(reader, owner.address) == PAYLOAD
    assert events == [("not reached", "owner")]


def test_payloads_that_fail_together_are_one_failure(reader):
    """As over an uplink that is too slow for all pieces of a delta."""
    together = threading.Barrier(STREAMS)

    def all_at_once():
        threads = [threading.Thread(target=fetched, args=(reader, rogue.address)) for _ in range(STREAMS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    with contextlib.closing(Rogue(lambda connection, rogue: together.wait(PATIENT))) as rogue:
        for failures in range(1, REFUSALS + 1):
            all_at_once()
            owner = reader._owners["owner"]
            assert (owner.refusals, owner.resting) == (failures, failures == REFUSALS)


def test_a_member_has_as_long_for_a_payload_as_for_its_upload():
    session = Session(Envelope("r"), Entry("a", 0), Timing(MemberOptions(), 2), None, 1.0, 4)
    deadlines = []
    session.carrier.fetch = lambda *given: deadlines.append(given[-1])
    for counter, seconds in enumerate([{}, {UPLOAD: 9.0}, {UPLOAD: 1e30}, {UPLOAD: -1e30}]):
        session.timing.uploaded(0, 4.0)
        session.members.update([Entry("b", 0, counter, published=seconds, address="x")], session.clock())
        session.source("b", DIGEST, SIZE).function()
    assert deadlines == [LEAST_DEADLINE + 4.0, LEAST_DEADLINE + 9.0, LEAST_DEADLINE + LONGEST_UPLOAD, LEAST_DEADLINE]


def test_connections_to_members_that_are_gone_are_closed(owner, reader):
    assert fetched(reader, owner.address) == PAYLOAD
    (connection,) = reader._owners["owner"]._idle
    reader.keep({"owner"})
    assert connection.fileno() >= 0
    reader.keep(set())
    assert connection.fileno() < 0 and not reader._owners


def test_a_delta_that_was_replaced_is_not_served(reader):
    with contextlib.closing(Carrier()) as owner:
        address = owner.listen(HERE)
        owner.offer(0, 1, {"00" * 32: b"older"}, own_delta=True)
        owner.offer(0, 1, {"11" * 32: b"a share"})
        owner.offer(0, 1, {DIGEST: PAYLOAD}, own_delta=True)
        assert fetched(reader, address) == PAYLOAD
        assert set(owner._offered[0][1]) == {"11" * 32, DIGEST}


def test_a_member_that_comes_back_elsewhere_is_asked_there(owner, reader):
    for _ in range(REFUSALS):
        assert fetched(reader, "127.0.0.1:1 a b") is None
    assert fetched(reader, owner.address) == PAYLOAD


def test_connections_to_a_former_address_are_closed(owner, reader):
    assert fetched(reader, owner.address) == PAYLOAD
    former = reader._owners["owner"]
    (connection,) = former._idle
    late = threading.Thread(target=fetched, args=(reader, owner.address))
    with contextlib.closing(Carrier()) as other:
        elsewhere = other.listen(HERE)
        other.offer(0, 1, {DIGEST: PAYLOAD})
        with owner._lock:  # until here it does not answer
            late.start()
            until(lambda: not former._idle)
            assert fetched(reader, elsewhere) == PAYLOAD
        late.join()
    assert connection.fileno() == -1
    assert not former._idle


def test_ranks_without_enough_ports_are_refused(tmp_path):
    assert replace(HERE, port=65_534).of_rank(1, 2).port == 65_535
    assert HERE.of_rank(1, 2) == HERE
    for rank in range(2):
        bucket = Bucket(str(tmp_path), "a", announce=f"{LOCAL}:65535")
        with pytest.raises(ConfigError, match="announce 65534 or a lower one"):
            bucket.join(replace(job([], []), shard=Shard(rank, 2)))


def test_a_public_address_needs_a_secret():
    with pytest.raises(ConfigError, match="--key-file"):
        check_announced("8.8.8.8:7000", signed=False)
    assert check_announced("8.8.8.8:7000", signed=True) == Announced("8.8.8.8", 7000, "")
    with pytest.raises(ConfigError, match="--key-file"):
        Bucket("memory://announced", "a", announce="8.8.8.8:7000")


def test_a_member_listens_at_the_announced_address_alone(owner, reader):
    address = Address.read(owner.address)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", address.port), PATIENT).close()
    assert fetched(reader, address) == PAYLOAD


def test_an_address_of_a_router_needs_a_secret(reader):
    with pytest.raises(ConfigError, match="not an address of this machine"):
        check_announced("192.0.2.1:0", signed=False)
    with contextlib.closing(Carrier()) as owner:
        passed_on = Address.read(owner.listen(check_announced("192.0.2.1:0", signed=True)))
        owner.offer(0, 1, {DIGEST: PAYLOAD})
        assert passed_on.host == "192.0.2.1"
        assert fetched(reader, replace(passed_on, host=LOCAL)) == PAYLOAD


@pytest.mark.parametrize("announced", ["", "host", ":7000", "host:", "host:70000", "a b:1", "host:-1"])
def test_an_announced_address_is_a_host_and_a_port(announced):
    with pytest.raises(ConfigError, match="give HOST:PORT"):
        check_announced(announced, signed=True)


def test_a_port_in_use_is_an_error(owner):
    with contextlib.closing(Carrier()) as other, pytest.raises(ConfigError, match="cannot be used"):
        other.listen(replace(HERE, port=Address.read(owner.address).port))


class Noting:
    """A store that notes what is read from it, with the bytes."""

    def __init__(self, folder):
        self._store, self.read = open_store(str(folder)), []

    def __getattr__(self, name):
        return getattr(self._store, name)

    def attempt(self, operation):
        answer = self._store.attempt(operation)
        if isinstance(operation, Read) and isinstance(answer, bytes):
            self.read.append((operation.name, len(answer)))
        return answer


def small_pieces(monkeypatch):
    """Also take nobody for dead: on a busy machine a heartbeat may be late, and who seems dead is not asked."""
    monkeypatch.setattr(MemberOptions, "ttl", PATIENT)
    monkeypatch.setattr(rounds_, "LEAST", 64)
    monkeypatch.setattr(rounds_, "UNIT", 256)


def trained(folder, names, **each):
    """Members that have made three rounds together, with the stores that they used."""
    gate = threading.Barrier(len(names))
    stores = {name: Noting(folder) for name in names}
    members = [Member(folder, name, 40, gate=gate, straggler_timeout=PATIENT, backend=stores[name],
                      announce=each.get(name, f"{LOCAL}:0")) for name in names]  # fmt: skip
    for member in members:
        member.end()
    agree(*members)
    assert any(round.members == len(names) and round.counted for round in members[0].rounds)
    assert not [e for member in members for e in member.reduce.events() if e["event"] in ("lie", "gone", "invalid")]
    return members, stores


def pieces_read(store, members):
    """From whom, in all rounds but the last: who finishes first no longer serves that one."""
    last = [min(held) for held in zip(*(member.held for member in members), strict=True)]
    assert min(last) > 1, "there was only one round"
    places = [name.split("/")[2:] for name, _ in store.read if name.startswith("pieces/")]
    return {name.partition("-")[0] for index, fragment, name in places if int(index) < last[int(fragment)]}


@pytest.mark.slow
@pytest.mark.parametrize("names", ["ab", "abcd"])
def test_members_that_reach_each_other_read_no_payload_from_the_store(names, tmp_path, monkeypatch):
    small_pieces(monkeypatch)
    monkeypatch.setattr("diloco.bucket.run.LEAST_DEADLINE", PATIENT)
    members, stores = trained(tmp_path, names)
    assert all(member.reduce.session.carrier.received for member in members)
    assert not any(pieces_read(store, members) for store in stores.values())


@pytest.mark.slow
def test_one_that_cannot_be_reached_gets_and_gives_the_same_bits_through_the_store(tmp_path, monkeypatch):
    small_pieces(monkeypatch)
    monkeypatch.setattr("diloco.bucket.run.LEAST_DEADLINE", PATIENT)
    members, stores = trained(tmp_path, "abc", c=None)
    assert all(member.reduce.session.carrier.received for member in members)
    assert pieces_read(stores["a"], members) == {"c"}
    assert pieces_read(stores["c"], members) == set()


@pytest.mark.slow
@pytest.mark.parametrize(("names", "serve"), [("ab", lies), ("ab", never_answers), ("ab", cuts), ("abcd", lies)])
def test_a_rogue_at_a_members_address_changes_no_bit(names, serve, tmp_path, monkeypatch):
    small_pieces(monkeypatch)
    monkeypatch.setattr("diloco.bucket.run.LEAST_DEADLINE", 0.2)
    with contextlib.closing(Rogue(serve)) as rogue:
        listen = Carrier.listen

        def elsewhere(carrier, announced):
            return str(rogue.address) if announced.port == 1 else listen(carrier, announced)

        monkeypatch.setattr(Carrier, "listen", elsewhere)
        trained(tmp_path, names, b=f"{LOCAL}:1")
        assert rogue.asked


@pytest.mark.slow
@pytest.mark.skipif((REASON := direct.impossible()) is not None, reason=str(REASON))
def test_harm_to_owners_and_to_the_store_stops_no_round_and_changes_no_bit(tmp_path):
    """A few of the study."""
    result = direct.faults(tmp_path / "run", 5, outage=1.0)
    assert (result["rejected"], result["states that differ"]) == ([], 0)
    assert result["met"]["store"] and result["events"] >= 5
    assert all(result["read from owners"])
