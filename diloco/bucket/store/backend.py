"""One try of one operation: a folder or a bucket behind `obstore`, and the probe that refuses unfit stores."""

import logging
import os
import re
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from diloco.bucket.store.folder import Folder
from diloco.bucket.store.operations import Create, Delete, List, Operation, Oversized, Read, Size, Write
from diloco.errors import ConfigError, DiLoCoError, install_command

TIMEOUT = 60.0
"""Seconds of one request. A part of 16 MB needs 2.2 Mbit/s if it travels alone, as `TransferLimit` makes it on a slow
link."""
FOLDERS = 8
"""Folders that are listed at once, where they have to be listed one by one."""
PAUSES = (0.2, 0.5, 1.0, 2.0)
"""Seconds between the tries of what is asked before a member takes part."""
METADATA = "169.254.169.254"
"""Where clients look for a role's credentials when the environment has none."""
T = TypeVar("T")
SCHEMES = "a folder, file://, s3://, gs://, az:// or memory://"
log = logging.getLogger("diloco")


class Failure(Exception):
    """An operation that may succeed when it is repeated."""


class Refused(Failure):
    """The store answers, and does not allow the operation: wrong credentials, or for a moment the right ones."""


class Backend(Protocol):
    """One try of one operation. Raises Failure, or a DiLoCoError if there is no point in repeating it."""

    def attempt(self, operation: Operation) -> Any: ...


def open_store(url: str, *, create: bool = True) -> Backend:
    """A backend for a URL or the path of a folder. `Encrypted` encrypts what it holds."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme == "file":
        folder = Path(rest if separator else url).expanduser().absolute()
        if not folder.is_dir():
            _make(folder, url, create)
        return FolderStore(Folder(folder), url)
    try:
        import obstore.store as stores
    except ImportError:
        raise ConfigError(f"the bucket needs obstore: {install_command('bucket')}") from None
    if scheme == "memory":
        return _MEMORIES.setdefault(rest, Obstore(stores.MemoryStore(), url))
    if scheme not in ("s3", "gs", "az"):
        raise ConfigError(f"{url}: give {SCHEMES}")
    # http is for a server of one's own that was given as the endpoint; the clouds' addresses are all https.
    for name, endpoint in os.environ.items():
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")) and "ENDPOINT" in name:
            _warn_unencrypted(name, endpoint)
    options: Any = {"timeout": f"{TIMEOUT:.0f}s", "connect_timeout": "10s", "allow_http": True}
    retries: Any = {"max_retries": 0}  # `Store` repeats what fails
    try:
        return Obstore(stores.from_url(url, client_options=options, retry_config=retries), url)
    except Exception as error:
        raise ConfigError(f"{url}: {_first_line(error)}") from None


_MEMORIES: dict[str, Backend] = {}


def _make(folder: Path, url: str, create: bool) -> None:
    if not create:
        raise ConfigError(f"there is no folder {folder}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{url}: {error}") from None
    log.warning("created the folder %s. If it should already hold a run, stop and check that it is mounted; with "
                "--join-only a member never creates one", folder)  # fmt: skip


@cache
def _warn_unencrypted(name: str, endpoint: str) -> None:
    url = urlsplit(endpoint)
    host = url.hostname or ""
    if url.scheme == "http" and host not in ("localhost", "::1") and not host.startswith("127."):
        log.warning("%s is %s: traffic is not encrypted, so anyone on the path can read and change it; "
                    "use https://", name, endpoint)  # fmt: skip


def patiently(attempt: Callable[[], T], url: str = "") -> T:
    """Repeat what fails a few times, for some seconds: before training there is nothing to do meanwhile. Raises
    DiLoCoError."""
    for pause in (*PAUSES, None):
        try:
            return attempt()
        except Refused as refused:
            raise ConfigError(str(refused)) from None
        except Failure as failure:
            if pause is None:
                where = f"{url}: " if url else ""
                raise DiLoCoError(f"{where}the store does not answer: {failure}; check the address, AWS_ENDPOINT_URL "
                                  "or the equivalent of your store, and the network") from None  # fmt: skip
            time.sleep(pause)
    raise AssertionError


def probe(backend: Backend) -> None:
    """Refuse a store whose create-only puts are not. Eight race for one name: a store that looks first and writes
    afterwards would pass if they came one by one."""
    patiently(lambda: _race(backend))


def _race(backend: Backend) -> None:
    name = f"probe/{secrets.token_hex(8)}"
    won: list[bytes] = []

    def attempt(body: bytes) -> None:
        if backend.attempt(Create(name, body)) is True:
            won.append(body)

    bodies = [f"{i}".encode() for i in range(9)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(attempt, bodies[:8]))
        read = pool.submit(backend.attempt, Read(name, 16))
        attempt(bodies[8])
        first, second = read.result(), backend.attempt(Read(name, 16))
    backend.attempt(Delete(name))
    if len(won) < 2 and not (isinstance(first, bytes) and isinstance(second, bytes)):
        raise Failure(f"the store stored {name} and could not read it back")
    if not won and first == second:
        raise Failure("9 puts raced for one name, and none was told that it won: replies were lost")
    if len(won) != 1 or first != won[0] or second != first:
        raise ConfigError(
            f"the store has no create-only puts: 9 puts raced for one name, {len(won)} were told that they won, and "
            f"{'the name was' if first == second else 'it was overwritten: it'} read as {second!r}. Members could "
            "disagree on who is in a round. Use S3, R2, GCS, Azure, MinIO, a local folder or NFS."
        )


class FolderStore:
    """One try in a folder."""

    def __init__(self, folder: Folder, url: str) -> None:
        self._folder, self._url = folder, url

    def attempt(self, operation: Operation) -> Any:
        try:
            return self._folder.attempt(operation)
        except PermissionError as error:
            raise Refused(f"{self._url}: access is refused ({_first_line(error)}); check the permissions") from None
        except OSError as error:
            raise Failure(_first_line(error)) from None


class Obstore:
    """One try through obstore."""

    def __init__(self, store: Any, url: str) -> None:
        self._store, self._url = store, url

    def attempt(self, operation: Operation) -> Any:
        from obstore import exceptions

        try:
            return self._attempt(operation)
        except FileNotFoundError as error:
            if isinstance(operation, (Create, Write)) or "NoSuchBucket" in str(error):
                raise Refused(f"{self._url}: there is no such bucket ({_first_line(error)})") from None
            return {} if isinstance(operation, List) else None
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
            if isinstance(operation, Create):
                return False
            raise Failure(_first_line(error)) from None
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError) as error:
            raise self._refused(error) from None
        except (exceptions.NotSupportedError, exceptions.InvalidPathError, NotImplementedError) as error:
            if isinstance(operation, List):  # because of a key that somebody has put, and may delete
                raise Failure(_first_line(error)) from None
            raise ConfigError(f"{self._url}: {_first_line(error)}") from None
        except (exceptions.BaseError, OSError) as error:
            if METADATA in str(error):
                raise Refused(f"{self._url}: there are no credentials: set AWS_ACCESS_KEY_ID and "
                              "AWS_SECRET_ACCESS_KEY, or those of your store") from None  # fmt: skip
            if any(word in str(error) for word in _REFUSED):
                raise self._refused(error) from None
            raise Failure(_first_line(error)) from None

    def _attempt(self, operation: Operation) -> Any:
        import obstore

        match operation:
            case Create(name, data):
                obstore.put(self._store, name, data, mode="create", use_multipart=False)
                return True
            case Write(name, data):
                obstore.put(self._store, name, data, use_multipart=False)
                return None
            case Read(name, _, int(first)) if operation.at == 0:
                return bytes(obstore.get_range(self._store, name, start=0, length=first))
            case Read(name, _, int(first)):
                return self._range(name, operation.at, first)
            case Read(name, limit):
                result = obstore.get(self._store, name)
                size = result.meta["size"]
                if size > limit:
                    return Oversized(size)
                data = bytes(result.bytes())
                if len(data) != size:
                    raise Failure(f"{name}: {len(data)} of {size} bytes came")
                return data
            case Size(name):
                return obstore.head(self._store, name)["size"]
            case List(prefix, after):
                return self._list(prefix, after)
            case Delete(name):
                return obstore.delete(self._store, name)
        raise TypeError(f"{operation} is not a store operation")

    def _list(self, folder: str, after: str) -> dict[str, int]:
        """obstore has no name for a key with an empty segment, as `a//b`, and fails for all that is listed with it. If
        it lies in this folder, look behind it: what members put there begins with a letter or a digit. Otherwise look
        into each folder below by itself."""
        import obstore
        from obstore import exceptions

        for start in (after, max(after, f"{folder}0")):
            with suppress(exceptions.InvalidPathError):
                return self._list_all(folder, start)
        found = obstore.list_with_delimiter(self._store, folder)
        names = {m["path"]: m["size"] for m in found["objects"] if m["path"] > after}
        each = (f"{below.rstrip('/')}/" for below in found["common_prefixes"])
        wanted = [below for below in each if below > after or after.startswith(below)]
        with ThreadPoolExecutor(FOLDERS) as pool:
            for below in pool.map(lambda below: self._list(below, after), wanted):
                names |= below
        return names

    def _list_all(self, folder: str, after: str) -> dict[str, int]:
        import obstore

        found = obstore.list(self._store, folder, offset=after or None, chunk_size=1000)
        return {m["path"]: m["size"] for part in found for m in part}

    def _range(self, name: str, at: int, length: int) -> bytes:
        """What there is of a range: a store refuses one that begins behind the end, as often as it is asked."""
        import obstore
        from obstore import exceptions

        try:
            return bytes(obstore.get_range(self._store, name, start=at, length=length))
        except exceptions.BaseError:
            if obstore.head(self._store, name)["size"] > at:
                raise
            return b""

    def _refused(self, error: BaseException) -> Refused:
        return Refused(f"{self._url}: access is refused ({_first_line(error)}); check the credentials")


class Below:
    """A folder of another store, used as a store."""

    def __init__(self, backend: Backend, folder: str) -> None:
        self._backend, self._folder = backend, f"{folder}/"

    def attempt(self, operation: Operation) -> Any:
        match operation:
            case List(prefix, after):
                names = self._backend.attempt(List(self._folder + prefix, after and self._folder + after))
                return {name.removeprefix(self._folder): size for name, size in names.items()}
            case Create() | Write() | Read() | Size() | Delete():
                return self._backend.attempt(replace(operation, name=self._folder + operation.name))
        raise TypeError(f"{operation} is not a store operation")


_REFUSED = ("403 Forbidden", "401 Unauthorized", "InvalidAccessKeyId", "SignatureDoesNotMatch", "AccessDenied",
            "NoSuchBucket", "ExpiredToken", "InvalidToken", "RequestTimeTooSkewed")  # fmt: skip


def _first_line(error: BaseException) -> str:
    """What the store says, without the XML around it."""
    if message := re.search(r"<Message>(.+?)</Message>", str(error)):
        return message[1][:300]
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
