"""Payloads straight from the member that owns them, over TCP with TLS, so that they need not be read from the store.

The store decides what counts, and names each payload by its SHA-256. So a carrier needs no trust and may fail at any
time: what does not arrive, or has another digest, is read from the store.

A member that announces an address serves its last payloads there. Its entry in the store also says which certificate it
shows, and with which token a connection must begin: anyone who cannot read the store learns nothing.
"""

import contextlib
import hashlib
import hmac
import ipaddress
import secrets
import socket
import ssl
import struct
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from diloco.errors import ConfigError, install_command

STREAMS = 4
"""Maximum connections to one member. While one waits for the next payload, the others use the link."""
ROUNDS = 2
"""Rounds of each fragment whose payloads are served."""
STRANGERS = 32
"""Maximum connections without the token. Beyond that the oldest is closed: so those that stay silent, or are slow, keep
nobody out."""
HANDSHAKE, IDLE = 5.0, 120.0
"""Seconds of silence after which a connection is closed, before and after its token."""
REFUSALS = 3
"""Failures in a row after which a member is not asked for a while. Failures of requests made at the same time count
once: one slow link can fail them all."""
REST = 60.0
SHORTAGE = 0.2
"""Seconds until the next try to accept connections, after a failure."""
TOKEN, DIGEST = 16, 16  # bytes
_LENGTH = struct.Struct("<Q")
Payload = bytes | memoryview
Report = Callable[..., None]


@dataclass(frozen=True)
class Address:
    """Where a member serves its payloads, as its entry says."""

    host: str  # an IP address
    port: int
    fingerprint: str  # SHA-256 of the certificate
    token: str

    def __str__(self) -> str:
        return f"{self.host}:{self.port} {self.fingerprint} {self.token}"

    @classmethod
    def read(cls, text: str) -> "Address":
        """Raises ValueError, also for a name instead of an IP address: to resolve it could take any time."""
        place, fingerprint, token = text.split()
        host, _, port = place.rpartition(":")
        if "%" in str(ipaddress.ip_address(host)) or not 0 < int(port) < 1 << 16:
            raise ValueError(f"{place[:80]!r} is not an IP address and a port")
        return cls(host, int(port), fingerprint, token)


@dataclass(frozen=True)
class Announced:
    """The IP address and port to announce, and the address to listen at: empty for all of this machine's."""

    host: str
    port: int
    listen: str

    def of_rank(self, rank: int, ranks: int) -> "Announced":
        """Each rank has the port after that of the rank before it."""
        if self.port and self.port + ranks > 1 << 16:
            raise ConfigError(f"announce: {ranks} ranks need {ranks} consecutive ports from {self.port}, but the "
                              f"highest is {(1 << 16) - 1}: announce {(1 << 16) - ranks} or a lower one")  # fmt: skip
        return replace(self, port=self.port and self.port + rank)


def check_announced(announced: str, signed: bool) -> Announced:
    """A name is resolved here, once, so that nobody else has to; IPv4 first, because every member has it.

    A public address needs a signed run: in any other, whoever can write to the store could point all members anywhere.
    So does an address that this machine does not have, because a router or the host of a container passes connections
    on from there: at which of its own they arrive is unknown, so it listens at all of them, public ones too."""
    host, _, port = announced.rpartition(":")
    if not host or any(c.isspace() for c in host) or not port.isascii() or not port.isdigit() or int(port) >= 1 << 16:
        raise ConfigError(f"announce={announced!r}: give HOST:PORT, as the other members reach this machine")
    host = host.strip("[]")
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"announce={announced!r}: there is no host {host}: {error}") from None
    address = min((ipaddress.ip_address(str(where[4][0])) for where in found), key=lambda address: address.version)
    nowhere = address.is_unspecified or address.is_multicast or "%" in str(address)
    if nowhere or (address.is_loopback and host not in (str(address), "localhost")):
        raise ConfigError(f"announce={announced!r}: others cannot reach this machine at {address}: give the IP address "
                          "at which they reach it")  # fmt: skip
    own = _is_own(address)
    if not signed and (address.is_global or not own):
        raise ConfigError(f"announce={announced!r} is {'a public address' if own else 'not an address of this machine'}"
                          ": also pass a secret that all members share with --key-file, or announce this machine's "
                          "address in a private network")  # fmt: skip
    return Announced(str(address), int(port), str(address) if own else "")


def _is_own(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    try:
        with socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return True


class Carrier:
    """Offers this member's payloads, and fetches those of others."""

    def __init__(self, report: Report = lambda event, **values: None) -> None:
        """`report` is called with an event and its values when a member is not asked any more, or cannot be served."""
        self._report = report
        self._offered: dict[int, dict[int, dict[str, Payload]]] = {}  # fragment: round: digest: payload
        self._delta: dict[int, tuple[str, ...]] = {}  # fragment: digests of the last delta of this member
        self._owners: dict[str, Owner] = {}
        self._lock = threading.Lock()
        self._server: Server | None = None
        self.received = 0  # bytes

    def listen(self, announced: Announced) -> str:
        """Serve payloads. Returns the address for this member's entry."""
        self._server = Server(announced, self._payload, self._report)
        return str(Address(announced.host, self._server.port, self._server.fingerprint, self._server.token.hex()))

    def offer(self, fragment: int, index: int, payloads: Mapping[str, Payload], *, own_delta: bool = False) -> None:
        """Serve these payloads, by digest, during this round and the next ones. A delta of this member replaces the one
        that it offered before for the same round."""
        if self._server is None:
            return
        with self._lock:
            rounds = self._offered.setdefault(fragment, {})
            offered = rounds.setdefault(index, {})
            if own_delta:
                for digest in self._delta.get(fragment, ()):
                    offered.pop(digest, None)
                self._delta[fragment] = tuple(payloads)
            offered.update(payloads)
            self._offered[fragment] = {i: offered for i, offered in rounds.items() if i > index - ROUNDS}

    def fetch(self, name: str, address: str, digest: str, size: int, deadline: float) -> bytes | None:
        """A payload from the member that owns it; None if it does not have it, or it does not come within so many
        seconds."""
        with self._lock:
            owner = self._owners.get(name)
            if owner is None or owner.address != address:
                if owner is not None:
                    owner.close()
                self._owners[name] = owner = Owner(address)
        if owner.resting:
            return None
        began = time.monotonic()
        try:
            data = owner.fetch(digest, size, began + deadline)
        except (OSError, ValueError) as error:
            if owner.refuse(began):
                self._report("not reached", member=name, reason=f"{type(error).__name__}: {error!s:.200}")
            return None
        if data is not None:
            with self._lock:
                self.received += size
            owner.refusals = 0
        return data

    def keep(self, names: Collection[str]) -> None:
        """Close the connections to all other members."""
        with self._lock:
            gone = [self._owners.pop(name) for name in self._owners.keys() - names]
        for owner in gone:
            owner.close()

    def _payload(self, digest: str) -> Payload | None:
        with self._lock:
            offered = (payloads for rounds in self._offered.values() for payloads in rounds.values())
            return next((payloads[digest] for payloads in offered if digest in payloads), None)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        with self._lock:
            for owner in self._owners.values():
                owner.close()


class Owner:
    """Connections to one member."""

    def __init__(self, address: str) -> None:
        self.address, self.refusals = address, 0
        self._refused = self._until = 0.0
        self._lock = threading.Lock()
        self._streams = threading.BoundedSemaphore(STREAMS)
        self._idle: deque[ssl.SSLSocket] = deque()
        self._closed = False

    @property
    def resting(self) -> bool:
        return time.monotonic() < self._until

    def refuse(self, began: float) -> bool:
        """Count the failure of a payload that was asked for at this time. Returns whether this is the one after which
        the member is not asked for a while."""
        with self._lock:
            if began < self._refused:
                return False
            self._refused = time.monotonic()
            self.refusals += 1
            if self.refusals >= REFUSALS:
                self._until = self._refused + REST
            return self.refusals == REFUSALS

    def fetch(self, digest: str, size: int, until: float) -> bytes | None:
        """None if the member does not have it. Raises OSError or ValueError."""
        if not self._streams.acquire(timeout=_left(until)):
            raise TimeoutError("too many payloads wait for this member")
        try:
            if self.resting:
                raise TimeoutError("it has just failed too often")
            with contextlib.suppress(IndexError, ConnectionError, ssl.SSLError):  # none is idle, or it was closed
                return self._ask(self._idle.popleft(), digest, size, until)
            return self._ask(self._connect(until), digest, size, until)
        finally:
            self._streams.release()

    def _connect(self, until: float) -> ssl.SSLSocket:
        address = Address.read(self.address)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # pinned below
        plain = socket.create_connection((address.host, address.port), _left(until))
        with contextlib.ExitStack() as failed:
            failed.callback(plain.close)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.settimeout(_left(until))
            connection = context.wrap_socket(plain)
            failed.callback(connection.close)
            shown = hashlib.sha256(connection.getpeercert(binary_form=True) or b"").hexdigest()
            if shown != address.fingerprint:
                raise ConnectionError("it shows another certificate than its entry says")
            connection.sendall(bytes.fromhex(address.token))
            failed.pop_all()
            return connection

    def _ask(self, connection: ssl.SSLSocket, digest: str, size: int, until: float) -> bytes | None:
        """Keeps the connection only after a good answer, which may be that it does not have it: it offers only its
        last rounds, and a share that another member averaged was never here."""
        try:
            connection.settimeout(_left(until))
            connection.sendall(bytes.fromhex(digest))
            (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size, until))
            if length not in (0, size):
                raise ValueError(f"it serves {length} bytes instead of {size}")
            data = _receive(connection, size, until) if length else None
            if data is not None and digest_of(data) != digest:
                raise ValueError("it serves bytes with another digest")
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        if self._closed:
            self.close()
        return data

    def close(self) -> None:
        """Connections in use close after their answer."""
        self._closed = True
        with contextlib.suppress(IndexError):  # all are closed
            while True:
                self._idle.popleft().close()


class Server:
    """Answers digests with payloads, on a connection that begins with the token. A thread for each connection: a slow
    one holds up only itself."""

    def __init__(self, announced: Announced, payload: Callable[[str], Payload | None], report: Report) -> None:
        self._payload, self._report = payload, report
        self.token = secrets.token_bytes(TOKEN)
        self._context, self.fingerprint = _certificate()
        try:
            family = socket.AF_INET6 if ":" in announced.host else socket.AF_INET
            self._socket = socket.create_server((announced.listen, announced.port), family=family, backlog=64)
        except OSError as error:
            raise ConfigError(f"announce: port {announced.port} cannot be used here: {error}") from None
        self.port: int = self._socket.getsockname()[1]
        self._connections: dict[ssl.SSLSocket, bool] = {}  # whether it has shown the token
        self._lock, self._closed = threading.Lock(), threading.Event()
        threading.Thread(target=self._accept, name="carrier", daemon=True).start()

    def _accept(self) -> None:
        """Only `close` ends it: a shortage of files or threads passes, and so does a network that is down."""
        reported = False
        while not self._closed.is_set():
            try:
                self._begin(self._socket.accept()[0])
            except (OSError, RuntimeError) as error:
                if not reported and not self._closed.is_set():
                    self._report("not serving", reason=f"{type(error).__name__}: {error!s:.200}")
                    reported = True
                self._closed.wait(SHORTAGE)

    def _begin(self, plain: socket.socket) -> None:
        """Serve a connection on a thread of its own. Raises RuntimeError if there can be no more threads."""
        try:
            plain.settimeout(HANDSHAKE)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = self._context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
        except OSError:  # gone already
            return plain.close()
        with self._lock:
            self._connections[connection] = False
            strangers = [stranger for stranger, known in self._connections.items() if not known]
            if len(strangers) > STRANGERS:
                _cut(strangers[0])
                self._connections.pop(strangers[0])
        try:
            threading.Thread(target=self._serve, args=(connection,), name="carrier", daemon=True).start()
        except RuntimeError:
            self._end(connection)
            raise

    def _end(self, connection: ssl.SSLSocket) -> None:
        with self._lock:
            self._connections.pop(connection, None)
        connection.close()

    def _serve(self, connection: ssl.SSLSocket) -> None:
        try:
            connection.do_handshake()
            if not hmac.compare_digest(_receive(connection, TOKEN), self.token):
                return
            with self._lock:
                if connection in self._connections:
                    self._connections[connection] = True
            connection.settimeout(IDLE)
            while True:
                data = self._payload(_receive(connection, DIGEST).hex())
                connection.sendall(_LENGTH.pack(0 if data is None else len(data)))
                if data is not None:
                    connection.sendall(data)
        except (OSError, ValueError):
            pass  # gone, silent, or not a member
        finally:
            self._end(connection)

    def close(self) -> None:
        self._closed.set()
        _cut(self._socket)
        self._socket.close()
        with self._lock:
            for connection in self._connections:
                _cut(connection)


def digest_of(data: Payload) -> str:
    return shortened(hashlib.sha256(data).hexdigest())


def shortened(sha256: str) -> str:
    """Half of it is enough: only the member that put a payload could search for a collision."""
    return sha256[: 2 * DIGEST]


def _cut(connection: socket.socket) -> None:
    """End a connection that another thread uses."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # an SSLSocket would first turn its TLS off


def _left(until: float) -> float:
    seconds = until - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("it took too long")
    return seconds


def _receive(connection: ssl.SSLSocket, size: int, until: float | None = None) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        if until is not None:
            connection.settimeout(_left(until))
        count = connection.recv_into(view)
        if not count:
            raise ConnectionResetError("it closed the connection")
        view = view[count:]
    return bytes(data)


def _certificate() -> tuple[ssl.SSLContext, str]:
    """A new certificate, signed by itself, and its SHA-256."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise ConfigError(f"announce needs cryptography: {install_command('bucket')}") from None
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "diloco")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=3650)).sign(key, hashes.SHA256())
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    plain = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with tempfile.TemporaryDirectory() as folder:  # ssl loads it from a file only; the folder is this user's alone
        path = Path(folder, "certificate")
        path.write_bytes(plain + made.public_bytes(serialization.Encoding.PEM))
        context.load_cert_chain(path)
    return context, hashlib.sha256(made.public_bytes(serialization.Encoding.DER)).hexdigest()
