"""Bytes that n values take on the wire, per codec. No torch: the planner uses these too."""

BLOCK = 256
"""Values that share one scale. E3M0: 4.03 bits a value."""


def blocks(n: int) -> int:
    return -(-n // BLOCK)


def float32(n: int) -> int:
    return 4 * n


def bfloat16(n: int) -> int:
    return 2 * n


def int8(n: int) -> int:
    """One byte a value and an fp32 scale a block."""
    return n + 4 * blocks(n)


def float8(n: int) -> int:
    """One byte a value and the exponent of a power-of-two scale a block."""
    return n + blocks(n)


def e3m0(n: int) -> int:
    """Half a byte a value and the exponent of a power-of-two scale a block."""
    return -(-n // 2) + blocks(n)
