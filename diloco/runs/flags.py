"""Flags: each is a field of a dataclass, declared as `x: int = flag(…)` and parsed by argparse. A config file is TOML
with the same names. No torch here.
"""

import argparse
import difflib
import json
import math
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from decimal import Decimal
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

from diloco.errors import ConfigError

REQUIRED: Any = MISSING
"""The default of a flag that must be set."""
Scope = Literal["run", "member", "start"]
COUNTS = {"": 0, "k": 3, "m": 6, "b": 9, "t": 12}
"""Suffixes of large numbers, with their power of ten."""
_WHOLE = re.compile(r"\s*([-+]?[0-9][0-9_]*(?:\.[0-9]+)?)(?:e\+?([0-9]{1,2}))?\s*([kmbt]?)\s*", re.IGNORECASE)
_METAVARS = {int: "N", float: "X", Path: "PATH", str: "TEXT"}
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
    needs: str = ""
    """The flag without which this one would be ignored. Empty: none."""
    replaces: str = ""
    """The setting of a config file that this flag overrides too. Empty: none."""
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


def shipped_configs(kind: type) -> dict[str, Path]:
    """The configs that come with the package, if they are of this kind."""
    shipped = (HOME / "recipes").glob("*.toml") if getattr(kind, "shipped", False) else ()
    return {path.stem: path for path in sorted(shipped)}


def config_file(words: Sequence[str], kind: type) -> Path | None:
    """The config file that comes before the flags: a path that ends in .toml, or the name of a shipped one."""
    first = words[0] if words else ""
    return Path(first) if first.endswith(".toml") else shipped_configs(kind).get(first)


def parse(kind: type, words: Sequence[str]) -> Any:
    """Parse a command line: a config file, then flags that override it."""
    values = parse_values(kind, words)
    for required in fields(kind):
        if required.default is MISSING and required.name not in values:
            raise ConfigError(f"{spelled(required.name)} is missing: {meaning(required).text}")
    return kind(**values)


def parse_values(kind: type, words: Sequence[str]) -> dict[str, Any]:
    """The values that a command line and its config file set, by name."""
    values: dict[str, Any] = {}
    if not any(meaning(field).positional for field in fields(kind)) and (path := config_file(words, kind)):
        values, words = read_toml(kind, path), words[1:]
    known = parser(kind)
    parsed, unknown = (known.parse_known_args if "--" in words else known.parse_known_intermixed_args)(words)
    for word in unknown:
        name = word.partition("=")[0]
        if name.startswith("--"):
            hint = _near(name, [spelled(field.name) for field in fields(kind)]) or "; --help-all lists all"
            raise ConfigError(f"unknown flag {name}{hint}")
        hint = "the config comes before the flags" if config_file([word], kind) else "flags begin with --"
        shipped = shipped_configs(kind)
        configs = f"; configs: a path that ends in .toml, or {_listed([*shipped])}" if shipped else ""
        raise ConfigError(f"unexpected argument {word!r}: {hint}{configs}")
    flags = {name: tuple(v) if isinstance(v, list) else v for name, v in vars(parsed).items() if v is not None}
    replaced = {meaning(field).replaces for field in fields(kind) if field.name in flags}
    return {name: value for name, value in values.items() if name not in replaced} | flags


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        prefix, (before, ignored, _) = "argument ", message.partition(": ignored explicit argument")
        if ignored:  # of "--compile/--no-compile", which argparse names only by what was written
            message = f"{before}: takes no value"
        raise ConfigError(message.removeprefix(prefix).replace(": ", " ", message.startswith(prefix)))


def parser(kind: type, *, full: bool = True, **settings: Any) -> argparse.ArgumentParser:
    """The parser of a config's flags. Its help shows the flags for experts, and inherited ones, only if `full`."""
    result = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS, **settings)
    groups: dict[str, Any] = {}
    for setting in sorted(
        fields(kind), key=lambda field: field.name not in kind.__annotations__
    ):  # inherited ones last
        about, several, name = meaning(setting), _value_type(setting)[1], spelled(setting.name)
        text = f"{about.text} {_default(setting)}".strip().replace("%", "%%")
        if about.positional:
            required = setting.default is MISSING
            count = ("+" if required else "*") if several else None if required else "?"
            metavar = setting.name.removesuffix("s").upper()
            # argparse would convert its own SUPPRESS for an absent optional one
            default = None if count == "?" else argparse.SUPPRESS
            options = {"type": partial(convert, setting), "metavar": metavar, "help": text}
            result.add_argument(setting.name, nargs=count, default=default, **options)
            continue
        if not (full or (setting.name in kind.__annotations__ and not about.expert)):
            text = argparse.SUPPRESS
        group = groups[about.group] = groups.get(about.group) or result.add_argument_group(about.group)
        if setting.type is bool:  # the help shows the one that changes the default
            on, off = (argparse.SUPPRESS, text) if setting.default else (text, argparse.SUPPRESS)
            group.add_argument(name, action="store_true", help=on)
            group.add_argument(f"--no-{name[2:]}", dest=setting.name, action="store_false", help=off)
        else:
            count = "*" if several else None
            group.add_argument(name, type=partial(convert, setting), nargs=count, metavar=_metavar(setting), help=text)
    return result


def convert(field: Field[Any], text: str) -> Any:
    """Convert one value to the field's type. Raises ArgumentTypeError."""
    kind, words = _value_type(field)[0], _words_beside(field)
    allowed = choices(field) or (("true", "false") if kind is bool else ())
    if text in words:
        return text
    if allowed and text not in allowed:
        raise argparse.ArgumentTypeError(f"{text}: use {_listed(allowed)}{_near(text, allowed)}")
    parsers: dict[Any, Any] = {bool: lambda text: text == "true", int: whole_number, float: finite_number, Path: Path}
    try:
        return parsers.get(kind, str)(text)
    except ValueError:
        number = "a whole number, such as 500, 10k or 1e6" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"{text}: use {_listed([number, *words])}") from None


def from_value(field: Field[Any], value: Any) -> Any:
    """Convert a value that TOML or JSON has parsed already. Raises ArgumentTypeError."""
    if _value_type(field)[1]:
        return tuple(convert(field, str(item)) for item in (value if isinstance(value, list) else [value]))
    if isinstance(value, (dict, list)):
        raise argparse.ArgumentTypeError(f"{value}: use one value")
    return convert(field, str(value).lower() if isinstance(value, bool) else str(value))


def choices(field: Field[Any]) -> tuple[str, ...]:
    """The values that are allowed; empty if any is."""
    inner, _ = _value_type(field)
    return get_args(inner) if get_origin(inner) is Literal else meaning(field).choices


def _value_type(field: Field[Any]) -> tuple[Any, bool]:
    """The type of one value, and whether the flag takes several."""
    declared: Any = field.type
    several = get_origin(declared) is tuple
    inner = get_args(declared)[0] if several else declared
    kinds = [kind for kind in get_args(inner) if kind is not NoneType] if _is_union(inner) else [inner]
    return kinds[0], several


def _words_beside(field: Field[Any]) -> tuple[str, ...]:
    """Words that a flag takes besides numbers, such as auto in `int | Literal["auto"]`."""
    more_types = get_args(field.type)[1:] if _is_union(field.type) else ()
    return tuple(word for kind in more_types for word in get_args(kind))


def _is_union(declared: Any) -> bool:
    return get_origin(declared) in (Union, UnionType)


def _metavar(field: Field[Any]) -> str:
    return "|".join(choices(field) or [_METAVARS[_value_type(field)[0]], *_words_beside(field)])


def _default(field: Field[Any]) -> str:
    why = meaning(field).why
    if field.default is MISSING:
        return "" if meaning(field).positional else "Required."
    if field.default in (None, ()):
        return f"Default: {why}." if why else ""
    if isinstance(field.default, bool):
        return ""
    value = f"{field.default:g}" if isinstance(field.default, float) else field.default
    return f"Default: {value} ({why})." if why else f"Default: {value}."


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


def read_toml(kind: type, path: Path) -> dict[str, Any]:
    """The values in a config file, by name."""
    try:
        with path.open("rb") as file:
            content = tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; `diloco train --help` lists the configs that come with it") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    flags = {field.name: field for field in fields(kind)}
    for name, value in content.items():
        if isinstance(value, dict):
            raise ConfigError(f"{path}: [{name}] is a table: a config has only keys, such as sync_every = 100")
        if name not in flags:
            raise ConfigError(f"{path}: unknown setting {name}{_near(name, flags)}")
        try:
            content[name] = from_value(flags[name], value)
        except (argparse.ArgumentTypeError, ValueError) as error:  # str() refuses integers of thousands of digits
            raise ConfigError(f"{path}: {name}: {error}") from None
    return content


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
