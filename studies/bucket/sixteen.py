"""Sixteen members on this machine, as real processes over a folder: are all in every round, and is the traffic as
predicted? Run: python -m studies.bucket.sixteen (some minutes, most of them sleep)"""

import multiprocessing
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import nn

from benchmarks.record import Target, write
from diloco import E3M0, SGD, Balanced, DiLoCo
from diloco.bucket import Bucket
from studies.bucket.scale import audited, values_moved

RESULTS = Path(__file__).parent / "sixteen.json"
MEMBERS, ROUNDS, SYNC_EVERY, STEP = 16, 8, 20, 0.25
WIDTH = 1024
"""The model is one matrix of a million parameters, in one fragment."""


def member(url: str, number: int, begin: Any, out: Any) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(number)
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    reduce = Bucket(url, f"m{number:02d}", grace=30.0)
    diloco = DiLoCo(model, reduce=reduce, fragments=Balanced(1), sync_every=SYNC_EVERY, overlap=5, outer=SGD(),
                    codec=E3M0())  # fmt: skip
    diloco.join()
    begin.wait()
    time.sleep(10.0)  # until each has seen the others
    seen: dict[int, tuple[float, dict[str, int], int]] = {}
    while (held := diloco.indices[0]) <= ROUNDS:
        time.sleep(STEP)
        with torch.no_grad():
            model.weight += 0.001 * torch.randn_like(model.weight)
        diloco.step()
        if diloco.indices[0] != held:
            fingerprint = diloco._fragments[0].state.fingerprint()
            seen[diloco.indices[0]] = time.monotonic(), reduce.traffic, fingerprint
    begin.wait()  # nobody leaves while others need it
    out.put((seen, [round.members for round in diloco.stats.last]))
    reduce.leave()


def main() -> None:
    context = multiprocessing.get_context("fork")
    begin, out = context.Barrier(MEMBERS), context.Queue()
    with tempfile.TemporaryDirectory() as place:
        processes = [context.Process(target=member, args=(f"{place}/run", k, begin, out)) for k in range(MEMBERS)]
        for process in processes:
            process.start()
        found = [out.get(timeout=3600) for _ in processes]
        for process in processes:
            process.join()
    values = summary(found)
    write(RESULTS, {"members": MEMBERS, "values": WIDTH**2, "sync_every": SYNC_EVERY, "step": STEP}, values,
          targets(values))  # fmt: skip


def summary(found: list[Any]) -> dict[str, Any]:
    """Bytes of a member and round, from the second round on, against those that the layout of the fragment gives."""
    up, down = values_moved(WIDTH**2, MEMBERS)
    down += audited(WIDTH**2, MEMBERS)
    sent, received, seconds = [], [], []
    states: dict[int, set[int]] = {}
    for seen, _ in found:
        (began, first, _), (ended, last, _), count = seen[min(seen)], seen[max(seen)], max(seen) - min(seen)
        for index, (_, _, fingerprint) in seen.items():
            states.setdefault(index, set()).add(fingerprint)
        sent.append((last["sent"] - first["sent"]) / count)
        received.append((last["received"] - first["received"]) / count)
        seconds.append((ended - began) / count)
    members = [count for _, rounds in found for count in rounds]
    return {
        "sent": mean(sent), "received": mean(received), "predicted to send": up, "predicted to receive": down,
        "seconds a round": mean(seconds),
        "members of a round": mean(members), "fewest members of a round": min(members),
        "states of a round": max(map(len, states.values())),
    }  # fmt: skip


def targets(values: dict[str, Any]) -> list[Target]:
    return [
        Target("bytes sent ÷ predicted", values["sent"] / values["predicted to send"], at_most=1.1),
        Target("bytes received ÷ predicted", values["received"] / values["predicted to receive"], at_most=1.1),
        Target("members of a round", values["members of a round"], at_least=MEMBERS),
        Target("states of a round", values["states of a round"], at_most=1),
    ]


if __name__ == "__main__":
    sys.exit(main())
