"""Host memory that is pinned in place for CUDA: the driver's part is played by an object that keeps its rules."""

import gc
import mmap
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from diloco.core import memory
from diloco.core.lane import already
from diloco.core.memory import Memory, Pinned
from diloco.errors import DiLoCoError

PAGE = mmap.PAGESIZE


class Driver:
    """Registers whole pages, and none of them twice; lets go of those that are still mapped."""

    cudaError = SimpleNamespace(success=0)

    def __init__(self):
        self.pages, self.ranges, self.limit = set(), {}, 1 << 30

    def cudaHostRegister(self, address, nbytes, flags):
        pages = range(address // PAGE, -(-(address + nbytes) // PAGE))
        if self.pages & set(pages):
            return 712
        if PAGE * (len(self.pages) + len(pages)) > self.limit:
            return 2
        self.ranges[address] = pages
        self.pages |= set(pages)
        return 0

    def cudaHostUnregister(self, address):
        if address not in self.ranges:
            return 713
        if flags_at(address) is None:
            return 1
        self.pages -= set(self.ranges.pop(address))
        return 0


def flags_at(address):
    """The kernel's, of the mapping that begins here."""
    head = re.compile(rf"^{address:x}-", re.MULTILINE)
    text = Path("/proc/self/smaps").read_text()
    match = head.search(text)
    return match and re.search(r"^VmFlags: (.*)$", text[match.start() :], re.MULTILINE)[1].split()


@pytest.fixture
def driver(monkeypatch):
    cudart = Driver()

    def check(code):
        if code:
            raise RuntimeError(f"CUDA error {code}")

    monkeypatch.setattr(memory, "_cuda", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "check_error", check)
    return cudart


def test_small_buffers_share_no_page(driver):
    pinned = Pinned("cuda")
    buffers = [pinned.empty(n) for n in (3, 5, 0, PAGE // 4, PAGE // 4 + 1)]
    assert [len(buffer) for buffer in buffers] == [3, 5, 0, PAGE // 4, PAGE // 4 + 1]
    for buffer in buffers:
        buffer.fill_(1.0)
    assert sorted(driver.ranges) == sorted(buffer.data_ptr() for buffer in buffers if len(buffer))
    assert all(address % PAGE == 0 for address in driver.ranges)
    assert pinned.nbytes == 5 * PAGE == PAGE * len(driver.pages)


def test_memory_is_unregistered_before_it_is_unmapped(driver):
    pinned = Pinned("cuda")
    kept, dropped = pinned.empty(8), pinned.empty(8)
    del dropped
    assert list(driver.ranges) == [kept.data_ptr()] and pinned.nbytes == PAGE
    part = kept.fill_(2.0)[4:]
    del kept
    assert len(driver.ranges) == 1 and part.tolist() == [2.0] * 4  # a part is all of it
    del part
    assert not driver.ranges and pinned.nbytes == 0


def test_memory_is_unregistered_only_after_copies_have_ended(driver):
    registered = []
    lane = SimpleNamespace(close=lambda: registered.append(len(driver.ranges)))
    buffer = Pinned("cuda", [lane]).empty(8)
    del buffer
    assert registered == [1] and not driver.ranges


def test_memory_of_a_cycle_that_nobody_closed_is_unregistered(driver):
    taken = Memory(pinned=Pinned("cuda"))
    taken.anchors.give(taken.anchors.take(8), already)
    taken.itself = taken
    assert driver.ranges
    del taken
    gc.collect()
    assert not driver.ranges


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of Python 3.12 and newer, beside threads
def test_a_fork_neither_gets_the_pages_nor_returns_them(driver):
    pinned = Pinned("cuda")
    buffer = pinned.empty(8).fill_(1.0)
    address = buffer.data_ptr()
    assert {"sh", "dc"} <= set(flags_at(address))  # shared, and not copied by a fork
    read, write = os.pipe()
    child = os.fork()
    if not child:  # its memory is free for something else there
        there = flags_at(address)
        del buffer
        os.write(write, repr((there, len(driver.ranges), len(memory._elsewhere))).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        assert answer.read() == "(None, 1, 1)"
    os.waitpid(child, 0)
    assert buffer.tolist() == [1.0] * 8 and flags_at(address)
    del buffer
    assert not driver.ranges


def test_what_cannot_be_pinned_is_an_error_that_says_how_much_and_what_to_do(driver):
    pinned = Pinned("cuda")
    driver.limit = 10_000_000
    first = pinned.empty(1_000_000)
    with pytest.raises(DiLoCoError, match=r"pin 8,003,584 bytes .* 4,001,792 .*CUDA error 2.*ulimit -l"):
        pinned.empty(2_000_000)
    assert list(driver.ranges) == [first.data_ptr()] and pinned.nbytes == PAGE * len(driver.pages)
