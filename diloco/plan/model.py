"""A model as the planner sees it: how many values its layers have, and which of them form a fragment."""

from collections.abc import Sequence
from dataclasses import dataclass

from diloco.errors import ConfigError
from diloco.fragment import Fragment, Sequential, Strided, fragmenter
from diloco.plan.simulate import Message
from diloco.presets import PRESETS, Shape


@dataclass(frozen=True)
class Model:
    """Layers of equal compute, and the other tensors as (rows, values a row), the input embedding first."""

    name: str
    layers: tuple[float, ...]
    rest: tuple[tuple[int, int], ...] = ()

    @property
    def parameters(self) -> float:
        return sum(self.layers) + sum(rows * width for rows, width in self.rest)

    def pieces(self) -> tuple[float, ...]:
        """Values that a sync of the complete model moves for each layer. Tensors outside the layers count as part of
        layer 0, which is needed first and ready last."""
        return (self.layers[0] + self.parameters - sum(self.layers), *self.layers[1:])

    def fragments(self, text: str) -> list[list[Message]]:
        """The fragments that the library makes of "strided:3", "sequential:3" or "balanced:4", as (layer, values)."""
        cutter = fragmenter(text)
        if isinstance(cutter, (Strided, Sequential)) and cutter.layers > len(self.layers):
            kind = text.partition(":")[0]
            raise ConfigError(
                f"fragments={text!r} with {len(self.layers)} layers: give {kind}:1 to {kind}:{len(self.layers)}"
            )
        layers = {f"layers.{i}": (max(round(n), 1), 1) for i, n in enumerate(self.layers)}
        rest = [(f"rest.{i}", shape) for i, shape in enumerate(self.rest)]
        split = cutter.split(dict(rest[:1]) | layers | dict(rest[1:]), [[name] for name in layers])
        return [self._messages(fragment) for fragment in split]

    def _messages(self, fragment: Fragment) -> list[Message]:
        """The pieces by layer; those outside the layers are one message, at layer 0."""
        out: list[Message] = []
        rest = 0
        for piece in fragment:
            kind, number = piece.name.split(".")
            if kind == "layers":
                n = self.layers[int(number)]
                out.append((int(number), (piece.stop - piece.start) * n / max(round(n), 1)))
            else:
                rest += (piece.stop - piece.start) * self.rest[int(number)][1]
        return [(0, rest), *out] if rest else out


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
        raise ConfigError(f"model={name!r}: give one of {', '.join(PRESETS)}, or give --parameters and --layers")
    return model_of_shape(PRESETS[name.lower()], name.lower())


def parse_fragments(text: str, layers: int) -> str:
    """ "8" → "strided:3" for 24 layers: a bare number is the number of fragments."""
    if not text.lstrip("-").isdigit():
        fragmenter(text)
        return text
    count = int(text)
    if not 1 <= count <= layers:
        raise ConfigError(
            f"fragments={text!r} with {layers} layers: give 1 to {layers}, or balanced:N, which also cuts layers"
        )
    return f"strided:{-(-layers // count)}"
