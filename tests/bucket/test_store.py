"""The store under load: large bodies over a slow link, and work that leaves the cores to training."""

import threading
import time
from typing import ClassVar

import pytest
import torch
from torch import nn

from diloco import Balanced, DiLoCo, Float32
from diloco.bucket import Bucket
from diloco.bucket.store.backend import Failure
from diloco.bucket.store.limit import LARGE, MAX_TRANSFERS, STEADY, TransferLimit
from diloco.bucket.store.operations import All, Create, Work, Write
from diloco.bucket.store.store import Closed, Store

TIMEOUT = 1.0


class Link:
    """A store behind an uplink that all who send share. Like obstore it gives up a request after TIMEOUT."""

    def __init__(self, rate):
        self.rate, self.lock, self.free, self.moved = rate, threading.Lock(), 0.0, 0
        self.stored = {}

    def attempt(self, operation):
        began = time.monotonic()
        for _ in range(0, len(operation.data), LARGE // 16):
            with self.lock:
                self.free = max(self.free, time.monotonic()) + LARGE / 16 / self.rate
                wait = self.free - time.monotonic()
                self.moved += LARGE // 16
            time.sleep(max(wait, 0.0))
            if time.monotonic() - began > TIMEOUT:
                raise Failure("operation timed out")
        self.stored[operation.name] = len(operation.data)


def test_over_a_slow_link_as_many_large_bodies_travel_as_it_carries_and_small_ones_pass():
    size = 3 * LARGE // 2
    link = Link(size / 0.3)  # one takes 0.3 s, eight together 2.4
    client = Store(link, timeout=TIMEOUT)
    parts = All([Create(f"p{k}", bytes(size)) for k in range(8)])
    sending = threading.Thread(target=client.perform, args=(parts,), daemon=True)
    sending.start()
    time.sleep(0.1)
    began = time.monotonic()
    client.perform(Write("beat", b"x"))
    assert time.monotonic() - began < 1.0
    sending.join(20)
    assert len(link.stored) == 9
    assert client._transfers.allowed < MAX_TRANSFERS and link.moved < 4 * 8 * size


def test_lanes_are_halved_once_for_all_that_time_out_together_and_come_back_when_transfers_are_quick():
    transfers, never = TransferLimit(60.0), threading.Event()
    with transfers.transfer(never) as first, transfers.transfer(never) as second:
        for halved in (first, second):
            transfers.failed(60.0, halved)
    assert transfers.allowed == 4
    transfers.failed(0.1, 1)  # refused, not slow
    assert transfers.allowed == 4
    for halved in range(1, 9):
        transfers.failed(60.0, halved)
    assert transfers.allowed == 1
    for _ in range(100):
        transfers.succeeded(43.0)  # two would not make it
    assert transfers.allowed == 1
    for _ in range(STEADY * (MAX_TRANSFERS - 1)):
        transfers.succeeded(1.0)
    assert transfers.allowed == MAX_TRANSFERS


def test_who_waits_for_a_lane_is_let_go_when_the_store_is_closed_and_sends_nothing_stale():
    client = Store(Link(1e12))
    client._transfers.allowed = 0
    errors = []

    def send():
        try:
            client.perform(Create("x", bytes(2 * LARGE)))
        except Closed as closed:
            errors.append(closed)

    waiting = threading.Thread(target=send, daemon=True)
    waiting.start()
    time.sleep(0.05)
    client.close()
    waiting.join(5)
    assert len(errors) == 1
    link = Link(1e12)
    client = Store(link)
    assert client.perform(Create("x", bytes(2 * LARGE), lambda: True)) is None
    assert not link.stored and client.sent == 0


class Watching(Float32):
    """Says how many threads torch has where it is used."""

    seen: ClassVar[set[tuple[str, int]]] = set()

    def encode(self, values):
        self.seen.add((threading.current_thread().name, torch.get_num_threads()))
        return super().encode(values)

    def decode(self, data, n):
        self.seen.add((threading.current_thread().name, torch.get_num_threads()))
        return super().decode(data, n)

    def __repr__(self):
        return "Float32()"


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
        members.append(DiLoCo(model, sync_every=2, overlap=1, fragments=Balanced(4), codec=Watching(), reduce=reduce))
        members[-1].join()
    assert torch.get_num_threads() == 3
    deadline = time.monotonic() + 20
    while min(min(member.indices) for member in members) < 2 and time.monotonic() < deadline:
        for member in members:
            member.step()
        time.sleep(0.05)
    for member in members:
        member._leave()
    assert Watching.seen == {("bucket", 1)}
    found = []
    new = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    new.start()
    new.join()
    assert found == [3]


def test_work_is_done_on_the_thread_that_asks_for_it_while_others_wait_for_the_store():
    link = Link(1e12)
    work = Work(lambda: threading.current_thread().name)
    answers = Store(link).perform(All([work, Write("x", b"1"), work, Write("y", b"2"), work]))
    assert answers[::2] == [threading.current_thread().name] * 3 and set(link.stored) == {"x", "y"}
