"""Which tests start processes, found in their code: what a test's function, fixtures and parameters name is followed
through all functions and classes of the tests, down to the modules that start processes."""

import dis
import inspect
from collections.abc import Iterable, Iterator
from functools import cache
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import pytest

STARTERS = {"subprocess", "multiprocessing"}


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
        loads = set(_loads(each.__code__))
        found = [each.__globals__[name] for kind, name in loads if kind == "LOAD_GLOBAL" and name in each.__globals__]
        modules = [vars(m) for m in found if isinstance(m, ModuleType) and _home(m).startswith("tests.")]
        found += [names[name] for names in modules for _, name in loads if name in names]
        return [_plain(one) for one in found]
    if isinstance(each, type):
        return [_plain(one) for one in (*each.__bases__, *vars(each).values())]
    return []


def _loads(code: CodeType) -> Iterator[tuple[str, Any]]:
    """(instruction, name), so that `local.run` is not taken for a function `run`."""
    yield from ((step.opname, step.argval) for step in dis.get_instructions(code) if step.argval in code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _loads(inner)
