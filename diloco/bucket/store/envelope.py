"""The envelope of every object in the store: a JSON header and a payload, checked completely before any of it is used.

Body: magic, length of the header, signature, header, payload. The header holds the payload's size and SHA-256; a name
that ends in a digest holds the header's SHA-256, so it commits to every byte. A payload of more than 16 MB is split
into separate parts, which are put first: once the named object exists, all of it does.

With encryption, all of this lies in chunks of 64 kB after another magic number: the store's owner learns names, sizes
and times, nothing else. Each chunk is sealed separately (AES-256-GCM, random nonce) and bound to the object's name and
its position, so a range can be decrypted without the rest. Completeness follows from the header inside.

The signature is an HMAC-SHA256 over run id, name and header (and through the header the payload), with the secret that
all members share. It is all zeros in a run without a secret.
"""

import hashlib
import hmac
import json
import logging
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from diloco.bucket.store import (
    UNDECIPHERED,
    All,
    Create,
    List,
    Operation,
    Read,
    Size,
    Task,
    Unusable,
    Work,
    Write,
    together,
    until_there,
)
from diloco.bucket.store.backend import Backend, open_store
from diloco.errors import ConfigError, install_command

log = logging.getLogger("diloco")
T = TypeVar("T")
P = ParamSpec("P")
PROTOCOL = 8
MAGIC = b"DLCO"
ENCRYPTED = b"DLCE"
"""The magic number of an encrypted object."""
SIGNATURE = 32  # bytes
PREFIX = struct.Struct("<4sI32s")
HEADER = 64 << 10
PART = 16 << 20
READS = 8
"""Maximum reads of an object that reads differently each time."""
CHUNK = 64 << 10
NONCE, TAG = 12, 16
SEALED = NONCE + CHUNK + TAG
SHORTEST = 32
"""Minimum bytes of a secret. Anyone who can read the bucket can guess offline, so it must be random, not typed."""
_LABEL = b"diloco object encryption 1|"
DIGEST = "{digest}"
"""Placeholder in a name for the digest of the header, until the object is sealed."""

Answer = bytes | Unusable
"""The possible answers to reading an existing object."""
Reject = Callable[[str, "Invalid"], None]
"""Reports an unusable object by name."""


class Invalid(Exception):
    """Why an object is not used. Caught where objects are read, and reported by name."""


def refuses(read: Callable[P, T]) -> Callable[P, T]:
    """Turn any exception of a reader into Invalid: objects can contain anything, and none may stop a member. So a
    reader checks the values that it returns, and need not check what would raise anyway."""

    @wraps(read)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return read(*args, **kwargs)
        except (Invalid, MemoryError):
            raise
        except Exception as error:
            raise Invalid(f"it cannot be read: {type(error).__name__}: {error!s:.200}") from None

    return guarded


@dataclass(frozen=True)
class Opened:
    """An object that passed all checks."""

    name: str
    digest: str  # of the header, and through it of everything
    header: Mapping[str, Any]
    payload: bytes
    nbytes: int  # bytes read from the store

    def number(self, key: str, low: float, high: float) -> float:
        return number(self.header.get(key), key, low, high)

    def integer(self, key: str, low: int, high: int) -> int:
        return integer(self.header.get(key), key, low, high)

    def text(self, key: str) -> str:
        return text(self.header.get(key), key)


@dataclass(frozen=True)
class Sealed:
    """An object ready to be put: the parts in order, then the body."""

    name: str
    digest: str
    body: bytes
    parts: tuple[bytes, ...]

    @property
    def nbytes(self) -> int:
        return len(self.body) + sum(map(len, self.parts))


@dataclass(frozen=True)
class Envelope:
    """Seals and checks the objects of one run. With a key, objects that are not signed with it are invalid."""

    run: str
    key: bytes | None = None

    def seal(self, name: str, kind: str, fields: Mapping[str, Any], payload: bytes = b"") -> Sealed:
        parts = tuple(payload[at : at + PART] for at in range(0, len(payload), PART))
        header = self.header(kind, fields, parts)
        digest = hashlib.sha256(header).hexdigest()
        name = name.replace(DIGEST, digest)
        body = PREFIX.pack(MAGIC, len(header), self._sign(self.run, name, header)) + header
        return Sealed(name, digest, body, parts) if len(parts) > 1 else Sealed(name, digest, body + payload, ())

    def header(self, kind: str, fields: Mapping[str, Any], parts: Sequence[bytes]) -> bytes:
        sums = [hashlib.sha256(part).hexdigest() for part in parts]
        size = sum(map(len, parts))
        head = {"protocol": PROTOCOL, "run": self.run, "kind": kind, "size": size, "sha256": sums, **fields}
        header = json.dumps(head, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
        if len(header) > HEADER:
            raise ValueError(f"the header has {len(header)} bytes; {HEADER} are allowed")
        return header

    @refuses
    def open(self, name: str, kind: str, data: Answer, size: int | None, *, head: bool = False) -> Opened:
        """Check everything except the parts. `size`: exact size of the payload; None: at most one part. `head`: the
        data may end after the header. Raises Invalid."""
        if isinstance(data, Unusable):
            raise Invalid(data.reason)
        if len(data) < PREFIX.size:
            raise Invalid("it is truncated")
        magic, length, signature = PREFIX.unpack_from(data)
        if magic == ENCRYPTED:
            raise Invalid("it is encrypted: pass the key of the run with --encrypt")
        if magic != MAGIC:
            raise Invalid("it is not a diloco object")
        if length > HEADER or PREFIX.size + length > len(data):
            raise Invalid("its header is truncated or too long")
        raw = data[PREFIX.size : PREFIX.size + length]
        header = _json(raw)
        run = text(header.get("run"), "run")
        if self.run and run != self.run:
            raise Invalid("it belongs to another run")
        if self.key is not None and not hmac.compare_digest(signature, self._sign(run, name, raw)):
            raise Invalid("it is not signed with the key of this run")
        if header.get("protocol") != PROTOCOL:
            raise Invalid(f"its protocol is {header.get('protocol')!r:.40}, this is {PROTOCOL}: another version of "
                          "diloco wrote it; use that version, or start a new run at another address")  # fmt: skip
        if header.get("kind") != kind:
            raise Invalid(f"it is not a {kind}")
        digest = hashlib.sha256(raw).hexdigest()
        if (named := name.rpartition("-")[2]) != name and len(named) == 64 and named != digest:
            raise Invalid("its header does not match the digest in its name")
        nbytes = integer(header.get("size"), "size", 0, PART if size is None and not head else 1 << 40)
        if size is not None and nbytes != size:
            raise Invalid(f"its payload has {nbytes} bytes instead of {size}")
        sums = header.get("sha256")
        if not isinstance(sums, list) or len(sums) != -(-nbytes // PART):
            raise Invalid("its checksums are missing")
        payload = data[PREFIX.size + length :]
        if len(sums) > 1 or head:
            return Opened(name, digest, header, b"", len(data))
        if len(payload) != nbytes:
            raise Invalid(f"its payload has {len(payload)} bytes instead of {nbytes}")
        if sums and hashlib.sha256(payload).hexdigest() != sums[0]:
            raise Invalid("its checksum is wrong")
        return Opened(name, digest, header, payload, len(data))

    @refuses
    def header_of(self, name: str, kind: str, data: bytes, size: int) -> tuple[bytes, str]:
        """The part of a body before its payload, and the payload's SHA-256. Raises Invalid."""
        opened = self.open(name, kind, data, None, head=True)
        sums = opened.header["sha256"]
        if opened.header["size"] != size or len(sums) != 1:
            raise Invalid(f"its payload does not have {size} bytes in one part")
        return data[: PREFIX.size + PREFIX.unpack_from(data)[1]], text(sums[0], "sha256")

    def _sign(self, run: str, name: str, header: bytes) -> bytes:
        """The header holds the checksums of the payload, so signing it signs both."""
        if self.key is None:
            return bytes(SIGNATURE)
        parts = (run.encode(), name.encode(), header)
        signed = b"|".join(str(len(part)).encode() + b":" + part for part in parts)
        return hmac.new(self.key, signed, "sha256").digest()


def put(sealed: Sealed, stale: Callable[[bool], bool] = lambda failed: False) -> Task[bool]:
    """Put an object whose name holds its digest. True once the store has it; False if it became stale first, or if
    the name is taken by another object."""
    parts = {f"{sealed.name}.p{k}": part for k, part in enumerate(sealed.parts)}
    for bodies in (parts, {sealed.name: sealed.body}):
        puts = [until_there(Create(name, body, stale), Size(name)) for name, body in bodies.items()]
        sizes = yield from together(puts)
        if sizes != [len(body) for body in bodies.values()]:
            return False
    return True


def get(envelope: Envelope, name: str, kind: str, size: int | None, data: Answer | None = None) -> Task[Opened | None]:
    """Read and check an object with all its parts; None if it or a part is missing. `data`: the object, if it was read
    before. Raises Invalid."""
    inline = PART if size is None else size if size <= PART else 0
    if data is None:
        data = yield Read(name, PREFIX.size + HEADER + inline)
    if data is None:
        return None
    opened = yield Work(lambda: envelope.open(name, kind, data, size))
    sums = opened.header["sha256"]
    if len(sums) < 2:
        return opened
    parts = yield All([Read(f"{name}.p{k}", PART) for k in range(len(sums))])
    if any(part is None for part in parts):
        return None
    payload = yield Work(lambda: _joined(parts, sums, opened.header["size"]))
    return Opened(name, opened.digest, opened.header, payload, opened.nbytes + len(payload))


def usable(name: str, task: Task[T], reject: Reject) -> Task[T | Invalid]:
    """The result of a task that reads one object; if the object is invalid, report it and return the reason."""
    try:
        return (yield from task)
    except Invalid as reason:
        reject(name, reason)
        return reason


def read_twice(
    read: Read, opened: Callable[[Answer], Task[T]], reject: Reject, data: Answer | None = None
) -> Task[T | Invalid | None]:
    """Read and open an object that all members must judge alike; None if it is missing or reads differently each time.
    An invalid object must be invalid for all members, forever. So read it again: the reply may have been cut off.
    `data`: the object, if it was read before."""
    before: Answer | None = None
    for _ in range(READS):
        if data is None:
            data = yield read
        if data is None:
            return None
        try:
            return (yield from opened(data))
        except Invalid as reason:
            if data == before:
                reject(read.name, reason)
                return reason
            before, data = data, None
    return None


@refuses
def _joined(parts: list[Answer], sums: list[Any], size: int) -> bytes:
    for k, (part, checksum) in enumerate(zip(parts, sums, strict=True)):
        if not isinstance(part, bytes) or hashlib.sha256(part).hexdigest() != checksum:
            raise Invalid(f"the checksum of part {k} is wrong")
    payload = b"".join(part for part in parts if isinstance(part, bytes))
    if len(payload) != size:
        raise Invalid(f"its payload has {len(payload)} bytes instead of {size}")
    return payload


def _json(raw: bytes) -> dict[str, Any]:
    def no_constant(name: str) -> None:
        raise ValueError(name)

    try:
        value = json.loads(raw, parse_constant=no_constant)
    except (ValueError, RecursionError):
        raise Invalid("its header is not JSON") from None
    if not isinstance(value, dict):
        raise Invalid("its header is not a JSON object")
    return value


def rounded(value: float) -> float:
    """A figure with the digits that anybody needs, because heartbeats and heads are many."""
    return float(f"{value:.7g}")


def number(value: object, key: str, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise Invalid(f"{key} is not a number from {low:g} to {high:g}")
    return float(value)


def integer(value: object, key: str, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise Invalid(f"{key} is not an integer from {low} to {high}")
    return value


def flag(value: object, key: str) -> bool:
    if not isinstance(value, bool):
        raise Invalid(f"{key} is neither true nor false")
    return value


def text(value: object, key: str) -> str:
    if not isinstance(value, str):
        raise Invalid(f"{key} is not text")
    return value


def read_secret(path: Path | None) -> bytes | None:
    """The secret in a file; None without a path. Raises ConfigError."""
    if path is None:
        return None
    try:
        content, mode = path.read_bytes().strip(), path.stat().st_mode
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    if len(content) < SHORTEST:
        raise ConfigError(f"{path} holds {len(content)} bytes; a secret needs at least {SHORTEST} random ones: make "
                          "one with `openssl rand -hex 32`")  # fmt: skip
    if mode & 0o077:
        _warn_readable(path)
    return content


@cache
def _warn_readable(path: Path) -> None:
    log.warning("%s can be read by other users of this machine: chmod 600 %s", path, path)


def sealed_size(size: int) -> int:
    """Bytes of an encrypted object.

    >>> [sealed_size(n) for n in (0, 1, CHUNK, CHUNK + 1)]
    [32, 33, 65568, 65597]
    """
    return len(ENCRYPTED) + size + max(-(-size // CHUNK), 1) * (NONCE + TAG)


def opened_size(size: int) -> int:
    """Bytes of an object before encryption; 0 if it is too short to be encrypted.

    >>> [opened_size(sealed_size(n)) for n in (0, 1, 65536, 65537, 999_999)]
    [0, 1, 65536, 65537, 999999]
    """
    rest = size - len(ENCRYPTED)
    return max(rest - max(-(-rest // SEALED), 1) * (NONCE + TAG), 0)


def span(start: int, stop: int) -> tuple[int, int, int]:
    """The bytes of the encrypted object that cover a range of the object, and the number of their first chunk."""
    first, last = start // CHUNK, max(-(-stop // CHUNK), start // CHUNK + 1)
    return len(ENCRYPTED) + first * SEALED, len(ENCRYPTED) + last * SEALED, first


class Cipher:
    """Seals and opens chunks."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def seal(self, name: str, data: bytes) -> bytes:
        """Encrypt a complete object."""
        aead, view = self._aead(name), memoryview(data)
        out = [ENCRYPTED]
        for number, at in enumerate(range(0, max(len(data), 1), CHUNK)):
            nonce = os.urandom(NONCE)
            out += [nonce, aead.encrypt(nonce, view[at : at + CHUNK], _place(name, number))]
        return b"".join(out)

    def open(self, name: str, data: bytes, first: int = 0) -> bytes | None:
        """Decrypt chunks, starting with number `first`. None if a chunk was altered or moved, or has another key."""
        try:
            return b"".join(self._opened(name, memoryview(data), first))
        except ValueError:
            return None

    def _opened(self, name: str, data: memoryview, first: int) -> Iterator[bytes]:
        from cryptography.exceptions import InvalidTag

        aead = self._aead(name)
        for number, at in enumerate(range(0, max(len(data), 1), SEALED)):
            chunk = data[at : at + SEALED]
            try:
                yield aead.decrypt(bytes(chunk[:NONCE]), chunk[NONCE:], _place(name, first + number))
            except InvalidTag:
                raise ValueError(name) from None

    def _aead(self, name: str) -> Any:
        """Each name has its own key, so nonces must differ only among the chunks of one name."""
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            raise ConfigError(f"encryption needs cryptography: {install_command('bucket')}") from None
        return AESGCM(hmac.new(self._secret, _LABEL + name.encode(errors="surrogateescape"), hashlib.sha256).digest())


def _place(name: str, number: int) -> bytes:
    return f"{number}|".encode() + name.encode(errors="surrogateescape")


class Encrypted:
    """Another store, where only names and sizes are in clear."""

    def __init__(self, backend: Backend, secret: bytes) -> None:
        self._backend, self._cipher = backend, Cipher(secret)

    def attempt(self, operation: Operation) -> Any:
        match operation:
            case Create(name, data) | Write(name, data):
                return self._backend.attempt(replace(operation, data=self._cipher.seal(name, data)))
            case Read(_, limit, None):
                answer = self._backend.attempt(replace(operation, limit=sealed_size(limit)))
                return self._opened(operation, answer)
            case Read(_, _, int(first)):
                low, high, _ = span(operation.at, operation.at + first)
                low = low if operation.at else 0
                return self._opened(operation, self._backend.attempt(replace(operation, at=low, first=high - low)))
            case Size():
                size = self._backend.attempt(operation)
                return None if size is None else opened_size(size)
            case List():
                return {name: opened_size(size) for name, size in self._backend.attempt(operation).items()}
        return self._backend.attempt(operation)

    def _opened(self, read: Read, answer: Any) -> Any:
        if not isinstance(answer, bytes):
            return answer
        chunk, skipped = divmod(read.at, CHUNK)
        if not answer and read.at:
            return b""  # the object ends earlier
        if not read.at and not answer.startswith(ENCRYPTED):
            return UNDECIPHERED
        data = self._cipher.open(read.name, answer if read.at else answer[len(ENCRYPTED) :], chunk)
        if data is None:
            return UNDECIPHERED
        return data[skipped:] if read.first is None else data[skipped : skipped + read.first]


def open_encrypted(url: str, secret: bytes | None, *, create: bool = True) -> Backend:
    """The store at a URL; with a secret, all its objects are encrypted."""
    return encrypted(open_store(url, create=create), secret)


def encrypted(backend: Backend, secret: bytes | None) -> Backend:
    return backend if secret is None else Encrypted(backend, secret)
