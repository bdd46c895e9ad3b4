"""Numbers as people read them: bytes, seconds, factors, counts. Decimal prefixes, three digits."""

import math

YEAR = 365.25 * 86_400


def size(count: float | None) -> str:
    """Bytes with a decimal prefix, as links are sold.

    >>> size(0), size(999), size(1_234_567), size(None)
    ('0 B', '999 B', '1.23 MB', '–')
    """
    return _prefixed(count, ("B", "kB", "MB", "GB", "TB", "PB"))


def amount(count: float | None) -> str:
    """A count with a decimal prefix.

    >>> amount(950), amount(35_000_000)
    ('950', '35 M')
    """
    return _prefixed(count, ("", "k", "M", "G", "T", "P")).strip()


def rate(bits: float | None) -> str:
    """Bits a second with a decimal prefix.

    >>> rate(1e9), rate(5e7)
    ('1 Gbit/s', '50 Mbit/s')
    """
    return _prefixed(bits, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"))


def duration(seconds: float | None) -> str:
    """Seconds in the units that people use for them.

    >>> duration(0.0123), duration(7.25), duration(192), duration(7260)
    ('12.3 ms', '7.25 s', '3 min 12 s', '2 h 01 min')
    >>> duration(3 * 86_400 + 7_200), duration(1_296_540_000)
    ('3 days 2 h', '41.1 years')
    """
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if 0 < seconds < 0.9995:
        return f"{_digits(seconds * 1000)} ms"
    if round(seconds) < 100:
        return f"{_digits(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days} days {hours} h" if days < 730 else f"{_digits(seconds / YEAR)} years"


def ago(seconds: float) -> str:
    """How long ago something was, in whole seconds; the very last ones are all the same.

    >>> ago(0.3), ago(7.4), ago(7260)
    ('now', '7 s ago', '2 h 01 min ago')
    """
    return "now" if seconds < 3 else f"{duration(round(seconds))} ago"


def factor(value: float | None) -> str:
    """A ratio.

    >>> factor(399.2), factor(1), factor(float("inf"))
    ('399 ×', '1 ×', '∞')
    """
    if value is None or math.isnan(value):
        return "–"
    return "∞" if math.isinf(value) else f"{_digits(value)} ×"


def loss(value: float | None) -> str:
    """Nats to four decimals.

    >>> loss(1.43219), loss(None), loss(float("nan"))
    ('1.4322', '–', 'nan')
    """
    return "–" if value is None else f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"


def percent(value: float | None, *, signed: bool = False, digits: int = 2) -> str:
    """A share of 1 as percent.

    >>> percent(0.9921), percent(0.0041, signed=True), percent(-1e-6, signed=True), percent(None)
    ('99.21 %', '+0.41 %', '+0.00 %', '–')
    """
    if value is None:
        return "–"
    nearest = round(value * 100, digits) + 0.0  # which makes -0 a 0
    return f"{nearest:{'+' if signed else ''}.{digits}f} %"


def _prefixed(count: float | None, prefixes: tuple[str, ...]) -> str:
    if count is None or not math.isfinite(count):
        return "–"
    power = 0
    while abs(count) >= 999.5 and power < len(prefixes) - 1:
        count, power = count / 1000, power + 1
    return f"{_digits(count)} {prefixes[power]}"


def _digits(value: float) -> str:
    """Three significant digits, never an exponent, no trailing zeros."""
    if abs(value) >= 99.95:
        return f"{value:.0f}"
    text = f"{value:.{1 if abs(value) >= 9.995 else 2}f}"
    return text.rstrip("0").rstrip(".")
