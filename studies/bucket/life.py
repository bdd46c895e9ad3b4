"""One life of a member in the chaos: a process that trains a small regression and writes down what happens to it.

What it says goes to the end of a file, one line of JSON at a time, so that nothing is lost when it is killed. Times are
those of CLOCK_MONOTONIC, which all processes share and no clock setting changes.
"""

import contextlib
import ctypes
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from diloco import Balanced, DiLoCo
from diloco.bucket import Bucket

FRAGMENTS, SYNC_EVERY = 3, 10
SAVE_EVERY = 40
HOUR = 3700.0
"""Seconds by which a member's clock may jump: old objects are deleted after an hour."""
LONG = 0.02
"""Seconds of a hook that is written down."""


@dataclass(frozen=True)
class Life:
    url: str
    name: str
    folder: str  # for its log and its checkpoint
    number: int  # of this life, for the data that it sees
    step: float  # seconds
    threads: int = 1
    clock: int = 0  # seconds by which its wall clock is off
    returns: bool = True  # with its checkpoint, if there is one
    join_only: bool = True
    secret: bytes | None = None  # signs and encrypts all objects
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def log(self) -> Path:
        return Path(self.folder, f"{self.name}.jsonl")


def live(life: Life) -> None:
    os.environ.update(life.environment)
    torch.set_num_threads(life.threads)
    if life.clock:
        ctypes.CDLL(None).diloco_clock_offset(ctypes.c_long(life.clock))
    file = os.open(life.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def say(what: str, **values: Any) -> None:
        line = {"what": what, "at": time.monotonic(), "life": life.number, **values}
        os.write(file, (json.dumps(line) + "\n").encode())

    try:
        _train(life, say)
        code = 0
    except BaseException as error:
        say("ended", error=type(error).__name__, text=str(error)[:300])
        code = 1
    os._exit(code)  # threads that wait for a store that hangs would keep it alive


def _train(life: Life, say: Callable[..., None]) -> None:
    leaving: list[int] = []
    jumps: list[float] = []
    flips: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: leaving.append(1))
    signal.signal(signal.SIGUSR1, lambda *_: flips.append(1))
    signal.signal(signal.SIGUSR2, lambda *_: jumps.append(HOUR))
    torch.manual_seed(0)
    teacher, model = _net(), _net()
    for parameter in teacher.parameters():
        parameter.data.mul_(3.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    begun: list[_Moment] = []
    optimizer.register_step_post_hook(lambda *_: begun.append(_now()))  # before DiLoCo's own: the optimizer has ended
    reduce = Bucket(life.url, life.name, key=life.secret, encrypt=life.secret, join_only=life.join_only)
    reduce._clock = lambda: time.monotonic() + sum(jumps)
    diloco = DiLoCo(model, optimizer, sync_every=SYNC_EVERY, overlap=2, fragments=Balanced(FRAGMENTS), reducer=reduce)
    saved = Path(life.folder, f"{life.name}.pt")
    if life.returns and saved.exists():
        known = torch.load(saved, weights_only=False)  # written here
        model.load_state_dict(known["model"])
        optimizer.load_state_dict(known["optimizer"])
        diloco.load_state_dict(known["diloco"])
    began = time.monotonic()
    say("begins", clock=time.time() - time.monotonic(), held=_held(diloco))
    diloco.join()
    say("joined", seconds=time.monotonic() - began)
    held = [-1] * FRAGMENTS
    generator = torch.Generator().manual_seed(life.number)
    step = 0
    while not leaving:
        step += 1
        time.sleep(life.step)
        x = torch.randn(16, 8, generator=generator)
        loss = (model(x) - teacher(x)).square().mean()
        loss.backward()
        rounds = diloco.stats.rounds
        optimizer.step()
        hook, spent = _since(begun.pop())
        optimizer.zero_grad()
        if hook > LONG:  # the first step after a return may take the rounds that were closed meanwhile, as join() does
            spent["rounds"] = diloco.stats.rounds - rounds
            say("hook" if step > 1 else "first hook", seconds=hook, step=step, **spent)
        for fragment, index in enumerate(diloco.indices):
            if index != held[fragment]:
                held[fragment] = index
                say("holds", fragment=fragment, index=index, fingerprint=_held(diloco)[fragment])
        if flips:
            flips.clear()
            flipped = diloco._fragments[step % FRAGMENTS]
            _flip(flipped.state.anchor, step)
            damaged = replace(flipped.state, cached_fingerprint=None)
            say("flipped", fragment=flipped.number, fingerprint=damaged.fingerprint())
        for event in reduce.events():
            say("event", **event)
        if step % SAVE_EVERY == 0:
            _save(saved, model, optimizer, diloco)
            say("trains", step=step, loss=loss.item())
    began = time.monotonic()
    diloco.finish()
    say("left", seconds=time.monotonic() - began)


@dataclass(frozen=True)
class _Moment:
    at: float
    cpu: float  # of this thread
    threads: dict[int, tuple[float, float]]
    """Of each thread: seconds for which it ran, and for which it could have run and had no core."""


def _now() -> _Moment:
    threads = {}
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            ran, waited, _ = Path(f"/proc/self/task/{thread}/schedstat").read_text().split()
            threads[int(thread)] = int(ran) / 1e9, int(waited) / 1e9
    return _Moment(time.perf_counter(), time.thread_time(), threads)


def _since(begun: _Moment) -> tuple[float, dict[str, float]]:
    """Seconds, and what kept this thread from running: no core; or other threads of this process, which had the
    interpreter or the bucket's lock, and ran or had no core themselves."""
    seconds, cpu = time.perf_counter() - begun.at, time.thread_time() - begun.cpu
    if seconds <= LONG:
        return seconds, {}
    spent = {}
    for thread, (ran, waited) in _now().threads.items():
        had = begun.threads.get(thread, (0.0, 0.0))
        spent[thread] = ran - had[0], waited - had[1]
    _, own = spent.pop(threading.get_native_id())
    return seconds, {"cpu": cpu, "waited": own, "others ran": sum(ran for ran, _ in spent.values()),
                     "others waited": sum(waited for _, waited in spent.values())}  # fmt: skip


def _held(diloco: DiLoCo) -> list[int]:
    """The fingerprint of each fragment's state."""
    return [fragment.state.fingerprint() for fragment in diloco._fragments]


def _flip(values: torch.Tensor, which: int) -> None:
    """Flip one bit, as a bad memory module does."""
    words = values.view(torch.int32)
    words[which % len(words)] ^= 1 << 20


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 48), nn.Tanh(), nn.Linear(48, 24), nn.Tanh(), nn.Linear(24, 1))


def _save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, diloco: DiLoCo) -> None:
    values = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "diloco": diloco.state_dict()}
    new = path.with_suffix(f".{os.getpid()}")  # another process may have the same name
    torch.save(values, new)
    new.replace(path)
