"""What happens to members and to what they meet in: the processes, and a folder or a server that fails on purpose."""

import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from diloco.bucket.rounds import ROUNDS, folder, place_of
from diloco.bucket.store import List
from diloco.bucket.store.backend import Backend, open_store
from diloco.bucket.store.envelope import Encrypted
from studies.bucket.life import FRAGMENTS, Life, live
from studies.bucket.s3_server import LISTS, REFUSALS, STATUS, Fault, Server

MEGABYTES = 256
"""Of the file system that becomes full."""
HOSTILE = "hostile names"
AWAY = "folder moved away"
context = multiprocessing.get_context("forkserver")


def strange_names(store: Backend, chance: random.Random) -> list[str]:
    """Names that anyone can take who may write: of objects of the next round, of a later life, and of nothing."""
    indices = [place[1] for name in store.attempt(List(ROUNDS)) if (place := place_of(name)) is not None]
    place = folder(chance.randrange(FRAGMENTS), max(indices, default=0) + chance.randint(1, 2))
    life = f"members/m{chance.randrange(4)}/{chance.randrange(900_000, 1_000_000):06d}"
    return [f"{place}closed.0", life, f"{place}d-zz-{'0' * 64}", f"{place}x/d-zz-{'0' * 64}", "rounds/x/0000/closed.0"]


class Medium(Protocol):
    """Where members meet, and what can happen to it."""

    url: str
    environment: Mapping[str, str]
    secret: bytes | None  # that members share
    faults: tuple[str, ...]
    stops: tuple[str, ...]  # faults during which nothing can be put

    def watched(self) -> Backend: ...
    def fail(self, fault: str) -> None: ...
    def heal(self) -> None: ...
    def spoiled(self) -> int: ...
    def end(self) -> None: ...


class FolderMedium:
    """A folder; as root on a file system of its own, which can be full or read-only."""

    environment: Mapping[str, str] = MappingProxyType({})
    secret: bytes | None = None
    faults: tuple[str, ...] = ()
    stops: tuple[str, ...] = ("full disk", "read-only", AWAY)

    def __init__(self, place: Path) -> None:
        self._chance = random.Random(0)
        self._place = place / "disk"
        self._place.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={MEGABYTES}m", "tmpfs", str(self._place)]
        self._mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0
        self.faults = (*self.stops, HOSTILE) if self._mounted else (AWAY, HOSTILE)
        self.url = str(self._place / "bucket")
        self._away = self._place / "away"

    def watched(self) -> Backend:
        return open_store(self.url)

    def fail(self, fault: str) -> None:
        if fault == HOSTILE:
            return self._plant()
        if fault == AWAY:
            Path(self.url).rename(self._away)
            return None
        if fault == "read-only":
            return self._remount("ro")
        with (self._place / "ballast").open("wb", buffering=0) as file:
            try:
                while file.write(bytes(1 << 16)):
                    pass
            except OSError:
                pass

    def _plant(self) -> None:
        """Whatever can lie in a folder. It stays."""
        for name in [*strange_names(self.watched(), self._chance), "members/\udcff\x1b[2J"]:
            path = Path(self.url, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            kinds: list[Callable[[], object]] = [
                path.mkdir, lambda path=path: os.mkfifo(path), lambda path=path: path.open("xb").close(),
                lambda path=path: path.symlink_to("/"), lambda path=path: path.symlink_to("nowhere"),
            ]  # fmt: skip
            with suppress(FileExistsError):  # a member was first
                self._chance.choice(kinds)()

    def heal(self) -> None:
        if self._mounted:
            self._remount("rw")
        (self._place / "ballast").unlink(missing_ok=True)
        if self._away.exists():
            self._away.rename(self.url)

    def _remount(self, how: str) -> None:
        for _ in range(100):  # busy while somebody writes
            if subprocess.run(["mount", "-o", f"remount,{how}", self._place], capture_output=True).returncode == 0:
                return
            time.sleep(0.02)

    def spoiled(self) -> int:
        return 0  # the witness compares

    def end(self) -> None:
        if self._mounted:
            subprocess.run(["umount", "-l", self._place], check=True)


class ServerMedium:
    """An S3 server."""

    secret: bytes | None = bytes(range(32))
    faults: tuple[str, ...] = (*STATUS, *LISTS, "slow", "cut", "reply lost", "done twice", "hang", "reset", "gone",
                               *REFUSALS, HOSTILE)  # fmt: skip
    stops: tuple[str, ...] = ("hang", "gone", *REFUSALS)
    url = "s3://bucket/run"

    def __init__(self) -> None:
        self.server, self._chance = Server(), random.Random(0)
        self.environment: Mapping[str, str] = self.server.environment

    def watched(self) -> Backend:
        return Encrypted(self.server, self.secret) if self.secret else self.server

    def fail(self, fault: str) -> None:
        if fault == HOSTILE:
            self._plant()
            return
        chosen: Any = fault
        self.server.fault = chosen

    def _plant(self) -> None:
        """With keys that have an empty segment, for which all look folder by folder. The rest stays."""
        names = strange_names(self.server, self._chance)
        empty = [f"{name.rpartition('/')[0]}//x" for name in names[:2]]
        with self.server.one:
            for name in [*names, *empty]:
                self.server.objects.setdefault(f"run/{name}", (b"garbage", time.monotonic()))

    def heal(self) -> None:
        none: Fault = "none"
        self.server.fault = none
        with self.server.one:
            for name in [name for name in self.server.objects if "//" in name]:
                del self.server.objects[name]

    def spoiled(self) -> int:
        return self.server.spoiled

    def end(self) -> None:
        self.server.end()


def prepare(place: Path) -> bool:
    """Start what members are forked from, with clocks of their own. False if there is no compiler for these."""
    context.set_forkserver_preload(["torch._dynamo", "diloco.bucket", "obstore.store", "studies.bucket.life"])
    library = place / "clock.so"
    source = Path(__file__).with_name("clock.c")
    compiler = shutil.which("cc")
    words = [compiler or "", "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    if compiler is None or subprocess.run(words, capture_output=True).returncode:
        return False
    os.environ["LD_PRELOAD"] = str(library)  # for the process that the members are forked from
    context.Process(target=int).start()
    del os.environ["LD_PRELOAD"]
    return True


@dataclass
class Crowd:
    """The processes of the members, by name; and older ones that run under a name that was taken over."""

    medium: Medium
    folder: Path
    chance: random.Random
    clocks: bool
    names: tuple[str, ...]
    processes: dict[str, Any] = field(default_factory=dict)
    others: list[Any] = field(default_factory=list)
    stopped: dict[str, float] = field(default_factory=dict)  # name: when it goes on
    stops: list[tuple[str, float, float]] = field(default_factory=list)  # name, from, to
    leaving: set[str] = field(default_factory=set)  # asked to leave, and not started again since
    lives: int = 0
    started: dict[str, int] = field(default_factory=dict)  # kind of start: how many

    def start(self, name: str) -> Life:
        self.lives += 1
        clock = self.chance.choice((0, 0, 0, 3600, -3600)) if self.clocks else 0
        threads = self.chance.choice((1, 1, 1, 2))
        life = Life(self.medium.url, name, str(self.folder), self.lives, self.chance.uniform(0.025, 0.05), threads,
                    clock, self.chance.random() < 0.5, self.lives > len(self.names), self.medium.secret,
                    dict(self.medium.environment))  # fmt: skip
        for kind, counts in (("clock off by an hour", clock), ("two threads", threads > 1), ("with its checkpoint",
                             life.returns)):  # fmt: skip
            self.started[kind] = self.started.get(kind, 0) + bool(counts)
        process = context.Process(target=live, args=(life,), daemon=True)
        process.start()
        self.processes[name] = process
        self.leaving.discard(name)
        return life

    def living(self) -> list[str]:
        return [name for name, process in self.processes.items() if process.is_alive()]

    def able(self) -> list[str]:
        return [name for name in self.living() if name not in self.stopped]

    def dead(self) -> list[str]:
        return [name for name in self.names if name not in self.living()]

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].join()
        if name in self.stopped:
            self._goes_on(name)

    def stop(self, name: str, seconds: float) -> None:
        os.kill(self.processes[name].pid, signal.SIGSTOP)
        self.stopped[name] = time.monotonic() + seconds
        self.stops.append((name, time.monotonic(), float("inf")))

    def wake(self, everybody: bool = False) -> None:
        for name, until in list(self.stopped.items()):
            if everybody or time.monotonic() >= until:
                if self.processes[name].is_alive():
                    os.kill(self.processes[name].pid, signal.SIGCONT)
                self._goes_on(name)

    def _goes_on(self, name: str) -> None:
        del self.stopped[name]
        at = next(k for k in reversed(range(len(self.stops))) if self.stops[k][0] == name)
        self.stops[at] = (name, self.stops[at][1], time.monotonic())

    def twice(self, name: str) -> None:
        """A second process under the same name."""
        self.others.append(self.processes[name])
        self.start(name)

    def leave(self, name: str) -> None:
        self.processes[name].terminate()
        self.leaving.add(name)

    def flip(self, name: str) -> None:
        os.kill(self.processes[name].pid, signal.SIGUSR1)

    def jump(self, name: str) -> None:
        os.kill(self.processes[name].pid, signal.SIGUSR2)

    def end(self) -> None:
        for process in [*self.processes.values(), *self.others]:
            process.kill()
            process.join()
