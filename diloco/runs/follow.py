"""A run directory that is followed while its replicas write: each look reads what was added since the last one."""

import threading
import time
from pathlib import Path

from diloco.runs.reader import RecordedRun, recorded, replica_folders
from diloco.runs.replica import Growing
from diloco.runs.schema import Event, Record, Step, from_line

EVERY = 0.2
"""Seconds between two looks, at least: whoever asks more often is given what is known."""
AT_ONCE = 1 << 22
"""Bytes that are read at once."""


class Tail:
    """The complete lines that were added to a file since the last look."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0

    def records(self) -> list[Record]:
        if not self.path.is_file():  # not there yet; or a pipe, which would block
            return []
        with self.path.open("rb") as file:
            if file.seek(0, 2) < self.offset:
                self.offset = 0  # written anew
            file.seek(self.offset)
            new = file.read(AT_ONCE)
        complete = new[: new.rfind(b"\n") + 1]
        self.offset += len(complete)
        return list(filter(None, map(from_line, complete.splitlines())))


class _Replica:
    """The two files of a replica. Metrics are read first: then no round of a step that is known is missing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._start()

    def _start(self) -> None:
        self.growing = Growing(thinned=True)
        self._tails = Tail(self._folder / "metrics.jsonl"), Tail(self._folder / "events.jsonl")
        self._complete = False

    def look(self) -> bool:
        """Whether there was anything new."""
        found = False
        for tail in self._tails:
            while records := tail.records():
                if self._complete and self._resumed(records):
                    self._start()
                    return self.look()
                found = True
                for record in records:
                    self.growing.add(record)
        self._complete = True
        return found

    def _resumed(self, records: list[Record]) -> bool:
        """Whether the run was resumed since the last look: what came after its checkpoint was cut off, and what was
        written since may end where the files ended."""
        first, known = records[0], self.growing.steps
        again = isinstance(first, Step) and known and first.step <= known[-1].step
        return bool(again) or any(isinstance(r, Event) and r.event == "resume" for r in records)


class Followed:
    """A run, thinned so that memory stays flat. May be used from several threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._replicas: dict[int, _Replica] = {}
        self._lock = threading.Lock()
        self._looked = -EVERY
        self._stamp: object = None
        self._run: RecordedRun | None = None

    def look(self) -> RecordedRun:
        """The run as it is."""
        with self._lock:
            if time.monotonic() - self._looked >= EVERY or self._run is None:
                self._run = self._read()
                self._looked = time.monotonic()
            return self._run

    def _read(self) -> RecordedRun:
        folders = replica_folders(self.folder)
        for number, folder in folders.items():
            self._replicas.setdefault(number, _Replica(folder))
        self._replicas = {number: known for number, known in self._replicas.items() if number in folders}
        new = [replica.look() for replica in self._replicas.values()]
        stamp = [_stamp(self.folder / name) for name in ("config.toml", "summary.json")]
        if self._run and not any(new) and stamp == self._stamp and len(new) == len(self._run.replicas):
            return self._run
        self._stamp = stamp
        width = max((replica.growing.width for replica in self._replicas.values()), default=1)
        for replica in self._replicas.values():
            replica.growing.widen(width)
        replicas = tuple(self._replicas[number].growing.replica(number) for number in sorted(self._replicas))
        return recorded(self.folder, replicas, width)


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
