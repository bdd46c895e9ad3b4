"""Encryption of all objects with a key of the run: the store's owner learns names, sizes and times, nothing else.

An encrypted object is a magic number and chunks of 64 kB. Each chunk is sealed separately (AES-256-GCM, random nonce)
and bound to the object's name and its position, so a range can be decrypted without the rest. Completeness is not
checked here: the header inside holds the payload's length and checksum.
"""

import hashlib
import hmac
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from diloco.bucket.store.backend import Backend, open_store
from diloco.bucket.store.envelope import ENCRYPTED
from diloco.bucket.store.operations import Create, List, Operation, Oversized, Read, Size, Undeciphered, Write
from diloco.errors import ConfigError, install_command

CHUNK = 64 << 10
NONCE, TAG = 12, 16
SEALED = NONCE + CHUNK + TAG
SHORTEST = 32
"""Minimum bytes of a secret. Anyone who can read the bucket can guess offline, so it must be random, not typed."""
_LABEL = b"diloco object encryption 1|"
log = logging.getLogger("diloco")


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
        if isinstance(answer, Oversized):
            return Oversized(opened_size(answer.size))
        if not isinstance(answer, bytes):
            return answer
        chunk, skipped = divmod(read.at, CHUNK)
        if not answer and read.at:
            return b""  # the object ends earlier
        if not read.at and not answer.startswith(ENCRYPTED):
            return Undeciphered()
        data = self._cipher.open(read.name, answer if read.at else answer[len(ENCRYPTED) :], chunk)
        if data is None:
            return Undeciphered()
        return data[skipped:] if read.first is None else data[skipped : skipped + read.first]


def open_encrypted(url: str, secret: bytes | None, *, create: bool = True) -> Backend:
    """The store at a URL; with a secret, all its objects are encrypted."""
    return encrypted(open_store(url, create=create), secret)


def encrypted(backend: Backend, secret: bytes | None) -> Backend:
    return backend if secret is None else Encrypted(backend, secret)
