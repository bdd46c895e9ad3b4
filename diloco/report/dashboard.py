"""The report as a live page: a small read-only HTTP server on loopback, polled by the pages it serves."""

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit

from diloco.errors import ConfigError, DiLoCoError
from diloco.report import html
from diloco.report.live import progress_of
from diloco.runs import folder as folders
from diloco.runs import units
from diloco.runs.reader import Follower, RecordedRun, read_fragments, read_phase, status

HOST, PORT = "127.0.0.1", 8265
FOLLOWED = 64
"""Runs kept in memory; others are read again when they are opened."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""The names under which a browser on this machine asks. Any other is a page elsewhere that reads through a browser."""
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "frame-ancestors 'none'",
}


class Page(NamedTuple):
    """A page as it is now."""

    kind: str
    """The template."""
    values: Mapping[str, Any]
    data: Mapping[str, Any]
    """For the page's scripts."""
    up: str = ""
    """Relative address of the list of runs."""

    def html(self) -> str:
        return html.page(self.kind, self.values, self.data, live=True, up=self.up)

    def json(self) -> str:
        """The title, the parts that may have changed, and the data of the curves."""
        values = {"title": f"{self.values['title']} – diloco", "parts": html.parts(self.kind, self.values)}
        return json.dumps({**values, "data": self.data}, separators=(",", ":"), allow_nan=False)


class Site:
    """Maps addresses to pages: of one run, or of all runs in a folder, which may not exist yet."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._follow = lru_cache(FOLLOWED)(_FollowedRun)

    def page(self, words: Sequence[str], selected: Sequence[str] = ()) -> Page | None:
        """The page at an address, by the words between its slashes and the runs it selects; None if there is none."""
        if (self._folder / "config.toml").is_file() or (self._folder / "replica-0").is_dir():
            return None if words else self._follow(self._folder).page(up="")
        runs = {_key(run, self._folder): run for run in folders.by_age(self._folder)}
        match words:
            case []:
                return _list(str(self._folder), runs)
            case ["run", key] if key in runs:
                return self._follow(runs[key]).page(up="../../")
            case ["compare"] if any(key in runs for key in selected):
                return self._comparison({key: runs[key] for key in selected if key in runs})
        return None

    def _comparison(self, folders: Mapping[str, Path]) -> Page:
        runs = [self._follow(folder).follower.read() for folder in folders.values()]
        links = [(run.name, f"../run/{quote(key)}/") for key, run in zip(folders, runs, strict=True)]
        return Page("comparison", html.comparison_values(runs, links), html.comparison_data(runs), up="../")


def _list(title: str, folders: Mapping[str, Path]) -> Page:
    runs = [(key, status(folder)) for key, folder in reversed(list(folders.items()))]
    running = sum(run.state == "running" for _, run in runs)
    about = f"{len(runs)} run{'s' * (len(runs) != 1)}, {running} running"
    return Page("runs", {"title": title, "about": about, "runs": runs}, {})


def _key(run: Path, home: Path) -> str:
    """The name of a run in addresses: its path below the folder, as one word."""
    return "~".join(run.relative_to(home).parts)


class _FollowedRun:
    """A run whose curves are computed again only if it has changed."""

    def __init__(self, folder: Path) -> None:
        self.follower = Follower(folder)
        self._drawn: tuple[RecordedRun | None, dict[str, Any]] = None, {}

    def page(self, up: str) -> Page:
        run = self.follower.read()
        if self._drawn[0] is not run:
            self._drawn = run, html.run_data(run)
        progress = _progress(run) if folders.in_use(run.folder) else None
        return Page("run", html.run_values(run, progress), self._drawn[1], up)


def _progress(run: RecordedRun) -> dict[str, Any]:
    """What a running run and its fragments are doing, the share that is done, and the time left."""
    phase, progress = read_phase(run.folder) or "starting", progress_of(run)
    fragments = read_fragments(run.folder)
    if not progress.total:
        return {"share": 0.0, "text": phase, "fragments": fragments}
    left = f" · {units.duration(progress.seconds_left)} left" if progress.seconds_left is not None else ""
    text = f"{phase} · {progress.unit} {progress.done} of {progress.total}{left}"
    return {"share": progress.share, "text": text, "fragments": fragments}


class Dashboard(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, site: Site, port: int) -> None:
        self.site = site
        super().__init__((HOST, port), _Handler)

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # ignore browsers that disconnect
            super().handle_error(request, client_address)


def open_dashboard(folder: Path, port: int | None = None) -> Dashboard:
    """Bind a server, without answering yet."""
    try:
        return Dashboard(Site(folder), PORT if port is None else port)
    except (OSError, OverflowError) as error:
        if port is None:
            return open_dashboard(folder, port=0)
        raise ConfigError(f"port {port}: {error}; pass another --port, or 0 for any free one") from None


class _Handler(BaseHTTPRequestHandler):
    timeout = 30.0  # seconds for a browser to send its request or to take the response

    def do_GET(self) -> None:
        try:
            address, host = urlsplit(self.path), urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        except ValueError:  # such as a host of [::1
            self._send_text(HTTPStatus.BAD_REQUEST, "The address or the Host header is malformed.")
            return
        if host not in LOOPBACK:
            self._send_text(HTTPStatus.FORBIDDEN, f"{host} is not this machine.")
            return
        words = [unquote(word) for word in address.path.split("/") if word]
        self._send_page(words, parse_qs(address.query).get("run", []))

    def _send_page(self, words: Sequence[str], selected: Sequence[str]) -> None:
        assert isinstance(self.server, Dashboard)
        is_data = words[-1:] == ["data"]
        try:
            page = self.server.site.page(words[:-1] if is_data else words, selected)
            body = b"" if page is None else (page.json() if is_data else page.html()).encode()
        except DiLoCoError as error:  # a folder that is gone
            self._send_text(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        except Exception as error:
            self._send_text(
                HTTPStatus.INTERNAL_SERVER_ERROR, f"This run cannot be read: {type(error).__name__}: {error}"
            )
        else:
            version = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            if page is None:
                self._send_text(HTTPStatus.NOT_FOUND, "There is no such page. / lists everything that is served.")
            elif is_data and self.headers.get("If-None-Match") == version:
                self._send(HTTPStatus.NOT_MODIFIED, b"", ETag=version)
            else:
                kind = "application/json" if is_data else "text/html; charset=utf-8"
                self._send(HTTPStatus.OK, body, **{"Content-Type": kind, "ETag": version})

    def _send_text(self, status: HTTPStatus, text: str) -> None:
        self._send(status, text.encode() + b"\n", **{"Content-Type": "text/plain; charset=utf-8"})

    def _send(self, status: HTTPStatus, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in (HEADERS | headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        return "diloco"

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the terminal belongs to the command that started the server."""
