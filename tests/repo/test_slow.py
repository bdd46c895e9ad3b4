"""What `make test-fast` leaves out: the tests that start processes are found in their code."""

import contextlib
import subprocess
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.reduce import local
from tests.support import commands
from tests.support.commands import run_here
from tests.support.processes import run
from tests.support.s3 import Server, free_port
from tests.support.slow import reaches_a_starter


def _directly():
    subprocess.run(["true"])


def _in_a_function_inside():
    return [(lambda: _directly)() for _ in range(2)]


@contextlib.contextmanager
def _behind_a_decorator():
    _directly()
    yield


@given(st.booleans())
def _behind_hypothesis(value):
    _directly()


def _with_the_shared_function():
    return run(2, print)


def _as_an_attribute_of_a_module():
    return commands.run_program


def _with_a_class():
    return Server


def _with_a_method_of_the_same_name():
    return local.run(2, lambda reduce: reduce.replica)


def _with_what_starts_none_in_the_same_modules():
    return run_here, free_port, commands.lines


def _with_an_annotation(process: subprocess.Popen[str]):
    return process


STARTING = [_directly, _in_a_function_inside, _behind_a_decorator, _behind_hypothesis, _with_the_shared_function,
            _as_an_attribute_of_a_module, _with_a_class]  # fmt: skip


@pytest.mark.parametrize("function", STARTING)
def test_what_starts_a_process_is_found(function: Callable[..., object]):
    assert reaches_a_starter([len, function])


@pytest.mark.parametrize("function", [_with_a_method_of_the_same_name, _with_what_starts_none_in_the_same_modules,
                                      _with_an_annotation])  # fmt: skip
def test_what_starts_none_is_not_slow(function: Callable[..., object]):
    assert not reaches_a_starter([function])


@pytest.fixture
def starter() -> Callable[..., object]:
    return _directly


def test_the_functions_of_fixtures_are_looked_at(starter: Callable[..., object], request: pytest.FixtureRequest):
    assert "slow" in request.node.keywords


@pytest.mark.parametrize("function", [_directly])
def test_parameters_are_looked_at(function: Callable[..., object], request: pytest.FixtureRequest):
    assert "slow" in request.node.keywords
