"""What a dashboard serves: one run, several side by side, all runs in a folder, or the members of a bucket."""

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from diloco.dashboard.pages import BucketPage, ComparisonPage, ListPage, Page, RunPage
from diloco.errors import ConfigError
from diloco.runs import folder as folders
from diloco.runs.follow import Followed

FOLLOWED = 64
"""Runs that are kept in memory. The one that was looked at longest ago is forgotten, and read again if it is wanted."""
OFFERED = "give the folder of a run, a folder of runs, or a bucket"


class Keys(NamedTuple):
    """What a bucket is opened with, as `diloco watch` takes it."""

    key_file: Path | None = None
    encrypt: Path | None = None


class Site:
    """Finds the page of an address. A run is followed from the first time that somebody looks at it."""

    def __init__(self, given: Sequence[str], keys: Keys | None = None) -> None:
        self._followed: OrderedDict[Path, Followed] = OrderedDict()
        self._lock = threading.Lock()
        self._bucket: Page | None = None
        self._folder: Path | None = None
        self._runs: dict[str, Path] = {}
        if any(map(_is_bucket, given)):
            if len(given) > 1:
                raise ConfigError(f"a bucket beside {len(given) - 1} others: a dashboard shows one bucket, or runs")
            self._bucket = BucketPage(_watch(given[0], keys or Keys()))
            return
        paths = [Path(text) for text in given]
        for path in paths:
            if not path.is_dir():
                raise ConfigError(f"there is no folder {path}: {OFFERED}")
        if len(paths) == 1 and not _is_run(paths[0]):
            self._folder = paths[0]
        else:
            inside = [run for path in paths for run in ([path] if _is_run(path) else folders.by_age(path))]
            self._runs = {_key(run, Path(run.parts[0])): run for run in inside}

    @classmethod
    def of_folder(cls, folder: Path) -> Self:
        """All runs in a folder, which may be there only when the first one begins."""
        site = cls(())
        site._folder = folder
        return site

    def page(self, words: Sequence[str], chosen: Sequence[str]) -> Page | None:
        """The page at an address, by the words between its slashes and the runs that it names; None: there is none."""
        match words:
            case [] if self._bucket:
                return self._bucket
            case [] if self._folder is not None:
                return ListPage(str(self._folder), self._find)
            case []:
                return self._side_by_side(list(self._runs), "", up="")
            case ["run", key] if key in (runs := self._find()):
                return RunPage(self._follow(runs[key]), up="../../")
            case ["compare"]:
                return self._side_by_side([key for key in chosen if key in self._find()], "../", up="../")
        return None

    def read_ahead(self) -> None:
        """Read what is most likely wanted before somebody asks: a long run takes a second or two."""
        newest = list(self._find().values())[-1:] if self._folder is not None else list(self._runs.values())
        for folder in newest[:FOLLOWED]:
            with contextlib.suppress(Exception):  # the page of this run says what is wrong
                self._follow(folder).look()

    def _side_by_side(self, keys: Sequence[str], to_root: str, up: str) -> Page | None:
        runs = {key: self._follow(self._find()[key]) for key in keys}
        if len(runs) == 1:
            return RunPage(next(iter(runs.values())), up)
        return ComparisonPage(runs, up, to_root) if runs else None

    def _find(self) -> Mapping[str, Path]:
        """The runs, by their names in addresses. In a folder, those that have begun since are there too."""
        if self._folder is None:
            return self._runs
        return {_key(run, self._folder): run for run in folders.by_age(self._folder)}

    def _follow(self, folder: Path) -> Followed:
        with self._lock:
            followed = self._followed.pop(folder, None) or Followed(folder)
            self._followed[folder] = followed
            while len(self._followed) > FOLLOWED:
                self._followed.popitem(last=False)
            return followed


def _watch(url: str, keys: Keys) -> Any:
    from diloco.bucket.store.keys import read_secret  # which import torch
    from diloco.report.bucket import Watch

    return Watch(url, read_secret(keys.key_file), read_secret(keys.encrypt))


def _is_run(path: Path) -> bool:
    return (path / "config.toml").is_file() or (path / "replica-0").is_dir()


def _is_bucket(text: str) -> bool:
    return "://" in text or any((Path(text) / name).is_file() for name in ("run.json", "shard-0/run.json"))


def _key(run: Path, home: Path) -> str:
    """The name of a run in addresses: its path below the folder, in one word."""
    return "~".join((run.relative_to(home) if run.is_relative_to(home) and run != home else run).parts)
