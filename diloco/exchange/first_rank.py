"""One replica of several DDP ranks behind any reducer: the first rank asks it, and every rank gets the answer.

DDP needs equal weights, so all ranks send and apply the same fragments after the same step. Each call of the reducer,
two for each fragment and step, is a small exchange inside the replica. The states of a round follow it, 8 bytes a
value, while training waits.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar
from warnings import warn

import torch
import torch.distributed as dist
from torch import Tensor

from diloco import errors
from diloco.errors import DiLoCoError, Mismatch, PeerLost
from diloco.exchange.contract import compare
from diloco.exchange.reducer import (
    Called,
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
from diloco.exchange.rendezvous import PATIENCE
from diloco.exchange.transport import Broken, gather_json, open_group, place_in, wait_patiently

T = TypeVar("T")


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
        self._group: Any = None
        self._sizes: Sequence[tuple[int, int]] = ()  # of each fragment: anchor and outer state
        self._apart = ""  # why the ranks are out of step
        self._sends = Counter[int]()  # by fragment
        self._sent: dict[int, tuple[int, Callable[[], Delta]]] = {}  # the last send of each, on the other ranks
        self._digests: dict[int, tuple[int, int]] = {}  # of the last delta that the first rank has taken, with its send
        self._warned = False

    @property
    def identity(self) -> Identity:
        """Deltas stay on the host, through which the ranks exchange states."""
        return replace(self.reducer.identity, ddp_ranks=self._ranks, packs_for=None)

    def join(self, job: Join) -> list[State | None]:
        if self._group is None:
            place = replace(self._place, name=f"ranks {self._place.name}")
            self._group = self._safely(lambda: open_group("first rank", place, PATIENCE, patient=True))
        self._sizes = [(len(state.anchor), len(state.outer)) for state in job.states]
        offers = self._gather([job.contract, [[state.index, state.fingerprint()] for state in job.states]])
        compare([contract for contract, _ in offers], [f"rank {rank}" for rank in self._ranks])
        versions = [states for _, states in offers]
        equal = all(states == versions[0] for states in versions)
        if not equal and any(index for states in versions for index, _ in states):
            raise Mismatch(f"the ranks {list(self._ranks)} of this member hold different states: load the same "
                           "checkpoint on all of them")  # fmt: skip

        def joined() -> list[State | None]:
            states = self.reducer.join(job)
            return states if equal else [state or job.states[f] for f, state in enumerate(states)]

        states, indices = self._ask("join", joined, lambda states: [state and state.index for state in states])
        states = states or [None] * len(indices)
        return [None if index is None else self._broadcast(f, index, states[f]) for f, index in enumerate(indices)]

    def should_send(self, fragment: int, steps: int, scheduled: bool) -> bool:
        return self._ask("step", lambda: self.reducer.should_send(fragment, steps, scheduled))[1]

    def send(self, fragment: int, index: int, delta: Callable[[], Delta]) -> None:
        self._sends[fragment] += 1
        number = self._sends[fragment]

        def of_all_ranks() -> Delta:
            """Each rank counts its own tokens, and the gradient is the mean over the ranks."""
            ours = delta()
            self._digests[fragment] = number, ours.digest()
            return replace(ours, weight=ours.weight * len(self._ranks)) if ours.tokens else ours

        if not self._first and not self._warned:
            self._sent[fragment] = number, delta
        self._ask("step", lambda: self.reducer.send(fragment, index, of_all_ranks))

    def poll(self, fragment: int, index: int) -> Outcome | None:
        outcome, outline = self._ask(
            "step", lambda: self.reducer.poll(fragment, index), lambda it: _outline(it, self._digests.get(fragment))
        )
        if outline is None:
            return None
        kind, fields, taken = _OUTCOMES[outline[0]], outline[1], outline[2]
        if kind is Round and fields["counted"] and (sent := self._sent.pop(fragment, None)):
            number, delta = sent
            if taken[0] == number:  # otherwise a newer delta was sent, and the first rank has not taken it yet
                self._check_trained_together(delta().digest() == taken[1])
        if kind in (Round, Jump):
            fields["state"] = self._broadcast(fragment, fields["state"], outcome and outcome.state)
        if kind is Round:
            fields |= {"cost": Cost(**fields["cost"]), "own": self._own(fields, outcome)}
        return kind(**fields)

    def drain(self, seconds: float | None = None) -> bool:
        return self._ask("finish", lambda: self.reducer.drain(seconds))[1]

    def leave(self) -> None:
        if self._first:
            self.reducer.leave()
        self._group, self._apart = None, ""

    def _check_trained_together(self, equal: bool) -> None:
        """Warn, once, on a rank whose delta is not that of the first."""
        if not (equal or self._warned):
            self._warned = True
            warn(f"this rank and rank {self._ranks[0]}, which has the reducer, trained different weights, and this "
                 "one's work is lost: FirstRank is for ranks that train one model together, with "
                 "DistributedDataParallel(model)", stacklevel=2)  # fmt: skip

    def _own(self, fields: dict[str, Any], round: Round | None) -> Callable[[], Tensor] | None:
        """The first rank's delta as the others decoded it, on all ranks."""
        if not fields["own"]:
            return None
        decoded = round.own() if round and round.own else torch.empty_like(fields["state"].anchor)
        self._broadcast_tensor(decoded)
        return lambda: decoded

    def _broadcast(self, fragment: int, index: int, state: State | None) -> State:
        """The first rank's state, on all ranks."""
        if state is None:
            anchor, outer = (torch.empty(n, dtype=torch.float32, device="cpu") for n in self._sizes[fragment])
            state = State(index, anchor, outer)
        self._broadcast_tensor(state.anchor)
        self._broadcast_tensor(state.outer)
        return state

    def _broadcast_tensor(self, tensor: Tensor) -> None:
        if len(tensor):
            self._safely(lambda: wait_patiently(self._group.broadcast(tensor, 0)))

    def _ask(
        self, moment: str, call: Callable[[], Any], outline: Callable[[Any], Any] = lambda answer: answer
    ) -> tuple[Any, Any]:
        """The first rank's answer, None on the others, and its outline, as JSON, on all. Or, on all, its error."""
        if self._apart:
            raise DiLoCoError(self._apart)
        answer, failure = None, None
        told: dict[str, Any] = {"moment": moment}
        if self._first:
            try:
                answer = call()
                told["outline"] = outline(answer)
            except BaseException as error:
                failure, told["error"] = error, [type(error).__name__, str(error)]
        try:
            told_by_all = self._gather(told)
        finally:
            if failure is not None:
                raise failure
        first = told_by_all[0]
        if "error" in first:
            name, text = first["error"]
            kind = getattr(errors, name, None)
            raise (kind or DiLoCoError)(f"the first rank of this member stopped: {text if kind else f'{name}: {text}'}")
        for rank, other in zip(self._ranks, told_by_all, strict=True):
            if other["moment"] != first["moment"]:
                self._apart = (
                    f"rank {self._ranks[0]} of this member is at a {first['moment']}, rank {rank} at a "
                    f"{other['moment']}: all ranks must make the same steps, and call finish() after the same one"
                )
                raise DiLoCoError(self._apart)
        return answer, first["outline"]

    def _gather(self, value: object) -> list[Any]:
        assert self._group is not None, "join() comes first"
        return self._safely(lambda: gather_json(self._group, value, wait_patiently))

    def _safely(self, exchange: Callable[[], T]) -> T:
        try:
            return exchange()
        except Broken as error:
            reason = str(error).replace("another replica", "another rank")
            raise PeerLost(f"the ranks {list(self._ranks)} of this member lost each other: {reason}. The state can "
                           "still be saved.") from None  # fmt: skip


_OUTCOMES = {kind.__name__: kind for kind in (Round, Jump, Dropped, NonFinite, Called)}


def _outline(outcome: Outcome | None, taken: tuple[int, int] | None) -> list[Any] | None:
    """An outcome as JSON: of states their index, and of a delta only its digest, and whether it is decoded."""
    if outcome is None:
        return None
    fields = dict(vars(outcome))
    if isinstance(outcome, (Round, Jump)):
        fields["state"] = outcome.state.index
    if isinstance(outcome, Round):
        fields |= {"members": dict(outcome.members), "own": outcome.own is not None, "cost": asdict(outcome.cost)}
    return [type(outcome).__name__, fields, taken]
