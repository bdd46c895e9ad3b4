"""`diloco train`: start the replicas here, be one of them, or be a member of a run in a bucket."""

import contextlib
import json
import logging
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from diloco.cli import stop, supervise
from diloco.errors import ConfigError, DiLoCoError, Mismatch
from diloco.flags import parse, recipe_of, spelled, stored, to_toml
from diloco.outer import OUTERS
from diloco.runs import folder as folders
from diloco.runs.config import TUNED, TrainConfig, names, outer_settings
from diloco.runs.schema import Summary, to_summary
from diloco.world import World, alone, own_world, started_here

CONFIG = TrainConfig
EXAMPLES = (
    "diloco train --model tiny --replicas 2 --steps 700",
    "diloco train demo --overlap 5 --name slow-link",
    "torchrun --nnodes 2 --nproc_per_node 1 --node_rank 0 --master_addr FIRST -m diloco train --auto",
    "diloco train --model 35m --bucket s3://bucket/run --data corpus/",
)


def complete(words: Sequence[str]) -> list[str]:
    """With `--resume`, put the stored flags of the run before the given words: what is not given stays as it was. With
    `--auto`, say which settings were given."""
    whole = _with_stored(words)
    kept = _kept(words, whole) if "--auto" in whole else []
    return [*whole, "--kept", *kept] if kept else whole


def _kept(words: Sequence[str], whole: list[str]) -> list[str]:
    """The settings that the autopilot leaves alone: those that are given, here or in a recipe, and those of before."""
    path = recipe_of(words) if "--auto" in words else None
    recipe = stored(path) if path else []
    given = {word.partition("=")[0][2:].replace("-", "_") for word in (*recipe, *words) if word.startswith("--")}
    before = whole[whole.index("--kept") + 1 :] if "--kept" in whole else []
    before = before[: next((i for i, word in enumerate(before) if word.startswith("--")), len(before))]
    return sorted({*before, *given} & set(TUNED))


def _with_stored(words: Sequence[str]) -> list[str]:
    if "--resume" not in words:
        return list(words)
    apart = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    given = {flag: value for flag, value in pairwise(apart) if flag.startswith("--")}
    if path := recipe_of(words):
        if "--name" not in given and "--name" not in stored(path):
            raise ConfigError(f"--resume with {words[0]}: which run? Add --name, or leave the recipe out to continue "
                              "the newest run with its own settings")  # fmt: skip
        return list(words)
    try:
        before = stored(folders.existing(Path(given.get("--out", "runs")), given.get("--name")) / "config.toml")
    except ConfigError:
        return list(words)  # starting the run raises the same error
    if "--tokens" in given:
        _drop(before, "--steps")  # they follow from the tokens
    if ":" in given.get("--outer", ""):
        _drop(before, *map(spelled, outer_settings(*OUTERS)))
    return [*before, *words]


def _drop(words: list[str], *flags: str) -> None:
    """Remove flags, each with its one value."""
    for flag in flags:
        if flag in words:
            at = words.index(flag)
            del words[at : at + 2]


def main(config: TrainConfig) -> int:
    if config.auto and config.method != "streaming":
        raise ConfigError(
            f"--auto with method {config.method}: it chooses how to stream; leave --method out, or --auto"
        )
    if config.bucket is not None:
        from diloco.train import preflight

        preflight.check(config, 1)
        preflight.say(config, 1)
        return _show_member(config) if config.dry_run else _be_member(config)
    world = own_world(config.shards, config.replicas)
    if world is None:
        code, _ = run_here(config)
        return code
    return _be_rank(config, world)


def run_here(config: TrainConfig, *, show: bool = True) -> tuple[int, Path]:
    """Start all processes of a run on this machine, show it, and report it.

    Args:
        config: the flags of `diloco train`, by their names.
        show: whether to print the table of results at the end.

    Returns the exit code, 0 if the run has finished and 130 if it was stopped, and the folder of the run. What is wrong
    with the config is raised before anything starts.
    """
    from diloco.train import preflight

    config = replace(config, replicas=config.replicas or 2)
    assert config.replicas is not None
    size = config.replicas * config.shards
    folder = _folder(config)
    if config.resume:
        _check_resume(config, folder)
    preflight.check(config, size)
    preflight.say(config, size)
    if config.dry_run:
        print(preflight.outline(config, config.replicas))
        return 0, folder
    with folders.locked(folder) as lock:
        for name in ("derived.txt", "phase"):
            (folder / name).unlink(missing_ok=True)
        (folder / "start.toml").write_text(to_toml(replace(config, name=folder.name)))
        words = ["train", str(folder / "start.toml"), *(["--resume"] if config.resume else [])]
        print(f"run {folder}", file=sys.stderr)
        from diloco.report.live import Live  # not before all was checked: a mistake is answered at once

        with _dashboard(config, folder), Live(folder, config.replicas, config.steps or 0) as live:
            code, reason = supervise.start(words, size, folder, config.shards, live.refresh, keep=(lock,))
    if reason:
        print(f"diloco: {reason}", file=sys.stderr)
    if code == 130:
        print(f"diloco: {stop.sentence(folder)}", file=sys.stderr)
    if code in (2, 130) and not (folder / "config.toml").exists():
        shutil.rmtree(folder)  # refused, or stopped before there was anything to keep
    if show and (folder / "summary.json").exists() and (code == 0 or (code == 130 and config.json)):
        show_run(folder, config.json)
    return code, folder


def _folder(config: TrainConfig) -> Path:
    if config.resume:
        return folders.existing(config.out, config.name)
    return folders.new(config.out, config.name, f"{config.model}-{config.method}")


def _check_resume(config: TrainConfig, folder: Path) -> None:
    from diloco.train import preflight

    before = parse(TrainConfig, stored(folder / "config.toml"))
    preflight.check_resume(config, folder, before)
    pairs = ((name, getattr(before, name), getattr(config, name)) for name in names("run", "member"))
    changed = [f"{name} {was} → {now}" for name, was, now in pairs if was != now]
    text = f"; changed: {', '.join(changed)}" if changed else ""
    print(f"resume with the settings of {folder / 'config.toml'}{text}", file=sys.stderr)
    kept = [f"{name} {getattr(config, name)}" for name in ("warmup", "weight_decay", "eval_every")
            if getattr(config, name) == getattr(before, name)]  # fmt: skip
    if config.steps != before.steps and kept:
        print(f"note: {', '.join(kept)} stay as they were for {before.steps} steps, unless you set them",
              file=sys.stderr)  # fmt: skip


def _be_rank(config: TrainConfig, world: World) -> int:
    """Be one process of the run. An error is one line for the user; its traceback goes to the log."""
    _log_to_stderr()
    folder = config.out / (config.name or "run")
    try:
        import torch.distributed as dist

        from diloco.rendezvous import meet

        meet(world, _backend())
        folder = _agree_on_folder(config, world, dist.distributed_c10d._get_default_store())
        if world.rank == 0 and not started_here():
            logging.getLogger("diloco").info("run %s", folder)
        from diloco.train.run import train

        # If `run_here` started this process, it holds the lock and shows the run itself.
        leads = world.shard == 0 and not started_here()
        shows = leads and world.rank == 0
        with (folders.locked(folder / f"replica-{world.replica}") if leads else contextlib.nullcontext(),
              _shown(config, folder, world.replicas) if shows else contextlib.nullcontext()):  # fmt: skip
            summary = train(config, world, folder)
        dist.barrier()  # until all have written their last line
        if world.rank == 0:
            write_summary(folder, summary)
            if leads and summary.stopped and not config.json:
                print(f"diloco: {stop.sentence(folder)}", file=sys.stderr)
            elif leads:
                show_run(folder, config.json)
        dist.destroy_process_group()
        return 0
    except BaseException as error:
        code = 2 if isinstance(error, (ConfigError, Mismatch)) else 130 if isinstance(error, KeyboardInterrupt) else 1
        supervise.write_error(folder, world, error, code)
        if not isinstance(error, DiLoCoError):
            logging.getLogger("diloco").exception("replica %d failed", world.replica)
        logging.getLogger("diloco").error("diloco: %s", error)
        return code


def _agree_on_folder(config: TrainConfig, world: World, store: Any) -> Path:
    """The folder that the first rank chooses for all, unless `run_here` has chosen it."""
    if world.rank == 0:
        chosen = config.out / str(config.name) if started_here() else _folder(config)
        store.set("folder", chosen.name)
    folder = config.out / store.get("folder").decode()
    folders.make(folder / f"replica-{world.replica}")
    return folder


def _show_member(config: TrainConfig) -> int:
    """What a member would do, with the settings of the run in the bucket if there is one."""
    from diloco.train import preflight
    from diloco.train.elastic import as_the_run

    world = own_world(config.shards, 1) if config.shards > 1 else None
    if world is None or world.rank == 0:
        config = as_the_run(config)
        print(preflight.outline(config, config.replicas or 1))
    return 0


def _be_member(config: TrainConfig) -> int:
    """Be one member of a run in a bucket, or one of its ranks under torchrun. Start no other process."""
    import torch.distributed as dist

    from diloco.rendezvous import meet
    from diloco.train.elastic import as_the_run, member_folder, member_name
    from diloco.train.run import train

    _log_to_stderr()
    world = own_world(config.shards, 1) if config.shards > 1 else World(0, 1, 0)
    if world is None:
        raise ConfigError(f"shards={config.shards} with a bucket: start the ranks of this member with torchrun "
                          f"--nproc-per-node {config.shards} -m diloco train …")  # fmt: skip
    config = as_the_run(config)
    folder, resume = member_folder(config)
    config = replace(config, name=folder.name, resume=resume)
    taken = f"member {member_name(config)!r} trains here already, in {folder}: give this one another --member"
    with folders.locked(folder, taken) if world.shard == 0 else contextlib.nullcontext():
        if world.size > 1:
            meet(world, _backend())
        else:  # the loop and its checkpoints need a process group, even for one process
            alone()
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            with _shown(config, folder, 1) if world.rank == 0 else contextlib.nullcontext():
                summary = train(config, world, folder)
        finally:
            dist.destroy_process_group()
        if world.rank > 0:
            return 0
        write_summary(folder, summary)
        if summary.stopped and not config.json:
            print(f"diloco: {stop.sentence(folder)}", file=sys.stderr)
        elif not summary.steps and not config.json:
            print(f"took the result of the run, with a loss of {summary.loss:.4f}; nothing was trained here")
        else:
            show_run(folder, config.json)
    return 130 if summary.stopped else 0


@contextlib.contextmanager
def _shown(config: TrainConfig, folder: Path, replicas: int) -> Iterator[None]:
    """Show the run that this process trains in, in its terminal and, if that is wanted, as a page."""
    from diloco.report.live import Live, beside

    live = Live(folder, replicas, config.steps or 0, every=10.0, told=True)
    (folder / "phase").unlink(missing_ok=True)
    with _dashboard(config, folder), beside(live):
        yield


@contextlib.contextmanager
def _dashboard(config: TrainConfig, folder: Path) -> Iterator[None]:
    """Serve the run as a page while it goes on, if that is wanted."""
    if not config.dashboard:
        yield
        return
    from diloco.dashboard.server import open_dashboard, serving
    from diloco.dashboard.site import Site

    (folder / "replica-0").mkdir(parents=True, exist_ok=True)  # which makes it a run
    with serving(open_dashboard(Site([str(folder)]), "127.0.0.1", None)) as dashboard:
        print(f"dashboard at {dashboard.address}", file=sys.stderr)
        yield


class _Stderr(logging.StreamHandler[Any]):
    """Writes to what is stderr at that moment: the live view puts itself in its place, to print above its panel."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _log_to_stderr() -> None:
    """Log our own lines, and the warnings of other libraries."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[_Stderr()])
    logging.getLogger("diloco").setLevel(logging.INFO)


def _backend() -> str:
    import torch

    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def write_summary(folder: Path, summary: Summary) -> None:
    from diloco.plan import check
    from diloco.report import html

    path = folder / "summary.json"
    path.write_text(json.dumps(to_summary(summary), indent=1))
    with contextlib.suppress(ConfigError):  # data-parallel, or other replicas' files are on other machines
        summary = replace(summary, predicted_utilization=check.compare(folder).predicted)
        path.write_text(json.dumps(to_summary(summary), indent=1))
    html.write([folder], folder / "report.html")


def show_run(folder: Path, as_json: bool) -> None:
    if as_json:
        print(json.dumps(json.loads((folder / "summary.json").read_text()) | {"run": str(folder)}))
        return
    from rich.console import Console

    from diloco.report import terminal
    from diloco.runs.reader import read

    Console().print(terminal.table(read(folder)))
