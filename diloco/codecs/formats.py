"""The wire formats: one row for each shipped codec, with its name and the bytes that n values take. No torch."""

from dataclasses import dataclass

from diloco.errors import ConfigError

BLOCK = 256
"""Values that share one scale. E3M0: 4.03 bits a value."""

GATHER = 3
"""Up to this many replicas, each gathers all deltas: one quantization, one round trip; the fewest bytes at 2, and 1.5
times the fewest at 3. With more, each replica averages one share, and the shares are gathered."""


def blocks(n: int) -> int:
    return -(-n // BLOCK)


def gathers(replicas: int) -> bool:
    return replicas <= GATHER


@dataclass(frozen=True)
class Format:
    """`bits` for each value, and `scale` bytes for each block of values."""

    name: str
    bits: int
    scale: int = 0
    coarse: bool = False
    """What it loses of a delta stays in the replica's weights, and a run's last round is sent in bfloat16."""
    mean: str | None = None
    """The format of averaged shares, whose loss stays nowhere; None: the same."""

    def nbytes(self, n: int) -> int:
        """Exactly the bytes of n values. The planner also asks for fractions of a value."""
        values = n * (self.bits // 8) if self.bits % 8 == 0 else -(-n * self.bits // 8)
        return values + self.scale * blocks(n)

    def __call__(self, n: int) -> int:
        """What the planner takes for any kind of traffic: a function from values to bytes."""
        return self.nbytes(n)


FORMATS: dict[str, Format] = {
    row.name: row
    for row in (
        Format("e3m0", bits=4, scale=1),  # the exponent of a power of two
        Format("bfloat16", bits=16),
        Format("float32", bits=32),
        Format("twobit", bits=2, scale=2, coarse=True, mean="e3m0"),  # bfloat16
    )
}


def format_named(name: str) -> Format:
    if name not in FORMATS:
        raise ConfigError(f"codec={name!r}: give one of {', '.join(FORMATS)}")
    return FORMATS[name]
