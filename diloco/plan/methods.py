"""What is sent when: a model's layers and fragments, and the methods that sync them, as messages to the simulator.

The paper simulates layer by layer: each layer is a message, sent when its backward pass ends and awaited by its forward
pass. This library (`by_fragment`) sends a fragment in one round after the step; the whole model waits for it `overlap`
steps later, and rounds run one after another on the communication thread.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from diloco.core.fragment import Fragment, Sequential, Strided, fragmenter
from diloco.core.schedule import Schedule
from diloco.errors import ConfigError
from diloco.plan.simulate import Message, Method
from diloco.plan.traffic import CODECS, Bytes, Reduce
from diloco.runs.presets import PRESETS, Shape


@dataclass(frozen=True)
class Model:
    """Layers of equal compute, and the tensors outside them as (rows, values per row), the input embedding first."""

    name: str
    layers: tuple[float, ...]
    rest: tuple[tuple[int, int], ...] = ()

    @property
    def parameters(self) -> float:
        return sum(self.layers) + sum(rows * width for rows, width in self.rest)

    def pieces(self) -> tuple[float, ...]:
        """Values that a sync of the whole model moves for each layer. Tensors outside the layers count as part of layer
        0, which is needed first and ready last."""
        return (self.layers[0] + self.parameters - sum(self.layers), *self.layers[1:])

    def fragments(self, text: str) -> list[list[Message]]:
        """The library's fragments for "strided:3", "sequential:3" or "balanced:4", as (layer, values)."""
        cutter = fragmenter(text)
        if isinstance(cutter, (Strided, Sequential)) and cutter.layers > len(self.layers):
            kind = text.partition(":")[0]
            raise ConfigError(
                f"fragments={text!r} with {len(self.layers)} layers: use {kind}:1 to {kind}:{len(self.layers)}"
            )
        layers = {f"layers.{i}": (max(round(n), 1), 1) for i, n in enumerate(self.layers)}
        rest = [(f"rest.{i}", shape) for i, shape in enumerate(self.rest)]
        split = cutter.split(dict(rest[:1]) | layers | dict(rest[1:]), [[name] for name in layers])
        return [self._messages(fragment) for fragment in split]

    def _messages(self, fragment: Fragment) -> list[Message]:
        """One message per layer; the pieces outside the layers are one message, at layer 0."""
        messages: list[Message] = []
        rest = 0
        for piece in fragment:
            kind, number = piece.name.split(".")
            if kind == "layers":
                n = self.layers[int(number)]
                messages.append((int(number), (piece.stop - piece.start) * n / max(round(n), 1)))
            else:
                rest += (piece.stop - piece.start) * self.rest[int(number)][1]
        return [(0, rest), *messages] if rest else messages


def count_values(fragment: Sequence[Message]) -> float:
    return sum(values for _, values in fragment)


def model_of_layers(parameters: float, layers: int, name: str = "") -> Model:
    """All parameters in equal layers, as in the paper's simulator."""
    return Model(name or f"{parameters:.3g} parameters", (parameters / layers,) * layers)


def model_of_shape(shape: Shape, name: str) -> Model:
    embedding, norm = (shape.vocabulary, shape.width), (shape.width, 1)
    head = () if shape.tied else (embedding,)
    return Model(name, (shape.layer_parameters,) * shape.layers, (embedding, norm, *head))


def model_of_preset(name: str) -> Model:
    if name.lower() not in PRESETS:
        raise ConfigError(f"model={name!r}: use one of {', '.join(PRESETS)}, or set --parameters and --layers")
    return model_of_shape(PRESETS[name.lower()], name.lower())


def data_parallel(pieces: Sequence[float], nbytes: Bytes = CODECS["bfloat16"]) -> Method:
    """Every layer after every step, by a ring all-reduce of gradients."""
    messages = _descending((layer, values) for layer, values in enumerate(pieces) if values)
    return Method(len(pieces), lambda step: messages, nbytes, period=1, reduce="ring")


def diloco(
    pieces: Sequence[float], sync_every: int, nbytes: Bytes, *, by_fragment: bool = False, reduce: Reduce = "collective"
) -> Method:
    """Everything after every `sync_every` steps, blocking."""
    whole = [list(enumerate(pieces))]
    return streaming(whole, len(pieces), sync_every, 0, nbytes, by_fragment=by_fragment, reduce=reduce)


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
    """One fragment after another, on the library's schedule."""
    schedule = Schedule(sync_every, len(fragments))
    due: dict[int, list[Message]] = {}
    for number, fragment in enumerate(fragments):
        messages = [(0, count_values(fragment))] if by_fragment else fragment
        due.setdefault(schedule.offset(number), []).extend(messages)
    if not by_fragment:
        due = {offset: _descending(messages) for offset, messages in due.items()}

    def sends(step: int) -> Sequence[Message]:
        return due.get(step % sync_every, ()) if step >= sync_every else ()  # nothing before a full sync_every

    return Method(layers, sends, nbytes, sync_every, overlap, reduce, by_fragment, first=sync_every)


def _descending(messages: Iterable[Message]) -> list[Message]:
    return sorted(messages, reverse=True)
