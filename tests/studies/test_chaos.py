"""The chaos in short, and the server that it disturbs members with."""

import os

import pytest

from diloco import ConfigError, DiLoCoError
from diloco.bucket.store import Create, Delete, List, Read, Size, Write, too_large
from diloco.bucket.store.backend import Failure, open_store
from diloco.bucket.store.contract import probe
from studies.bucket.chaos import campaign
from studies.bucket.s3_server import PAGE, STATUS, Server

pytestmark = pytest.mark.slow  # each test starts a server


@pytest.fixture
def server(monkeypatch):
    server = Server()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.end()


def test_the_server_does_what_the_protocol_asks_of_a_store(server):
    store = open_store("s3://bucket/run")
    probe(store)
    attempt = store.attempt
    assert attempt(Create("a/b", b"one")) is True and attempt(Create("a/b", b"two")) is False
    assert attempt(Read("a/b", 3)) == b"one" and attempt(Read("a/b", 2)) == too_large(3)
    assert attempt(Read("a/b", 0, first=2)) == b"on" and attempt(Read("a/c", 9)) is None
    attempt(Write("a/b", b"three"))
    assert attempt(Size("a/b")) == 5 and attempt(List("a/")) == {"a/b": 5}
    for k in range(PAGE + 5):
        server.objects[f"run/many/{k:05d}"] = (b"x", 0.0)
    assert len(attempt(List("many/"))) == PAGE + 5
    assert len(attempt(List("many/", after="many/00999"))) == 5
    for name in ("strange/x", "strange/a/x", "strange/a//x", "strange/b/x"):  # listed folder by folder
        server.objects[f"run/{name}"] = (b"x", 0.0)
    assert attempt(List("strange/")) == dict.fromkeys(("strange/x", "strange/a/x", "strange/b/x"), 1)
    attempt(Delete("a/b"))
    assert attempt(List("a/")) == {} and server.spoiled == 0
    attempt(Create("rounds/1/closed.0", b"x"))
    attempt(Write("rounds/1/closed.0", b"y"))
    assert server.spoiled == 1


OPERATIONS = [Create("y", b"1"), Write("y", b"1"), Read("x", 100), Read("x", 0, first=10), Read("x", 0, first=9, at=9),
              Size("x"), List("none/"), Delete("none")]  # fmt: skip


@pytest.mark.parametrize("fault", STATUS)
@pytest.mark.parametrize("operation", OPERATIONS, ids=repr)
def test_a_status_that_makes_no_sense_is_a_failure_and_not_an_answer(server, operation, fault):
    """Some stores answer 409 to a GET. Only a create-only put may be told 409 or 412."""
    store = open_store("s3://bucket/run")
    store.attempt(Write("x", os.urandom(100)))
    right = store.attempt(operation)
    server.fault = fault
    wrong = False if isinstance(operation, Create) and fault in ("409", "412") else Failure
    answers = []
    for _ in range(20):
        try:
            answers.append(store.attempt(operation))
        except Failure:
            answers.append(Failure)
    taken = isinstance(operation, Create)  # by the first put
    assert all(answer == right or answer is wrong or (taken and answer is False) for answer in answers), answers
    assert wrong in answers


@pytest.mark.parametrize("fault", ["409", "412", "429/503", "reply lost", "stale lists"])
def test_the_probe_does_not_blame_a_store_that_answers_oddly(server, monkeypatch, fault):
    """It says that the store does not answer, which is true, and tries again."""
    monkeypatch.setattr("diloco.bucket.store.backend.PAUSES", ())
    store = open_store("s3://bucket/run")
    server.fault = fault
    for _ in range(8):
        try:
            probe(store)
        except ConfigError:
            raise
        except DiLoCoError:
            continue


def test_a_few_events_harm_nothing():
    found = campaign("s3", events=4, seed=3, clocks=False, roll_back=False)
    assert sum(found["events"].values()) == 4
    assert found["records changed or lost"] == 0 and found["records"] > 6
    assert found["ends that nobody asked for"] == {}
    assert found["states with several fingerprints"] == 0 and found["states compared"] > 6
