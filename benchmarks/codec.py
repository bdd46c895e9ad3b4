"""How fast codecs encode and decode on one core, and what they lose. Run: python -m benchmarks.codec

Speed on 8M Gaussian values, as GB/s of fp32 and as a ratio to a warm `out.copy_(x)` of the same tensor:
    encode  `pack`
    decode  chunk by chunk into the same warm memory as the copy, which is what the mean of a round does
    fresh   `unpack`, which also allocates its result: 32 MB of new pages, which cost as much as the decoding
    next    the state after a round of two replicas: decode both, mean, Nesterov, fingerprint, in warm memory
All are timed in turn, repetition by repetition. A ratio is the median over repetitions, so a machine that becomes
slower meanwhile gives the same figure.
Loss: relative error |x − decoded| / |x| and cosine between x and decoded, on the same values.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.record import RESULTS, Record, Target, write
from diloco.codecs import kernels
from diloco.codecs.codec import E3M0, BFloat16, Codec, Float32, TwoBit, chunks, pack, unpack
from diloco.core.memory import Memory
from diloco.core.next_state import NextState
from diloco.core.outer import Nesterov
from diloco.exchange.mean import Encoded
from diloco.exchange.reducer import State

CODECS: tuple[Codec, ...] = (E3M0(), BFloat16(), Float32(), TwoBit())
WAYS = ("encode", "decode", "fresh", "next")
WARM_UP = 2


def main() -> None:
    parser = argparse.ArgumentParser(description="speed and loss of the codecs")
    parser.add_argument("--values", type=int, default=8 << 20)
    parser.add_argument("--repetitions", type=int, default=25)
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    x = torch.randn(arguments.values, generator=torch.Generator().manual_seed(0))
    print(f"{'codec':10} {'bits':>6}", *(f"{way:>16}" for way in WAYS), f"{'error':>9} {'cosine':>9}")
    results: Record = {}
    for codec in CODECS:
        found = results[type(codec).__name__] = measure(codec, x, arguments.repetitions)
        speeds = [f"{found[f'{way}_gbyte_s']:5.2f} GB/s {found[f'{way}_ratio']:4.2f}×" for way in WAYS]
        print(f"{type(codec).__name__:10} {found['bits']:6.3f}", *(f"{speed:>16}" for speed in speeds), end=" ")
        print(f"{found['relative_error']:9.2g} {found['cosine']:9.6f}")
    found = results["E3M0"]
    targets = [
        Target("E3M0 encode, speed relative to a copy", found["encode_ratio"], at_least=0.8),
        Target("E3M0 next state of two replicas, times a copy", 1 / found["next_ratio"], at_most=3),
    ]
    write(RESULTS / "codec.json", {**vars(arguments), "cores_used": 1, "kernels": kernels.level}, results, targets)


def measure(codec: Codec, x: torch.Tensor, repetitions: int) -> Record:
    n, out, payload = len(x), torch.empty_like(x), pack(codec, x)
    wire = type(codec).__name__.lower()

    def decode() -> None:
        if kernels.decodes(wire):
            kernels.mean(wire, [payload], [1.0], out)
            return
        for values, data in chunks(codec, n):
            out[values] = codec.decode(payload[data], values.stop - values.start)

    memory, state = Memory(), State(0, torch.zeros(n), torch.zeros(n))

    def advance() -> None:
        made = NextState(state, Nesterov(), memory, 1.0)
        made.add(Encoded(0, n, codec, [payload, payload], [0.5, 0.5]))
        new = made.state(1)
        memory.anchors.give(new.anchor, lambda: None)
        memory.outers.give(new.outer, lambda: None)

    work: dict[str, Callable[[], object]] = {
        "copy": lambda: out.copy_(x),
        "encode": lambda: pack(codec, x),
        "decode": decode,
        "fresh": lambda: unpack(codec, payload, n),
        "next": advance,
    }
    times: dict[str, list[float]] = {name: [] for name in work}
    for repetition in range(WARM_UP + repetitions):
        for name, function in work.items():
            began = time.perf_counter()
            function()
            if repetition >= WARM_UP:
                times[name].append(time.perf_counter() - began)
    exact, decoded = x.double(), unpack(codec, payload, n).double()
    record: Record = {
        "bits": 8 * codec.nbytes(n) / n,
        "relative_error": float((exact - decoded).norm() / exact.norm()),
        "cosine": float(torch.dot(exact, decoded) / (exact.norm() * decoded.norm())),
        "copy_gbyte_s": 4e-9 * n / statistics.median(times["copy"]),
    }
    for way in WAYS:
        ratios = [copy / other for copy, other in zip(times["copy"], times[way], strict=True)]
        record[f"{way}_gbyte_s"] = 4e-9 * n / statistics.median(times[way])
        record[f"{way}_ratio"] = statistics.median(ratios)
    return record


if __name__ == "__main__":
    main()
