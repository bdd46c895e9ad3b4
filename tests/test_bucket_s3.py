"""The bucket over the S3 protocol: a real server on loopback, which refuses, goes away, fails and cuts off replies."""

import http.client
import http.server
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import pytest

from diloco import ConfigError
from diloco.reduce.bucket.store import open_store, probe
from diloco.reduce.bucket.task import Create, List, Read
from tests.test_bucket import Member, agree, until


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Server:
    """moto's S3, as a process of its own. What it holds is in its memory."""

    def __init__(self, port, **environment):
        self.port = port
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={"PATH": "/usr/bin:/bin"} | environment,
        )  # fmt: skip
        until(self.answers, 60)

    def answers(self):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/moto-api/data.json", timeout=1)
        except OSError:
            return False
        return True

    def make(self, bucket):
        urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{self.port}/{bucket}", method="PUT"))

    def end(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def server():
    server = Server(free_port())
    server.make("bucket")
    yield server
    server.end()


@pytest.fixture
def proxy(server, monkeypatch):
    proxy = Proxy(server.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.server_port}")
    yield proxy
    proxy.shutdown()
    proxy.server_close()


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")


def test_it_keeps_its_word_on_create_only_puts(proxy):
    store = open_store("s3://bucket/one")
    probe(store)
    assert store.attempt(Create("x/y", b"1")) is True
    assert store.attempt(Create("x/y", b"2")) is False
    assert store.attempt(Read("x/y", 9)) == b"1"
    assert store.attempt(Read("x/y", 0, first=100)) == b"1"
    assert store.attempt(Read("x/z", 9)) is None
    assert store.attempt(List("x/")) == {"x/y": 1}


def test_two_members_train_to_the_same_bits(proxy):
    gate = threading.Barrier(2)
    members = [Member("s3://bucket/two", name, 40, pause=0.03, gate=gate) for name in "ab"]
    for member in members:
        member.end()
    agree(*members)
    assert any(round.members == 2 for round in members[0].rounds)


def test_a_bucket_that_is_not_there_is_said_at_once(proxy):
    with pytest.raises(ConfigError, match="no such bucket"):
        probe(open_store("s3://missing/x"))


def test_wrong_credentials_are_said_at_once(monkeypatch):
    server = Server(free_port(), INITIAL_NO_AUTH_ACTION_COUNT="1")
    try:
        server.make("bucket")
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
        began = time.monotonic()
        with pytest.raises(ConfigError, match=r"access is refused.*check the credentials"):
            Member("s3://bucket/x", "a", 1).end()
        assert time.monotonic() - began < 10
    finally:
        server.end()


class Proxy(http.server.ThreadingHTTPServer):
    """In front of the server: lets requests through, answers 500, or cuts the body of a reply off. Puts go one by one:
    moto looks first and writes then, so that on a busy machine two of a race win, and the probe refuses it."""

    daemon_threads = True

    def __init__(self, target):
        super().__init__(("127.0.0.1", 0), Handler)
        self.target, self.mode, self.count, self.harmed = target, "through", 0, 0
        self.one = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle_any(self):
        server = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        server.count += 1
        harm = server.mode != "through" and server.count % 3 == 0
        server.harmed += harm
        if server.mode == "gone":
            self.close_connection = True
            return
        if harm and server.mode == "500":
            self.reply(500, {}, b"")
            return
        connection = http.client.HTTPConnection("127.0.0.1", server.target, timeout=10)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in ("connection", "transfer-encoding")}
        with server.one:
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            data = answer.read()
        self.reply(answer.status, dict(answer.getheaders()), data, cut=harm)

    def reply(self, status, headers, body, cut=False):
        self.send_response(status)
        for key, value in headers.items():
            if key.lower() not in ("content-length", "connection", "transfer-encoding", "date", "server"):
                self.send_header(key, value)
        length = headers.get("Content-Length", len(body)) if self.command == "HEAD" else len(body)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.close_connection = True

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_any

    def log_message(self, format, *args):
        pass


@pytest.mark.parametrize("mode", ["500", "cut"])
def test_errors_and_replies_that_are_cut_off_are_tried_again(proxy, mode):
    a = Member(f"s3://bucket/{mode}", "a", 120, pause=0.05)
    until(lambda: a.done > 3 or a.error)
    proxy.mode = mode
    a.end(100)
    assert proxy.harmed > 3
    assert min(a.held) >= 2
    assert a.reduce.meeting.rejected == 0  # a reply that is cut off is no bad object


def test_while_the_server_is_gone_training_goes_on_and_rounds_catch_up(proxy):
    a = Member("s3://bucket/gone", "a", 260, pause=0.03)
    until(lambda: a.done > 15 or a.error)
    proxy.mode = "gone"
    at, held = a.done, list(a.held)
    until(lambda: a.done > at + 100)
    assert max(now - then for now, then in zip(a.held, held, strict=True)) <= 1
    proxy.mode = "through"
    a.end(100)
    assert min(a.held) > max(held) + 2 and a.longest < 2
