"""Two replicas train a decoder and one is killed: what the other loses, with the bucket and with torchft."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch.distributed as dist

from benchmarks.processes import pin
from benchmarks.record import Record
from diloco import Balanced, DiLoCo
from diloco.bucket import Bucket
from studies.netlab.methods import FRAGMENTS, OVERLAP, SYNC_EVERY, Torchft
from studies.netlab.training import Training

REPETITIONS = 3
BATCH = 2
LEAD, REST = 8.0, 16.0
"""Seconds of training before the kill, and after."""


def kill(folder: str) -> Record:
    """Longest step of the survivor after the kill, beyond its usual one."""
    kinds = ("bucket", "torchft") if _installed() else ("bucket",)
    found: Record = {kind: [] for kind in kinds}
    for repetition in range(REPETITIONS):
        for kind in kinds:
            found[kind].append(_once(kind, f"{folder}-{repetition}"))
    return found | {"settings": {"sync_every": SYNC_EVERY, "fragments": FRAGMENTS, "batch": BATCH}}


def _installed() -> bool:
    try:
        import torchft  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        return False
    return True


def _once(kind: str, folder: str) -> Record:
    with tempfile.NamedTemporaryFile() as store:
        workers = []
        for rank in range(2):
            names = {"RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR",
                     "RUST_LOG": "error", "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # fmt: skip
            words = json.dumps({"kind": kind, "url": folder, "store": store.name})
            workers.append(subprocess.Popen([sys.executable, "-m", "studies.bucket.kill", words], text=True,
                                            env={**os.environ, **names}, stdout=subprocess.PIPE))  # fmt: skip
        try:
            for worker in workers:
                assert worker.stdout and worker.stdout.readline().strip() == "ready"
            time.sleep(LEAD)
            workers[1].kill()
            killed = time.time()
            result = json.loads(workers[0].communicate(timeout=120)[0].splitlines()[-1])
        finally:
            for worker in workers:
                worker.kill()
                worker.communicate()
    before = [s for t, s in zip(result["ends"], result["seconds"], strict=True) if t <= killed]
    after = [s for t, s in zip(result["ends"], result["seconds"], strict=True) if t > killed]
    hook = [s for t, s in zip(result["ends"], result["hook"], strict=True) if t > killed]
    usual = statistics.median(before)
    return {"stall": max(after) - usual, "hook": max(hook), "usual": usual, "steps": len(after)}


def main() -> None:
    settings = json.loads(sys.argv[1])
    rank = pin()
    dist.init_process_group("gloo", store=dist.FileStore(settings["store"], 2), rank=rank, world_size=2)
    training = Training(BATCH)
    sync = _bucket(training, settings["url"], rank) if settings["kind"] == "bucket" else _torchft(training)
    dist.barrier()
    print("ready", flush=True)
    ends, seconds, hook = [], [], []
    last = time.time() + LEAD + REST
    while time.time() < last:
        began = time.perf_counter()
        training.step()
        trained = time.perf_counter()
        sync()
        ends.append(time.time())
        seconds.append(time.perf_counter() - began)
        hook.append(time.perf_counter() - trained)
    print(json.dumps({"ends": ends, "seconds": seconds, "hook": hook}), flush=True)
    os._exit(0)


def _bucket(training: Training, url: str, rank: int) -> Callable[[], None]:
    diloco = DiLoCo(training.model, sync_every=SYNC_EVERY, overlap=OVERLAP, fragments=Balanced(FRAGMENTS),
                    reducer=Bucket(url, f"m{rank}"))  # fmt: skip
    diloco.join()
    return diloco.step


def _torchft(training: Training) -> Callable[[], None]:
    """In its optimizer's hook: its stall is in the training step."""
    return Torchft("", FRAGMENTS, least=1).attach(training, ["127.0.0.1"] * 2).step


if __name__ == "__main__":
    main()
