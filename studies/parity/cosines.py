"""How far the replicas agree."""

from collections import defaultdict
from itertools import combinations, pairwise
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from diloco.exchange import local
from diloco.exchange.reducer import Delta

BINS = 10
"""Parts of a run over which cosines are averaged."""


class Cosines:
    """Mean cosine between the deltas of two replicas, per fragment, over each tenth of the run."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self.deltas: dict[tuple[int, int], dict[int, Tensor]] = defaultdict(dict)
        self.found: dict[int, list[float]] = defaultdict(list)

    def watch(self, reduce: local.Local) -> None:
        send = reduce.send

        def watched(fragment: int, index: int, delta: Any) -> None:
            offered: Delta = delta()
            deltas = self.deltas[fragment, index]
            deltas[reduce.replica] = offered.unpacked().clone()
            if len(deltas) == self.replicas > 1:
                del self.deltas[fragment, index]
                pairs = [float(F.cosine_similarity(a, b, 0)) for a, b in combinations(deltas.values(), 2)]
                if all(delta.any() for delta in deltas.values()):  # at the end there may be nothing new
                    self.found[fragment].append(sum(pairs) / len(pairs))
            send(fragment, index, lambda: offered)

        reduce.send = watched

    def means(self) -> list[list[float]]:
        """[fragment][tenth of its rounds]."""
        out = []
        for _, values in sorted(self.found.items()):
            borders = [round(i * len(values) / BINS) for i in range(BINS + 1)]
            parts = [values[a:b] for a, b in pairwise(borders)]
            out.append([round(sum(part) / len(part), 4) for part in parts if part])
        return out
