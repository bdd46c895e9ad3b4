"""`diloco train`: start all replicas here, or run this process as one replica or as a member of a bucket."""

import contextlib
import json
import logging
import shlex
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from diloco.cli import supervise
from diloco.errors import ConfigError, DiLoCoError, Mismatch
from diloco.exchange.world import World, alone, own_world, started_here
from diloco.runs import folder as folders
from diloco.runs.config import TUNED, TrainConfig
from diloco.runs.flags import config_file, parse, parse_values, to_toml
from diloco.runs.reader import read, read_config, read_summary, status
from diloco.runs.schema import Summary, to_summary

CONFIG = TrainConfig
EXAMPLES = (
    "diloco train --model tiny --replicas 2 --steps 700",
    "diloco train demo --overlap 5 --name slow-link",
    "torchrun --nnodes 2 --nproc_per_node 1 --node_rank 0 --master_addr FIRST -m diloco train --auto",
    "diloco train --model 35m --bucket s3://bucket/run --data corpus/",
)


def complete(words: Sequence[str]) -> list[str]:
    """With `--resume`, put the stored settings of the run before the words. With `--auto`, name the settings that the
    autopilot chooses: all that are not set explicitly, here or in the config file."""
    explicit = parse_values(TrainConfig, words)
    stored = explicit.get("resume") and "bucket" not in explicit  # a member finds its own run, with its settings
    complete_words = _with_stored(words, explicit) if stored else list(words)
    chosen = parse_values(TrainConfig, complete_words).get("auto") or (TUNED if "--auto" in words else ())
    in_config = "--auto" not in words and complete_words == list(words)  # where it has names already
    if in_config or not chosen:
        return complete_words
    return [*complete_words, "--auto", *(name for name in chosen if name not in explicit)]


def _with_stored(words: Sequence[str], explicit: Mapping[str, Any]) -> list[str]:
    if config_file(words, TrainConfig):
        if "name" not in explicit:
            raise ConfigError(f"--resume with {words[0]}: which run? Add --name, or leave the config out to continue "
                              "the newest run with its own settings")  # fmt: skip
        return list(words)
    try:
        folder = folders.existing(explicit.get("out", folders.RUNS), explicit.get("name"))
        return [str(folder / "config.toml"), *words]
    except ConfigError:
        return list(words)  # starting the run raises the same error


def main(config: TrainConfig) -> int:
    if config.auto and config.method != "streaming":
        raise ConfigError(
            f"--auto with method {config.method}: it chooses how to stream; leave --method out, or --auto"
        )
    if config.bucket is not None:
        from diloco.train import settings

        settings.check(config, 1)
        settings.print_notes(config, 1)
        return _outline_member(config) if config.dry_run else _run_member(config)
    world = own_world(config.shards, config.replicas)
    if world is None:
        code, _ = run_here(config)
        return code
    if config.dry_run:
        if world.rank == 0:
            _outline(replace(config, replicas=world.replicas), world.size)
        return 0
    return _run_rank(config, world)


def run_here(config: TrainConfig, *, show: bool = True) -> tuple[int, Path]:
    """Start all processes of a run on this machine, show its progress, and report it.

    Args:
        config: the flags of `diloco train`, by name.
        show: whether to print the table of results at the end.

    Returns the exit code, 0 if the run has finished and 130 if it was stopped, and the folder of the run. Errors in the
    config are raised before anything starts.
    """
    from diloco.train import settings

    config = replace(config, replicas=config.replicas or 2)
    assert config.replicas is not None
    size = config.replicas * config.shards
    folder = _folder(config)
    if config.resume:
        settings.check_resume(config, folder)
    if config.dry_run:
        _outline(config, size)
        return 0, folder
    settings.check(config, size)
    settings.print_notes(config, size)
    fresh = not folder.exists()
    with folders.locked(folder) as lock:
        for name in ("derived.txt", "phase"):
            (folder / name).unlink(missing_ok=True)
        (folder / "start.toml").write_text(to_toml(replace(config, name=folder.name)), encoding="utf-8")
        words = ["train", str(folder / "start.toml"), *(["--resume"] if config.resume else [])]
        print(f"run {folder}", file=sys.stderr)
        from diloco.report.live import Live  # only now, so that errors are reported at once

        with Live(folder, config.steps or 0) as live:
            code, reason = supervise.start(words, size, folder, config.shards, live.refresh, keep=(lock,))
    if reason:
        print(f"diloco: {reason}", file=sys.stderr)
    summary = read_summary(folder)
    finished = summary and not summary.stopped and config.steps in (None, summary.steps)
    if code == 130 and finished:  # the signal came when the run was about to end
        code = 0
    if code == 130:
        print(f"diloco: {stop_report(folder)}", file=sys.stderr)
    if fresh and code in (2, 130) and not (folder / "config.toml").exists():
        shutil.rmtree(folder)  # refused, or stopped before there was anything to save
    if show and (folder / "summary.json").exists() and (code == 0 or (code == 130 and config.json)):
        show_run(folder, config.json)
    return code, folder


def _outline(config: TrainConfig, processes: int) -> None:
    """Print what a run of these processes would do."""
    from diloco.train import settings

    settings.check(config, processes)
    settings.print_notes(config, processes)
    print(settings.outline(config, config.replicas or 1))


def _folder(config: TrainConfig) -> Path:
    if config.resume:
        return folders.existing(config.out, config.name)
    return folders.new(config.out, config.name, f"{config.model}-{config.method}")


def _run_rank(config: TrainConfig, world: World) -> int:
    """Run one process of the run. An error is one line for the user; the traceback of a defect is logged."""
    _log_to_stderr()
    folder = config.out / config.name if started_here() and config.name else None
    try:
        import torch.distributed as dist

        from diloco.exchange.rendezvous import meet

        meet(world, _backend())
        folder = _agree_on_folder(config, world, dist.distributed_c10d._get_default_store())
        if world.rank == 0 and not started_here():
            logging.getLogger("diloco").info("run %s", folder)
        from diloco.train.run import train

        # If `run_here` started this process, it holds the lock and shows the progress.
        leads = world.shard == 0 and not started_here()
        shows = leads and world.rank == 0
        with (folders.locked(folder / f"replica-{world.replica}") if leads else contextlib.nullcontext(),
              _progress(config, folder) if shows else contextlib.nullcontext()):  # fmt: skip
            summary = train(config, world, folder)
        dist.barrier()  # until all have written their last records
        if world.rank == 0:
            _conclude(folder, summary, config.json, show=leads)
        dist.destroy_process_group()
        return 0
    except BaseException as error:
        code = 2 if isinstance(error, (ConfigError, Mismatch)) else 130 if isinstance(error, KeyboardInterrupt) else 1
        if folder is not None:  # otherwise the processes have not met
            supervise.write_error(folder, world, error, code)
        if not isinstance(error, (DiLoCoError, KeyboardInterrupt)):
            logging.getLogger("diloco").exception("replica %d failed", world.replica)
        stopped = "stopped without saving" if isinstance(error, KeyboardInterrupt) else type(error).__name__
        logging.getLogger("diloco").error("diloco: %s", str(error) or stopped)
        return code


def _agree_on_folder(config: TrainConfig, world: World, store: Any) -> Path:
    """The folder of the run, chosen by the first rank unless `run_here` has chosen it."""
    import torch.distributed as dist

    from diloco.exchange.transport import gather_json
    from diloco.train import settings

    if world.rank == 0:
        try:
            chosen = config.out / str(config.name) if started_here() else _folder(config)
            if config.resume and not started_here():
                settings.check_resume(config, chosen)
        except ConfigError:
            store.set("folder", "")
            raise
        store.set("folder", chosen.name)
    name = store.get("folder").decode()
    if not name:
        raise ConfigError("the first process was refused: see its error")
    folder = config.out / name
    taken = not config.resume and (folder / "config.toml").exists()
    hosts = sorted(filter(None, gather_json(dist.group.WORLD, socket.gethostname() if taken else "")))
    if hosts:
        raise ConfigError(f"{folder} already holds a run on {hosts[0]}: give a --name that is free on all machines")
    folders.make(folder / f"replica-{world.replica}")
    supervise.error_file(folder, world).unlink(missing_ok=True)
    return folder


def _outline_member(config: TrainConfig) -> int:
    """Print what a member would do, with the settings of the run in the bucket if there is one."""
    from diloco.train import settings
    from diloco.train.members import adopt_settings

    world = own_world(config.shards, 1) if config.shards > 1 else None
    if world is None or world.rank == 0:
        config = adopt_settings(config)
        print(settings.outline(config, config.replicas or 1))
    return 0


def _run_member(config: TrainConfig) -> int:
    """Run one member of a run in a bucket, or one of its ranks under torchrun, in this process."""
    import torch.distributed as dist

    from diloco.exchange.rendezvous import meet
    from diloco.train.members import adopt_settings, member_folder, member_name
    from diloco.train.run import train

    _log_to_stderr()
    world = own_world(config.shards, 1) if config.shards > 1 else World(0, 1, 0)
    if world is None:
        raise ConfigError(f"shards={config.shards} with a bucket: start the ranks of this member with torchrun "
                          f"--nproc-per-node {config.shards} -m diloco train …")  # fmt: skip
    config = adopt_settings(config)
    folder, resume = member_folder(config)
    config = replace(config, name=folder.name, resume=resume)
    if resume and config.share == "auto" and (folder / "config.toml").exists():  # keep its batch
        before = parse(TrainConfig, [str(folder / "config.toml")])
        config = replace(config, share=before.share or "auto", accumulate=before.accumulate)
    busy = f"member {member_name(config)!r} is already training in {folder}: use another --member for this one"
    with folders.locked(folder, busy) if world.shard == 0 else contextlib.nullcontext():
        if world.size > 1:
            meet(world, _backend())
        else:  # the loop and its checkpoints need a process group, even for one process
            alone()
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            with _progress(config, folder) if world.rank == 0 else contextlib.nullcontext():
                summary = train(config, world, folder)
        finally:
            dist.destroy_process_group()
        if world.rank > 0:
            return 0
        _conclude(folder, summary, config.json)
    return 130 if summary.stopped else 0


@contextlib.contextmanager
def _progress(config: TrainConfig, folder: Path) -> Iterator[None]:
    """Show the progress of the run that this process trains in."""
    from diloco.report.live import Live, shown_in_background

    live = Live(folder, config.steps or 0, interval=10.0, show_derived=False)
    (folder / "phase").unlink(missing_ok=True)
    with shown_in_background(live):
        yield


def stop_report(folder: Path) -> str:
    """Say at which step the run stopped, what is saved, and how to resume."""
    run, saved = status(folder), newest_saved(folder)
    if not run.step:
        return "stopped before the first step; there is nothing to resume"
    of = f" of {run.steps}" if run.steps else ""
    if saved is None:
        return f"stopped at step {run.step}{of}; no checkpoint was saved, so there is nothing to resume"
    state = "which is saved" if saved == run.step else f"the newest checkpoint is from step {saved}"
    if read_config(folder).get("bucket"):
        return f"stopped at step {run.step}, {state}; the same command rejoins the run"
    out = "" if folder.parent == folders.RUNS else f" --out {shlex.quote(str(folder.parent))}"
    command = f"diloco train --resume --name {shlex.quote(folder.name)}{out}"
    return f"stopped at step {run.step}{of}, {state}; continue with: {command}"


def newest_saved(folder: Path) -> int | None:
    """The newest step for which every replica here has a checkpoint."""
    steps = [set(folders.checkpoints(replica / "checkpoints")) for replica in folder.glob("replica-*")]
    return max(set.intersection(*steps), default=None) if steps else None


class _Stderr(logging.StreamHandler[Any]):
    """Write to the current sys.stderr: the live view replaces it, to print above its panel."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _log_to_stderr() -> None:
    """Log our messages, and the warnings of other libraries."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[_Stderr()])
    logging.getLogger("diloco").setLevel(logging.INFO)


def _backend() -> str:
    import torch

    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def _conclude(folder: Path, summary: Summary, as_json: bool, *, show: bool = True) -> None:
    """Write the summary and the report, and print the result."""
    from diloco.report import html

    (folder / "summary.json").write_text(json.dumps(to_summary(summary), indent=1))
    html.write([folder], folder / "report.html")
    if not show:
        return
    if as_json or (summary.steps and not summary.stopped):
        show_run(folder, as_json)
    elif summary.stopped:
        print(f"diloco: {stop_report(folder)}", file=sys.stderr)
    else:
        print(f"took the result of the run, with a loss of {summary.loss:.4f}; nothing was trained here")


def show_run(folder: Path, as_json: bool) -> None:
    if as_json:
        print(json.dumps(json.loads((folder / "summary.json").read_text()) | {"run": str(folder)}))
        return
    from rich.console import Console

    from diloco.report import terminal

    Console().print(terminal.table(read(folder)))
