"""What can be known of a run before its processes start: mistakes are refused in under a second. No torch."""

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from diloco.errors import ConfigError, install_command
from diloco.presets import shape_named
from diloco.report import units
from diloco.runs.config import SYNCED, TrainConfig
from diloco.runs.reader import read_summary
from diloco.runs.sinks import MODULES, missing
from diloco.train.data import documents
from diloco.train.data.documents import Sources
from diloco.train.data.tokenizer import check_tokenizer, default_tokenizer, load_tokenizer
from diloco.train.defaults import Rule, describe, resolve
from diloco.world import cores

DEVICES = ("auto", "cpu", "cuda", "mps", "xpu", "hpu", "npu", "mtia", "xla")
FEW_ROUNDS = 5
"""Rounds of a fragment below which a run shows little of what it is for."""


def check(config: TrainConfig, processes: int) -> None:
    """Raise on what would fail in every process. `processes`: how many train together."""
    _check_model(config.model)
    tokenizer = config.tokenizer or default_tokenizer(config.model)
    check_tokenizer(tokenizer)
    _check_data(documents.find(config.data, config.text_key), tokenizer, online=config.dry_run)
    if config.device.partition(":")[0] not in DEVICES:
        hint = "; did you mean cuda?" if config.device.startswith("gpu") else ""
        raise ConfigError(f"device={config.device!r}: give {', '.join(DEVICES)}{hint}")
    if config.bucket is not None:
        _check_bucket(config.bucket, config.join_only)
    for name in config.track:
        if importlib.util.find_spec(MODULES[name]) is None:
            raise missing(name)
    multiple = processes * config.accumulate * ((config.replicas or 2) if config.bucket else 1)
    if config.batch is not None and config.batch % multiple:
        raise wrong_batch(config.batch, multiple)


def wrong_batch(batch: int, multiple: int) -> ConfigError:
    near = max(round(batch / multiple), 1) * multiple
    return ConfigError(f"batch={batch}: give a multiple of ranks · accumulate, {multiple}, such as {near}")


def warnings(config: TrainConfig, processes: int) -> Iterator[str]:
    """What is allowed and probably not meant."""
    chosen = config.auto and "sync_every" not in config.kept
    if config.method in SYNCED and not chosen and config.steps and config.steps < FEW_ROUNDS * config.sync_every:
        rounds = config.steps // config.sync_every
        what = f"each part of the model is synced {rounds} times" if rounds else "the replicas meet at the end only"
        advice = f"--sync-every {config.steps // 10}" if config.steps >= 10 else "more --steps"
        yield f"{config.steps} steps with sync_every {config.sync_every}: {what}; try {advice}"
    if processes > cores() and config.device in ("auto", "cpu") and not config.bucket:
        yield f"{processes} processes on {cores()} cores: without an accelerator they take turns, and start slowly"
    if config.model.startswith("hf:") and config.tokenizer == "bytes":
        yield f"tokenizer bytes with {config.model}: its weights were made for other tokens, and are lost"


def _check_model(spec: str) -> None:
    if not spec.startswith("hf:"):
        shape_named(spec)
        return
    source = spec.removeprefix("hf:")
    if source.startswith(("/", ".", "~")) or source.count("/") > 1:
        folder = Path(source).expanduser()
        if not folder.is_dir():
            raise ConfigError(
                f"model={spec!r}: there is no folder {folder}; give one, or the hub's name of a causal LM"
            )
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model={spec!r}: the folder has no config.json; give that of a causal LM")
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(f"model={spec!r} needs transformers: {install_command('hf')}")


def _check_bucket(url: str, join_only: bool) -> None:
    """What opening it would refuse too, once torch is imported."""
    scheme, separator, _ = url.partition("://")
    if not separator:
        if join_only and not Path(url).expanduser().is_dir():
            raise ConfigError(f"there is no folder {url}: check the address, or leave --join-only out to begin a run")
        return
    if scheme not in ("file", "s3", "gs", "az", "memory"):
        raise ConfigError(f"bucket={url}: give a folder, file://, s3://, gs://, az:// or memory://")
    if scheme != "file" and importlib.util.find_spec("obstore") is None:
        raise ConfigError(f"the bucket needs obstore: {install_command('bucket')}")


def _check_data(sources: Sources, tokenizer: str, online: bool) -> None:
    """Read the first documents of every file. Datasets are left to the replicas, unless `online`."""
    if sources.standard_library:
        return
    local = tuple(item for item in sources.items if online or isinstance(item, Path))
    if len(local) < len(sources.items) and importlib.util.find_spec("datasets") is None:
        raise ConfigError(f"data={sources.name!r} needs datasets: {install_command('hf')}")
    shards = sources.tokenized and not tokenizer.startswith("train:")
    vocabulary = load_tokenizer(tokenizer).vocabulary if shards else None
    if local:
        documents.check(replace(sources, items=local), utf8=tokenizer != "bytes", vocabulary=vocabulary)


def outline(config: TrainConfig, replicas: int) -> str:
    """What a run with this config would be: derived settings with their reasons, and the memory of a replica."""
    sources = documents.find(config.data, config.text_key)
    config = replace(config, tokenizer=config.tokenizer or default_tokenizer(config.model))
    parameters = _parameters(config)
    resolved, rules = resolve(config, parameters, replicas)
    if config.model.startswith("hf:") and config.steps is None and config.tokens is None:
        rules = [rule for rule in rules if rule.name not in ("tokens", "steps", "warmup", "weight_decay")]
        rules.append(Rule("steps", "by the data", "one pass over the data; its length is known once they are read"))
    text = describe(rules, parameters, resolved, sources.name, 0)
    assert resolved.batch is not None
    tokens = resolved.batch // replicas // config.accumulate * config.context
    return (f"{text}\n  memory of a replica: {units.size(16 * parameters)} for weights, gradients and moments; the "
            f"activations of {tokens} tokens at a time come on top and are not estimated")  # fmt: skip


def _parameters(config: TrainConfig) -> int:
    spec = config.tokenizer or "bytes"
    vocabulary = int(spec[6:]) if spec.startswith("train:") else load_tokenizer(spec).vocabulary
    if not config.model.startswith("hf:"):
        return replace(shape_named(config.model), vocabulary=vocabulary).parameters
    from diloco.train.model import pretrained

    return sum(p.numel() for p in pretrained(config.model[3:], vocabulary, config.context, weights=False).parameters())


def say(config: TrainConfig, processes: int) -> None:
    for text in (*documents.find(config.data, config.text_key).skipped, *warnings(config, processes)):
        print(f"note: {text}", file=sys.stderr)  # noqa: T201


def check_resume(config: TrainConfig, folder: Path, before: TrainConfig) -> None:
    """Raise if the checkpoints of the run cannot be continued with these settings, or need not be."""
    for name in ("model", "method", "shards"):
        was, now = getattr(before, name), getattr(config, name)
        if was != now:
            raise ConfigError(f"{folder} was run with {name} {was}, not {now}: its checkpoints do not fit; leave "
                              f"--{name} out, or start under another --name")  # fmt: skip
    done = read_summary(folder)
    if done and not done.stopped and config.steps is not None and config.steps <= done.steps:
        raise ConfigError(f"{folder} is finished, at step {done.steps}: give more --steps to train on, as in "
                          f"--resume --name {folder.name} --steps {2 * done.steps}")  # fmt: skip
