"""A folder as a store. What lies at a name and is not a regular file (a directory, a link, a pipe, a device) is listed,
and read as an empty object: so all members find the same there, something that they cannot use, and none of them waits
for it or follows it."""

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from diloco.bucket.store.operations import Create, Delete, Forbidden, List, Operation, Oversized, Read, Size, Write

STAGING = "staging"
"""Where objects are written before they get their name in one step."""
LEFT_OVER = 86_400.0
"""Seconds after which a file there belongs to a process that died."""
_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class Folder:
    """One try of one operation. Raises OSError."""

    def __init__(self, root: Path) -> None:
        self.root, self._swept = root, False

    def attempt(self, operation: Operation) -> Any:
        match operation:
            case Create(name, data):
                return self._create(name, data)
            case Write(name, data):
                staged = self._stage(data)
                os.replace(staged, self._place(name))
            case Read(name, limit, first):
                self.root.lstat()  # a folder that is gone for a while is not an empty one
                return self._read(self.root / name, limit, first, operation.at)
            case Size(name):
                self.root.lstat()
                return _size(self.root / name)
            case List(prefix, after):
                self.root.lstat()
                return dict(_below(self.root / prefix, prefix, after))
            case Delete(name):
                with suppress(IsADirectoryError, PermissionError):  # it is not ours, and would not be later either
                    (self.root / name).unlink(missing_ok=True)
            case _:
                raise TypeError(f"{operation} is not a store operation")
        return None

    def _create(self, name: str, data: bytes) -> bool:
        staged = self._stage(data)
        try:
            os.link(staged, self._place(name))  # fails if the name is taken, by whatever
            return True
        except FileExistsError:
            return False
        finally:
            staged.unlink(missing_ok=True)

    def _place(self, name: str) -> Path:
        place = self.root / name
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:  # a file lies where its folder should be: the name itself is not taken
            raise NotADirectoryError(str(error)) from None
        return place

    def _stage(self, data: bytes) -> Path:
        staged = self.root / STAGING / secrets.token_hex(8)
        staged.parent.mkdir(exist_ok=True)  # not its parents: the folder may only be unmounted for a while
        staged.write_bytes(data)
        if not self._swept:
            self._swept = True
            self._sweep(staged.stat().st_mtime)
        return staged

    def _sweep(self, now: float) -> None:
        """Delete what died processes left behind, judged by the clock that stamps the files."""
        with os.scandir(self.root / STAGING) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # another member sweeps too, or has just moved its own away
                    if entry.is_file(follow_symlinks=False) and now - entry.stat().st_mtime > LEFT_OVER:
                        Path(entry.path).unlink()

    def _read(self, path: Path, limit: int, first: int | None, at: int) -> bytes | Oversized | Forbidden | None:
        size = _size(path)
        if size is None or not stat.S_ISREG(path.lstat().st_mode):
            return None if size is None else b""
        try:
            file = os.fdopen(os.open(path, _FLAGS), "rb")
        except PermissionError:
            return Forbidden()
        with file:
            size = os.fstat(file.fileno()).st_size
            if first is None and size > limit:
                return Oversized(size)
            file.seek(at)
            return file.read(size if first is None else first)


def _size(path: Path) -> int | None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def _below(folder: Path, prefix: str, after: str) -> Iterator[tuple[str, int]]:
    """All that lies below a folder, with directories, without following links. Names that are not UTF-8 are escaped."""
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
            with suppress(PermissionError):  # of another user: what lies in it concerns nobody
                yield from _below(folder / entry.name, f"{name}/", after)
