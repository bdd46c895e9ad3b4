"""Keys: one secret that all members share, or a key pair for each member, listed by the run's founder.

A list has a version number that only grows. Which version counts in a round follows from the objects in the slots of
that round and the record before it, as everything that decides about records does; see `diloco.bucket.roster`.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from diloco.errors import ConfigError

SHORTEST = 16
"""Bytes of a shared secret."""
PUBLIC = "ed25519:"
_PRIVATE = "diloco private key ed25519:"
_HEX = re.compile("[0-9a-f]{64}")
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
TAIL = re.compile(r"[0-9]{8}\.[0-9a-f]{64}")
MOST = 4096
"""Members that a list may have."""


@dataclass(frozen=True)
class KeyPair:
    """The key pair of one member. Without the private half one can only look.

    Args:
        private: 32 bytes.
        founder: the public key that the run must have been founded with. None: the one that the run names is believed.
    """

    private: bytes | None = field(default=None, repr=False)
    founder: bytes | None = None

    @property
    def public(self) -> bytes:
        return self._loaded.public_key().public_bytes_raw() if self.private is not None else b""

    def sign(self, data: bytes) -> bytes:
        return self._loaded.sign(data)

    @property
    def _loaded(self) -> Any:
        assert self.private is not None
        return _ed25519().Ed25519PrivateKey.from_private_bytes(self.private)


Key = bytes | KeyPair | None
"""What a member is given: a shared secret, its own pair, or nothing."""


def verify(public: bytes, signature: bytes, data: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        _ed25519().Ed25519PublicKey.from_public_bytes(public).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise ConfigError("key pairs need cryptography: pip install 'diloco[bucket]'") from None
    return ed25519


def new_pair(path: Path) -> KeyPair:
    """Make a pair, and write it to a new file that only its owner may read."""
    pair = KeyPair(_ed25519().Ed25519PrivateKey.generate().private_bytes_raw())
    assert pair.private is not None
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{_PRIVATE}{pair.private.hex()}\n")
    except FileExistsError:
        raise ConfigError(f"{path} exists: a key is never overwritten; give another name") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    return pair


def read_key(path: Path | None, founder: str | None = None) -> Key:
    """The key in a file: a pair that `diloco keys new` made, or a secret that all members share."""
    expected = None if founder is None else public_key(founder)
    if path is None:
        return None if expected is None else KeyPair(None, expected)
    content = read_secret(path)
    if not content.startswith(_PRIVATE.encode()):
        if expected is not None:
            raise ConfigError(f"{path} holds a secret that all members share, so that the run has no founder: leave "
                              "--founder out, or give your own key, made with `diloco keys new FILE`")  # fmt: skip
        return content
    private = content[len(_PRIVATE) :].decode("ascii", "replace")
    if not _HEX.fullmatch(private):
        raise ConfigError(f"{path} is cut off or changed: it is not a key that `diloco keys new FILE` has made")
    return KeyPair(bytes.fromhex(private), expected)


def read_secret(path: Path) -> bytes:
    try:
        content = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    if len(content) < SHORTEST:
        raise ConfigError(f"{path} holds {len(content)} bytes: give at least {SHORTEST}, as from "
                          "`openssl rand -hex 32`, or a key of your own from `diloco keys new FILE`")  # fmt: skip
    return content


def shown(public: bytes) -> str:
    return PUBLIC + public.hex()


def public_key(text: str) -> bytes:
    """
    >>> public_key("ed25519:" + "0f" * 32) == bytes([15] * 32)
    True
    """
    digits = text.removeprefix(PUBLIC)
    if digits == text or not _HEX.fullmatch(digits):
        raise ConfigError(f"{text[:100]!r} is not a public key: give what `diloco keys new FILE` printed, {PUBLIC} and "
                          "64 hexadecimal digits")  # fmt: skip
    return bytes.fromhex(digits)


@dataclass(frozen=True)
class Listed:
    """One version of the list of those who may take part. Version 0 is in run.json."""

    version: int
    members: Mapping[str, bytes]  # name: public key

    @property
    def payload(self) -> bytes:
        members = {name: public.hex() for name, public in self.members.items()}
        return json.dumps({"version": self.version, "members": members}, sort_keys=True).encode()

    @cached_property
    def tail(self) -> str:
        """How records name it: its version and the digest of its content; nothing for the one in run.json."""
        return f"{self.version:08d}.{hashlib.sha256(self.payload).hexdigest()}" if self.version else ""


def read_list(payload: bytes) -> Listed:
    """Raises ValueError, or what else comes of JSON that is not a list."""
    value = json.loads(payload)
    version, members = value["version"], value["members"]
    if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version < 10**8:
        raise ValueError("its version is not one")
    if not isinstance(members, dict) or len(members) > MOST:
        raise ValueError(f"it lists nobody, or more than {MOST}")
    if not all(NAME.fullmatch(name) and isinstance(key, str) and _HEX.fullmatch(key) for name, key in members.items()):
        raise ValueError("a name or a key in it is not one")
    return Listed(version, {name: bytes.fromhex(key) for name, key in members.items()})


def version_of(tail: str) -> int:
    return int(tail[:8]) if tail else 0


@dataclass
class Roster:
    """The lists of a run, as far as they were read."""

    founder: bytes
    first: Listed
    known: dict[str, Listed] = field(default_factory=dict)  # by tail
    since: dict[str, tuple[int, ...]] = field(default_factory=dict)  # by tail: round of each fragment

    def __post_init__(self) -> None:
        self.known.setdefault("", self.first)

    @property
    def newest(self) -> Listed:
        return max(self.known.values(), key=lambda listed: (listed.version, listed.tail))

    def add(self, listed: Listed) -> None:
        self.known[listed.tail] = listed

    def names_of(self, signer: bytes, *, ever: bool) -> set[str]:
        """Whose key this is, in the newest list or in any that is known."""
        lists = self.known.values() if ever else [self.newest]
        return {name for listed in lists for name, public in listed.members.items() if public == signer}
