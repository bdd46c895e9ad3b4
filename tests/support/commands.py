"""`diloco` commands in a folder of their own, and what they leave there.

`start` and `run` fork the command, and the replicas that it starts, from a server that has imported torch and the
trainer: a fresh interpreter needs seconds for that, and a run has three of them. `start_program` and `run_program`
start fresh interpreters, as users do; `run_here` calls the command in this process.
"""

import contextlib
import io
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import diloco.train.run
from diloco.cli import main
from diloco.train.model import sample
from tests.support.processes import context
from tests.support.s3 import free_port

ROOT = Path(__file__).parents[2]
SMALL = ["--model", "nano", "--batch", "4", "--context", "32", "--sync-every", "10", "--fragments", "balanced:3",
         "--overlap", "2", "--inner", "adamw", "--eval-every", "1000"]  # fmt: skip
"""With AdamW, whose step takes half of Muon's; the run that others are compared with has Muon."""
DILOCO = [sys.executable, "-m", "diloco"]
HANG = 150
"""Seconds after which a command is taken to hang: below the limit of a test, far above what any of them needs."""


class Command:
    """A command that is forked, with the methods of `subprocess.Popen` that tests use. Its output goes to files."""

    def __init__(
        self,
        place: Path,
        main: Callable[..., Any],
        *args: Any,
        env: dict[str, str] | None = None,
        file_limit: int | None = None,
    ) -> None:
        """`file_limit`: largest size of a file in bytes; writing more fails as on a full disk."""
        self._folder = Path(tempfile.mkdtemp(prefix="output-", dir=place))
        arguments = (place, self._folder, _environment(place) | (env or {}), file_limit, main, args)
        self._process = context.Process(target=_be_command, args=arguments, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float = HANG) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("diloco", timeout, *self.said())
        return self.returncode

    def communicate(self, timeout: float = HANG) -> tuple[str, str]:
        self.wait(timeout)
        return self.said()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def said(self) -> tuple[str, str]:
        out, err = self._folder / "out", self._folder / "err"
        return (out.read_text() if out.exists() else "", err.read_text() if err.exists() else "")


class _Fork:
    """A replica, forked by the command that starts it, in place of `subprocess.Popen`."""

    def __init__(self, words: Sequence[str], stdout: Any, env: dict[str, str]) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        # A signal that comes before the handlers of the command are gone would be lost.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP, signal.SIGINT})
        self.pid = os.fork()
        if self.pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        else:
            os.setsid()
            _accept_signals()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.environ.clear()
            os.environ.update(env)
            _execute(stdout.fileno(), stdout.fileno(), main, list(words))

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


_popen = subprocess.Popen


def _popen_or_fork(words: Any, *args: Any, **kwargs: Any) -> Any:
    if list(words[:3]) == DILOCO:
        return _Fork(words[3:], kwargs["stdout"], kwargs["env"])
    return _popen(words, *args, **kwargs)


def _short_sample(model: Any, tokenizer: Any, prompt: str, count: int, *rest: Any) -> str:
    """Five tokens: 200 would take most of the time of a short run, above all of sharded replicas."""
    return sample(model, tokenizer, prompt, min(count, 5), *rest)


def _accept_signals() -> None:
    """As in a terminal, also if the tests run in the background or under nohup, where signals are ignored."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _be_command(place: Path, folder: Path, env: dict[str, str], file_limit: int | None, main: Any, args: Any) -> None:
    torch.set_num_threads(1)
    _accept_signals()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(place)
    subprocess.Popen = _popen_or_fork
    diloco.train.run.sample = _short_sample
    out, err = (os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for name in ("out", "err"))
    if file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    _execute(out, err, main, *args)


def _execute(out: int, err: int, main: Callable[..., Any], *args: Any) -> NoReturn:
    """Call it as a program of its own, and end this process."""
    os.dup2(out, 1)
    os.dup2(err, 2)
    code: Any = 1
    try:
        code = main(*args)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _environment(place: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    return kept | {"XDG_CACHE_HOME": str(place / "cache"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
                   "GLOO_SOCKET_IFNAME": "lo", "NO_COLOR": "1", "COLUMNS": "120"}  # fmt: skip


def start(place: Path, *words: Any, **kwargs: Any) -> Command:
    return Command(place, main, [str(word) for word in words], **kwargs)


def start_ranks(
    place: Path, size: int, called: Callable[..., Any], *args: Any, port: int | None = None
) -> list[Command]:
    """The function in as many processes, each told its rank in the variables that torchrun sets."""
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or free_port())}
    ranks = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    return [Command(place, called, *args, env=rank) for rank in ranks]


def start_program(place: Path, *words: Any, tool: Sequence[str] = ("-m", "diloco")) -> subprocess.Popen[str]:
    """A real interpreter, as users start it."""
    return subprocess.Popen([sys.executable, *tool, *map(str, words)], cwd=place, env=_environment(place), text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip


def ended(process: Any) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=HANG)
    return process.returncode, out, err


def run(place: Path, *words: Any, **kwargs: Any) -> tuple[int, str, str]:
    return ended(start(place, *words, **kwargs))


def run_program(place: Path, *words: Any, **kwargs: Any) -> tuple[int, str, str]:
    return ended(start_program(place, *words, **kwargs))


def run_here(place: Path, *words: Any) -> tuple[int, str, str]:
    """In this process: for what starts no replica."""
    out, err = io.StringIO(), io.StringIO()
    with (contextlib.chdir(place), mock.patch.dict(os.environ, _environment(place), clear=True),
          contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)):  # fmt: skip
        try:
            code = main([str(word) for word in words])
        except SystemExit as end:
            code = end.code
    assert isinstance(code, int)
    return code, out.getvalue(), err.getvalue()


def training(name: str, *words: Any) -> list[Any]:
    """The words of a small run."""
    return ["train", *SMALL, "--data", "corpus.txt", "--name", name, *words]


def train(place: Path, name: str, *words: Any, **kwargs: Any) -> tuple[int, str, str]:
    return run(place, *training(name, *words), **kwargs)


def children(process: Any) -> list[int]:
    """The processes that it started."""
    return [int(p) for p in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def lines(place, name, replica=0, kind="metrics"):
    text = (place / f"runs/{name}/replica-{replica}/{kind}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def losses(place, name, replica=0):
    return {line["step"]: line["loss"] for line in lines(place, name, replica) if line["event"] == "step"}


def weights(place, name, step, replica=0):
    """All tensors of a checkpoint: model, moments, anchors, outer state."""
    checkpoint = place / f"runs/{name}/replica-{replica}/checkpoints/step-{step:08d}"
    with tempfile.TemporaryDirectory() as folder:
        dcp_to_torch_save(checkpoint, Path(folder, "all.pt"))
        saved = torch.load(Path(folder, "all.pt"), weights_only=False)

    def tensors(value, path=""):
        if isinstance(value, torch.Tensor):
            yield path, value
        elif isinstance(value, dict):
            for key, part in value.items():
                yield from tensors(part, f"{path}/{key}")

    return dict(tensors(saved))


def wait_for(condition: Callable[[], bool], process: Any, seconds: float = HANG) -> None:
    """`seconds` only end a test that hangs."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for_text(path: Path, text: str, process: Any) -> None:
    """Until the file is there and holds the text."""
    wait_for(lambda: path.exists() and text in path.read_text(), process)


def wait_for_lines(path: Path, count: int, process: Any) -> None:
    wait_for(lambda: path.exists() and len(path.read_text().splitlines()) >= count, process)


def check_same(place, name, step=40):
    """The run has the losses and the checkpoint of the uninterrupted one."""
    for replica in (0, 1):
        assert losses(place, name, replica) == losses(place, "whole", replica)
        one, two = weights(place, name, step, replica), weights(place, "whole", step, replica)
        assert one.keys() == two.keys() and len(one) > 100
        assert all(torch.equal(one[key], two[key]) for key in one if "rank" not in key)


def check_anchors(place, name, saved, shards=1):
    """The exported model is the anchors of the checkpoint, not the replica's own weights."""
    exported = load_file(place / name / "model.safetensors")
    anchors = [saved[f"/diloco/shard {k} of {shards}/fragments/{i}/anchor"] for k in range(shards) for i in range(3)]
    names = [name.removeprefix("/model/") for name in saved if name.startswith("/model/")]
    flat = torch.cat([exported[name].flatten() for name in names])
    assert torch.equal(flat.sort().values, torch.cat(anchors).sort().values)
    assert not any(torch.equal(exported[name], saved[f"/model/{name}"]) for name in names if "norm" not in name)
