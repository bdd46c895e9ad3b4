"""Shapes of decoders, by name. No torch: the planner uses these too.

The paper's sizes (Table 2) have a two-matrix MLP four times as wide as the model, 12·width² parameters a layer. Ours is
gated, with three matrices, and 8/3 times as wide: the same count.
"""

import difflib
from dataclasses import dataclass

from diloco.errors import ConfigError


@dataclass(frozen=True)
class Shape:
    """A decoder with tied or separate output embedding, RMSNorm, QK-norm and a gated MLP."""

    layers: int
    width: int
    heads: int
    mlp: int
    vocabulary: int
    tied: bool = True

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def layer_parameters(self) -> int:
        """Attention, MLP, two norms of the width and two of a head."""
        return 4 * self.width**2 + 3 * self.width * self.mlp + 2 * self.width + 2 * self.head_width

    @property
    def parameters(self) -> int:
        """All layers, the embedding (twice if not tied) and the final norm."""
        embeddings = self.vocabulary * self.width * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + embeddings + self.width


def _paper(layers: int, width: int) -> Shape:
    """Heads of 64; the MLP's 8/3 rounded to a multiple of 8."""
    return Shape(layers, width, width // 64, round(width * 8 / 3 / 8) * 8, 32_000)


PRESETS: dict[str, Shape] = {
    "nano": Shape(layers=3, width=32, heads=2, mlp=88, vocabulary=257),
    "tiny": Shape(layers=6, width=96, heads=3, mlp=256, vocabulary=257),
    "35m": _paper(6, 512),
    "100m": _paper(9, 768),
    "200m": _paper(12, 1024),
    "300m": _paper(15, 1280),
    "500m": _paper(18, 1536),
    "1b": _paper(24, 2048),
    "4b": _paper(36, 3072),
}
"""`nano` and `tiny` are for bytes (256 and an end-of-document mark): `tiny` trains on two cores in minutes, `nano` only
shows in seconds whether everything works."""


def shape_named(name: str) -> Shape:
    if name not in PRESETS:
        near = difflib.get_close_matches(name.lower(), PRESETS, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"model={name!r}: {hint}give {', '.join(PRESETS)}, or hf:PATH_OR_ID")
    return PRESETS[name]
