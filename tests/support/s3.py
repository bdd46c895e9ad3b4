"""A real S3 protocol server on this machine: moto, as a process of its own, behind a proxy that can harm what passes.

`python -m tests.support.s3 ADDRESS PORT` serves a bucket named `bucket` there, until its input ends.
"""

import http.client
import http.server
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

ENVIRONMENT = {"AWS_ALLOW_HTTP": "true", "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret",
               "AWS_REGION": "us-east-1"}  # fmt: skip
"""What a member needs to reach it, besides AWS_ENDPOINT_URL."""
Mode = Literal["through", "500", "cut", "gone"]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Server:
    """What it holds is in its memory."""

    def __init__(self, **environment: str) -> None:
        for _ in range(5):  # another process may take the port first
            self.port = free_port()
            self.process = subprocess.Popen(
                [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={"PATH": "/usr/bin:/bin"} | environment,
            )  # fmt: skip
            deadline = time.monotonic() + 150  # against a hang
            while self.process.poll() is None and time.monotonic() < deadline:
                if self._answers() and self.process.poll() is None:
                    return
                time.sleep(0.1)
            self.end()
        raise RuntimeError("moto's server does not start: pip install 'moto[s3,server]'")

    def make(self, bucket: str) -> None:
        urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{self.port}/{bucket}", method="PUT"))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/moto-api/data.json", timeout=1)
        except OSError:
            return False
        return True


class Proxy(http.server.ThreadingHTTPServer):
    """In front of the server: lets requests through, answers 500 to one in three, cuts the body of one reply in three
    off, or does not answer at all. Requests go on one by one: moto looks first and writes then, so that on a busy
    machine two of a race win, and the probe refuses it."""

    daemon_threads = True

    def __init__(self, target: int, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        super().__init__(address, Handler)
        self.target, self.count, self.harmed = target, 0, 0
        self.mode: Mode = "through"
        self.one = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def environment(self) -> Mapping[str, str]:
        return ENVIRONMENT | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.server_port}"}

    def handle_error(self, request: object, client_address: object) -> None:
        """A client was cut off in the middle of a request."""

    def end(self) -> None:
        self.shutdown()
        self.server_close()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body that waits for the ack of its headers would take 40 ms, and nothing else
    server: Proxy  # pyright: ignore[reportIncompatibleVariableOverride]

    def handle_any(self) -> None:
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

    def reply(self, status: int, headers: Mapping[str, str], body: bytes, cut: bool = False) -> None:
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

    def log_message(self, format: str, *args: object) -> None:
        pass


def cpu_seconds(*pids: int) -> float:
    """What processes have used so far, in the kernel too."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    server = Server()
    try:
        server.make("bucket")
        proxy = Proxy(server.port, (sys.argv[1], int(sys.argv[2])))
        print(os.getpid(), server.process.pid, flush=True)
        sys.stdin.read()
        proxy.end()
    finally:
        server.end()


if __name__ == "__main__":
    main()
