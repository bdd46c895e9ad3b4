"""The wire formats: one row for each shipped codec, with its name and the bytes that n values take. No torch."""

from dataclasses import dataclass

from diloco.errors import ConfigError

BLOCK = 256
"""Values that share one scale. E3M0: 4.03 bits a value."""


def blocks(n: int) -> int:
    return -(-n // BLOCK)


@dataclass(frozen=True)
class Format:
    """`bits` for each value, and `scale` bytes for each block of values."""

    name: str
    bits: int
    scale: int = 0

    def nbytes(self, n: int) -> int:
        """Exactly the bytes of n values. The planner also asks for fractions of a value."""
        values = n * (self.bits // 8) if self.bits % 8 == 0 else -(-n * self.bits // 8)
        return values + self.scale * blocks(n)


FORMATS: dict[str, Format] = {
    row.name: row
    for row in (
        Format("e3m0", bits=4, scale=1),  # the exponent of a power of two
        Format("float8", bits=8, scale=1),  # the same
        Format("int8", bits=8, scale=4),  # fp32
        Format("bfloat16", bits=16),
        Format("float32", bits=32),
    )
}


def format_named(name: str) -> Format:
    if name not in FORMATS:
        raise ConfigError(f"codec={name!r}: give one of {', '.join(FORMATS)}")
    return FORMATS[name]
