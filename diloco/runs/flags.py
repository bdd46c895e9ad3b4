"""Flags: each is a field of a dataclass, declared as `x: int = flag(…)`. A config file is TOML with the same names. No
torch here.
"""

import difflib
import json
import math
import re
import tomllib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from decimal import Decimal
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from diloco.errors import ConfigError

REQUIRED: Any = MISSING
"""The default of a flag that must be set."""
Scope = Literal["run", "member", "start"]
COUNTS = {"": 0, "k": 3, "m": 6, "b": 9, "t": 12}
"""Suffixes of large numbers, with their power of ten."""
_WHOLE = re.compile(r"\s*([-+]?[0-9][0-9_]*(?:\.[0-9]+)?)(?:e\+?([0-9]{1,2}))?\s*([kmbt]?)\s*", re.IGNORECASE)
PACKAGE = Path(__file__).parents[1]
HOME = PACKAGE.parent if (PACKAGE.parent / "pyproject.toml").exists() else PACKAGE
"""The folder that holds `recipes`: next to the package in a checkout, inside it in a wheel."""


@dataclass(frozen=True, kw_only=True)
class Meaning:
    text: str
    """One or two sentences for the help."""
    group: str = "flags"
    """The heading above it in the help."""
    why: str = ""
    """The reason for the default, or what happens if the flag is not set."""
    scope: Scope = "run"
    """run: shared by all members. member: each member has its own. start: for this start only, and not stored."""
    methods: tuple[str, ...] = ()
    """The methods that read it. Empty: all of them."""
    result: bool = True
    """Whether the report treats runs that differ in it as different settings."""
    choices: tuple[str, ...] = ()
    positional: bool = False
    rest: bool = False
    """Whether this positional takes all words that follow, including those that begin with --."""
    needs: str = ""
    """The flag without which this one would be ignored. Empty: none."""
    expert: bool = False
    """Whether only --help-all shows it."""


def flag(default: Any, text: str, *, choices: Iterable[str] = (), needs: str = "", **more: Any) -> Any:
    """Declare a field of a config. For the keywords see `Meaning`."""
    text = f"With {spelled(needs)}: {text}" if needs else text
    described = Meaning(text=text, choices=tuple(choices), needs=needs, **more)
    if described.scope == "start":
        described = replace(described, result=False)
    return field(default=default, metadata={"flag": described})


def meaning(field: Field[Any]) -> Meaning:
    return field.metadata["flag"]


def spelled(name: str) -> str:
    return "--" + name.replace("_", "-")


def choices(field: Field[Any]) -> tuple[str, ...]:
    """The values that are allowed; empty if any is."""
    inner, _ = value_type(field)
    return get_args(inner) if get_origin(inner) is Literal else meaning(field).choices


def value_type(field: Field[Any]) -> tuple[Any, bool]:
    """The type of one value, and whether the flag takes several."""
    declared: Any = field.type
    several = get_origin(declared) is tuple
    inner = get_args(declared)[0] if several else declared
    kinds = [kind for kind in get_args(inner) if kind is not NoneType] if _is_union(inner) else [inner]
    return kinds[0], several


def words_beside(field: Field[Any]) -> tuple[str, ...]:
    """Words that a flag takes besides numbers, such as auto in `int | Literal["auto"]`."""
    more_types = get_args(field.type)[1:] if _is_union(field.type) else ()
    return tuple(word for kind in more_types for word in get_args(kind))


def _is_union(declared: Any) -> bool:
    return get_origin(declared) in (Union, UnionType)


def convert(field: Field[Any], text: str) -> Any:
    """Convert one value to the field's type."""
    kind, _ = value_type(field)
    words = words_beside(field)
    if text in words:
        return text
    allowed = choices(field) or (("true", "false") if kind is bool else ())
    if allowed and text not in allowed:
        raise ConfigError(f"{spelled(field.name)} {text}: use {_listed(allowed)}{_near(text, allowed)}")
    if kind is bool:
        return text == "true"
    try:
        if kind is float:
            return finite_number(text)
        return whole_number(text) if kind is int else Path(text) if kind is Path else text
    except ValueError:
        number = "a whole number, such as 500, 10k or 1e6" if kind is int else "a number"
        raise ConfigError(f"{spelled(field.name)} {text}: use {_listed([number, *words])}") from None


def whole_number(text: str) -> int:
    """Parse a count such as 500, 10k or 1e6. Raises ValueError if it is not a whole number.

    >>> whole_number("-1"), whole_number("7_000"), whole_number("1e3"), whole_number("1.3b")
    (-1, 7000, 1000, 1300000000)
    """
    if not (match := _WHOLE.fullmatch(text)):
        raise ValueError(text)
    digits, exponent = match[1].replace("_", ""), int(match[2] or 0) + COUNTS[match[3].lower()]
    if len(digits) > 20 or abs(exponent) > 20:
        raise ValueError(text)
    number = Decimal(digits).scaleb(exponent)
    if number != (whole := int(number)):
        raise ValueError(text)
    return whole


def finite_number(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(text)
    return number


def shipped_configs(kind: type) -> dict[str, Path]:
    """The configs that come with the package, if they are of this kind."""
    return (
        {}
        if not getattr(kind, "shipped", False)
        else {path.stem: path for path in sorted((HOME / "recipes").glob("*.toml"))}
    )


def config_file(words: Sequence[str], kind: type) -> Path | None:
    """The config file that comes before the flags: a path that ends in .toml, or the name of a shipped one."""
    first = words[0] if words else ""
    return Path(first) if first.endswith(".toml") else shipped_configs(kind).get(first)


def parse(kind: type, words: Sequence[str]) -> Any:
    """Parse a command line: a config file, then flags that override it."""
    values = parse_values(kind, words)
    for required in fields(kind):
        if required.default is MISSING and required.name not in values:
            label = required.name.upper() if meaning(required).positional else spelled(required.name)
            raise ConfigError(f"{label} is missing: {meaning(required).text}")
    return kind(**values)


def parse_values(kind: type, words: Sequence[str]) -> dict[str, Any]:
    """The values that a command line and its config file set, by name."""
    flags = {f.name: f for f in fields(kind)}
    places = [f for f in flags.values() if meaning(f).positional]
    if not places and (path := config_file(words, kind)):
        words = [*_from_file(path, flags), *words[1:]]
    values: dict[str, Any] = {}
    remaining, arguments = list(words), []
    while remaining:
        word = remaining.pop(0)
        if not word.startswith("--"):
            arguments.append(word)
            if any(meaning(place).rest for place in places):
                arguments += remaining
                break
            continue
        name, equals, text = word[2:].partition("=")
        name = name.replace("-", "_")
        if name.startswith("no_") and name[3:] in flags and flags[name[3:]].type is bool:
            values[name[3:]] = False
            continue
        if name not in flags:
            near = difflib.get_close_matches(name, flags, 1)
            hint = f"; did you mean {spelled(near[0])}?" if near else "; --help-all lists all"
            raise ConfigError(f"unknown flag {spelled(name)}{hint}")
        values[name] = _value(flags[name], [text] if equals else _take(flags[name], remaining))
    for position, place in enumerate(places):
        end = None if value_type(place)[1] else position + 1
        if arguments[position:end]:
            values[place.name] = _value(place, arguments[position:end])
    if len(arguments) > len(places) and not (places and value_type(places[-1])[1]):
        hint = "the config comes before the flags" if config_file(arguments[-1:], kind) else "flags begin with --"
        names = [*shipped_configs(kind)]
        configs = f"; configs: a path that ends in .toml, or {_listed(names)}" if names else ""
        raise ConfigError(f"unexpected argument {arguments[-1]!r}: {hint}{configs}")
    return values


def _take(field: Field[Any], remaining: list[str]) -> list[str]:
    """Remove the words that belong to the flag from those that remain."""
    kind, several = value_type(field)
    if kind is bool:
        return ["true"]
    end = next((i for i, word in enumerate(remaining) if word.startswith("--")), len(remaining))
    count = end if several else min(end, 1)
    if not count and not several:
        raise ConfigError(f"{spelled(field.name)} needs a value. {meaning(field).text}")
    texts, remaining[:] = remaining[:count], remaining[count:]
    return texts


def _value(field: Field[Any], texts: list[str]) -> Any:
    values = tuple(convert(field, text) for text in texts)
    return values if value_type(field)[1] else values[0]


def _from_file(path: Path, names: Collection[str]) -> list[str]:
    """The flags in a config file. All of them must belong to this command."""
    words = stored(path)
    for key in (word.removeprefix("--").replace("-", "_") for word in words if word.startswith("--")):
        if key.removeprefix("no_") not in names and key not in names:
            raise ConfigError(f"{path}: unknown setting {key}{_near(key, names)}")
    return words


def stored(path: Path) -> list[str]:
    """The keys of a TOML file as flags."""
    try:
        with path.open("rb") as file:
            values = tomllib.load(file)
        return [word for key, value in values.items() for word in _words(key, value)]
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; `diloco train --help` lists the configs that come with it") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def _words(key: str, value: Any) -> list[str]:
    if isinstance(value, dict):
        raise ConfigError(f"[{key}] is a table: a config has only keys, such as sync_every = 100")
    if isinstance(value, bool):
        return [spelled(key) if value else spelled(f"no_{key}")]
    if isinstance(value, list):
        return [spelled(key), *map(str, value)] if value else []
    return [spelled(key), str(value)]


def to_toml(config: Any) -> str:
    """Write the config as TOML that gives the same run. Leave out flags that are None or have the scope `start`."""
    lines = []
    for setting in fields(config):
        value = getattr(config, setting.name)
        if value is None or meaning(setting).scope == "start":
            continue
        if isinstance(value, bool):
            text = "true" if value else "false"
        elif isinstance(value, (int, float)):
            text = repr(value)
        elif isinstance(value, tuple):
            text = "[" + ", ".join(_quoted(v) for v in value) + "]"
        else:
            text = _quoted(str(value))
        lines.append(f"{setting.name} = {text}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _listed(allowed: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(allowed[:-1]), allowed[-1]]))


def _near(text: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(text, list(names), 1)
    return f"; did you mean {close[0]}?" if close else ""
