"""The ranks of a member with DDP inside: the first one asks the store, and all do the same after the same step.

Each rank would see the store at a time of its own. So the first one alone uses it, and after every step it tells the
others, in one message, what all of them send after this step and take from then on. It tells what it has found out by
then: so all is done one step later than in a member of one process.

What a round or a snapshot holds travels beside the messages. It is taken when all ranks have it, so that nobody waits;
only to join, to finish, and in strict pace do all wait with the first.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from diloco import errors
from diloco.bucket.rank_channel import RankChannel
from diloco.codec import Codec, Float32
from diloco.errors import DiLoCoError, Mismatch, PeerLost
from diloco.reduce import Contract, Delta, Dropped, Jump, Round, State, words
from diloco.reduce.contract import compare
from diloco.reduce.groups import Broken, Place, place_in
from diloco.reduce.mean import Encoded, exact

Outcome = Round | Jump | Dropped
OFFERED = "offered"


@dataclass(frozen=True)
class Asked:
    """What the first rank asks its bucket, as a member of one process does."""

    join: Callable[[Contract, Sequence[State], Sequence[Codec]], list[State | None]]
    due: Callable[[int, int, bool], bool]
    send: Callable[[int, int, Callable[[], Delta]], None]
    take: Callable[[int, int], Outcome | None]
    settle: Callable[[], bool]
    arrived: Callable[[int], Outcome | None]  # what `take` would give now for a fragment, without waiting
    waits: Callable[[int], bool]  # whether `take` would wait


class _Rank:
    """What the first rank and the others have in common."""

    def __init__(self, place: Place, ranks: Sequence[int]) -> None:
        self._place, self.ranks = place, tuple(ranks)
        self._channel: RankChannel | None = None
        self._begin()

    def _begin(self) -> None:
        self._together = True  # all wait with the first: to join and to finish
        self._codecs: Sequence[Codec] = ()
        self._sent: Counter[int] = Counter()  # deltas, by fragment
        self._sends: set[int] = set()  # fragments that all send after this step
        self._takes: set[int] = set()  # those whose outcome all have
        self._waits: set[int] = set()  # those that all wait for, in strict pace
        self._trained: set[int] = set()  # fragments with rounds of their own, unlike buffers, which DDP lets differ

    @property
    def channel(self) -> RankChannel:
        assert self._channel is not None, "join() comes first"
        return self._channel

    def _meet(self, contract: Contract, states: Sequence[State]) -> list[bool]:
        """Compare with the other ranks. Returns which fragments' states the others take from the first."""
        if self._channel is None:
            self._channel = self._safely(lambda: RankChannel(self._place))
        self._begin()
        held = [(state.index, state.fingerprint()) for state in states]
        said = self._safely(lambda: self.channel.gather([contract, held]))
        names = [f"rank {rank} of this member" for rank in self.ranks]
        for name, (other, _) in zip(names[1:], said[1:], strict=True):
            compare([said[0][0], other], (names[0], name))
        differ = [any(other[1][f] != said[0][1][f] for other in said) for f in range(len(states))]
        for f, (index, _) in enumerate(said[0][1]):
            if differ[f] and any(other[1][f][0] for other in said):
                raise Mismatch(f"fragment {f}: {names[0]} holds round {index}, and another rank holds another round or "
                               "other values: load the same checkpoint on all ranks of a member")  # fmt: skip
        return differ

    def _safely(self, exchange: Callable[[], Any]) -> Any:
        try:
            return exchange()
        except Broken as error:
            raise PeerLost(f"the ranks {list(self.ranks)} of this member cannot go on together: {error}. The state can "
                           "still be saved.".replace("another replica", "another rank")) from None  # fmt: skip

    def leave(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()


class First(_Rank):
    """Asks the bucket, and tells the others."""

    def __init__(self, place: Place, ranks: Sequence[int], asked: Asked) -> None:
        self._asked = asked
        super().__init__(place, ranks)

    def _begin(self) -> None:
        super()._begin()
        self._next: set[int] = set()  # fragments that are to be sent after the next step
        self._offered: dict[int, tuple[Outcome, list[Any]]] = {}
        self._sums: dict[int, tuple[int, int]] = {}  # by fragment: number of the last delta, sum over its bits

    def join(self, contract: Contract, states: Sequence[State], codecs: Sequence[Codec]) -> list[State | None]:
        differ = self._meet(contract, states)
        self._codecs = codecs
        entered = self._ask(lambda: self._asked.join(contract, states, codecs))
        given = [state or (states[f] if differ[f] else None) for f, state in enumerate(entered)]
        self._tell({"at": "join", "states": [state and state.index for state in given]})
        self._safely(lambda: self.channel.start([t for state in given if state for t in (state.anchor, state.outer)]))
        return entered

    def due(self, fragment: int, steps: int, slot: bool) -> bool:
        self._trained.add(fragment)
        wanted = self._ask(lambda: self._asked.due(fragment, steps, slot))
        if fragment == 0:
            self._ask(self._announce)
        if wanted and fragment not in self._sends and fragment not in self._offered:
            self._next.add(fragment)
        return fragment in self._sends

    def _announce(self) -> None:
        """After each step: what all send now and take from now on."""
        self._together = False
        new = {
            f: arrived for f in sorted(self._trained) if f not in self._offered and (arrived := self._asked.arrived(f))
        }
        self._sends, self._next = self._next - new.keys(), set()
        self._takes = {f for f, (_, works) in self._offered.items() if all(work.is_completed() for work in works)}
        self._waits = {f for f in self._trained - new.keys() - self._offered.keys() if self._asked.waits(f)}
        tensors = {f: self._pack(f, outcome) for f, outcome in new.items()}
        message = {"sends": sorted(self._sends), "takes": sorted(self._takes), "waits": sorted(self._waits),
                   "offers": {f: said for f, (said, _) in tensors.items()}}  # fmt: skip
        self._tell({"at": "step"} | {key: value for key, value in message.items() if value})
        for f, outcome in new.items():
            self._offered[f] = outcome, self._safely(lambda f=f: self.channel.start(tensors[f][1]))

    def send(self, fragment: int, index: int, delta: Callable[[], Delta]) -> None:
        self._sent[fragment] += 1
        number = self._sent[fragment]

        def taken() -> Delta:
            """In the background. A rank counts its own tokens, and the gradient is the mean over the ranks."""
            found = delta()
            self._sums[fragment] = number, words(found.values)
            return replace(found, weight=found.weight * len(self.ranks)) if found.tokens else found

        self._ask(lambda: self._asked.send(fragment, index, taken))

    def take(self, fragment: int, index: int) -> Outcome | None:
        if self._together or fragment in self._waits:
            return self._take_together(fragment, index)
        if fragment not in self._takes:
            return None
        self._takes.remove(fragment)
        return self._offered.pop(fragment)[0]

    def _take_together(self, fragment: int, index: int) -> Outcome | None:
        if fragment in self._offered:
            self._tell({"at": "round", "outcome": OFFERED})
            return self._offered.pop(fragment)[0]
        outcome = self._ask(lambda: self._asked.take(fragment, index))
        said, tensors = (None, []) if outcome is None else self._pack(fragment, outcome)
        self._tell({"at": "round", "outcome": said})
        self._safely(lambda: self.channel.start(tensors))
        return outcome

    def _pack(self, fragment: int, outcome: Outcome) -> tuple[dict[str, Any], list[Tensor]]:
        if isinstance(outcome, Dropped):
            return {"reset": outcome.reset, "spoiled": outcome.spoiled}, []
        if isinstance(outcome, Jump):
            return {"index": outcome.state.index}, [outcome.state.anchor, outcome.state.outer]
        codec, parts = self._codecs[fragment], outcome.encoded
        if any(part.codec not in (codec, Float32()) for part in parts):
            parts = exact(outcome.mean)
        said = {
            "index": outcome.index, "members": dict(outcome.members), "lr": outcome.lr,
            "counted": outcome.counted, "seconds": outcome.seconds, "own": outcome.own is not None,
            "delta": self._sums.get(fragment),
            "parts": [[p.at, p.n, p.codec == codec, list(p.factors), [len(each) for each in p.payloads]]
                      for p in parts],
        }  # fmt: skip
        return said, [*(t for part in parts for t in part.payloads), *([outcome.own()] if outcome.own else [])]

    def settle(self) -> bool:
        settled = self._ask(self._asked.settle)
        self._together = True
        self._tell({"at": "finish", "settled": settled})
        return settled

    def _ask(self, question: Callable[[], Any]) -> Any:
        """An error is one of all ranks."""
        try:
            return question()
        except BaseException as error:
            with suppress(Broken):
                self.channel.tell({"error": [type(error).__name__, str(error)]})
            raise

    def _tell(self, message: dict[str, Any]) -> None:
        self._safely(lambda: self.channel.tell(message))


class Other(_Rank):
    """Does what the first rank says."""

    def _begin(self) -> None:
        super()._begin()
        self._sizes: list[tuple[int, int]] = []
        self._offered: dict[int, Future[Outcome]] = {}
        self._deltas: dict[int, tuple[int, int, Callable[[], Delta]]] = {}  # the last: number, index, delta
        self._drifted = self._warned = False

    def join(self, contract: Contract, states: Sequence[State], codecs: Sequence[Codec]) -> list[State | None]:
        self._meet(contract, states)
        self._codecs, self._sizes = codecs, [(len(state.anchor), len(state.outer)) for state in states]
        given = self._hear("join")["states"]
        return [None if index is None else self._state(f, index) for f, index in enumerate(given)]

    def due(self, fragment: int, steps: int, slot: bool) -> bool:
        self._trained.add(fragment)
        if fragment == 0:
            said = self._hear("step")
            self._together = False
            self._sends, self._takes, self._waits = (set(said.get(key, ())) for key in ("sends", "takes", "waits"))
            for f, offer in said.get("offers", {}).items():
                self._offered[int(f)] = self._expect(int(f), offer)
        return fragment in self._sends

    def send(self, fragment: int, index: int, delta: Callable[[], Delta]) -> None:
        self._sent[fragment] += 1
        self._deltas[fragment] = self._sent[fragment], index, delta

    def take(self, fragment: int, index: int) -> Outcome | None:
        if self._together or fragment in self._waits:
            said = self._hear("round")["outcome"]
            if said is None:
                return None
            if said != OFFERED:
                self._offered[fragment] = self._expect(fragment, said)
        elif fragment in self._takes:
            self._takes.remove(fragment)
        else:
            return None
        outcome = self._safely(self._offered.pop(fragment).result)
        self._deltas.pop(fragment, None)
        if self._drifted and not self._warned:
            self._warned = True
            warnings.warn(f"this rank and rank {self.ranks[0]}, which has the store, have trained other weights, so "
                          "that what this one has trained is lost: ddp_ranks= is for ranks that train one model "
                          "together, with DistributedDataParallel(model)", stacklevel=3)  # fmt: skip
        return outcome

    def _expect(self, fragment: int, said: dict[str, Any]) -> Future[Outcome]:
        """Start to get what the first rank offers. It is unpacked beside training."""
        if "reset" in said:
            return self.channel.later(lambda: Dropped(said["reset"], said["spoiled"]))
        if "parts" not in said:
            tensors = [torch.empty(n, dtype=torch.float32, device="cpu") for n in self._sizes[fragment]]
        else:
            tensors = [_bytes(n) for *_, sizes in said["parts"] for n in sizes]
            if said["own"]:
                tensors.append(torch.empty(self._sizes[fragment][0], dtype=torch.float32, device="cpu"))
        works = self._safely(lambda: self.channel.start(tensors))
        return self.channel.later(self._unpack, fragment, said, tensors, works, self._deltas.get(fragment))

    def _unpack(
        self, fragment: int, said: dict[str, Any], tensors: list[Tensor], works: list[Any], sent: tuple[Any, ...] | None
    ) -> Outcome:
        self.channel.wait(works)
        if "parts" not in said:
            anchor, outer = tensors
            return Jump(State(said["index"], anchor, outer))
        arrived, parts = iter(tensors), []
        for at, n, encoded, factors, sizes in said["parts"]:
            codec = self._codecs[fragment] if encoded else Float32()
            parts.append(Encoded(at, n, codec, [next(arrived) for _ in sizes], factors))
        own = next(arrived, None)
        state = self._advance(fragment, said, parts, *sent) if sent and sent[1] == said["index"] else None
        return Round(
            said["index"], parts, said["members"], said["lr"], said["counted"], seconds=said["seconds"],
            own=None if own is None else lambda: own, state=state,
        )  # fmt: skip

    def _advance(
        self, fragment: int, said: dict[str, Any], parts: Sequence[Encoded], number: int, index: int,
        later: Callable[[], Delta],
    ) -> State | None:  # fmt: skip
        """The state after the round, as the first rank has made it; and whether both have trained the same."""
        delta = later()
        if said["delta"] and said["delta"][0] == number and said["delta"][1] != words(delta.values):
            self._drifted |= fragment in self._trained
        if delta.next is None:
            return None
        prepared = delta.next(said["lr"])
        for part in parts:
            prepared.add(part)
        return prepared.state(index)

    def settle(self) -> bool:
        settled = self._hear("finish")["settled"]
        self._together = True
        return settled

    def _state(self, fragment: int, index: int) -> State:
        outcome = self._safely(self._expect(fragment, {"index": index}).result)
        assert isinstance(outcome, Jump)
        return outcome.state

    def _hear(self, at: str) -> dict[str, Any]:
        said = self._safely(self.channel.hear)
        if "error" in said:
            _raise(*said["error"])
        if said["at"] != at:
            raise DiLoCoError(f"rank {self.ranks[0]} of this member is at a {said['at']}, this one at a {at}: all "
                              "ranks must make the same steps, and call finish() after the same one")  # fmt: skip
        return said


def _raise(kind: str, text: str) -> NoReturn:
    known = getattr(errors, kind, None)
    raise (known or DiLoCoError)(f"the first rank of this member has stopped: {text if known else f'{kind}: {text}'}")


def _bytes(n: int) -> Tensor:
    return torch.empty(n, dtype=torch.uint8, device="cpu")


def ranks_of(group: dist.ProcessGroup | None, asked: Asked) -> First | Other | None:
    """This process among the ranks that train one model together. None: a member of one process, or of ranks that meet
    others shard by shard."""
    place = place_in(group)
    if group is None or place.size == 1:
        return None
    ranks = dist.get_process_group_ranks(group)
    return First(place, ranks, asked) if place.index == 0 else Other(place, ranks)
