"""The header before each payload. It lets all replicas end a round in the same way, instead of hanging."""

import enum
import struct
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

from diloco.errors import Diverged, Mismatch

_FORMAT = struct.Struct("<BB?xiqddqiQ12x")  # padded for later fields: gloo aborts if two sizes meet
_PROTOCOL = 7
NBYTES = _FORMAT.size


class Kind(enum.IntEnum):
    ROUND = 1
    JOIN = 2
    DRAIN = 3
    MEASURE = 4


_DOING = {Kind.ROUND: "starting a round", Kind.JOIN: "joining", Kind.DRAIN: "finishing", Kind.MEASURE: "measuring"}


@dataclass(frozen=True)
class Header:
    kind: Kind
    tokens: bool = False
    fragment: int = -1
    index: int = -1
    weight: float = 0.0
    lr: float = 0.0
    fingerprint: int = 0
    non_finite: int = -1  # the first span of the delta with inf or nan
    digest: int = 0  # of the delta

    def pack(self) -> bytes:
        return _FORMAT.pack(_PROTOCOL, *astuple(self))

    @staticmethod
    def unpack(data: bytes, replica: int) -> "Header":
        protocol, kind, *rest = _FORMAT.unpack(data)
        if protocol != _PROTOCOL or kind not in set(Kind):
            raise Mismatch(
                f"replica {replica} sent a header of protocol {protocol}, kind {kind}, unknown to protocol {_PROTOCOL} "
                "of this one: install the same version of diloco on all replicas"
            )
        return Header(Kind(kind), *rest)


def draining(headers: Sequence[Header]) -> bool:
    """Whether a replica has done its steps. Then all drop a round that others start."""
    return any(h.kind is Kind.DRAIN for h in headers) and all(h.kind in (Kind.ROUND, Kind.DRAIN) for h in headers)


class EarlyEnd:
    """Warns once that replicas have finished while this one still trains."""

    def __init__(self) -> None:
        self._warned = False

    def warn(self, finished: Iterable[int]) -> None:
        if not self._warned:
            self._warned = True
            names = " and ".join(f"replica {m}" for m in sorted(finished))
            warnings.warn(
                f"{names} finished while others still train: there are no more rounds until all call finish(), so "
                "their work until then is not synced. Give all replicas the same number of steps",
                stacklevel=2,
            )


def check_round(headers: Sequence[Header]) -> None:
    """Raise the same error on every replica unless all bring a delta for the same round against the same state."""
    first = headers[0]
    for m, h in enumerate(headers):
        if h.kind is not first.kind:
            remedy = "load a state on all replicas or on none, before the first step"
            if Kind.MEASURE in (h.kind, first.kind):
                remedy = "use the autopilot on all replicas or on none, and let all of them make its first steps"
            raise Mismatch(f"replica {m} is {_DOING[h.kind]} while replica 0 is {_DOING[first.kind]}: {remedy}")
        if (h.fragment, h.index) != (first.fragment, first.index):
            raise Mismatch(
                f"replica {m} sends round {h.index} of fragment {h.fragment} while replica 0 sends round {first.index} "
                f"of fragment {first.fragment}: they resumed from different steps; resume all from the same one"
            )
        if h.tokens is not first.tokens:
            raise Mismatch(f"only one of replicas 0 and {m} calls count(tokens): call it on all, or on none")
        if h.fingerprint != first.fingerprint:
            raise Diverged(
                f"replicas 0 and {m} hold different anchors or outer state at round {h.index - 1} of fragment "
                f"{h.fragment}: resume all from the last checkpoint"
            )
