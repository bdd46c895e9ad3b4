"""Run a function in n real processes joined by gloo, and give back what each returned."""

import contextlib
import functools
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload([
    "torch._dynamo", "torch.distributed.fsdp", "diloco.core.diloco", "diloco.exchange.collective", "diloco.cli.compare",
    "diloco.cli.export", "diloco.cli.train", "diloco.report.html", "diloco.report.live", "diloco.train.members",
    "diloco.train.run", "fsspec", "numpy.ma", "pytest", "tests.support.commands",
    "tests.support.freeze",
])  # fmt: skip


class Died:
    """In place of a result: the process ended without one."""

    def __init__(self, exitcode: int | None) -> None:
        self.exitcode = exitcode


def run(n: int, function: Callable[..., Any], *args: Any, seconds: float = 150, may_die: bool = False) -> list[Any]:
    """`function(rank, *args)` in n processes with a default gloo group. The first error is raised here. `seconds` only
    end a test that hangs."""
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(n)]
        processes = [
            context.Process(target=_main, args=(rank, n, folder, pipes[rank][1], function, args), daemon=True)
            for rank in range(n)
        ]
        for process in processes:
            process.start()
        for _, write in pipes:
            write.close()  # so that the death of a process ends its pipe
        results: list[Any] = []
        deadline = time.monotonic() + seconds
        try:
            for (read, _), process in zip(pipes, processes, strict=True):
                if not read.poll(max(deadline - time.monotonic(), 0)):
                    if may_die:
                        results.append(Died(None))
                        continue
                    raise TimeoutError(f"rank {len(results)} of {n} has not answered within {seconds} s")
                try:
                    results.append(pickle.loads(read.recv_bytes()))
                except EOFError:
                    process.join(10)
                    results.append(Died(process.exitcode))
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                process.join()
    for rank, result in enumerate(results):
        if isinstance(result, Died) and not may_die:
            raise RuntimeError(f"rank {rank} died with exit code {result.exitcode}")
        if isinstance(result, BaseException):
            raise result
    return results


def message_of(kind: type[Exception]) -> Callable[[Callable[..., Any]], Callable[..., str | None]]:
    """Decorates a function that is expected to fail: what the error of this kind says, or None without one."""

    def decorate(function: Callable[..., Any]) -> Callable[..., str | None]:
        @functools.wraps(function)
        def call(*args: Any) -> str | None:
            try:
                function(*args)
            except kind as error:
                return str(error)
            return None

        return call

    return decorate


def _main(rank: int, n: int, folder: str, pipe: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", store=dist.FileStore(str(Path(folder) / "store"), n), rank=rank, world_size=n)
        dist.barrier()  # nobody may be gone before all are connected
        result = function(rank, *args)
    except BaseException as error:
        error.add_note(f"on rank {rank}:\n" + traceback.format_exc())
        result = error
    pipe.send_bytes(pickle.dumps(result))  # tensors by value: the process is about to end
    pipe.close()
    sys.stdout.flush()
    os._exit(0)  # peers must see the sockets close now, not when the interpreter has been taken down
