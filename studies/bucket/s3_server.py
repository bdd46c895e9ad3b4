"""An S3 server in memory that fails on purpose. It speaks as much of the protocol as the bucket uses: put (also
create-only), get, ranges, head, list, delete. It counts commit records that were overwritten or deleted."""

import hashlib
import http.server
import random
import socket
import struct
import threading
import time
import urllib.parse
from typing import Any, Literal
from xml.sax.saxutils import escape

from diloco.bucket.store import List, Read, Size, too_large

Fault = Literal["none", "500", "429/503", "409", "412", "slow", "cut", "reply lost", "done twice", "hang", "reset",
                "gone", "stale lists", "late lists", "refused", "no such bucket", "expired credentials",
                "clock off"]  # fmt: skip
STATUS: dict[Fault, tuple[int, ...]] = {"500": (500,), "429/503": (429, 503), "409": (409,), "412": (412,)}
"""What the server answers instead, whatever the operation."""
REFUSALS: dict[Fault, tuple[int, str]] = {
    "refused": (403, "AccessDenied"), "no such bucket": (404, "NoSuchBucket"),
    "expired credentials": (403, "ExpiredToken"), "clock off": (403, "RequestTimeTooSkewed"),
}  # fmt: skip
"""What the server answers to everything."""
ALL: tuple[Fault, ...] = ("slow", "hang", "gone", *REFUSALS)
"""Faults that harm every request."""
LISTS: tuple[Fault, ...] = ("stale lists", "late lists")
"""Faults that harm four of five LISTs and nothing else."""
SOME = 3
"""One request in this many is harmed by the other faults."""
AGE = (1.0, 15.0)
"""Seconds by which a stale LIST lags behind."""
LATE = (0.5, 3.0)
"""Seconds after which a late LIST arrives."""
PAGE = 1000
LATENCY = (0.01, 0.05)
"""Seconds that a request takes, as those for small objects do at S3: any number of them at the same time."""


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects: dict[str, tuple[bytes, float]] = {}  # with the time of the first put
        self.deleted: list[tuple[str, bytes, float, float]] = []  # with the times of the first put and the delete
        self.one = threading.Lock()
        self.fault: Fault = "none"
        self.requests = self.harmed = self.spoiled = 0
        self.chance = random.Random(0)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def environment(self) -> dict[str, str]:
        return {"AWS_ALLOW_HTTP": "true", "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret",
                "AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.server_port}"}  # fmt: skip

    def attempt(self, operation: Any) -> Any:
        """One look from inside, past all faults: for whoever watches."""
        with self.one:
            match operation:
                case Read(name, limit, first):
                    data = self.objects.get(f"run/{name}", (None, 0.0))[0]
                    if data is None or first is not None:
                        return data if data is None else data[operation.at :][:first]
                    return data if len(data) <= limit else too_large(len(data))
                case Size(name):
                    found = self.objects.get(f"run/{name}")
                    return None if found is None else len(found[0])
                case List(prefix, after):
                    names = {key.removeprefix("run/"): len(data) for key, (data, _) in self.objects.items()}
                    return {n: size for n, size in names.items() if n.startswith(prefix) and n > after}
        raise TypeError(operation)

    def delete(self, key: str) -> None:
        found = self.objects.pop(key, None)
        if found is not None:
            self.spoiled += "/closed." in key
            now = time.monotonic()
            self.deleted = [each for each in self.deleted if now - each[3] < AGE[1]]
            self.deleted.append((key, *found, now))

    def names(self, age: float = 0.0) -> dict[str, tuple[int, float]]:
        """Sizes and times of all objects, as they were some seconds ago."""
        then = time.monotonic() - age
        held = {key: (len(data), at) for key, data, at, until in self.deleted if at <= then < until}
        return held | {key: (len(data), at) for key, (data, at) in self.objects.items() if at <= then}

    def roll_back(self, seconds: float) -> None:
        """Return to what was held some seconds ago, as a store that is restored from a backup."""
        with self.one:
            then = time.monotonic() - seconds
            kept = {key: (data, at) for key, data, at, until in self.deleted if at <= then < until}
            self.objects = kept | {key: found for key, found in self.objects.items() if found[1] <= then}

    def closed(self) -> int:
        """Closing records."""
        with self.one:
            return sum("/closed." in key for key in self.objects)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A member was killed in the middle of a request."""

    def end(self) -> None:
        self.fault = "none"
        self.shutdown()
        self.server_close()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body that waits for the ack of its headers would take 40 ms, and nothing else
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def handle_any(self) -> None:
        server = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        time.sleep(random.uniform(*LATENCY))
        with server.one:
            server.requests += 1
            fault = server.fault
            harm = self.harms(fault)
            server.harmed += harm
        if not harm:
            return self.answer(*self.perform(body))
        if fault in STATUS:
            if server.chance.random() < 0.5:
                self.perform(body)  # it may have been done all the same
            return self.answer(server.chance.choice(STATUS[fault]), {}, b"")
        if fault == "stale lists":
            return self.answer(*self.perform(body, age=server.chance.uniform(*AGE)))
        if fault == "late lists":
            reply = self.perform(body)
            time.sleep(server.chance.uniform(*LATE))
            return self.answer(*reply)
        if fault == "done twice":
            self.perform(body)
            return self.answer(*self.perform(body))
        if fault in REFUSALS:
            status, code = REFUSALS[fault]
            return self.answer(status, {}, _error(code))
        if fault == "slow":
            time.sleep(server.chance.uniform(0.1, 0.6))
            return self.answer(*self.perform(body))
        if fault == "hang":
            while server.fault == "hang":
                time.sleep(0.1)
        if fault in ("hang", "gone"):
            self.close_connection = True
            return None
        status, headers, data = self.perform(body)
        if fault == "cut" and len(data) > 1:
            return self.answer(status, headers, data, cut=True)
        if fault == "reset":  # a FIN would be an end; this is a broken connection
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True  # it was done, and the reply is lost
        return None

    def harms(self, fault: Fault) -> bool:
        if fault in LISTS:
            return "list-type" in self.path and self.server.chance.random() < 0.8
        return fault in ALL or (fault != "none" and self.server.chance.randrange(SOME) == 0)

    def perform(self, body: bytes, age: float = 0.0) -> tuple[int, dict[str, str], bytes]:
        url = urllib.parse.urlsplit(self.path)
        key = urllib.parse.unquote(url.path).removeprefix("/bucket").lstrip("/")
        with self.server.one:
            if self.command == "PUT":
                return self.put(key, body)
            if self.command == "DELETE":
                self.server.delete(key)
                return 204, {}, b""
            if self.command == "POST":  # several deletes in one request
                keys = [part.partition("</Key>")[0] for part in body.decode().split("<Key>")[1:]]
                for each in keys:
                    self.server.delete(each)
                rows = "".join(f"<Deleted><Key>{each}</Key></Deleted>" for each in keys)
                return 200, {"Content-Type": "application/xml"}, f"<DeleteResult>{rows}</DeleteResult>".encode()
            if not key:
                return 200, {"Content-Type": "application/xml"}, self.listing(urllib.parse.parse_qs(url.query), age)
            found = self.server.objects.get(key)
        return self.get(found[0]) if found is not None else (404, {}, _error("NoSuchKey"))

    def put(self, key: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        if key in self.server.objects and self.headers.get("If-None-Match") == "*":
            return 412, {}, _error("PreconditionFailed")
        self.server.spoiled += "/closed." in key and key in self.server.objects
        self.server.objects[key] = body, self.server.objects.get(key, (b"", time.monotonic()))[1]
        return 200, {"ETag": _etag(body)}, b""

    def get(self, data: bytes) -> tuple[int, dict[str, str], bytes]:
        headers, status, total = {"ETag": _etag(data), "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}, 200, len(data)
        if wanted := self.headers.get("Range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(int(last) + 1 if last else total, total)
            data, status = data[start:stop], 206
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{total}"
        return status, headers, data

    def listing(self, query: dict[str, list[str]], age: float) -> bytes:
        prefix = query.get("prefix", [""])[0]
        after = query.get("continuation-token", query.get("start-after", [""]))[0]
        split = query.get("delimiter", [""])[0]
        held = self.server.names(age)
        found = {_rolled_up(name, prefix, split) for name in held if name.startswith(prefix)}
        names = sorted(name for name in found if name > after)
        shown, more = names[:PAGE], len(names) > PAGE
        rows = []
        for name in shown:
            if name not in held:
                rows.append(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>")
                continue
            rows.append(f"<Contents><Key>{escape(name)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                        f"<ETag>0</ETag><Size>{held[name][0]}</Size></Contents>")  # fmt: skip
        token = f"<NextContinuationToken>{escape(shown[-1])}</NextContinuationToken>" if more else ""
        head = f"<Name>bucket</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(shown)}</KeyCount>"
        return (f'<?xml version="1.0"?><ListBucketResult>{head}<IsTruncated>{str(more).lower()}</IsTruncated>{token}'
                f'{"".join(rows)}</ListBucketResult>').encode()  # fmt: skip

    def answer(self, status: int, headers: dict[str, str], body: bytes, cut: bool = False) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        self.close_connection |= cut

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_any

    def log_message(self, format: str, *args: object) -> None:
        pass


def _rolled_up(name: str, prefix: str, delimiter: str) -> str:
    """The name, or the folder in which it lies below the prefix."""
    first, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
    return f"{prefix}{first}{found}" if found else name


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


def _error(code: str) -> bytes:
    return f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{code}</Message></Error>'.encode()
