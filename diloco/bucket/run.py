"""The run in a bucket: find it or create it, and the state that a member starts with."""

import contextlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from diloco.bucket.members import PREFIX_OF_ALL, lives_of
from diloco.bucket.protocol import BEHIND, FragmentProtocol
from diloco.bucket.rounds import Link
from diloco.bucket.snapshots import index_of, seal_snapshot
from diloco.bucket.store.backend import Backend, Below, patiently
from diloco.bucket.store.cipher import encrypted, open_encrypted
from diloco.bucket.store.envelope import HEADER, PART, PREFIX, Envelope, Invalid, put
from diloco.bucket.store.operations import List, Read, Size, Task, Work, create, together
from diloco.bucket.store.store import Store
from diloco.errors import ConfigError, DiLoCoError, Mismatch
from diloco.reduce import Contract, State
from diloco.reduce.contract import compare

log = logging.getLogger("diloco")
NAME = "run.json"
UNSHARDED = "shard 0 of 1"
SHARD = "shard-{}"
"""Where ranks of sharded replicas meet those that hold the same shard. Each shard has rounds of its own, as each
fragment has, so the ranks of one replica need not agree on anything."""


@dataclass(frozen=True)
class Run:
    id: str
    contract: Contract
    snapshots: tuple[str, ...]
    note: Mapping[str, Any]  # settings published by the member that created the run
    created: bool  # by this member


def read_run(key: bytes | None) -> Task[Run | None]:
    """The run in the bucket. Raises ConfigError if what is there cannot be used."""
    try:
        data = yield Read(NAME, PREFIX.size + HEADER + PART)
        if data is None:
            return None
        signed = Envelope("").open(NAME, "run", data, None).header.get("signed")
        if signed is not (key is not None):
            raise ConfigError("the run is not signed: leave --key-file out" if key is not None else
                              "the run is signed: give its secret with --key-file")  # fmt: skip
        found = Envelope("", key).open(NAME, "run", data, None)
        value = json.loads(found.payload)
        contract, snapshots, note = value["contract"], value["snapshots"], value["note"]
        if not isinstance(note, dict) or not isinstance(contract, dict) or not isinstance(snapshots, list):
            raise Invalid("its contract, snapshots or note are not what they should be")
        if not all(isinstance(name, str) and index_of(name) == 0 for name in snapshots):
            raise Invalid("it names something that is not a first snapshot")
        if not re.fullmatch("[0-9a-f]{16}", found.text("run")):
            raise Invalid("its run id is not one")
        return Run(found.text("run"), contract, tuple(snapshots), note, created=False)
    except (Invalid, ValueError, KeyError, TypeError, RecursionError) as reason:
        raise ConfigError(f"{NAME} in the bucket cannot be used: {reason}") from None


def find_or_create(proposal: Run, key: bytes | None, states: Sequence[State], join_only: bool) -> Task[Run]:
    """The run in the bucket; if there is none, create the proposed one. Raises Mismatch if the contracts differ."""
    run = yield from read_run(key)
    if run is None:
        if join_only:
            raise ConfigError("there is no run in the bucket: check the address, or leave --join-only out to begin one")
        members = lives_of((yield List(PREFIX_OF_ALL)))
        run = yield from _create_run(proposal, key, states)
        if run.created and members:
            log.warning("the store had no %s, but entries of members (%s), so this member has begun a new run. If they "
                        "still train, someone deleted the run under them: stop them, or use another address", NAME,
                        ", ".join(sorted(members)[:8]))  # fmt: skip
    compare([run.contract, json.loads(json.dumps(proposal.contract))], ("the run", "this member"))
    if len(run.snapshots) != len(states):
        raise Mismatch(f"the run has {len(run.snapshots)} fragments, this member {len(states)}")
    return run


def _create_run(proposal: Run, key: bytes | None, states: Sequence[State]) -> Task[Run]:
    """Put the snapshots that everybody starts from, then create run.json, which names them. If several members do so at
    once, one wins, and all take what its run.json names: equal seeds do not give equal bits on different machines."""
    envelope = Envelope(proposal.id, key)
    sealed = yield Work(lambda: [seal_snapshot(envelope, f, state, "") for f, state in enumerate(states)])
    yield from together([put(each) for each in sealed])
    value = {"contract": proposal.contract, "snapshots": [each.name for each in sealed], "note": proposal.note}
    payload = json.dumps(value, sort_keys=True).encode()
    body = envelope.seal(NAME, "run", {"signed": key is not None}, payload).body
    yield from create(NAME, body, PREFIX.size + HEADER + PART)
    run = yield from read_run(key)
    if run is None:
        raise DiLoCoError(f"{NAME} was created and is gone: somebody deletes objects in the bucket")
    return replace(run, created=run.id == proposal.id)


def starting_state(protocol: FragmentProtocol, state: State) -> Task[State | None]:
    """The state that this member starts with: the one it brings, if that belongs to the run and is recent, then
    None is returned, otherwise the newest snapshot. The rounds closed since are followed from there."""
    previous = yield from _previous(protocol, state)
    if previous is not None:
        yield from protocol.snapshots.refresh()
        protocol.start_from(state, previous)
        return None
    loaded = yield from protocol.snapshots.load()
    if loaded is None:
        raise DiLoCoError(f"the bucket has no usable snapshot of fragment {protocol.number}: somebody has deleted them")
    protocol.start_from(*loaded)
    return loaded[0]


def _previous(protocol: FragmentProtocol, state: State) -> Task[Link | None]:
    """What the record after a state has to follow; None if the state is not of this run, or too old."""
    rounds, snapshots, mine = protocol.round_store, protocol.snapshots, state.fingerprint()
    if (yield from rounds.reaches(state.index + BEHIND + 1)):
        return None
    for name in (yield from snapshots.list()):
        base: Any = index_of(name)
        judged = (yield from snapshots.judge(name)) if base <= state.index else None
        if judged is not None:
            break
    else:
        return None
    head, link = judged
    if base == state.index and head.header["fingerprint"] != mine:
        return None
    for index in range(base + 1, state.index + 1):
        yield from rounds.records_ahead(range(index, state.index + 2))
        record, _, _ = yield from rounds.record(index, link)
        if record is None:
            protocol.session.event("behind", fragment=protocol.number, index=state.index, closed=index - 1)
            log.warning("fragment %d: this member holds round %d, and the store ends at round %d: the store was rolled "
                        "back, or the checkpoint is of another run; going on from the store", protocol.number,
                        state.index, index - 1)  # fmt: skip
            return None
        snapshots.followed(record)
        link = record.link
    following, _, _ = yield from rounds.record(state.index + 1, link)
    return None if following is not None and following.fingerprint != mine else link


def contract_of(contract: Contract, rounds: int | None, max_work: float, shares_from: int) -> dict[str, Any]:
    """What members of a bucket must agree on, beyond what all replicas must."""
    return {
        **contract,
        "rounds": rounds,
        "members from which on each averages a share": shares_from,
        "most tokens of a delta": max_work if max_work < float("inf") else None,
    }


def find_run(url: str, key: bytes | None = None, *, encrypt: bytes | None = None, create: bool = False) -> Run | None:
    """The run in a bucket, if there is one. `create`: make the folder if it does not exist."""
    backend = open_encrypted(url, encrypt, create=create)
    patiently(lambda: backend.attempt(Size(NAME)), url)
    return Store(backend).run(read_run(key), contextlib.nullcontext())


def below(url: str, shard: int) -> str:
    """The bucket of one shard of a run."""
    return f"{url.rstrip('/')}/{SHARD.format(shard)}"


def backend_of_shard(shard: str, bucket: Backend, key: bytes | None, encrypt: bytes | None, strict: bool) -> Backend:
    """Where this rank meets others: the bucket itself, or the part of its shard. All members must have the same number
    of shards. The contract compares the numbers; this finds sharded and unsharded members in one bucket."""
    other = encrypted(Below(bucket, SHARD.format(0)) if shard == UNSHARDED else bucket, encrypt)
    with contextlib.suppress(ConfigError):  # what cannot be used is no run: anyone may have put it there
        if Store(other).run(read_run(key), contextlib.nullcontext()) is not None:
            has = "are sharded" if shard == UNSHARDED else "have one rank"
            raise Mismatch(f"the bucket holds a run whose members {has}, this one is {shard}: give all the same number "
                           "of ranks")  # fmt: skip
    if shard == UNSHARDED:
        return encrypted(bucket, encrypt)
    if strict:
        raise ConfigError("pace='strict' with several ranks: two members could wait for each other crosswise, each "
                          "with another rank; give 'decoupled'")  # fmt: skip
    return encrypted(Below(bucket, SHARD.format(int(shard.split()[1]))), encrypt)
