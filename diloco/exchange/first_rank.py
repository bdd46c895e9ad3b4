"""One replica of several DDP ranks behind any reducer: the first rank uses it, and all ranks do the same at each step.

Each rank would see rounds arrive at a different step, and DDP needs equal weights. So after every step the first rank
broadcasts one message: the fragments that all ranks send now, and the outcomes that they apply from the next step on.
Everything happens one step later than in a replica of one process. The states of a round follow the message: 8 bytes a
value, over the network inside the replica, while training waits.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any
from warnings import warn

import torch
import torch.distributed as dist
from torch import Tensor

from diloco import errors
from diloco.errors import DiLoCoError, Mismatch, PeerLost
from diloco.exchange.contract import compare
from diloco.exchange.reducer import (
    Cost,
    Delta,
    Dropped,
    Identity,
    Join,
    Jump,
    NonFinite,
    Outcome,
    Reducer,
    Round,
    State,
)
from diloco.exchange.transport import Broken, Groups, place_in

OPENING = 600.0
"""Seconds to wait for the other ranks to join."""
HEAD = 512
"""Bytes of a message; the rest of a longer one follows."""


class FirstRank:
    """Let the ranks of one DDP job share a reducer.

    Args:
        reducer: the first rank uses it; the other ranks pass an equal one, which stays unused.
        group: the ranks that train this replica together, with DistributedDataParallel.
    """

    def __init__(self, reducer: Reducer, group: dist.ProcessGroup) -> None:
        self.reducer, self._place = reducer, place_in(group)
        self._ranks = tuple(dist.get_process_group_ranks(group))
        self._first = self._place.index == 0
        self._groups: Groups | None = None
        self._job: Join | None = None
        self._begin()

    def _begin(self) -> None:
        self._together = True  # every poll waits for the first rank: while joining and finishing
        self._outcomes: dict[int, Outcome] = {}  # that all ranks have
        self._sends: set[int] = set()  # fragments that all ranks send after this step
        self._next_sends: set[int] = set()  # after the next step
        self._polled: dict[int, int] = {}  # fragments that all ranks are ready to apply → index
        self._digests: dict[int, list[int]] = {}  # of the last delta of a fragment: round, sum over its bits
        self._deltas: dict[int, Callable[[], Delta]] = {}
        self._warned = False

    @property
    def identity(self) -> Identity:
        return replace(self.reducer.identity, ddp_ranks=self._ranks)

    def join(self, job: Join) -> list[State | None]:
        if self._groups is None:
            self._groups = self._safely(lambda: Groups(replace(self._place, name=f"ranks {self._place.name}"), OPENING))
        self._begin()
        self._job = job
        differs = self._compare(job)
        entered: list[State | None] = [None] * len(job.states)
        if self._first:
            entered = self._ask(lambda: self.reducer.join(job))
        replaced = [state or (job.states[f] if differs[f] else None) for f, state in enumerate(entered)]
        indices = self._share("join", lambda: [state and state.index for state in replaced])
        states = [None if index is None else self._broadcast(f, index, replaced[f]) for f, index in enumerate(indices)]
        return entered if self._first else states

    def _compare(self, job: Join) -> list[bool]:
        """Compare the ranks. Returns which fragments the other ranks take from the first."""
        groups = self._groups
        assert groups is not None
        states = [[state.index, state.fingerprint()] for state in job.states]
        offers = self._safely(lambda: groups.gather_json([job.contract, states]))
        names = [f"rank {rank} of this member" for rank in self._ranks]
        for name, (contract, _) in zip(names[1:], offers[1:], strict=True):
            compare([offers[0][0], contract], (names[0], name))
        differs = [any(theirs[f] != offers[0][1][f] for _, theirs in offers) for f in range(len(states))]
        for f, (index, _) in enumerate(offers[0][1]):
            if differs[f] and any(theirs[f][0] for _, theirs in offers):
                raise Mismatch(f"fragment {f}: {names[0]} holds round {index}, and another rank a different round or "
                               "different values: load the same checkpoint on all ranks of a member")  # fmt: skip
        return differs

    def should_send(self, fragment: int, steps: int, scheduled: bool) -> bool:
        if fragment == 0:
            self._announce()
        if self._first and self._ask(lambda: self.reducer.should_send(fragment, steps, scheduled)):
            self._next_sends.add(fragment)
        return fragment in self._sends

    def _announce(self) -> None:
        """After each step: what all ranks send now, and apply from the next step on."""
        self._together = False
        outcomes: dict[int, Outcome] = {}
        if self._first:
            arrived = {f: self._ask(lambda f=f, i=i: self.reducer.poll(f, i)) for f, i in self._polled.items()}
            outcomes = {f: outcome for f, outcome in arrived.items() if outcome is not None}
            self._sends = self._next_sends - outcomes.keys() - self._outcomes.keys() - self._sends
        message = self._share("step", lambda: {
            "sends": sorted(self._sends),
            "outcomes": {str(f): self._described(f, outcome) for f, outcome in outcomes.items()},
        })  # fmt: skip
        self._sends = set(message["sends"])
        for f, described in message["outcomes"].items():
            self._outcomes[int(f)] = self._received(int(f), described, outcomes.get(int(f)))
        self._next_sends.clear()
        self._polled.clear()

    def send(self, fragment: int, index: int, delta: Callable[[], Delta]) -> None:
        self._deltas[fragment] = delta
        if not self._first:
            return

        def of_all_ranks() -> Delta:
            """Each rank counts its own tokens, and the gradient is the mean over the ranks."""
            mine = delta()
            self._digests[fragment] = [index, mine.digest()]
            return replace(mine, weight=mine.weight * len(self._ranks)) if mine.tokens else mine

        self._ask(lambda: self.reducer.send(fragment, index, of_all_ranks))

    def poll(self, fragment: int, index: int) -> Outcome | None:
        if fragment in self._outcomes:
            return self._outcomes.pop(fragment)
        if not self._together:
            self._polled[fragment] = index
            return None
        outcome = self._ask(lambda: self.reducer.poll(fragment, index)) if self._first else None
        described = self._share("poll", lambda: outcome and self._described(fragment, outcome))
        return described and self._received(fragment, described, outcome)

    def drain(self, seconds: float | None = None) -> bool:
        done = self._ask(lambda: self.reducer.drain(seconds)) if self._first else False
        self._together = True
        return self._share("finish", lambda: done)

    def leave(self) -> None:
        if self._first:
            self.reducer.leave()
        if self._groups is not None:
            self._groups.drop()
            self._groups = None

    def _described(self, fragment: int, outcome: Outcome) -> dict[str, Any]:
        """An outcome as JSON, without its tensors."""
        match outcome:
            case Round():
                return {"kind": "round", "index": outcome.state.index, "members": dict(outcome.members),
                        "counted": outcome.counted, "own": outcome.own is not None, "cost": asdict(outcome.cost),
                        "digest": self._digests.get(fragment)}  # fmt: skip
            case Jump():
                return {"kind": "jump", "index": outcome.state.index}
            case Dropped():
                return {"kind": "dropped", **asdict(outcome)}
            case NonFinite():
                return {"kind": "non-finite", "index": outcome.index, "spans": dict(outcome.spans)}

    def _received(self, fragment: int, described: dict[str, Any], outcome: Outcome | None) -> Outcome:
        """The outcome, with the tensors that the first rank sends now."""
        kind, index = described.pop("kind"), described.get("index", 0)
        if kind == "dropped":
            return Dropped(**described)
        if kind == "non-finite":
            return NonFinite(**described)
        state = self._broadcast(fragment, index, outcome.state if isinstance(outcome, (Round, Jump)) else None)
        if kind == "jump":
            return outcome or Jump(state)
        own = outcome.own() if isinstance(outcome, Round) and outcome.own else None
        if described["own"]:
            own = self._send_tensor(own if own is not None else torch.empty_like(state.anchor))
        if isinstance(outcome, Round):
            return replace(outcome, own=None if own is None else lambda: own)
        self._check_drift(fragment, described)
        cost = Cost(**described["cost"])
        return Round(state, described["members"], described["counted"], None if own is None else lambda: own, cost)

    def _check_drift(self, fragment: int, described: dict[str, Any]) -> None:
        delta = self._deltas.pop(fragment, None)
        if delta is None or described["digest"] is None or described["digest"][0] != described["index"]:
            return
        if not self._warned and delta().digest() != described["digest"][1]:
            self._warned = True
            warn(f"this rank and rank {self._ranks[0]}, which has the reducer, trained different weights, and this "
                 "one's work is lost: FirstRank is for ranks that train one model together, with "
                 "DistributedDataParallel(model)", stacklevel=2)  # fmt: skip

    def _broadcast(self, fragment: int, index: int, state: State | None) -> State:
        """The first rank's state, on all ranks."""
        assert self._job is not None
        like = self._job.states[fragment]
        tensors = (
            (state.anchor, state.outer) if state else (torch.empty_like(like.anchor), torch.empty_like(like.outer))
        )
        for tensor in tensors:
            self._send_tensor(tensor)
        return state or State(index, *tensors)

    def _send_tensor(self, tensor: Tensor) -> Tensor:
        groups = self._groups
        assert groups is not None, "join() comes first"
        if len(tensor):
            self._safely(lambda: groups.broadcast_patiently(tensor))
        return tensor

    def _share(self, moment: str, value: Callable[[], Any]) -> Any:
        """The first rank's value, on all ranks."""
        if self._first:
            shared = value()
            self._send_json({"moment": moment, "value": shared})
            return shared
        message = self._receive_json()
        if "error" in message:
            kind, text = message["error"]
            error = getattr(errors, kind, None)
            raise (error or DiLoCoError)(
                f"the first rank of this member stopped: {text if error else f'{kind}: {text}'}"
            )
        if message["moment"] != moment:
            raise DiLoCoError(
                f"rank {self._ranks[0]} of this member is at a {message['moment']}, this one at a {moment}: all ranks "
                "must make the same steps, and call finish() after the same one"
            )
        return message["value"]

    def _send_json(self, message: object) -> None:
        data = json.dumps(message).encode()
        head = len(data).to_bytes(4, "little") + data[: HEAD - 4]
        for part in (head.ljust(HEAD, b"\0"), data[HEAD - 4 :]):
            self._send_tensor(torch.frombuffer(bytearray(part), dtype=torch.uint8) if part else torch.empty(0))

    def _receive_json(self) -> Any:
        head = self._send_tensor(torch.empty(HEAD, dtype=torch.uint8)).numpy().tobytes()
        length = int.from_bytes(head[:4], "little")
        rest = self._send_tensor(torch.empty(max(length - (HEAD - 4), 0), dtype=torch.uint8))
        return json.loads((head[4:] + rest.numpy().tobytes())[:length])

    def _ask(self, question: Callable[[], Any]) -> Any:
        """Ask the reducer. An error on the first rank is one of all ranks."""
        try:
            return question()
        except BaseException as error:
            with suppress(PeerLost):
                self._send_json({"error": [type(error).__name__, str(error)]})
            raise

    def _safely(self, exchange: Callable[[], Any]) -> Any:
        try:
            return exchange()
        except Broken as error:
            reason = str(error).replace("another replica", "another rank")
            raise PeerLost(f"the ranks {list(self._ranks)} of this member lost each other: {reason}. The state can "
                           "still be saved.") from None  # fmt: skip
