"""Beginning: the run that the bucket holds, or a new one, and where in it this member stands."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from diloco.bucket.protocol import BEHIND, Course
from diloco.bucket.snapshots import index_of, seal_snapshot
from diloco.bucket.store.envelope import HEADER, PART, PREFIX, Invalid, Seal, get, put
from diloco.bucket.store.operations import Task, Work, create, together
from diloco.errors import ConfigError, DiLoCoError
from diloco.reduce import Contract, State
from diloco.reduce.contract import compare

NAME = "run.json"


@dataclass(frozen=True)
class Run:
    id: str
    contract: Contract
    snapshots: tuple[str, ...]
    note: Mapping[str, Any]  # what who began it wanted later members to know
    created: bool  # by this member


def read_run(key: bytes | None) -> Task[Run | None]:
    """The run in the bucket. Raises ConfigError if what is there cannot be used."""
    try:
        found = yield from get(Seal("", key), NAME, "run", None)
        if found is None:
            return None
        if found.header.get("signed") is not (key is not None):
            raise ConfigError("the run is signed: give its key with --key-file" if key is None else "it is not signed")
        value = json.loads(found.payload)
        note = value["note"]
        if not isinstance(note, dict):
            raise Invalid("its note is no JSON object")
        return Run(found.text("run"), value["contract"], tuple(value["snapshots"]), note, created=False)
    except (Invalid, ValueError, KeyError, TypeError, RecursionError) as reason:
        raise ConfigError(f"{NAME} in the bucket cannot be used: {reason}") from None


def meet(offer: Run, key: bytes | None, states: Sequence[State], join_only: bool) -> Task[Run]:
    """Find the run, or found the one that is offered. The contract must be the run's."""
    run = yield from read_run(key)
    if run is None:
        if join_only:
            raise ConfigError("there is no run in the bucket: check the address, or leave --join-only out to begin one")
        run = yield from _found(offer, key, states)
    compare([run.contract, json.loads(json.dumps(offer.contract))], ("the run", "this member"))
    return run


def _found(offer: Run, key: bytes | None, states: Sequence[State]) -> Task[Run]:
    """Put what everybody starts from, then create run.json, which names it. If several do so at once, one wins, and all
    take what its run.json names: equal seeds do not give equal bits on different machines."""
    seal = Seal(offer.id, key)
    sealed = yield Work(lambda: [seal_snapshot(seal, f, state, "") for f, state in enumerate(states)])
    yield from together([put(each) for each in sealed])
    value = {"contract": offer.contract, "snapshots": [each.name for each in sealed], "note": offer.note}
    payload = json.dumps(value, sort_keys=True).encode()
    body = seal.close(NAME, "run", {"signed": key is not None}, payload).body
    yield from create(NAME, body, PREFIX.size + HEADER + PART)
    run = yield from read_run(key)
    if run is None:
        raise DiLoCoError(f"{NAME} was there and is gone: somebody deletes what is in the bucket")
    return replace(run, created=run.id == offer.id)


def enter(course: Course, state: State) -> Task[State]:
    """Where this member begins: with the state it brings, if that is the run's and recent, else with the newest
    snapshot. What was closed since is followed from there."""
    previous = yield from _previous(course, state)
    if previous is not None:
        yield from course.shelf.refresh()
        course.stand(state, previous)
        return state
    loaded = yield from course.shelf.load()
    if loaded is None:
        raise DiLoCoError(f"the bucket has no usable snapshot of fragment {course.number}: somebody has deleted them")
    course.stand(*loaded)
    return loaded[0]


def _previous(course: Course, state: State) -> Task[str | None]:
    """The digest of the record that led to a state; None if the state is not the run's, or of long ago."""
    ledger, mine = course.ledger, state.fingerprint()
    if (yield from ledger.reaches(state.index + BEHIND + 1)):
        return None
    for name in (yield from course.shelf.list()):
        base: Any = index_of(name)
        head = (yield from course.shelf.peek(name)) if base <= state.index else None
        if head is not None:
            break
    else:
        return None
    if base == state.index and head.header["fingerprint"] != mine:
        return None
    previous = head.header["record"]
    for index in range(base + 1, state.index + 1):
        record, _ = yield from ledger.record(index, previous)
        if record is None:
            return None  # the run has not come so far: the state is of another one
        previous = record.digest
    following, _ = yield from ledger.record(state.index + 1, previous)
    return None if following is not None and following.fingerprint != mine else previous


def contract_of(contract: Contract, rounds: int | None, most: float) -> dict[str, Any]:
    """What members of a bucket agree on, beyond what all replicas do."""
    return {**contract, "rounds": rounds, "most tokens of a delta": most if most < float("inf") else None}
