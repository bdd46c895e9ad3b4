"""Quantities with units, as people write them: 1gbit, 80ms, 1.3b, 24gb."""

import math
import re

from diloco.errors import ConfigError
from diloco.flags import whole_number

RATES = {f"{prefix}{unit}": scale for prefix, scale in (("", 1.0), ("k", 1e3), ("m", 1e6), ("g", 1e9), ("t", 1e12))
         for unit in ("bit", "bps")}  # fmt: skip
TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "y": 365.25 * 86400.0}
LONG = {"second": "s", "sec": "s", "minute": "min", "hour": "h", "hr": "h", "day": "d", "year": "y"}
"""Names of times that are taken too, also with an s at the end."""
SIZES = {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12,
         "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40}  # fmt: skip

_DECIMAL = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)"
_NUMBER = re.compile(rf"\s*([-+]?{_DECIMAL}(?:e[-+]?[0-9]+)?)\s*([a-z]*)(?:/s)?\s*", re.IGNORECASE | re.ASCII)
_BYTES = re.compile(rf"\s*({_DECIMAL})\s*([kKmMgGtT]?)(?:B(?:/s|ps)?|b(?:/s)?|[bB]ytes?(?:/s)?)\s*")
"""A rate that may be of bytes: MB/s, MBps, and gb, which people write for either."""


def rate(text: str, name: str = "link") -> float:
    """Bits a second.

    >>> rate("1gbit"), rate("50 Mbit/s"), rate("1Gbps")
    (1000000000.0, 50000000.0, 1000000000.0)
    """
    if match := _BYTES.fullmatch(text):
        each = {"": "", "k": "k", "m": "M", "g": "G", "t": "T"}[match[2].lower()]
        raise ConfigError(f"{name}={text!r}: bits or bytes? Links are given in bits: {match[1]}{each}bit if bits were "
                          f"meant, {8 * float(match[1]):g}{each}bit if bytes")  # fmt: skip
    return _quantity(text, name, RATES, "1gbit, 100mbit or 500kbit")


def seconds(text: str, name: str = "round_trip", *, zero: bool = True) -> float:
    """
    >>> seconds("80ms"), seconds("7d"), seconds("7 days")
    (0.08, 604800.0, 604800.0)
    """
    return _quantity(text, name, TIMES, "80ms, 1.5s, 10min, 2h, 7d or 1y", zero=zero)


def count(text: str, name: str = "tokens") -> int:
    """
    >>> count("1.3b"), count("70000")
    (1300000000, 70000)
    """
    examples = "25b, 700m, 64k or a whole number"
    try:
        number = whole_number(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r}: write {examples}") from None
    if number < 1:
        raise ConfigError(f"{name}={text!r}: must be above 0; write {examples}")
    return number


def size(text: str, name: str = "memory") -> float:
    """Bytes.

    >>> size("80gb"), size("1GiB")
    (80000000000.0, 1073741824.0)
    """
    return _quantity(text, name, SIZES, "80gb or 512mb")


def up_down(text: str) -> tuple[float, float]:
    """One rate for both directions, or both apart, in bits a second.

    >>> up_down("1gbit"), up_down("up=50mbit,down=500mbit")
    ((1000000000.0, 1000000000.0), (50000000.0, 500000000.0))
    """
    if "=" not in text:
        both = rate(text)
        return both, both
    parts: dict[str, str] = {}
    for part in text.replace(" ", "").split(","):
        direction, _, value = part.partition("=")
        parts[direction] = value
    if set(parts) != {"up", "down"}:
        raise ConfigError(f"link={text!r}: give one rate (1gbit), or both as up=50mbit,down=500mbit")
    return rate(parts["up"], "link up"), rate(parts["down"], "link down")


def _quantity(text: str, name: str, units: dict[str, float], examples: str, *, zero: bool = False) -> float:
    if not (match := _NUMBER.fullmatch(text)):
        raise ConfigError(f"{name}={text!r}: write {examples}")
    unit = match[2].lower()
    unit = LONG.get(unit.removesuffix("s"), unit) if units is TIMES else unit
    if unit not in units:
        raise ConfigError(f"{name}={text!r}: unit {match[2] or 'missing'}; allowed: {', '.join(filter(None, units))}")
    number = float(match[1]) * units[unit]
    if number < 0 or (number == 0 and not zero) or math.isinf(number):
        raise ConfigError(
            f"{name}={text!r}: must be {'0 or more' if zero else 'above 0'}, and finite; write {examples}"
        )
    return number
