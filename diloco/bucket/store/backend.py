"""One try of one operation: in a folder, or in an object store through `obstore`. A probe rejects unfit stores."""

import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from diloco.bucket.store import FORBIDDEN, Create, Delete, List, Operation, Read, Size, Unusable, Write, too_large
from diloco.errors import ConfigError, DiLoCoError, install_command

TIMEOUT = 60.0
"""Seconds allowed for one request. A part of 16 MB needs 2.2 Mbit/s when it travels alone, as `TransferLimit` makes it
on a slow link."""
FOLDERS = 8
"""Folders listed concurrently when each must be listed separately."""
PAUSES = (0.2, 0.5, 1.0, 2.0)
"""Seconds between tries before training starts."""
METADATA = "169.254.169.254"
"""Where clients look for a role's credentials when the environment has none."""
STAGING = "staging"
"""The subfolder where objects are written before an atomic link or rename gives them their names."""
LEFT_OVER = 86_400.0
"""Seconds after which a staged file must belong to a process that died."""
SCHEMES = "a folder, file://, s3://, gs://, az:// or memory://"
T = TypeVar("T")
log = logging.getLogger("diloco")
_MEMORIES: dict[str, "Backend"] = {}
_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_REFUSED = ("403 Forbidden", "401 Unauthorized", "InvalidAccessKeyId", "SignatureDoesNotMatch", "AccessDenied",
            "NoSuchBucket", "ExpiredToken", "InvalidToken", "RequestTimeTooSkewed")  # fmt: skip


class Failure(Exception):
    """An operation failed and may succeed when it is retried."""


class Refused(Failure):
    """The store answers but does not allow the operation. The credentials may be wrong, or only late to take effect."""


class Backend(Protocol):
    """One try of one operation. Raises Failure, or a DiLoCoError if retrying is pointless."""

    def attempt(self, operation: Operation) -> Any: ...


def open_store(url: str, *, create: bool = True) -> Backend:
    """The backend for a URL or a folder's path. Wrap it in `Encrypted` to encrypt the objects."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme == "file":
        folder = Path(rest if separator else url).expanduser().absolute()
        if not folder.is_dir():
            _make(folder, url, create)
        return Folder(folder, url)
    try:
        import obstore.store as stores
    except ImportError:
        raise ConfigError(f"the bucket needs obstore: {install_command('bucket')}") from None
    if scheme == "memory":
        return _MEMORIES.setdefault(rest, Obstore(stores.MemoryStore(), url))
    if scheme not in ("s3", "gs", "az"):
        raise ConfigError(f"{url}: use {SCHEMES}")
    # Plain http serves only a custom endpoint; the clouds' own addresses are all https.
    for name, endpoint in os.environ.items():
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")) and "ENDPOINT" in name:
            _warn_unencrypted(name, endpoint)
    options: Any = {"timeout": f"{TIMEOUT:.0f}s", "connect_timeout": "10s", "allow_http": True}
    retries: Any = {"max_retries": 0}  # `Store` retries
    try:
        return Obstore(stores.from_url(url, client_options=options, retry_config=retries), url)
    except Exception as error:
        raise ConfigError(f"{url}: {_first_line(error)}") from None


def _make(folder: Path, url: str, create: bool) -> None:
    if not create:
        raise ConfigError(f"there is no folder {folder}: check the address")
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
    """Retry a failing operation for a few seconds, before training starts. Raises DiLoCoError."""
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


class Folder:
    """A folder as a store.

    A name that is not a regular file (a directory, a link, a pipe, a device) is listed, and reads as an empty object.
    So all members see the same unusable object, and none of them blocks on it or follows it.
    """

    def __init__(self, root: Path, url: str = "") -> None:
        self.root, self._url, self._swept = root, url or str(root), False

    def attempt(self, operation: Operation) -> Any:
        try:
            return self._attempt(operation)
        except PermissionError as error:
            raise Refused(f"{self._url}: access is refused ({_first_line(error)}); check the permissions") from None
        except OSError as error:
            raise Failure(_first_line(error)) from None

    def _attempt(self, operation: Operation) -> Any:
        if isinstance(operation, (Read, Size, List)):
            self.root.lstat()  # fails if the folder is unmounted for a while: do not mistake it for an empty one
        match operation:
            case Create(name, data):
                return self._create(name, data)
            case Write(name, data):
                staged = self._stage(data)
                try:
                    os.replace(staged, self._place(name))
                finally:
                    staged.unlink(missing_ok=True)
            case Read(name, limit, first):
                return self._read(self.root / name, limit, first, operation.at)
            case Size(name):
                return _size(self.root / name)
            case List(prefix, after):
                return dict(_below(self.root / prefix, prefix, after))
            case Delete(name):
                with suppress(IsADirectoryError, PermissionError):  # another user's: retrying would not help
                    (self.root / name).unlink(missing_ok=True)
            case _:
                raise TypeError(f"{operation} is not a store operation")
        return None

    def _create(self, name: str, data: bytes) -> bool:
        staged = self._stage(data)
        try:
            os.link(staged, self._place(name))  # fails if the name is taken
            return True
        except FileExistsError:
            return False
        finally:
            staged.unlink(missing_ok=True)

    def _place(self, name: str) -> Path:
        place = self.root / name
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:  # its folder is a file, so the name itself is not taken
            raise NotADirectoryError(str(error)) from None
        return place

    def _stage(self, data: bytes) -> Path:
        staged = self.root / STAGING / secrets.token_hex(8)
        staged.parent.mkdir(exist_ok=True)  # not its parents: the folder may be unmounted for a while
        try:
            staged.write_bytes(data)
        except OSError:  # leave no part of a file on a full disk
            staged.unlink(missing_ok=True)
            raise
        if not self._swept:
            self._swept = True
            self._sweep(staged.stat().st_mtime)
        return staged

    def _sweep(self, now: float) -> None:
        """Delete files of dead processes. `now` comes from the clock that stamps the files."""
        with os.scandir(self.root / STAGING) as entries:
            for entry in entries:
                with suppress(
                    OSError
                ):  # another member sweeps too, or has just moved its own file, or it is another user's
                    if entry.is_file(follow_symlinks=False) and now - entry.stat().st_mtime > LEFT_OVER:
                        Path(entry.path).unlink()

    def _read(self, path: Path, limit: int, first: int | None, at: int) -> bytes | Unusable | None:
        size = _size(path)
        if size is None or not stat.S_ISREG(path.lstat().st_mode):
            return None if size is None else b""
        try:
            file = os.fdopen(os.open(path, _FLAGS), "rb")
        except PermissionError:
            return FORBIDDEN
        with file:
            size = os.fstat(file.fileno()).st_size
            if first is None and size > limit:
                return too_large(size)
            file.seek(at)
            return file.read(size if first is None else first)


def _size(path: Path) -> int | None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def _below(folder: Path, prefix: str, after: str) -> Iterator[tuple[str, int]]:
    """Everything below a folder, including directories, without following links. Names that are not UTF-8 are
    escaped."""
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        name = prefix + entry.name
        if name <= after and not after.startswith(f"{name}/"):
            continue
        try:
            regular = entry.is_file(follow_symlinks=False)
            size = entry.stat(follow_symlinks=False).st_size if regular else 0
        except FileNotFoundError:
            continue  # deleted meanwhile
        if name > after:
            yield name, size
        if entry.is_dir(follow_symlinks=False):
            with suppress(PermissionError):  # another user's directory: its content does not matter
                yield from _below(folder / entry.name, f"{name}/", after)


class Obstore:
    """An object store through obstore."""

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
            if isinstance(operation, List):  # caused by a key that someone put and may delete
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
            case Read(name, _, int(first)):
                return self._range(name, operation.at, first)
            case Read(name, limit):
                result = obstore.get(self._store, name)
                size = result.meta["size"]
                if size > limit:
                    return too_large(size)
                data = bytes(result.bytes())
                if len(data) != size:
                    raise Failure(f"{name}: received {len(data)} of {size} bytes")
                return data
            case Size(name):
                return obstore.head(self._store, name)["size"]
            case List(prefix, after):
                return self._list(prefix, after)
            case Delete(name):
                return obstore.delete(self._store, name)
        raise TypeError(f"{operation} is not a store operation")

    def _list(self, folder: str, after: str) -> dict[str, int]:
        """obstore cannot represent a key with an empty segment, as in `a//b`, and fails for the whole listing. If
        such a key is in this folder, list the names after it: those that members put start with a letter or a digit.
        Otherwise list each folder below separately."""
        import obstore
        from obstore import exceptions

        for start in (after, max(after, f"{folder}0")):
            with suppress(exceptions.InvalidPathError):
                pages = obstore.list(self._store, folder, offset=start or None, chunk_size=1000)
                return {m["path"]: m["size"] for page in pages for m in page}
        level = obstore.list_with_delimiter(self._store, folder)
        names = {m["path"]: m["size"] for m in level["objects"] if m["path"] > after}
        prefixes = (f"{prefix.rstrip('/')}/" for prefix in level["common_prefixes"])
        prefixes = [prefix for prefix in prefixes if prefix > after or after.startswith(prefix)]
        with ThreadPoolExecutor(FOLDERS) as pool:
            for listing in pool.map(lambda prefix: self._list(prefix, after), prefixes):
                names |= listing
        return names

    def _range(self, name: str, at: int, length: int) -> bytes:
        """The available part of a range: a store refuses one that begins at the end or after it, as any range of an
        empty object does, however often it is asked."""
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


def _first_line(error: BaseException) -> str:
    """The store's message, without the XML around it."""
    if message := re.search(r"<Message>(.+?)</Message>", str(error)):
        return message[1][:300]
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
