"""One replica of several DDP ranks behind any reducer: the first rank asks it, and every rank gets the answer.

DDP needs equal weights, so all ranks send and apply the same fragments after the same step. Each call of the reducer,
two for each fragment and step, is a message of 512 bytes inside the replica: 0.3 ms between two processes of a busy
machine. The states of a round follow it, 8 bytes a value, while training waits.
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
        self._deltas: dict[int, tuple[int, Callable[[], Delta]]] = {}  # the last of each fragment, with its round
        self._digests: dict[int, tuple[int, int]] = {}  # of those of the first rank, with their rounds
        self._warned = False

    @property
    def identity(self) -> Identity:
        """Deltas stay on the host, through which the ranks exchange states."""
        return replace(self.reducer.identity, ddp_ranks=self._ranks, packs_for=None)

    def join(self, job: Join) -> list[State | None]:
        if self._groups is None:
            self._groups = self._safely(lambda: Groups(replace(self._place, name=f"ranks {self._place.name}"), OPENING))
        self._job = job
        differs = self._compare(job)
        entered: list[State | None] = []
        shared: list[State | None] = [None] * len(job.states)

        def ask() -> list[int | None]:
            entered[:] = self.reducer.join(job)
            shared[:] = [state or (job.states[f] if differs[f] else None) for f, state in enumerate(entered)]
            return [state and state.index for state in shared]

        indices = self._share("join", ask)
        states = [None if index is None else self._broadcast(f, index, shared[f]) for f, index in enumerate(indices)]
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
        return self._share("step", lambda: self.reducer.should_send(fragment, steps, scheduled))

    def send(self, fragment: int, index: int, delta: Callable[[], Delta]) -> None:
        def of_all_ranks() -> Delta:
            """Each rank counts its own tokens, and the gradient is the mean over the ranks."""
            ours = delta()
            self._digests[fragment] = index, ours.digest()
            return replace(ours, weight=ours.weight * len(self._ranks)) if ours.tokens else ours

        self._deltas[fragment] = index, delta
        self._share("step", lambda: self.reducer.send(fragment, index, of_all_ranks))

    def poll(self, fragment: int, index: int) -> Outcome | None:
        outcome: Outcome | None = None

        def ask() -> dict[str, Any] | None:
            nonlocal outcome
            outcome = self.reducer.poll(fragment, index)
            return outcome and self._outline(fragment, outcome)

        outline = self._share("step", ask)
        match outline and outline.pop("kind"):
            case "Round":
                return self._round(fragment, outline, outcome if isinstance(outcome, Round) else None)
            case "Jump":
                state = outcome.state if isinstance(outcome, Jump) else None
                return Jump(self._broadcast(fragment, outline["index"], state))
            case "Dropped":
                return Dropped(**outline)
            case "NonFinite":
                return NonFinite(**outline)
        return None

    def drain(self, seconds: float | None = None) -> bool:
        return self._share("finish", lambda: self.reducer.drain(seconds))

    def leave(self) -> None:
        if self._first:
            self.reducer.leave()
        if self._groups is not None:
            self._groups.drop()
            self._groups = None

    def _outline(self, fragment: int, outcome: Outcome) -> dict[str, Any]:
        """An outcome as JSON, without its tensors."""
        kind = {"kind": type(outcome).__name__}
        match outcome:
            case Round():
                return {**kind, "index": outcome.state.index, "members": dict(outcome.members),
                        "counted": outcome.counted, "earlier": outcome.earlier, "own": outcome.own is not None,
                        "cost": asdict(outcome.cost), "digest": self._digests.get(fragment)}  # fmt: skip
            case Jump():
                return {**kind, "index": outcome.state.index}
            case _:
                return {**kind, **asdict(outcome)}

    def _round(self, fragment: int, outline: dict[str, Any], outcome: Round | None) -> Round:
        """The first rank's round, on all ranks."""
        state = self._broadcast(fragment, outline["index"], outcome and outcome.state)
        own = None
        if outline["own"]:
            decoded = outcome.own() if outcome and outcome.own else torch.empty_like(state.anchor)
            self._broadcast_tensor(decoded)
            own = lambda: decoded  # noqa: E731
        sent_index, delta = self._deltas.pop(fragment, (None, None))
        index, digest = outline["digest"] or (None, None)
        comparable = outcome is None and sent_index == index == outline["index"] and not self._warned
        if comparable and delta and delta().digest() != digest:
            self._warned = True
            warn(f"this rank and rank {self._ranks[0]}, which has the reducer, trained different weights, and this "
                 "one's work is lost: FirstRank is for ranks that train one model together, with "
                 "DistributedDataParallel(model)", stacklevel=2)  # fmt: skip
        flags = {name: outline[name] for name in ("counted", "earlier")}
        return Round(state, members=outline["members"], own=own, cost=Cost(**outline["cost"]), **flags)

    def _broadcast(self, fragment: int, index: int, state: State | None) -> State:
        """The first rank's state, on all ranks."""
        assert self._job is not None
        if state is None:
            like = self._job.states[fragment]
            state = State(index, torch.empty_like(like.anchor), torch.empty_like(like.outer))
        self._broadcast_tensor(state.anchor)
        self._broadcast_tensor(state.outer)
        return state

    def _broadcast_tensor(self, tensor: Tensor) -> None:
        groups = self._groups
        assert groups is not None, "join() comes first"
        if len(tensor):
            self._safely(lambda: groups.broadcast_patiently(tensor))

    def _share(self, moment: str, ask: Callable[[], Any]) -> Any:
        """The first rank's answer, or the error that it got, on all ranks."""
        if self._first:
            try:
                answer = ask()
            except BaseException as error:
                with suppress(PeerLost):
                    self._send({"error": [type(error).__name__, str(error)]})
                raise
            self._send({"moment": moment, "answer": answer})
            return answer
        message = self._receive()
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
        return message["answer"]

    def _send(self, message: object) -> None:
        data = json.dumps(message).encode()
        head = len(data).to_bytes(4, "little") + data[: HEAD - 4]
        for part in (head.ljust(HEAD, b"\0"), data[HEAD - 4 :]):
            self._broadcast_tensor(torch.frombuffer(bytearray(part), dtype=torch.uint8) if part else torch.empty(0))

    def _receive(self) -> Any:
        self._broadcast_tensor(head := torch.empty(HEAD, dtype=torch.uint8))
        length = int.from_bytes(head[:4].numpy().tobytes(), "little")
        self._broadcast_tensor(rest := torch.empty(max(length - (HEAD - 4), 0), dtype=torch.uint8))
        return json.loads((head[4:].numpy().tobytes() + rest.numpy().tobytes())[:length])

    def _safely(self, exchange: Callable[[], Any]) -> Any:
        try:
            return exchange()
        except Broken as error:
            reason = str(error).replace("another replica", "another rank")
            raise PeerLost(f"the ranks {list(self._ranks)} of this member lost each other: {reason}. The state can "
                           "still be saved.") from None  # fmt: skip
