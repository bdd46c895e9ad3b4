"""Encryption of what the store holds, with a key of the run: its owner learns names, sizes and times, nothing else.

An object is four bytes that say so, and chunks of 64 kB. Each chunk is sealed by itself (AES-256-GCM, a nonce of its
own), bound to the object's name and its place in it, so a range can be read and opened without the rest. That an object
is complete is not checked here: its header, inside, says how long it is and what its payload's checksum is.
"""

import hashlib
import hmac
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from diloco.bucket.store.backend import Backend, open_store
from diloco.bucket.store.envelope import ENCRYPTED
from diloco.bucket.store.operations import Create, List, Operation, Oversized, Read, Size, Undeciphered, Write
from diloco.errors import ConfigError

CHUNK = 64 << 10
NONCE, TAG = 12, 16
SEALED = NONCE + CHUNK + TAG
_LABEL = b"diloco object encryption 1|"


def sealed_size(size: int) -> int:
    """Bytes of an encrypted object.

    >>> [sealed_size(n) for n in (0, 1, CHUNK, CHUNK + 1)]
    [32, 33, 65568, 65597]
    """
    return len(ENCRYPTED) + size + max(-(-size // CHUNK), 1) * (NONCE + TAG)


def opened_size(size: int) -> int:
    """Bytes of an object before it was encrypted; what is too short for one counts as empty.

    >>> [opened_size(sealed_size(n)) for n in (0, 1, 65536, 65537, 999_999)]
    [0, 1, 65536, 65537, 999999]
    """
    rest = size - len(ENCRYPTED)
    return max(rest - max(-(-rest // SEALED), 1) * (NONCE + TAG), 0)


def span(start: int, stop: int) -> tuple[int, int, int]:
    """The bytes of the encrypted object that hold a range of the object, and the number of their first chunk."""
    first, last = start // CHUNK, max(-(-stop // CHUNK), start // CHUNK + 1)
    return len(ENCRYPTED) + first * SEALED, len(ENCRYPTED) + last * SEALED, first


class Cipher:
    """Seals and opens chunks."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def seal(self, name: str, data: bytes) -> bytes:
        """The complete object, encrypted."""
        aead, view = self._aead(name), memoryview(data)
        out = [ENCRYPTED]
        for number, at in enumerate(range(0, max(len(data), 1), CHUNK)):
            nonce = os.urandom(NONCE)
            out += [nonce, aead.encrypt(nonce, view[at : at + CHUNK], _place(name, number))]
        return b"".join(out)

    def open(self, name: str, data: bytes, first: int = 0) -> bytes | None:
        """Chunks from number `first` on, without the bytes before them; None if one of them was changed, is of another
        object or place, or sealed with another key."""
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
        """A key for each name, so that nonces need to differ among the chunks of one name only."""
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            raise ConfigError("encryption needs cryptography: pip install 'diloco[bucket]'") from None
        return AESGCM(hmac.new(self._secret, _LABEL + name.encode(errors="surrogateescape"), hashlib.sha256).digest())


def _place(name: str, number: int) -> bytes:
    return f"{number}|".encode() + name.encode(errors="surrogateescape")


class Encrypted:
    """One try in another store, of which only names and sizes are in clear."""

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
            return b""  # it ends before
        if not read.at and not answer.startswith(ENCRYPTED):
            return Undeciphered()
        data = self._cipher.open(read.name, answer if read.at else answer[len(ENCRYPTED) :], chunk)
        if data is None:
            return Undeciphered()
        return data[skipped:] if read.first is None else data[skipped : skipped + read.first]


def open_encrypted(url: str, secret: bytes | None, *, create: bool = True) -> Backend:
    """The store at a URL; with a secret, all that is in it is encrypted."""
    return encrypted(open_store(url, create=create), secret)


def encrypted(backend: Backend, secret: bytes | None) -> Backend:
    return backend if secret is None else Encrypted(backend, secret)
