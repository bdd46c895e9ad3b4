"""The S3 server does not answer for 30 s while two members train."""

import time

from benchmarks.record import Record
from studies.bucket.worker import COMMON, Worker, open_gate, rate
from tests.support.s3 import Proxy, Server

GONE = 30.0


def outage(folder: str) -> Record:
    server = Server()
    server.make("bucket")
    proxy = Proxy(server.port)
    workers = [
        Worker(env=proxy.environment, url="s3://bucket/run", name=name, seed=k, gate=f"{folder}-gate", seconds=75,
               **COMMON)
        for k, name in enumerate("ab")
    ]  # fmt: skip
    try:
        open_gate(workers, f"{folder}-gate")
        time.sleep(20)
        began, proxy.mode = time.time(), "gone"
        time.sleep(GONE)
        proxy.mode, ended = "through", time.time()
        results = [worker.result() for worker in workers]
    finally:
        for worker in workers:
            worker.process.kill()
        proxy.end()
        server.end()
    inside = [s for r in results for t, s in zip(r["ends"], r["inside"], strict=True) if began <= t <= ended + 10]
    return {
        "seconds": GONE,
        "rate": sum(rate(r, began + 1, ended) for r in results) / sum(rate(r, began - 15, began) for r in results),
        "longest_hook": max(inside),
        "rounds_before": [_held(r, began) for r in results],
        "rounds_meanwhile": [_held(r, ended) - _held(r, began) for r in results],
        "rounds_after": [_held(r, ended + 20) - _held(r, ended) for r in results],
        "first_round_after": [_first_after(r, ended) for r in results],
    }


def _held(result: Record, at: float) -> int:
    """Rounds that all fragments had at a time."""
    return max((h for t, h in zip(result["ends"], result["held"], strict=True) if t <= at), default=0)


def _first_after(result: Record, at: float) -> float:
    """Seconds until another round was applied by all fragments."""
    had = _held(result, at)
    return min(t for t, h in zip(result["ends"], result["held"], strict=True) if h > had) - at
