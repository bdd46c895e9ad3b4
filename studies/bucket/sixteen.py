"""Sixteen members on this machine, as real processes over a folder: are all in every round, and is the traffic as
predicted? Run: python -m studies.bucket.sixteen (some minutes, most of them sleep)

What is predicted: the bytes that the same number of members moved in virtual time (scale.json), for the values of this
fragment.
"""

import multiprocessing
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import nn

from benchmarks.record import Target, read, write
from diloco import E3M0, SGD, Balanced, DiLoCo
from diloco.bucket import Bucket
from diloco.bucket.store.backend import open_store
from diloco.bucket.store.operations import Create, Operation, Read, Write
from studies.bucket import scale

RESULTS = Path(__file__).parent / "sixteen.json"
MEMBERS, ROUNDS, SYNC_EVERY, STEP = 16, 16, 20, 0.25
WIDTH = 1024
"""The model is one matrix of a million parameters, in one fragment."""
KINDS = {"d": "heads of deltas", "c": "records", "h": "heads of a round", "s": "shares"}
"""Of the objects of a round, by the first letter."""


class Counted:
    """The folder, and the bytes of each kind of object that went there and back."""

    def __init__(self, url: str) -> None:
        self._store, self._one = open_store(url, create=True), threading.Lock()
        self.sent, self.received = Counter[str](), Counter[str]()

    def attempt(self, operation: Operation) -> Any:
        answer = self._store.attempt(operation)
        match operation:
            case Create(data=data) | Write(data=data):
                self._count(self.sent, operation.name, data)
            case Read() if isinstance(answer, bytes):
                self._count(self.received, operation.name, answer)
        return answer

    def _count(self, where: Counter[str], name: str, data: bytes) -> None:
        top, _, rest = name.partition("/")
        with self._one:
            where[KINDS[rest.rpartition("/")[2][0]] if top == "rounds" else top] += len(data)


def member(url: str, number: int, begin: Any, out: Any) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(number)
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    store = Counted(url)
    reduce = Bucket(url, f"m{number:02d}", grace=30.0, backend=store)
    diloco = DiLoCo(model, reduce=reduce, fragments=Balanced(1), sync_every=SYNC_EVERY, overlap=5, outer=SGD(),
                    codec=E3M0())  # fmt: skip
    diloco.join()
    begin.wait()
    time.sleep(10.0)  # until each has seen the others
    seen: dict[int, tuple[float, Counter[str], Counter[str], int]] = {}
    while (held := diloco.indices[0]) <= ROUNDS:
        time.sleep(STEP)
        with torch.no_grad():
            model.weight += 0.001 * torch.randn_like(model.weight)
        diloco.step()
        if diloco.indices[0] != held:
            fingerprint = diloco._fragments[0].state.fingerprint()
            seen[diloco.indices[0]] = time.monotonic(), store.sent.copy(), store.received.copy(), fingerprint
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
    """Bytes of a member and round, from the second round on, against those that were predicted."""
    sent, received, seconds, rounds = Counter[str](), Counter[str](), 0.0, 0
    states: dict[int, set[int]] = {}
    for seen, _ in found:
        first, last = min(seen), max(seen)
        for index, (*_, fingerprint) in seen.items():
            states.setdefault(index, set()).add(fingerprint)
        sent += seen[last][1] - seen[first][1]
        received += seen[last][2] - seen[first][2]
        seconds += seen[last][0] - seen[first][0]
        rounds += last - first
    up, down = predicted(seconds / rounds)
    members = [count for _, rounds_ in found for count in rounds_]
    return {
        "sent": sent.total() / rounds, "received": received.total() / rounds, "predicted to send": up,
        "predicted to receive": down, "sent, by kind": {kind: n / rounds for kind, n in sorted(sent.items())},
        "received, by kind": {kind: n / rounds for kind, n in sorted(received.items())},
        "seconds a round": seconds / rounds,
        "members of a round": mean(members), "fewest members of a round": min(members),
        "states of a round": max(map(len, states.values())),
    }  # fmt: skip


def predicted(seconds: float) -> tuple[float, float]:
    """Bytes to send and to receive in a round that takes so long. Here answers to LISTs are not counted."""
    row = (read(scale.RESULTS) or {})["values"][f"{MEMBERS} members"]
    up, down = scale.moved({**row, "listed beside": 0.0}, WIDTH**2, outer=0)
    return up + row["up life"] * seconds / 60, down + row["down life"] * seconds / 60


def targets(values: dict[str, Any]) -> list[Target]:
    return [
        Target("bytes sent ÷ predicted", values["sent"] / values["predicted to send"], at_most=1.1),
        Target("bytes received ÷ predicted", values["received"] / values["predicted to receive"], at_most=1.1),
        Target("members of a round", values["members of a round"], at_least=MEMBERS),
        Target("states of a round", values["states of a round"], at_most=1),
    ]


if __name__ == "__main__":
    sys.exit(main())
