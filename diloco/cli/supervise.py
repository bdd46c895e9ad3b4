"""Start the processes of a run on this machine, watch them, stop them, and report why they failed."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from diloco.exchange.world import STARTED, World, cores, started_here
from diloco.runs.reader import read_errors

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Ctrl-C, a plain kill, a closed terminal, the signal that many Slurm scripts ask for."""
GRACE = 10.0
"""Seconds that the other processes get to exit on their own after one has failed."""


def start(
    words: Sequence[str], size: int, folder: Path, shards: int, watch: Callable[[], None], keep: Sequence[int] = ()
) -> tuple[int, str]:
    """Run `python -m diloco WORDS` in `size` processes here; return their exit code and the reason if they failed.

    `watch` is called several times a second. If one process fails, all stop. They inherit the open files `keep`.
    """
    signals: list[int] = []
    heeded = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # as under nohup
    before = {number: signal.signal(number, lambda number, _: signals.append(number)) for number in heeded}
    try:
        return _attend(_spawn(words, size, folder, shards, keep), folder, watch, signals)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _spawn(
    words: Sequence[str], size: int, folder: Path, shards: int, keep: Sequence[int]
) -> list[subprocess.Popen[bytes]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        STARTED: str(os.getpid()),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(cores() // size, 1))),
    }
    if sys.platform == "linux":
        common["GLOO_SOCKET_IFNAME"] = "lo"  # the machine's name may not resolve, above all offline
    processes = []
    for rank in range(size):
        world = World(rank, size, rank, shards)
        log = _log(folder, world)
        log.parent.mkdir(parents=True, exist_ok=True)
        error_file(folder, world).unlink(missing_ok=True)
        with log.open("a") as out:
            processes.append(subprocess.Popen(
                [sys.executable, "-m", "diloco", *words], stdout=out, stderr=out, stdin=subprocess.DEVNULL,
                env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                start_new_session=True, pass_fds=keep,  # Ctrl-C reaches us; we pass it on once
            ))  # fmt: skip
    return processes


def _attend(
    processes: list[subprocess.Popen[bytes]], folder: Path, watch: Callable[[], None], signals: list[int]
) -> tuple[int, str]:
    """Watch the processes until all have ended. `signals`: those received so far; the list grows."""
    passed_on, failed_at = 0, None
    try:
        while any(p.poll() is None for p in processes):
            if failed_at is None and any(p.poll() for p in processes):
                failed_at = time.monotonic()
            if len(signals) > passed_on:  # the first asks for a checkpoint, the second kills
                passed_on = len(signals)
                first = passed_on == 1
                training = any(folder.glob("replica-*/metrics.jsonl"))
                saving = "saving a checkpoint and stopping; press Ctrl-C again to stop now without saving"
                print((saving if training else "stopping") if first else "stopping now", file=sys.stderr)
                _signal_all(processes, signal.SIGTERM if first else signal.SIGKILL)
            if failed_at is not None and time.monotonic() - failed_at > GRACE:
                _signal_all(processes, signal.SIGKILL)
            watch()
            time.sleep(0.1)
    finally:
        _signal_all(processes, signal.SIGKILL)
    watch()
    if failed_at is None and not any(p.returncode for p in processes):
        return (130, "") if signals else (0, "")
    if passed_on > 1 or (passed_on and any(p.returncode == -signal.SIGTERM for p in processes)):
        return 130, ""  # a signal before or after training saves nothing
    return _reason(processes, folder)


def _signal_all(processes: list[subprocess.Popen[bytes]], number: int) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)


def _reason(processes: list[subprocess.Popen[bytes]], folder: Path) -> tuple[int, str]:
    """Exit code and text of the first error; the death of a process explains the loss of a peer."""
    errors = read_errors(folder)
    killed = [f"process {rank} was killed by signal {-p.returncode}" for rank, p in enumerate(processes)
              if p.returncode < 0]  # fmt: skip
    if killed and (not errors or errors[0]["type"] == "PeerLost"):
        return 1, f"{killed[0]}; resume with --resume; the logs are in {folder}/replica-*/log.txt"
    if errors:
        return errors[0]["code"], errors[0]["message"]
    logs = [text for path in sorted(folder.glob("replica-*/log*.txt")) if (text := path.read_text().strip())]
    last = f": {logs[0].splitlines()[-1]}" if logs else ""
    return 1, f"a process failed{last}; the logs are in {folder}/replica-*/log.txt"


def write_error(folder: Path, world: World, error: BaseException, code: int) -> None:
    """Write the reason of a failure where the process that started this one finds it."""
    message = str(error) if str(error) else type(error).__name__
    if code != 2:
        message = f"replica {world.replica}: {type(error).__name__}: {message}"
    if code != 2 and started_here():
        message += f"; see {_log(folder, world)}"
    value = {"type": type(error).__name__, "message": message, "code": code, "time": time.time()}
    file = error_file(folder, world)
    with contextlib.suppress(OSError):  # the folder itself may be the problem
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(value))


def error_file(folder: Path, world: World) -> Path:
    """Where a process writes why it failed."""
    return folder / f"replica-{world.replica}" / f"error-{world.shard}.json"


def _log(folder: Path, world: World) -> Path:
    """The output of a process."""
    return folder / f"replica-{world.replica}" / ("log.txt" if world.shard == 0 else f"log-{world.shard}.txt")
