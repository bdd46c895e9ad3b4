"""Checkpoints of one replica: complete or absent, found by step, the newest two kept.

Each replica has its own folder, possibly on its own machine. A checkpoint is written under a temporary name and renamed
when complete, so a kill at any moment leaves only complete ones.
"""

import errno
import logging
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from diloco.errors import ConfigError
from diloco.exchange.transport import gather_json
from diloco.runs import folder as folders

log = logging.getLogger("diloco")


KEEP = 2
"""After a crash while saving, only some replicas may have the newest checkpoint, so each keeps the previous one."""


class Checkpoints:
    """Checkpoints of a replica. `group`: its ranks, if there are several; `leader`: this rank renames and deletes."""

    def __init__(self, folder: Path, group: dist.ProcessGroup | None = None, leader: bool = True) -> None:
        self._folder, self._group, self._leader = folder, group, leader
        self._store: dist.Store = dist.distributed_c10d._get_default_store()
        self._publish(0)

    def steps(self) -> list[int]:
        """Steps that have a complete checkpoint here."""
        return sorted(folders.checkpoints(self._folder))

    def newest_common(self) -> int | None:
        """The newest step for which all replicas have a complete checkpoint."""
        complete = folders.checkpoints(self._folder)
        for path in sorted({*self._folder.glob("step-*")} - {*complete.values()}) if self._leader else ():
            log.warning("ignored %s: not a complete checkpoint", path)
        return max(set.intersection(*map(set, gather_json(dist.group.WORLD, sorted(complete)))), default=None)

    def save(self, step: int, state: dict[str, Any]) -> None:
        final, temporary = self._folder / f"step-{step:08d}", self._folder / f"writing-{step:08d}"
        try:
            if self._leader:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
            self._barrier()
            with alone():
                dcp.save(state, checkpoint_id=temporary, process_group=self._group, no_dist=self._group is None)
            if self._leader:
                _sync(temporary)
                _delete(final)  # of a run that resumed from an earlier step, which is still there
                temporary.rename(final)
                _sync(self._folder)
        except (OSError, CheckpointException, RuntimeError) as error:
            if self._leader:
                shutil.rmtree(temporary, ignore_errors=True)
            raise _explain(error, self._folder, self.steps()) from error
        self._barrier()
        self._publish(step)
        if self._leader:
            self._prune()

    def load(self, step: int, state: dict[str, Any]) -> None:
        """Fill `state` in place."""
        path = folders.checkpoints(self._folder)[step]
        try:
            with alone():
                dcp.load(state, checkpoint_id=path, process_group=self._group, no_dist=self._group is None)
        except (CheckpointException, RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[-1][:200]
            raise ConfigError(
                f"{path} does not fit this run ({reason}): its model, method or number of shards is different; "
                "resume with the settings in the run's config.toml, or start under another --name"
            ) from error

    def _barrier(self) -> None:
        if self._group is not None:
            dist.barrier(self._group)

    def _publish(self, step: int) -> None:
        self._store.set(f"saved/{dist.get_rank()}", str(step))

    def _prune(self) -> None:
        """Delete old checkpoints, but none as new as the newest that every replica has saved."""
        common = min(int(self._store.get(f"saved/{rank}")) for rank in range(dist.get_world_size()))
        for step, path in sorted(folders.checkpoints(self._folder).items())[:-KEEP]:
            if step < common:
                _delete(path)


def _delete(path: Path) -> None:
    (path / ".metadata").unlink(missing_ok=True)  # first, so that a half-deleted checkpoint does not look complete
    shutil.rmtree(path, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Make the names in a folder survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def alone() -> Iterator[None]:
    """Silence torch, which warns whenever a replica saves alone: that is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _explain(error: BaseException, folder: Path, steps: list[int]) -> Exception:
    """Recognize a full disk. torch reports errors as a table of all ranks, with the system's reason inside."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
    texts = ("No space left", "File too large", "Disk quota", "PytorchStreamWriter", "unexpected pos")
    if full or any(text in f"{error!r} {error}" for text in texts):
        newest = f"the checkpoint of step {steps[-1]} is complete" if steps else "there is no earlier checkpoint"
        return ConfigError(f"no space left to save in {folder}: {newest}; free some space and use --resume")
    return error if isinstance(error, Exception) else RuntimeError(str(error))
