"""What of a collective needs no other process: how a broken exchange is told, and the communication thread."""

import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from diloco.exchange import thread, transport
from diloco.exchange.thread import CommThread
from diloco.exchange.transport import RollCall, _explain

NAMES = ["process 10 on a", "process 11 on b", "process 12 on c"]


@pytest.mark.parametrize(("message", "text"), [
    ("[gloo/transport] Timed out waiting 5000ms for recv", "another replica did not answer within 5 s"),
    ("Connection closed by peer [127.0.0.1]:1234", "another replica ([127.0.0.1]:1234) is gone: its connection was"),
    ("[a.cc:8] Connection reset by peer [fd00::1]:99", "another replica ([fd00::1]:99) is gone: its connection was"),
    ("Connection reset by peer", "another replica is gone: its connection was closed"),
    ("no route\nat line 7", "the exchange failed: no route"),
])  # fmt: skip
def test_an_error_of_gloo_is_said_in_words(message, text):
    assert _explain(message, 5.0).startswith(text) and "line 7" not in _explain(message, 5.0)


def roll_call(monkeypatch, answered, store=None):
    """What replica 0 says, if nobody answers any more."""
    monkeypatch.setattr(transport, "PATIENCE", 0.0)
    store = store or dist.HashStore()
    for replica in answered:
        store.set(f"broken/{replica}", "")
    roll = RollCall(store, 0, NAMES)
    roll._thread.join()  # the store answers at once, or never
    return roll.result(), store


def test_a_roll_call_names_those_that_do_not_answer_and_answers_for_this_one(monkeypatch):
    text, store = roll_call(monkeypatch, [2])
    assert text == "No answer from replica 1 (process 11 on b)." and store.check(["broken/0"])
    text, _ = roll_call(monkeypatch, [])
    assert text == "No answer from replica 1 (process 11 on b), replica 2 (process 12 on c)."
    text, _ = roll_call(monkeypatch, [1, 2])
    assert text == "All replicas answer: only a connection between two of them broke."


def test_a_roll_call_of_two_needs_no_store_and_one_without_a_store_says_so(monkeypatch):
    assert RollCall(dist.HashStore(), 1, NAMES[:2]).result() == "The other is replica 0 (process 10 on a)."

    def gone(*_):
        raise RuntimeError

    text, _ = roll_call(monkeypatch, [], SimpleNamespace(set=gone, check=gone))
    assert text == "Could not tell which one: the rendezvous store does not answer."


def test_jobs_run_one_after_another_on_a_thread_of_their_own_and_closing_ends_it():
    comm, seen = CommThread(), []

    def job(value):
        seen.append((value, threading.current_thread().name))
        if value == 2:
            raise ZeroDivisionError
        return 10 * value

    futures = [comm.submit(job, value) for value in (1, 2, 3)]
    comm.close(lambda: seen.append("last"))
    assert [futures[0].result(), futures[2].result()] == [10, 30]
    assert isinstance(futures[1].exception(), ZeroDivisionError)
    comm._thread.join()
    assert seen == [(1, "diloco"), (2, "diloco"), (3, "diloco"), "last"]


def test_closing_waits_for_the_current_job_and_not_for_ever(monkeypatch):
    comm, seen, waits, closing = CommThread(), [], [], threading.Event()
    join = comm._thread.join

    def wait(timeout=None):
        waits.append(timeout)
        closing.set()
        join()  # however long the machine takes

    monkeypatch.setattr(comm._thread, "join", wait)
    comm.submit(closing.wait)
    comm.close(lambda: seen.append("last"))
    assert seen == ["last"] and waits == [1.0]


def test_nothing_is_closed_while_the_interpreter_ends(monkeypatch):
    comm, acted, slept = CommThread(), [], []
    comm.unless_exiting(lambda: acted.append("before"))
    comm._at_exit()
    monkeypatch.setattr(
        thread, "threading", SimpleNamespace(Event=lambda: SimpleNamespace(wait=lambda: slept.append(1)))
    )
    comm.unless_exiting(lambda: acted.append("after"))
    assert acted == ["before"] and slept == [1]
    comm.close(lambda: None)
