"""The methods as messages: data-parallel, DiLoCo and streaming, as the paper simulates them and as this library runs.

The paper: every layer is a message of its own, sent when its backward pass has ended and awaited by its forward pass.
This library (`by_fragment`): a fragment is one round, sent after the step and awaited `overlap` steps later by the
complete model; rounds run one after another on the communication thread.
"""

from collections.abc import Iterable, Sequence

from diloco.plan.model import count_values
from diloco.plan.simulate import Message, Method
from diloco.plan.traffic import CODECS, Bytes, Reduce
from diloco.schedule import Schedule, check_overlap


def data_parallel(pieces: Sequence[float], nbytes: Bytes = CODECS["bfloat16"]) -> Method:
    """Every layer after every step, by a ring all-reduce of gradients."""
    messages = _descending((layer, values) for layer, values in enumerate(pieces) if values)
    return Method(len(pieces), lambda step: messages, nbytes, period=1, reduce="ring")


def bucketed(pieces: Sequence[float], first: float, others: float) -> list[float]:
    """Layers as DDP sends them: from the last on, in buckets that are sent when they hold this many values.

    >>> bucketed([3, 3, 3, 3], first=1, others=100)
    [9.0, 0.0, 0.0, 3.0]
    """
    out, size, limit = [0.0] * len(pieces), 0.0, first
    for layer in reversed(range(len(pieces))):
        size += pieces[layer]
        if size >= limit or layer == 0:
            out[layer], size, limit = float(size), 0.0, others
    return out


def diloco(
    pieces: Sequence[float], sync_every: int, nbytes: Bytes, *, by_fragment: bool = False, reduce: Reduce = "collective"
) -> Method:
    """Everything after every `sync_every` steps, blocking."""
    return streaming(
        [list(enumerate(pieces))], len(pieces), sync_every, 0, nbytes, by_fragment=by_fragment, reduce=reduce
    )


def streaming(
    fragments: Sequence[Sequence[Message]],
    layers: int,
    sync_every: int,
    overlap: int,
    nbytes: Bytes,
    *,
    by_fragment: bool = False,
    reduce: Reduce = "collective",
) -> Method:
    """Fragment after fragment by the library's schedule."""
    check_overlap(overlap, sync_every)
    schedule = Schedule(sync_every, len(fragments))
    due: dict[int, list[Message]] = {}
    for number, fragment in enumerate(fragments):
        messages = [(0, count_values(fragment))] if by_fragment else fragment
        due.setdefault(schedule.offset(number), []).extend(messages)
    if not by_fragment:
        due = {offset: _descending(messages) for offset, messages in due.items()}

    def sends(step: int) -> Sequence[Message]:
        return due.get(step % sync_every, ()) if step >= sync_every else ()  # first after a full sync_every

    return Method(layers, sends, nbytes, sync_every, overlap, reduce, by_fragment, first=sync_every)


def _descending(messages: Iterable[Message]) -> list[Message]:
    return sorted(messages, reverse=True)
