"""Checks between replicas: settings and states before the first round, and deltas in every round."""

import warnings
from collections import deque
from collections.abc import Mapping, Sequence

from diloco.errors import Diverged, Mismatch
from diloco.exchange.reducer import Contract

FROZEN = "frozen parameters"
"""The entry of a contract that holds checksums."""
LONGEST = 80
"""Characters of a value in a message."""


def compare(contracts: Sequence[Contract], names: Sequence[str] = ()) -> None:
    """Raise a Mismatch that names every setting on which replicas differ, with both values. If the models differ, it
    names the first difference only: the others follow from it. `names`: of the replicas; by default replica 0, …"""
    labels = names or [f"replica {m}" for m in range(len(contracts))]
    settings, models = [], []
    for key in dict.fromkeys(key for contract in contracts for key in contract):
        values = [contract.get(key) for contract in contracts]
        other = next((m for m, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            of_model = isinstance(values[0], dict) and isinstance(values[other], dict)
            differences = models if of_model else settings
            differences.append(_difference(key, values[0], values[other], labels[0], labels[other]))
    if settings or models:
        raise Mismatch(
            f"{'replicas' if not names else ' and '.join(names) if len(names) < 3 else 'the processes'} disagree: "
            + "; ".join(settings + models[:1])
            + ". Start all with the same settings and model."
        )


def _difference(key: str, first: object, second: object, one: str, other: str) -> str:
    if isinstance(first, dict) and isinstance(second, dict):
        names = list(dict.fromkeys(name for name in [*first, *second] if first.get(name) != second.get(name)))
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        ours, theirs = first.get(names[0]), second.get(names[0])
        if key == FROZEN and None not in (ours, theirs):  # checksums mean nothing to a reader
            return f"{key} of {one} / {other} differ in value, {names[0]}{more}: load the same base model on all"
        return f"{key} of {one} / {other}: {names[0]} is {_show(ours)} / {_show(theirs)}{more}"
    return f"{key} is {_show(first)} on {one}, {_show(second)} on {other}"


def _show(value: object) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def sources(versions: Sequence[Sequence[tuple[int, int]]]) -> list[int | None]:
    """For each fragment, the replica with the state that all take, or None where all are equal.

    `versions[replica][fragment]` is (index, fingerprint). A replica that is behind gets the state of one that is ahead.
    At round 0 states may differ (different seeds): all take the first replica's. Later they must be equal.
    """
    out: list[int | None] = []
    for fragment, states in enumerate(zip(*versions, strict=True)):
        newest = max(index for index, _ in states)
        ahead = [m for m, (index, _) in enumerate(states) if index == newest]
        other = next((m for m in ahead if states[m] != states[ahead[0]]), None)
        if newest > 0 and other is not None:
            raise Diverged(
                f"replicas {ahead[0]} and {other} both hold round {newest} of fragment {fragment}, with different "
                "anchors or outer state: they come from different runs. Resume all from checkpoints of one run."
            )
        out.append(ahead[0] if any(state != states[0] for state in states) else None)
    return out


class SameData:
    """Warns, once, of two replicas whose deltas are equal to the bit: both train on the same data.

    One fragment is no proof: AdamW moves embedding rows that no batch has touched in the same way on every replica. So
    the deltas must be equal in as many rounds in a row as there are fragments. Rounds in which nothing moved are left
    out: finish() syncs fragments that it has just synced.
    """

    def __init__(self) -> None:
        self._rounds: deque[Mapping[str, int]] = deque()
        self._warned = False

    def compare(self, digests: Mapping[str, int], fragments: int, warn: bool = True) -> None:
        """Args: digests: of the deltas in the next round, by replica; 0 if all values are 0."""
        if self._warned or not any(digests.values()):
            return
        self._rounds.append(digests)
        if len(self._rounds) > fragments:
            self._rounds.popleft()
        first: dict[tuple[int | None, ...], str] = {}
        for name in digests if len(self._rounds) == fragments else ():
            sent = tuple(round.get(name) for round in self._rounds)
            if not all(sent) or first.setdefault(sent, name) == name:
                continue
            self._warned = True
            if warn:
                warnings.warn(
                    f"replicas {first[sent]} and {name} sent identical updates: they are training on the same data. "
                    "Give each replica its own shard, for example dataset.shard(num_shards=replicas, index=replica), "
                    "or shuffle with a seed that includes the replica's number",
                    stacklevel=2,
                )
            return
