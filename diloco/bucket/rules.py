"""The rules of a round: pure functions of what was read. Members that read the same decide the same.

docs/bucket-protocol.md numbers the guarantees that the rules serve: 1 one record per round, 2 equal bits, 3 rounds in
order and once, 4 what is closed stays, 5 one living member makes progress, 6 a delta counts once, 7 replay gives the
same, 8 nothing unchecked is used.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate

from diloco.bucket.rounds import (
    MOST,
    Branched,
    Contribution,
    Entry,
    Record,
    is_record,
    place_of,
    snapshot_index,
    without_part,
)
from diloco.bucket.store.envelope import Invalid

BEHIND = 8
"""How many rounds a member may fall behind and still keep its local work."""
VOID = 900.0
"""Seconds for which a delta of a record must be missing before another record may replace that record."""
LINKS = 16
"""Rounds back from the newest one in which a member looks for a record that was replaced after it had been followed."""
ALL_EVERY = 4
"""One round in this many waits for all living members."""


# Which record is that of a round.


def record_of_round(attempts: Iterable[Record | Invalid], void: Collection[str]) -> tuple[Record | None, bool]:
    """The record of a round from all attempts in their order, and whether some attempt follows another history.

    The first valid attempt counts, and nobody deletes one, so a round has one record (1). An attempt may replace the
    one that counts only by naming it as void. `void`: records that this member knows to be wrong, although they are
    well formed.
    """
    record, branched = None, False
    for attempt in attempts:
        if isinstance(attempt, Branched):
            branched = True
        elif isinstance(attempt, Record) and record is not None:
            branched = True
            record = attempt if attempt.voids == record.digest else record
        elif isinstance(attempt, Record) and attempt.digest not in void:
            record = attempt
    return (None if record is not None and record.digest in void else record), branched


def is_truthful(record: Record, deltas: Mapping[str, Contribution], max_work: float) -> bool:
    """Whether a record states the work and learning rate of its deltas correctly, so that no closer chooses their
    weights (2)."""
    return all(
        e.tokens == min(deltas[e.digest].tokens, max_work) and e.lr == deltas[e.digest].lr for e in record.entries
    )


def may_replace(lacking: float, followed: bool) -> bool:
    """Whether another record may void one whose deltas have been missing for so many seconds. Not if anybody has
    followed it: that would change a round that counts (1). Otherwise its fragment would stop forever (5)."""
    return lacking >= VOID and not followed


# Which deltas are in a round, and when it closes.


def expected(training: Collection[str], active: Collection[str] | None, everyone: bool) -> set[str]:
    """The members that a round waits for: of those that live and make steps, the ones that were in the last closed
    round or have delivered or joined since (`active`; None: no round was seen). So a dead or slow member costs the
    straggler timeout once, not in every round (5). `everyone`: all that train; see `waits_for_everyone`."""
    return {name for name in training if everyone or active is None or name in active}


def waits_for_everyone(index: int) -> bool:
    """Whether this round waits for all living members. Otherwise a member that was late once, and always delivers a
    little after the others, would find every round closed, because the others no longer wait for it."""
    return index % ALL_EVERY == 0


def may_close(present: set[str], awaited: Iterable[str], waited: float, straggler_timeout: float, quorum: int) -> bool:
    """Whether a round is complete: all expected members are present, or the straggler timeout is over (5). Either way
    the quorum must be met."""
    return len(present) >= quorum and (present.issuperset(awaited) or waited >= straggler_timeout)


def one_per_member(deltas: Iterable[Contribution], fingerprint: int, own_digest: str) -> list[Contribution]:
    """The deltas that a record may name, ordered by member: trained from the state that the closer holds (2), and at
    most one of each member (6). Of several, the one with `own_digest`, otherwise the one with the most work."""
    best: dict[str, Contribution] = {}
    for delta in sorted(deltas, key=lambda d: (d.digest == own_digest, d.tokens, d.digest)):
        if delta.fingerprint == fingerprint:
            best[delta.member] = delta
    return [best[name] for name in sorted(best)]


def entries_of(deltas: Sequence[Contribution], max_work: float, own_digest: str) -> tuple[Entry, ...]:
    """The entries of a record, at most MOST, always with the closer's own delta: so no correct member closes a round
    that it would have to carry, or an empty one. Work counts up to `max_work`."""
    chosen = sorted(deltas, key=lambda delta: (delta.digest != own_digest, delta.member))[:MOST]
    chosen.sort(key=lambda delta: delta.member)
    return tuple(Entry(d.member, d.digest, min(d.tokens, max_work), d.lr) for d in chosen)


def turns(order: Sequence[str], member: str, away: Collection[str]) -> Callable[[int], int]:
    """Whose turn it is to close a round or to average a share: a function that counts the members before this one when
    the order begins at a given place, without those that are away. A member that is not in the order comes last."""
    before = [0, *accumulate(name not in away for name in order)]
    place = order.index(member) if member in order else None

    def turn(start: int) -> int:
        start %= len(order)
        if place is None:
            return before[-1]
        return before[place] - before[start] + (before[-1] if place < start else 0)

    return turn


# Members that compute other bits.


def count_votes(deltas: Iterable[Contribution], fingerprint: int) -> tuple[int, int]:
    """How many members sent a delta trained from the state with this fingerprint, and the largest number of members
    that agree on a different one (2)."""
    votes = Counter(vote for _, vote in {(delta.member, delta.fingerprint) for delta in deltas})
    return votes.pop(fingerprint, 0), max(votes.values(), default=0)


def is_outvoted(fingerprint: int, deltas: Iterable[Contribution]) -> bool:
    """Whether more members sent a delta trained from one other state than from this one: then a machine that computes
    other bits has made it, and a record closed against it does not count (2). At a tie it counts."""
    agree, differ = count_votes(deltas, fingerprint)
    return differ > agree


# Where a member starts.


def link_after(
    index: int, fingerprint: int, record: Record | None, following: Record | None, branched: bool, outvoted: bool
) -> str:
    """What the record after a snapshot must refer to, if a member may start from the snapshot: its record exists, and
    the run continued from that record and from these bits (2, 3). Raises Invalid.

    Args:
        index, fingerprint: of the snapshot.
        record: the one that it names. following: the record of the round after it, if that is closed.
        branched: some record of that round follows another history. outvoted: `following` does not count.
    """
    if index and record is None:
        raise Invalid("its record does not exist")
    if following is None and branched:
        raise Invalid("the run continued from another record")
    if following is not None and following.fingerprint != fingerprint and not outvoted:
        raise Invalid("the run continued from other bits")
    return "" if record is None else record.digest


def too_far(held: int) -> int:
    """The first round that, once it is closed, is too far ahead for a member that holds another one to keep its local
    work: that belongs to an old anchor (3)."""
    return held + BEHIND + 1


# What may be deleted.


def superfluous(names: Iterable[str], fragment: int, floor: int) -> list[str]:
    """What nobody needs who starts from a snapshot of the floor or later: deltas and shares up to it, and snapshots
    before it, with their parts. Never a record: otherwise a member that slept before its own put could close the round
    a second time, with another mean (1, 4). A share that is put late is the same one again."""

    def serves_nobody(name: str) -> bool:
        if (snapshot := snapshot_index(without_part(name))) is not None:
            return snapshot < floor
        place = place_of(name)
        return place is not None and not is_record(name) and place[0] == fragment and place[1] <= floor

    return [name for name in names if serves_nobody(name)]
