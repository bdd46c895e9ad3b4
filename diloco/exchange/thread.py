"""The communication thread: runs jobs in the order of submission, concurrently with training."""

import atexit
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from diloco.codecs import kernels
from diloco.exchange.world import cores

T = TypeVar("T")


def usual_threads() -> int:
    """One where training needs the cores itself; up to four next to an accelerator."""
    return min(4, max(cores() // 2, 1)) if torch.accelerator.is_available() else 1


def start_threads(targets: Sequence[Callable[[], None]], name: str) -> list[threading.Thread]:
    """Start one daemon thread for each target. Each uses one core, because training needs the others, and the current
    accelerator: otherwise every rank would also take memory of the first one.

    torch keeps the number of threads for each thread, but a new thread inherits what was set last."""
    number, ready = torch.get_num_threads(), threading.Barrier(len(targets) + 1)
    index = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

    def begin(target: Callable[[], None]) -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # reading the value pins it for this thread
        if index is not None:
            torch.accelerator.set_device_index(index)
        ready.wait()
        target()

    threads = [threading.Thread(target=begin, args=(target,), name=name, daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    ready.wait()
    torch.set_num_threads(number)
    return threads


class CommThread:
    """`threads`: how many encode and decode; one does everything else."""

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads
        self._jobs: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...], Future[Any]] | None]
        self._jobs = queue.SimpleQueue()
        self._exit, self._exiting = threading.Lock(), False
        (self._thread,) = start_threads([self._serve], "diloco")
        atexit.register(self._at_exit)

    def submit(self, job: Callable[..., T], *args: Any) -> Future[T]:
        future: Future[T] = Future()
        self._jobs.put((job, args, future))
        return future

    def close(self, last: Callable[[], None]) -> None:
        """Stop after the current job and `last`. Wait at most a second: the job may wait for other replicas."""
        self.submit(last)
        self._jobs.put(None)
        self._thread.join(timeout=1.0)
        if not self._thread.is_alive():
            atexit.unregister(self._at_exit)

    def unless_exiting(self, act: Callable[[], None]) -> None:
        """Call `act`. While the interpreter ends, that would abort the process: then sleep until the end instead."""
        with self._exit:
            if not self._exiting:
                act()
                return
        threading.Event().wait()

    def _at_exit(self) -> None:
        with self._exit:
            self._exiting = True

    def _serve(self) -> None:
        kernels.use_threads(self._threads)
        while (queued := self._jobs.get()) is not None:
            job, args, future = queued
            try:
                future.set_result(job(*args))
            except BaseException as error:
                future.set_exception(error)
            del queued, job, args, future  # free the delta and the mean: the next job may come much later
