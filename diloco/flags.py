"""Flags are the fields of a dataclass, each with its meaning. A recipe is a TOML file of flags. No torch.

Everything about a flag is declared with its field: `x: int = flag(…)`.
"""

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from decimal import Decimal
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from diloco.errors import ConfigError

REQUIRED: Any = MISSING
"""The default of a flag that must be given."""
Scope = Literal["run", "member", "start"]
COUNTS = {"": 0, "k": 3, "m": 6, "b": 9, "t": 12}
"""Suffixes of large numbers, and the power of ten that each stands for."""
_WHOLE = re.compile(r"\s*([-+]?[0-9][0-9_]*(?:\.[0-9]+)?)(?:e\+?([0-9]{1,2}))?\s*([kmbt]?)\s*", re.IGNORECASE)
PACKAGE = Path(__file__).parent
HOME = PACKAGE.parent if (PACKAGE.parent / "pyproject.toml").exists() else PACKAGE
"""The folder that holds `recipes` and `examples`: next to the package in a checkout, inside it in a wheel."""


@dataclass(frozen=True)
class Meaning:
    text: str
    """What it is, in one or two sentences."""
    group: str
    """The heading above it in the help."""
    default: str
    """The reason for the default, or what happens if the flag is not set."""
    scope: Scope
    """run: one value for all. member: each member has its own. start: of this start only, and not stored."""
    methods: tuple[str, ...]
    """The methods that read it. Empty: all of them."""
    result: bool
    """Whether runs that differ in it are compared as different settings."""
    choices: tuple[str, ...]
    positional: bool
    needs: str
    """The flag without which this one would be ignored. Empty: none."""
    expert: bool
    """Whether only --help-all shows it."""


def flag(
    default: Any,
    text: str,
    *,
    group: str = "flags",
    why: str = "",
    scope: Scope = "run",
    methods: tuple[str, ...] = (),
    result: bool = True,
    choices: Iterable[str] = (),
    positional: bool = False,
    needs: str = "",
    expert: bool = False,
) -> Any:
    """A field of a config; see `Meaning`."""
    described = Meaning(
        text=f"With {spelled(needs)}: {text}" if needs else text,
        group=group,
        default=why,
        scope=scope,
        methods=methods,
        result=result and scope != "start",
        choices=tuple(choices),
        positional=positional,
        needs=needs,
        expert=expert,
    )
    return field(default=default, metadata={"flag": described})


def meaning(field: Field[Any]) -> Meaning:
    return field.metadata["flag"]


def spelled(name: str) -> str:
    return "--" + name.replace("_", "-")


def choices(field: Field[Any]) -> tuple[str, ...]:
    """The values that are allowed; empty if it is not a choice."""
    (inner, _) = value_type(field)
    return get_args(inner) if get_origin(inner) is Literal else meaning(field).choices


def value_type(field: Field[Any]) -> tuple[Any, bool]:
    """The type of one value, and whether the flag takes several."""
    declared: Any = field.type
    several = get_origin(declared) is tuple
    inner = get_args(declared)[0] if several else declared
    kinds = [kind for kind in get_args(inner) if kind is not NoneType] if _is_union(inner) else [inner]
    return kinds[0], several


def words_beside(field: Field[Any]) -> tuple[str, ...]:
    """Words that a flag takes beside numbers, as auto in `int | Literal["auto"]`."""
    others = get_args(field.type)[1:] if _is_union(field.type) else ()
    return tuple(word for kind in others for word in get_args(kind))


def _is_union(declared: Any) -> bool:
    return get_origin(declared) in (Union, UnionType)


def convert(field: Field[Any], text: str) -> Any:
    """One value, converted to the field's type."""
    kind, _ = value_type(field)
    words = words_beside(field)
    if text in words:
        return text
    allowed = choices(field) or (("true", "false") if kind is bool else ())
    if allowed and text not in allowed:
        raise ConfigError(f"{spelled(field.name)} {text}: give {_listed(allowed)}{_near(text, allowed)}")
    if kind is bool:
        return text == "true"
    try:
        return whole_number(text) if kind is int else kind(text) if kind in (float, Path) else text
    except ValueError:
        number = "a whole number, such as 500, 10k or 1e6" if kind is int else "a number"
        raise ConfigError(f"{spelled(field.name)} {text}: give {_listed([number, *words])}") from None


def whole_number(text: str) -> int:
    """Raises ValueError if it is none.

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


def shipped_recipes() -> dict[str, Path]:
    return {path.stem: path for path in sorted((HOME / "recipes").glob("*.toml"))}


def recipe_of(words: Sequence[str]) -> Path | None:
    """The recipe that comes before the flags: a path that ends in .toml, or the name of a shipped one."""
    first = words[0] if words else ""
    return Path(first) if first.endswith(".toml") else shipped_recipes().get(first)


def parse(kind: type, words: Sequence[str]) -> Any:
    """The config that the command line describes: a recipe, if the command takes one, then flags that override it."""
    takes_recipe = not any(meaning(field).positional for field in fields(kind))
    if takes_recipe and (path := recipe_of(words)):
        words = [*_known(kind, path), *words[1:]]
    known = {f.name: f for f in fields(kind)}
    values: dict[str, Any] = {}
    left, loose = list(words), []
    while left:
        word = left.pop(0)
        if not word.startswith("--"):
            loose.append(word)
            continue
        name, equals, text = word[2:].partition("=")
        name = name.replace("-", "_")
        if name.startswith("no_") and name[3:] in known and known[name[3:]].type is bool:
            values[name[3:]] = False
            continue
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {spelled(near[0])}?" if near else "; --help-all lists all"
            raise ConfigError(f"unknown flag {spelled(name)}{hint}")
        values[name] = _value(known[name], [text] if equals else None, left)
    places = [f for f in known.values() if meaning(f).positional]
    if len(loose) > len(places) and not (places and value_type(places[-1])[1]):
        hint = "a recipe comes before the flags" if recipe_of(loose[-1:]) else "flags begin with --"
        recipes = f"; recipes: a path that ends in .toml, or {_listed([*shipped_recipes()])}" if takes_recipe else ""
        raise ConfigError(f"unexpected argument {loose[-1]!r}: {hint}{recipes}")
    for place, each in enumerate(places):
        if given := loose[place:] if value_type(each)[1] else loose[place : place + 1]:
            values[each.name] = _value(each, given, [])
    for each in known.values():
        if each.default is MISSING and each.name not in values:
            shown = each.name.upper() if meaning(each).positional else spelled(each.name)
            raise ConfigError(f"{shown} is missing: {meaning(each).text}")
    return kind(**values)


def _value(field: Field[Any], given: list[str] | None, left: list[str]) -> Any:
    """The flag's value: `given`, or taken from the words that are left."""
    kind, several = value_type(field)
    if given is None and kind is bool:
        return True
    if given is None:
        end = next((i for i, word in enumerate(left) if word.startswith("--")), len(left))
        count = end if several else min(end, 1)
        given, left[:] = left[:count], left[count:]
        if not given and not several:
            raise ConfigError(f"{spelled(field.name)}: give a value. {meaning(field).text}")
    values = tuple(convert(field, text) for text in given)
    return values if several else values[0]


def _known(kind: type, path: Path) -> list[str]:
    """The flags of a recipe. All of them must belong to this config."""
    words, names = stored(path), [field.name for field in fields(kind)]
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
        raise ConfigError(f"{path} does not exist; these recipes come with diloco, by name: "
                          f"{', '.join(shipped_recipes())}") from None  # fmt: skip
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def _words(key: str, value: Any) -> list[str]:
    if isinstance(value, dict):
        raise ConfigError(f"[{key}] is a table: a recipe has only keys, as in sync_every = 100")
    if isinstance(value, bool):
        return [spelled(key) if value else spelled(f"no_{key}")]
    if isinstance(value, list):
        return [spelled(key), *map(str, value)] if value else []
    return [spelled(key), str(value)]


def to_toml(config: Any) -> str:
    """The config as a recipe that gives the same run. Flags that are None or have the scope `start` are left out."""
    lines = []
    for each in fields(config):
        value = getattr(config, each.name)
        if value is None or meaning(each).scope == "start":
            continue
        if isinstance(value, bool):
            text = "true" if value else "false"
        elif isinstance(value, (int, float)):
            text = repr(value)
        elif isinstance(value, tuple):
            text = "[" + ", ".join(_quoted(v) for v in value) + "]"
        else:
            text = _quoted(str(value))
        lines.append(f"{each.name} = {text}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _listed(allowed: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(allowed[:-1]), allowed[-1]]))


def _near(text: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(text, list(known), 1)
    return f"; did you mean {close[0]}?" if close else ""
