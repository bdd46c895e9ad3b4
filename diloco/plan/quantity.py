"""Parse quantities as people write them: 1gbit, 80ms, 25GB/s."""

import math
import re

from diloco.errors import ConfigError

RATES = {f"{prefix}{unit}": scale for prefix, scale in (("", 1.0), ("k", 1e3), ("m", 1e6), ("g", 1e9), ("t", 1e12))
         for unit in ("bit", "bps")}  # fmt: skip
BYTES = {f"{prefix}b": scale for prefix, scale in (("", 1.0), ("k", 1e3), ("m", 1e6), ("g", 1e9), ("t", 1e12))}
TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "y": 365.25 * 86400.0}

_DECIMAL = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)"
_NUMBER = re.compile(rf"\s*([-+]?{_DECIMAL}(?:e[-+]?[0-9]+)?)\s*([a-z]*)(?:/s)?\s*", re.IGNORECASE | re.ASCII)
_BYTES = re.compile(rf"\s*({_DECIMAL})\s*([kKmMgGtT]?)(?:B(?:/s|ps)?|b(?:/s)?|[bB]ytes?(?:/s)?)\s*")
"""A rate that may mean bytes: MB/s, MBps, and gb, which people use for both."""


def rate(text: str, name: str = "link") -> float:
    """Bits per second.

    >>> rate("1gbit"), rate("50 Mbit/s"), rate("1Gbps")
    (1000000000.0, 50000000.0, 1000000000.0)
    """
    if match := _BYTES.fullmatch(text):
        prefix = {"": "", "k": "k", "m": "M", "g": "G", "t": "T"}[match[2].lower()]
        raise ConfigError(f"{name}={text!r}: bits or bytes? Use bits: {match[1]}{prefix}bit, or "
                          f"{8 * float(match[1]):g}{prefix}bit if you meant bytes")  # fmt: skip
    return _quantity(text, name, RATES, "1gbit, 100mbit or 500kbit")


def bandwidth(text: str, name: str = "bus") -> float:
    """Bytes per second.

    >>> bandwidth("50GB/s"), bandwidth("800 MB/s")
    (50000000000.0, 800000000.0)
    """
    if "b" in text:
        raise ConfigError(f"{name}={text!r}: bits or bytes? Use bytes, with a large B: 50GB/s or 800MB/s")
    return _quantity(text, name, BYTES, "50GB/s or 800MB/s")


def seconds(text: str, name: str = "round_trip", *, zero: bool = True) -> float:
    """
    >>> seconds("80ms"), seconds("7 d")
    (0.08, 604800.0)
    """
    return _quantity(text, name, TIMES, "80ms, 1.5s, 10min, 2h, 7d or 1y", zero=zero)


def _quantity(text: str, name: str, units: dict[str, float], examples: str, *, zero: bool = False) -> float:
    if not (match := _NUMBER.fullmatch(text)):
        raise ConfigError(f"{name}={text!r}: write {examples}")
    unit = match[2].lower()
    if unit not in units:
        raise ConfigError(f"{name}={text!r}: unit {match[2] or 'missing'}; allowed: {', '.join(filter(None, units))}")
    number = float(match[1]) * units[unit]
    if number < 0 or (number == 0 and not zero) or math.isinf(number):
        raise ConfigError(
            f"{name}={text!r}: must be {'0 or more' if zero else 'above 0'}, and finite; write {examples}"
        )
    return number
