"""The notice of a cloud: read from a service that answers as those of the clouds do, and obeyed in time."""

import json
import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from diloco.train import preemption
from tests.support.commands import ended, lines, start, training, wait_for_text
from tests.support.members import until

TOKEN = "of this minute"
NAME = "gpus_1"
"""Of this machine in its scale set. Its host name would be gpus000001."""


class Service(BaseHTTPRequestHandler):
    """Answers with `self.server.notice` in the manner of `self.server.cloud`."""

    def do_PUT(self):
        known = self.server.cloud == "aws" and self.path == "/latest/api/token"
        self.say(TOKEN if known else None)

    def do_GET(self):
        self.server.asked += 1
        cloud, sent = self.server.cloud, self.headers
        if cloud == "aws" and sent["X-aws-ec2-metadata-token"] != TOKEN:
            return self.say("no token", 401)
        name, value = {"gcp": ("Metadata-Flavor", "Google"), "azure": ("Metadata", "true")}.get(
            cloud, ("Host", sent["Host"])
        )
        if sent[name] != value:
            return self.say("no header", 403)
        if self.path.startswith("/metadata/instance/"):
            return self.say(NAME if self.path == preemption.NAME else None)
        return self.say(self.server.notice)

    def say(self, text, code=200):
        self.send_response(404 if text is None else code)
        self.end_headers()
        self.wfile.write((text or "").encode())

    def log_message(self, *_): ...


@contextmanager
def service(cloud, notice):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    server.cloud, server.notice, server.asked = cloud, notice, 0
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server, f"http://127.0.0.1:{server.server_port}/notice"
    finally:
        server.shutdown()
        server.server_close()


def events(*kinds, machine=NAME):
    """What azure says to all machines of a scale set. `machine`: the one that the last event is for."""
    names = [[NAME, "gpus_0"]] * (len(kinds) - 1) + [["gpus_7", machine]]
    listed = [{"EventType": kind, "Resources": each} for kind, each in zip(kinds, names, strict=True)]
    return json.dumps({"DocumentIncarnation": 1, "Events": listed})


def test_a_service_whose_token_is_no_header_is_understood(monkeypatch):
    monkeypatch.setattr(Service, "do_PUT", lambda self: self.say("FALSE\n"))
    with service("gcp", "TRUE") as (_, url):
        assert preemption.has_notice(url)


@pytest.mark.parametrize(("cloud", "before", "notice"), [
    ("aws", None, '{"action": "terminate", "time": "2026-11-19T08:22:00Z"}'),
    ("gcp", "FALSE", "TRUE"),
    ("azure", events("Freeze", "Reboot"), events("Freeze", "Preempt")),
    ("azure", events("Freeze", "Preempt", machine="gpus_0"), events("Terminate", machine="GPUS_1")),
    ("a page of a hotel", "<html>please log in</html>", '{"action": "stop"}'),
])  # fmt: skip
def test_the_notice_of_each_cloud_is_understood(monkeypatch, cloud, before, notice):
    monkeypatch.setattr(preemption, "INTERVAL", 0.01)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # of no use here
    told = threading.Event()
    with service(cloud, before) as (server, url), preemption.watched(url, told.set):
        assert not preemption.has_notice(url)
        until(lambda: server.asked > 5)
        assert not told.is_set()
        server.notice = notice
        assert told.wait(60)


def test_a_service_that_does_not_speak_http_is_asked_again(monkeypatch):
    monkeypatch.setattr(preemption, "INTERVAL", 0.01)
    told = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def answer():
            for reply in [b"garbage\r\n\r\n"] * 4 + [b"HTTP/1.0 404 no\r\n\r\n", b"HTTP/1.0 200 OK\r\n\r\nTRUE"]:
                with listener.accept()[0] as connection:
                    connection.recv(4096)
                    connection.sendall(reply)

        threading.Thread(target=answer, daemon=True).start()
        with preemption.watched(f"http://127.0.0.1:{port}/", told.set):
            assert told.wait(60)


def test_a_service_that_does_not_answer_is_no_notice_and_is_reported_once(monkeypatch, caplog):
    monkeypatch.setattr(preemption, "INTERVAL", 0.0)
    ask, asked, told = preemption.has_notice, [], threading.Event()
    monkeypatch.setattr(preemption, "has_notice", lambda url: asked.append(url) or ask(url))
    with preemption.watched("http://127.0.0.1:1/", told.set):
        while len(asked) < 3:  # then the first two have failed
            time.sleep(0.01)
    assert [record.message.count("does not answer") for record in caplog.records] == [1]
    assert not told.is_set()


@pytest.mark.slow
def test_a_member_obeys_the_notice_and_comes_back_elsewhere_from_the_store(place):
    options = ["--bucket", "noticed", "--member", "a", "--steps", 1_000_000]
    with service("gcp", "FALSE") as (server, url):
        a = start(place, *training("here", *options, "--preemption", url))
        wait_for_text(place / "runs/here/replica-0/events.jsonl", '"round"', a)
        server.notice = "TRUE"
        code, _, err = ended(a)
    assert code == 130 and "the cloud will preempt this machine" in err, err
    (stop,) = [event for event in lines(place, "here", kind="events") if event["event"] == "stop"]
    assert stop["steps_lost"] == 0 and "the other members have all of this member's steps" in err
    elsewhere = start(place, *training("there", *options))
    wait_for_text(place / "runs/there/replica-0/events.jsonl", '"round"', elsewhere)
    elsewhere.kill()
    last = {e["fragment"]: e["index"] for e in lines(place, "here", kind="events") if e["event"] == "round"}
    (first, *_) = [e for e in lines(place, "there", kind="events") if e["event"] == "round"]
    assert first["index"] > last[first["fragment"]]  # it goes on with the rounds of the run
