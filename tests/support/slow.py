"""Which tests start processes, found in their code: what a test's function, fixtures and parameters name is followed
through all functions and classes of the tests, down to the modules that start processes."""

import inspect
from collections.abc import Iterable, Iterator
from functools import cache
from opcode import EXTENDED_ARG, opmap
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import pytest

STARTERS = {"subprocess", "multiprocessing"}
LOAD_GLOBAL = opmap["LOAD_GLOBAL"]


def starts_processes(test: pytest.Function) -> bool:
    fixtures = [found.func for each in test._fixtureinfo.name2fixturedefs.values() for found in each]
    given = test.callspec.params.values() if hasattr(test, "callspec") else ()
    return reaches_a_starter([test.obj, *fixtures, *given])


def reaches_a_starter(objects: Iterable[Any]) -> bool:
    waiting, seen = [_plain(each) for each in objects], set()
    while waiting:
        each = waiting.pop()
        home = _home(each)
        if home.partition(".")[0] in STARTERS:
            return True
        if home.startswith("tests.") and id(each) not in seen:
            seen.add(id(each))
            waiting += _named(each)
    return False


def _plain(each: Any) -> Any:
    """Without what decorators put around it."""
    each = getattr(each, "hypothesis", each)
    each = getattr(each, "inner_test", each)
    return inspect.unwrap(each.__func__ if isinstance(each, MethodType) else each)


def _home(each: Any) -> str:
    """The module of a function, a class or an object; a module's own name."""
    if isinstance(each, ModuleType):
        return each.__name__
    return str(getattr(each, "__module__", None) or type(each).__module__)


@cache
def _named(each: Any) -> list[Any]:
    """What the code of a function, or of a class's functions, names."""
    if isinstance(each, FunctionType):
        codes = list(_codes(each.__code__))
        loaded = {name for code in codes for name in _globals(code)}
        found = [each.__globals__[name] for name in loaded if name in each.__globals__]
        modules = [vars(m) for m in found if isinstance(m, ModuleType) and _home(m).startswith("tests.")]
        found += [names[name] for names in modules for code in codes for name in code.co_names if name in names]
        return [_plain(one) for one in found]
    if isinstance(each, type):
        return [_plain(one) for one in (*each.__bases__, *vars(each).values())]
    return []


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Its own, and that of the functions in it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def _globals(code: CodeType) -> Iterator[str]:
    """The names that are loaded as globals, so that `local.run` is not taken for a function `run`. `dis` would say the
    same, in seconds for all tests."""
    more = 0
    for operation, argument in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument |= more
        more = argument << 8 if operation == EXTENDED_ARG else 0
        if operation == LOAD_GLOBAL:
            yield code.co_names[argument >> 1]  # the lowest bit says whether it is called
