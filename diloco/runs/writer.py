"""Writes what a replica records: to metrics.jsonl and events.jsonl, and the numbers also to the sinks."""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco.runs.schema import Evaluation, Record, Round, Step, to_line
from diloco.runs.sinks import Sink
from diloco.stats import RoundStats


class Writer:
    """The records of one replica. Seconds count from the start of the run and go on after a resume."""

    def __init__(self, folder: Path, sinks: Sequence[Sink] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._files = {kind: (folder / f"{kind}.jsonl").open("a") for kind in ("metrics", "events")}
        self._sinks = sinks
        self._began = time.time()

    def seconds(self, at: float | None = None) -> float:
        """Seconds of the run until now, or until `at`, which is seconds since the epoch."""
        return (time.time() if at is None else at) - self._began

    def write(self, record: Record) -> None:
        line = to_line(record)
        measured = isinstance(record, Step | Evaluation)
        file = self._files["metrics" if measured else "events"]
        file.write(json.dumps(line) + "\n")
        file.flush()  # a killed run keeps its numbers, and the live view reads them
        if measured:
            values = {key: value for key, value in line.items() if key not in ("step", "seconds")}
            for sink in self._sinks:
                sink.log(values, record.step)

    def round(self, stats: RoundStats, ranks: int = 1) -> None:
        """Write a round that was just applied. `ranks`: of this replica, each of which sends as many bytes."""
        self.write(
            Round(
                seconds=self.seconds(),
                step=stats.applied_step,
                fragment=stats.fragment,
                index=stats.index,
                sent_step=stats.sent_step,
                sent_seconds=self.seconds(stats.sent_at),
                flight_seconds=stats.seconds,
                exposed_seconds=stats.seconds_exposed,
                bytes_sent=ranks * stats.bytes_sent,
                bytes_received=ranks * stats.bytes_received,
                members=stats.members,
                counted=stats.counted,
                overlap=stats.overlap,
            )
        )

    def state_dict(self) -> dict[str, Any]:
        """How much of each file belongs to this moment: on resume, what was written later is cut off."""
        return {"seconds": self.seconds(), **{kind: file.tell() for kind, file in self._files.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._began = time.time() - state["seconds"]
        for kind, file in self._files.items():
            file.truncate(state[kind])
            file.seek(0, 2)

    @contextlib.contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """What was written must be in the files when a run ends early."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        for sink in self._sinks:
            sink.close()
