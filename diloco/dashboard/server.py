"""The server: whole pages, and for each a stream of server-sent events with what is new."""

import contextlib
import gzip
import json
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

from diloco.dashboard import access
from diloco.dashboard.pages import Page
from diloco.dashboard.site import Site
from diloco.errors import ConfigError, DiLoCoError

PORT = 8265
TRIES = 10
"""Ports that are tried, from `PORT` on, if none is asked for."""
RETRY = 1000
"""Milliseconds after which a browser that lost the server tries again."""
ALIVE = 15.0
"""Seconds without news after which a line says that the server is still there: how a dead browser is noticed."""
STREAMS = 128
"""Browsers that may listen at the same time."""
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "frame-ancestors 'none'",
}


class Dashboard(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, site: Site, host: str, port: int, token: str | None) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.site, self.token, self.host = site, token, host
        self.streams = threading.BoundedSemaphore(STREAMS)
        self.ended = threading.Event()
        super().__init__((host, port), _Handler)
        threading.Thread(target=site.read_ahead, name="read ahead", daemon=True).start()

    @property
    def address(self) -> str:
        host = socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host
        name = f"[{host}]" if ":" in host else host
        secret = f"?{urlencode({'token': self.token})}" if self.token else ""
        return f"http://{name}:{self.server_address[1]}/{secret}"

    def server_close(self) -> None:
        self.ended.set()
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # a browser that goes away is nothing to speak of
            super().handle_error(request, client_address)


def open_dashboard(site: Site, host: str, port: int | None) -> Dashboard:
    """A server that is bound, and does not answer yet. Raises ConfigError if it cannot be.

    Beyond loopback it answers only requests that carry its token.
    """
    token, reason = None if access.is_loopback(host) else secrets.token_urlsafe(24), ""
    for number in [port] if port is not None else range(PORT, PORT + TRIES):
        try:
            return Dashboard(site, host, number, token)
        except OSError as error:
            reason = error.strerror or str(error)
        except OverflowError:
            reason = "ports end at 65535"
    where = f"port {port}" if port is not None else f"ports {PORT} to {PORT + TRIES - 1}"
    raise ConfigError(f"--host {host}, {where}: {reason}; give another --port, or 0 for any that is free")


@contextlib.contextmanager
def serving(dashboard: Dashboard) -> Iterator[Dashboard]:
    """Answer in threads of this process while the block runs."""
    thread = threading.Thread(target=dashboard.serve_forever, name="dashboard", daemon=True)
    thread.start()
    try:
        yield dashboard
    finally:
        dashboard.shutdown()
        dashboard.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30.0  # seconds for a browser to send its request, or to take what it is sent

    @property
    def dashboard(self) -> Dashboard:
        assert isinstance(self.server, Dashboard)
        return self.server

    def do_GET(self) -> None:
        port = self.dashboard.server_address[1]
        host, cookies = self.headers.get("Host", ""), self.headers.get("Cookie", "")
        try:
            address = urlsplit(self.path)
            asked = parse_qs(address.query)
            token = asked.pop("token", [""])[0]
            allowed = access.allowed(self.dashboard.token, host, token, cookies, port)
        except ValueError:  # such as a host of [::1
            self._say(HTTPStatus.BAD_REQUEST, "The address or the Host header is malformed.")
            return
        if not allowed:
            asked_as = (
                f"{host} is not a name of this machine" if self.dashboard.token is None else "this needs its token"
            )
            self._say(HTTPStatus.FORBIDDEN, f"{asked_as}: open the address that `diloco dashboard` printed.")
            return
        if token and self.dashboard.token:  # into a cookie, so that it stays in no history
            rest = f"?{urlencode(asked, doseq=True)}" if asked else ""
            # Lax: with Strict, whoever follows the address from another page would be refused after the redirection.
            cookie = f"{access.cookie_name(port)}={self.dashboard.token}; Path=/; HttpOnly; SameSite=Lax"
            here = "/" + address.path.lstrip("/\\")  # browsers take // and /\ for the beginning of a host's name
            self._answer(HTTPStatus.SEE_OTHER, b"", Location=here + rest, **{"Set-Cookie": cookie})
            return
        words = [unquote(word) for word in address.path.split("/") if word]
        stream = words[-1:] == ["events"]
        try:
            page = self.dashboard.site.page(words[:-1] if stream else words, asked.get("run", []))
            body = "" if page is None or stream else page.whole()
        except DiLoCoError as error:  # a folder that is gone, a bucket that cannot be read
            self._say(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        except Exception as error:
            self._say(HTTPStatus.INTERNAL_SERVER_ERROR, f"This run cannot be read: {type(error).__name__}: {error}")
        else:
            if page is None:
                self._say(HTTPStatus.NOT_FOUND, "There is no such page. / has all that is served.")
            elif stream:
                self._stream(page, self.headers.get("Last-Event-ID") or asked.get("at", [""])[0])
            else:
                self._answer(HTTPStatus.OK, body.encode(), **{"Content-Type": "text/html; charset=utf-8"})

    def _stream(self, page: Page, position: str) -> None:
        if not self.dashboard.streams.acquire(blocking=False):
            self._say(HTTPStatus.SERVICE_UNAVAILABLE, f"{STREAMS} browsers listen already.")
            return
        try:
            self.close_connection = True
            self._begin(HTTPStatus.OK, **{"Content-Type": "text/event-stream", "Connection": "close"})
            self.wfile.write(f"retry: {RETRY}\n\n".encode())
            self._send_news(page, position)
        finally:
            self.dashboard.streams.release()

    def _send_news(self, page: Page, position: str) -> None:
        shown: dict[str, str] = {}
        said = time.monotonic()
        while not self.dashboard.ended.is_set():
            try:
                position, parts, data = page.news(position)
            except Exception:
                return  # the run is gone or cannot be read; the browser asks again, and a reload shows why
            changed = {name: text for name, text in parts.items() if shown.get(name) != text}
            shown = parts
            if changed or data:
                text = json.dumps({"parts": changed, **data}, separators=(",", ":"), allow_nan=False)
                self.wfile.write(f"id: {position}\ndata: {text}\n\n".encode())
                said = time.monotonic()
            elif time.monotonic() - said > ALIVE:
                self.wfile.write(b": here\n\n")
                said = time.monotonic()
            self.dashboard.ended.wait(page.every)

    def _say(self, status: HTTPStatus, text: str) -> None:
        self._answer(status, text.encode() + b"\n", **{"Content-Type": "text/plain; charset=utf-8"})

    def _answer(self, status: HTTPStatus, body: bytes, **headers: str) -> None:
        if len(body) > 4096 and "gzip" in self.headers.get("Accept-Encoding", ""):
            body, headers["Content-Encoding"] = gzip.compress(body, compresslevel=1), "gzip"
        self._begin(status, **headers, **{"Content-Length": str(len(body))})
        self.wfile.write(body)

    def _begin(self, status: HTTPStatus, **headers: str) -> None:
        self.send_response(status)
        for name, value in (HEADERS | headers).items():
            self.send_header(name, value)
        self.end_headers()

    def version_string(self) -> str:
        return "diloco"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal belongs to whoever started it."""
