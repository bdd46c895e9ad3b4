"""The run in a bucket: find or create it, and choose the state that a member starts with."""

import contextlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from diloco.bucket import rules
from diloco.bucket.fragment import Fragment
from diloco.bucket.members import MEMBERS, incarnations
from diloco.bucket.rounds import Link, snapshot_index
from diloco.bucket.snapshots import seal_snapshot
from diloco.bucket.store.backend import Backend, Below, patiently
from diloco.bucket.store.cipher import encrypted, open_encrypted
from diloco.bucket.store.envelope import HEADER, PART, PREFIX, Envelope, Invalid, put
from diloco.bucket.store.operations import List, Read, Size, Task, Work, create, together
from diloco.bucket.store.store import Store
from diloco.errors import ConfigError, DiLoCoError, Mismatch
from diloco.exchange.contract import compare
from diloco.exchange.reducer import Contract, Shard, State

log = logging.getLogger("diloco")
NAME = "run.json"
SHARD = "shard-{}"
"""Where ranks of sharded replicas meet those with the same shard. Each shard has separate rounds, as each fragment has,
so the ranks of one replica need not agree on anything."""


@dataclass(frozen=True)
class Run:
    id: str
    contract: Contract
    snapshots: tuple[str, ...]
    note: Mapping[str, Any]  # settings published by the member that created the run
    created: bool  # by this member


def read_run(key: bytes | None) -> Task[Run | None]:
    """The run in the bucket. Raises ConfigError if run.json is unusable."""
    try:
        data = yield Read(NAME, PREFIX.size + HEADER + PART)
        if data is None:
            return None
        signed = Envelope("").open(NAME, "run", data, None).header.get("signed")
        if signed is not (key is not None):
            raise ConfigError("the run is not signed: omit --key-file" if key is not None else
                              "the run is signed: pass its secret with --key-file")  # fmt: skip
        opened = Envelope("", key).open(NAME, "run", data, None)
        value = json.loads(opened.payload)
        contract, snapshots, note = value["contract"], value["snapshots"], value["note"]
        if not isinstance(note, dict) or not isinstance(contract, dict) or not isinstance(snapshots, list):
            raise Invalid("its contract, snapshots or note are malformed")
        if not all(isinstance(name, str) and snapshot_index(name) == 0 for name in snapshots):
            raise Invalid("one of its snapshots is not an initial one")
        if not re.fullmatch("[0-9a-f]{16}", opened.text("run")):
            raise Invalid("its run id is malformed")
        return Run(opened.text("run"), contract, tuple(snapshots), note, created=False)
    except (Invalid, ValueError, KeyError, TypeError, RecursionError) as reason:
        raise ConfigError(f"{NAME} in the bucket is unusable: {reason}") from None


def find_or_create(proposal: Run, key: bytes | None, states: Sequence[State], join_only: bool) -> Task[Run]:
    """The run in the bucket; if there is none, create the proposed one. Raises Mismatch if the contracts differ."""
    run = yield from read_run(key)
    if run is None:
        if join_only:
            raise ConfigError("there is no run in the bucket: check the address, or omit --join-only to start one")
        members = incarnations((yield List(MEMBERS)))
        run = yield from _create_run(proposal, key, states)
        if run.created and members:
            log.warning("the store had entries of members (%s) but no %s, so this member has started a new run. If "
                        "they are still training, someone deleted their run: stop them, or use another address",
                        ", ".join(sorted(members)[:8]), NAME)  # fmt: skip
    compare([run.contract, json.loads(json.dumps(proposal.contract))], ("the run", "this member"))
    if len(run.snapshots) != len(states):
        raise Mismatch(f"the run has {len(run.snapshots)} fragments, this member {len(states)}")
    return run


def _create_run(proposal: Run, key: bytes | None, states: Sequence[State]) -> Task[Run]:
    """Put the initial snapshots, then create run.json, which names them. If several members do so at once, one wins,
    and all take the snapshots of its run.json: equal seeds do not give equal bits on different machines."""
    envelope = Envelope(proposal.id, key)
    snapshots = yield Work(lambda: [seal_snapshot(envelope, f, state, "") for f, state in enumerate(states)])
    yield from together([put(snapshot) for snapshot in snapshots])
    names = [snapshot.name for snapshot in snapshots]
    value = {"contract": proposal.contract, "snapshots": names, "note": proposal.note}
    payload = json.dumps(value, sort_keys=True).encode()
    body = envelope.seal(NAME, "run", {"signed": key is not None}, payload).body
    yield from create(NAME, body, PREFIX.size + HEADER + PART)
    run = yield from read_run(key)
    if run is None:
        raise DiLoCoError(f"{NAME} disappeared right after it was created: something deletes objects in the bucket")
    return replace(run, created=run.id == proposal.id)


def starting_state(fragment: Fragment, state: State) -> Task[State | None]:
    """Choose the state that this member starts with: None for its own, if that belongs to the run and is recent,
    otherwise the newest snapshot. From there it follows the rounds closed since."""
    link = yield from _link_after(fragment, state)
    if link is not None:
        yield from fragment.snapshots.refresh()
        fragment.machine.start_from(state, link)
        return None
    loaded = yield from fragment.snapshots.load()
    if loaded is None:
        raise DiLoCoError(f"the bucket has no usable snapshot of fragment {fragment.number}: someone deleted them")
    fragment.machine.start_from(*loaded)
    return loaded[0]


def _link_after(fragment: Fragment, state: State) -> Task[Link | None]:
    """What the record after a state must refer to; None if the state is too old or not of this run."""
    rounds, snapshots, fingerprint = fragment.rounds, fragment.snapshots, state.fingerprint()
    if (yield from rounds.reaches(rules.too_far(state.index))):
        return None
    for name in (yield from snapshots.list()):
        base: Any = snapshot_index(name)
        judged = (yield from snapshots.judge(name)) if base <= state.index else None
        if judged is not None:
            break
    else:
        return None
    head, link = judged
    if base == state.index and head.header["fingerprint"] != fingerprint:
        return None
    for index in range(base + 1, state.index + 1):
        yield from rounds.records_ahead(range(index, state.index + 2))
        record, _, _ = yield from rounds.record(index, link)
        if record is None:
            fragment.session.event("behind", fragment=fragment.number, index=state.index, closed=index - 1)
            log.warning("fragment %d: this member holds round %d, but the store ends at round %d: the store was rolled "
                        "back, or the checkpoint is from another run; continuing from the store", fragment.number,
                        state.index, index - 1)  # fmt: skip
            return None
        snapshots.followed(record)
        link = record.link
    following, _, _ = yield from rounds.record(state.index + 1, link)
    return None if following is not None and following.fingerprint != fingerprint else link


def contract_of(contract: Contract, rounds: int | None, max_work: float, shares_from: int) -> dict[str, Any]:
    """The settings that members of a bucket must agree on, beyond those of all replicas."""
    return {
        **contract,
        "rounds": rounds,
        "members from which on each averages a share": shares_from,
        "most tokens of a delta": max_work if max_work < float("inf") else None,
    }


def find_run(url: str, key: bytes | None = None, *, encrypt: bytes | None = None, create: bool = False) -> Run | None:
    """The run in a bucket, if there is one. `create`: create the folder if it does not exist."""
    backend = open_encrypted(url, encrypt, create=create)
    patiently(lambda: backend.attempt(Size(NAME)), url)
    return Store(backend).run(read_run(key), contextlib.nullcontext())


def below(url: str, shard: int) -> str:
    """The bucket of one shard of a run."""
    return f"{url.rstrip('/')}/{SHARD.format(shard)}"


def backend_of_shard(shard: Shard, bucket: Backend, key: bytes | None, encrypt: bytes | None) -> Backend:
    """Where this rank meets others: the bucket itself, or the part of its shard. All members must have the same number
    of shards. The contract compares the numbers; this detects sharded and unsharded members in one bucket."""
    elsewhere = encrypted(Below(bucket, SHARD.format(0)) if shard == Shard() else bucket, encrypt)
    with contextlib.suppress(ConfigError):  # an unusable run.json does not count: anyone may have put it there
        if Store(elsewhere).run(read_run(key), contextlib.nullcontext()) is not None:
            ranks = "are sharded" if shard == Shard() else "have one rank"
            raise Mismatch(f"the bucket holds a run whose members {ranks}, this one is {shard}: use the same number of "
                           "ranks on all members")  # fmt: skip
    if shard == Shard():
        return encrypted(bucket, encrypt)
    return encrypted(Below(bucket, SHARD.format(shard.index)), encrypt)
