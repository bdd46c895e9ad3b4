"""The store under load: large bodies over a slow link, and work that leaves the cores to training."""

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

from diloco import Balanced, DiLoCo, Float32
from diloco.bucket import Bucket
from diloco.bucket.store import All, Create, List, Read, Size, Write
from diloco.bucket.store.backend import TIMEOUT, Failure, Obstore, open_store, patiently
from diloco.bucket.store.store import LARGE, LARGEST, MAX_TRANSFERS, Closed, Store, TransferLimit
from diloco.errors import ConfigError
from tests.support.members import PATIENT, until


class Memory:
    """A store that answers at once."""

    def __init__(self):
        self.stored = {}

    def attempt(self, operation):
        self.stored[operation.name] = len(operation.data)


@dataclass
class Batch:
    """Large bodies that travel together."""

    names: list[str] = field(default_factory=list)
    failed: bool | None = None


class Link(Memory):
    """A store behind a link that carries two large bodies at a time: if more travel together, all of them time out.
    Time is virtual: a batch leaves when as many bodies have come as may travel, and the heartbeat has passed them."""

    CARRIES, BODIES = 2, 8

    def __init__(self):
        super().__init__()
        self.now, self.batch, self.sizes, self.changed = 0.0, Batch(), [], threading.Condition()
        self.client = Store(self, clock=lambda: self.now)

    def attempt(self, operation):
        with self.changed:
            if len(operation.data) > LARGE:
                batch = self.batch
                batch.names.append(operation.name)
                assert self.changed.wait_for(lambda: self.left(batch), PATIENT)
                self.changed.notify_all()
                if batch.failed:
                    raise Failure("operation timed out")
            super().attempt(operation)
            self.changed.notify_all()

    def left(self, batch):
        if batch.failed is None and "beat" in self.stored:
            rest = self.BODIES - sum(size > LARGE for size in self.stored.values())
            if len(batch.names) >= min(self.client._transfers.allowed, rest):
                self.sizes.append(len(batch.names))
                batch.failed = len(batch.names) > self.CARRIES
                self.now += TIMEOUT if batch.failed else 0.2 * TIMEOUT
                self.batch = Batch()
        return batch.failed is not None


def test_over_a_slow_link_large_bodies_take_turns_and_small_ones_pass():
    link = Link()
    parts = All([Create(f"p{k}", bytes(LARGE + 1)) for k in range(link.BODIES)])
    sending = threading.Thread(target=link.client.perform, args=(parts,), daemon=True)
    sending.start()
    until(lambda: len(link.batch.names) == link.BODIES)
    link.client.perform(Write("beat", b"x"))
    sending.join(PATIENT)
    assert len(link.stored) == link.BODIES + 1
    assert link.sizes == [8] + [1] * 8 and link.client._transfers.allowed == 1


def test_after_a_timeout_large_bodies_take_turns_until_the_link_is_seen_to_carry_several():
    transfers = TransferLimit(60.0)
    transfers.failed(0.1)  # refused, not slow
    assert transfers.allowed == MAX_TRANSFERS
    transfers.failed(60.0)
    assert transfers.allowed == 1
    for nbytes, seconds, allowed in ((LARGEST, 4.0, 1), (LARGE, 1.0, 1), (LARGE, 0.2, MAX_TRANSFERS)):
        transfers.succeeded(nbytes, seconds)
        assert transfers.allowed == allowed


@pytest.mark.parametrize("operation", [Create("x", b"12345678"), Write("x", b"12345678")], ids=["create", "write"])
def test_a_full_disk_is_not_filled_with_parts_of_files(operation, tmp_path, monkeypatch):
    def write(path, data):
        path.touch()
        raise OSError("no space left")

    folder = open_store(str(tmp_path))
    monkeypatch.setattr(Path, "write_bytes", write)
    with pytest.raises(Failure):
        folder.attempt(operation)
    assert not list((tmp_path / "staging").iterdir())


def test_a_heartbeat_that_cannot_be_moved_into_its_place_leaves_nothing(tmp_path):
    folder = open_store(str(tmp_path))
    (tmp_path / "members").touch()  # a file where a folder must be
    with pytest.raises(Failure):
        folder.attempt(Write("members/a", b"x"))
    assert not list((tmp_path / "staging").iterdir())


def test_a_shortage_of_threads_only_slows_a_member_down(monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    memory = Memory()
    monkeypatch.setattr(threading.Thread, "start", start)
    Store(memory).perform(All([Create(str(k), b"x") for k in range(5)]))
    assert len(memory.stored) == 5


def test_who_waits_for_a_lane_is_let_go_when_the_store_is_closed_and_sends_nothing_stale():
    client = Store(Memory())
    client._transfers.allowed = 0
    errors = []

    def send():
        try:
            client.perform(Create("x", bytes(2 * LARGE)))
        except Closed as closed:
            errors.append(closed)

    waiting = threading.Thread(target=send, daemon=True)
    waiting.start()
    until(lambda: client._transfers._changed._waiters)
    client.close()
    waiting.join(PATIENT)
    assert len(errors) == 1
    memory = Memory()
    client = Store(memory)
    assert client.perform(Create("x", bytes(2 * LARGE), lambda failed: True)) is None
    assert not memory.stored and client.sent == 0


class Watching:
    """Float32 that notes on which thread it is used, and how many threads torch has there."""

    seen: ClassVar[set[tuple[str, int]]] = set()

    def encode(self, values):
        self.seen.add((threading.current_thread().name, torch.get_num_threads()))
        return Float32().encode(values)

    def decode(self, data, n):
        self.seen.add((threading.current_thread().name, torch.get_num_threads()))
        return Float32().decode(data, n)

    def nbytes(self, n):
        return Float32().nbytes(n)

    def __repr__(self):
        return "Watching()"


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_the_background_computes_on_one_thread_and_training_keeps_its_own(three_threads, tmp_path):
    members = []
    for name in "ab":
        model = nn.Linear(64, 64)
        reduce = Bucket(str(tmp_path), name, heartbeat=0.1, poll=0.02)
        members.append(DiLoCo(model, sync_every=2, overlap=1, fragments=Balanced(4), codec=Watching(), reducer=reduce))
        members[-1].join()
    assert torch.get_num_threads() == 3
    deadline = time.monotonic() + PATIENT
    while min(min(member.indices) for member in members) < 2 and time.monotonic() < deadline:
        for member in members:
            member.step()
        time.sleep(0.01)
    assert min(min(member.indices) for member in members) >= 2
    for member in members:
        member.leave()
    assert Watching.seen == {("bucket", 1)}
    counts = []
    new = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
    new.start()
    new.join()
    assert counts == [3]


class Gone(Memory):
    """A store that fails until it is back."""

    def __init__(self):
        super().__init__()
        self.back, self.failed = False, threading.Semaphore(0)

    def attempt(self, operation):
        if not self.back:
            self.failed.release()
            raise Failure("connection refused")
        super().attempt(operation)


def test_the_first_answer_of_a_store_that_is_back_wakes_all_that_wait_to_ask_again(monkeypatch):
    monkeypatch.setattr("diloco.bucket.store.store.random.uniform", lambda low, high: 1e4)  # nobody asks again unwoken
    gone = Gone()
    store = Store(gone)
    asking = [threading.Thread(target=store.perform, args=(Write(name, b"1"),), daemon=True) for name in "xy"]
    for thread in asking:
        thread.start()
        assert gone.failed.acquire(timeout=PATIENT)
    until(lambda: len(store._news._waiters) == 2)
    gone.back = True
    store.perform(Write("z", b"1"))
    for thread in asking:
        thread.join(PATIENT)
    assert set(gone.stored) == {"x", "y", "z"}


def test_a_store_without_credentials_is_told_which_to_set(monkeypatch):
    exceptions = pytest.importorskip("obstore.exceptions")

    def fail(self, operation):
        raise exceptions.GenericError("Error performing PUT http://169.254.169.254/latest/api/token in 1s - HTTP error")

    monkeypatch.setattr(Obstore, "_attempt", fail)
    with pytest.raises(ConfigError, match=r"s3://b: there are no credentials.*set AWS_ACCESS_KEY_ID") as error:
        patiently(lambda: open_store("s3://b").attempt(Size("x")), "s3://b")
    assert "169.254" not in str(error.value)


@pytest.mark.parametrize(("endpoint", "warns"), [
    ("http://10.1.2.3:9000", True), ("http://minio.example", True), ("https://10.1.2.3:9000", False),
    ("http://127.0.0.1:9000", False), ("http://localhost:9000", False), ("http://[::1]:9000", False),
])  # fmt: skip
def test_an_unencrypted_endpoint_on_another_machine_is_warned_about(monkeypatch, caplog, endpoint, warns):
    pytest.importorskip("obstore")
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    for _ in range(2):
        open_store("s3://b")
    assert len([line for line in caplog.messages if "not encrypted" in line]) == warns


def test_a_folder_that_is_not_there_is_never_made_in_silence(tmp_path, caplog):
    with pytest.raises(ConfigError, match="there is no folder"):
        open_store(f"{tmp_path}/mount/run", create=False)
    assert not caplog.messages
    open_store(f"{tmp_path}/mount/run")
    assert "created the folder" in caplog.text and "--join-only" in caplog.text
    caplog.clear()
    open_store(f"{tmp_path}/mount/run")
    assert not caplog.messages


def test_a_file_where_a_folder_should_be_is_a_failure_and_not_a_name_that_is_taken(tmp_path):
    store = open_store(str(tmp_path))
    (tmp_path / "rounds").write_bytes(b"")
    with pytest.raises(Failure):
        store.attempt(Create("rounds/x", b"1"))
    assert not list((tmp_path / "staging").iterdir())


FOLDER_OPERATIONS = [Read("x", 9), Read("x", 0, first=1), Size("x"), List("x/"), Create("x", b""), Write("x", b"")]


@pytest.mark.parametrize("operation", FOLDER_OPERATIONS)
def test_a_folder_that_is_moved_away_for_a_while_is_not_an_empty_one(tmp_path, operation):
    """Who read nothing there would believe that records are gone."""
    store = open_store(str(tmp_path / "bucket"))
    (tmp_path / "bucket").rename(tmp_path / "away")
    with pytest.raises(Failure):
        store.attempt(operation)
    assert not (tmp_path / "bucket").exists()
