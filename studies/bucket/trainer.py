"""`diloco train` as one member of a bucket: a forked process, whose steps take as long as they are told."""

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch._dynamo", "diloco.cli.train", "diloco.train.run", "studies.bucket.trainer"])


class Trainer:
    """A process that does what `diloco train WORDS` does after it has started itself once more."""

    def __init__(
        self,
        place: Path,
        name: str,
        life: int,
        words: Sequence[str],
        step: float = 0.0,
        sequence: float = 0.0,
        gate: Path | None = None,
        prepare: Callable[[], Any] = bool,
    ) -> None:
        """`step`, `sequence`: seconds that a step takes at least, and for each of its sequences. `gate`: a file before
        whose creation it only joins. `prepare` is called in the process, before it trains."""
        self.name, self.log = name, place / f"{name}-{life}.log"
        self.run = place / f"machine-{name}-{life}" / name
        words = ["train", "--bucket", str(place / "bucket"), "--member", name, "--name", name, "--out",
                 str(self.run.parent), *words]  # fmt: skip
        options = (words, self.log, step, sequence, gate, prepare)
        self.process = _context.Process(target=_train, args=options, daemon=True)
        self.process.start()

    def events(self, kind: str = "events") -> list[dict[str, Any]]:
        path = self.run / f"replica-0/{kind}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        with contextlib.suppress(ValueError):  # of a line that is being written
            return [json.loads(line) for line in lines]
        return [json.loads(line) for line in lines[:-1]]

    def rounds(self) -> int:
        """Rounds that have counted it."""
        return sum(event["event"] == "round" and event["counted"] for event in self.events())

    def trains(self, rounds: int) -> None:
        """Wait until this many rounds have counted it."""
        deadline = time.monotonic() + 600
        while self.rounds() < rounds:
            if not self.process.is_alive() or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} does not train: {self.log.read_text()[-2000:]}")
            time.sleep(0.1)

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def _train(
    words: Sequence[str], log: Path, step: float, sequence: float, gate: Path | None, prepare: Callable[[], Any]
) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                   "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    import torch

    import diloco.train.run
    from diloco.cli import main

    torch.set_num_threads(1)
    prepare()
    train_step = diloco.train.run.train_step

    def slowed(run: Any, lr: float) -> Any:
        while gate and run.diloco and not gate.exists():
            time.sleep(0.01)
        began, sequences = time.perf_counter(), run.tokens_per_step / run.config.context
        reading = train_step(run, lr)
        time.sleep(max(step + sequence * sequences - (time.perf_counter() - began), 0.0))
        return reading

    diloco.train.run.train_step = slowed
    code = 1
    try:
        code = main(list(words))
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)
