"""The settings of a run before its processes start: derive what is not set, check it, describe it. No torch.

The scaling laws are those of Scaling Laws for DiLoCo (arXiv 2503.09799), fitted on 35M to 2.4B parameters: lr and batch
as A·N^a·M^b. Below that range they are capped at values that were seen to train.
"""

import importlib.util
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from diloco.core.outer import OUTERS, derived
from diloco.errors import ConfigError, install_command
from diloco.exchange.world import cores
from diloco.plan import laws
from diloco.runs import units
from diloco.runs.config import SYNCED, TrainConfig, names
from diloco.runs.flags import parse
from diloco.runs.presets import shape_named
from diloco.runs.reader import read_summary
from diloco.runs.writer import TRACKER_MODULES, missing_tracker
from diloco.train.data import documents
from diloco.train.data.documents import Sources
from diloco.train.data.tokenizer import check_tokenizer, default_tokenizer, load_tokenizer

MANY = 8
"""From this many replicas on, the outer optimizer makes larger steps: with eight the loss ends 0.6 % lower, with two
and four it makes no difference (docs/parity.md)."""
LARGEST_LR = 8e-3
"""The law gives more only below 35M parameters, where it was not fitted. At 0.09M and 0.34M the best of a grid with
factor √2 was 1.1e-2, and 8e-3 came close (docs/parity.md)."""
FINE_TUNING_LR, FINE_TUNING_BATCH = 2e-5, 32
"""For a model that comes with its weights: typical of published settings for full fine-tuning."""
DEVICES = ("auto", "cpu", "cuda", "mps", "xpu", "hpu", "npu", "mtia", "xla")
FEW_ROUNDS = 5
"""With fewer rounds per fragment, a run shows little of what DiLoCo does."""


@dataclass(frozen=True)
class Derived:
    """A value that was not set, with the reason for it. Not all of them are settings of the config."""

    name: str
    value: float | str
    reason: str


def resolve(
    config: TrainConfig, parameters: int, replicas: int, corpus_tokens: int = 0
) -> tuple[TrainConfig, list[Derived]]:
    """Fill in every setting, and explain the values that were derived. `corpus_tokens`: tokens of the train split."""
    values: list[Derived] = []
    if config.batch == "auto":  # the batch of all members together is planned as usual
        config = replace(config, batch=None)

    def derive(name: str, value: float | str, reason: str) -> None:
        if getattr(config, name) is None:
            values.append(Derived(name, value, reason))

    pretrained = config.model.startswith("hf:")
    if pretrained and config.tokenizer == config.model:
        values.append(Derived("tokenizer", config.model, "the model's own: its embeddings fit no other"))
    batch, why = _batch(config, parameters, replicas)
    derive("batch", batch, why)
    tokens_per_step = int(config.batch or batch) * config.context
    one_pass = pretrained and corpus_tokens > 0
    tokens = config.tokens or (corpus_tokens if one_pass else laws.TOKENS_PER_PARAMETER * parameters)
    if config.steps is None and config.tokens is None:
        why = "one pass over the data, as in fine-tuning" if one_pass else "20 tokens for each parameter"
        values.append(Derived("tokens", tokens, why))
    steps = config.steps or max(round(tokens / tokens_per_step), 1)
    derive("steps", steps, "tokens ÷ (batch · context)")
    if pretrained:
        derive("inner", "adamw", "usual for a pretrained model")
        derive("lr", FINE_TUNING_LR, "usual for a pretrained model; the scaling law is for training from scratch")
    else:
        derive("inner", "muon", "lower loss than AdamW at equal tokens (docs/parity.md)")
        law = laws.inner_lr(parameters, replicas)
        capped = f", capped at {LARGEST_LR:g}" if law > LARGEST_LR else ""
        derive("lr", float(f"{min(law, LARGEST_LR):.3g}"), f"scaling law 22256·N^-0.88·M^0.29{capped}")
    derive("eval_every", min(max(steps // 10, 50), 1000), "a tenth of the steps, from 50 to 1000")
    if config.method in SYNCED and config.outer == "nesterov" and replicas >= MANY and not config.resume:
        reason = f"with {MANY} replicas or more: momentum grows from 0 to 0.8, the learning rate falls from 1 to 0.9"
        values.append(Derived("outer", "nesterov:many", reason))
    elif config.method in SYNCED and ":" not in config.outer:
        values += [Derived(f"outer_{name}", value, why) for name, (value, why) in derived(OUTERS[config.outer]).items()]
    settings = {value.name: value.value for value in values if value.name in asdict(config) and value.name != "tokens"}
    return replace(config, replicas=replicas, tokens=None, **settings), values


def _batch(config: TrainConfig, parameters: int, replicas: int) -> tuple[int, str]:
    multiple = replicas * config.shards * config.accumulate
    if config.model.startswith("hf:"):
        return max(round(FINE_TUNING_BATCH / multiple), 1) * multiple, "usual for a pretrained model"
    why = "scaling law 0.00709·N^0.47·M^0.34 sequences of 2048 tokens, converted to this context"
    return laws.batch_of(parameters, replicas, config.context, multiple), why


def lr_at(config: TrainConfig, step: int) -> float:
    """Inner learning rate of a step (from 1): linear warm-up over a tenth of the steps, but at most 1000, then a cosine
    to 5 % of the peak."""
    assert config.lr is not None and config.steps is not None
    warmup = min(max(config.steps // 10, 1), 1000)
    if step <= warmup:
        return config.lr * step / warmup
    done = (step - warmup) / max(config.steps - warmup, 1)
    return config.lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))


def weight_decay(config: TrainConfig) -> float:
    """1 ÷ steps, as in the scaling laws; for matrices only."""
    assert config.steps is not None
    return float(f"{1 / config.steps:.3g}")


def describe(values: list[Derived], parameters: int, config: TrainConfig, corpus: str, start: int) -> str:
    """Describe what is about to run, with the reason for each derived value."""
    where = f" from step {start}" if start else ""
    head = f"{config.method}: {parameters / 1e6:.3g}M parameters on {corpus}, {config.steps} steps{where}"
    return "\n".join([head, *(f"  {value.name} = {_number(value.value)}: {value.reason}" for value in values)])


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:g}"


def check(config: TrainConfig, processes: int) -> None:
    """Raise on anything that would fail in every process, before they start. `processes`: how many train together."""
    _check_model(config.model)
    tokenizer = config.tokenizer or default_tokenizer(config.model)
    check_tokenizer(tokenizer)
    _check_data(documents.find(config.data, config.text_key), tokenizer, online=config.dry_run)
    if config.device.partition(":")[0] not in DEVICES:
        hint = "; did you mean cuda?" if config.device.startswith("gpu") else ""
        raise ConfigError(f"device={config.device!r}: use {', '.join(DEVICES)}{hint}")
    for name in config.track:
        if importlib.util.find_spec(TRACKER_MODULES[name]) is None:
            raise missing_tracker(name)
    check_batch(config, processes * ((config.replicas or 2) if config.bucket else 1))


def check_batch(config: TrainConfig, ranks: int) -> None:
    """Raise unless the batch can be divided over all ranks of all replicas, or a member's share over its own."""
    name, value, ranks = ("share", config.share, config.shards) if config.share else ("batch", config.batch, ranks)
    multiple = ranks * config.accumulate
    if isinstance(value, int) and value % multiple:
        near = max(round(value / multiple), 1) * multiple
        raise ConfigError(f"{name}={value}: use a multiple of ranks · accumulate, {multiple}, such as {near}")


def _check_model(spec: str) -> None:
    if not spec.startswith("hf:"):
        shape_named(spec)
        return
    source = spec.removeprefix("hf:")
    if source.startswith(("/", ".", "~")) or source.count("/") > 1:
        folder = Path(source).expanduser()
        if not folder.is_dir():
            raise ConfigError(f"model={spec!r}: there is no folder {folder}; use the folder or the hub name of a "
                              "causal LM")  # fmt: skip
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model={spec!r}: the folder has no config.json; use the folder of a causal LM")
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(f"model={spec!r} needs transformers: {install_command('hf')}")


def _check_data(sources: Sources, tokenizer: str, online: bool) -> None:
    """Read the first documents of every file. Datasets are left to the replicas, unless `online`."""
    if sources.standard_library:
        return
    local = tuple(item for item in sources.items if online or isinstance(item, Path))
    if len(local) < len(sources.items) and importlib.util.find_spec("datasets") is None:
        raise ConfigError(f"data={sources.name!r} needs datasets: {install_command('hf')}")
    if local:
        documents.check(replace(sources, items=local), utf8=tokenizer != "bytes")


def check_resume(config: TrainConfig, folder: Path) -> None:
    """Raise if the checkpoints do not fit these settings, or the run has nothing left to do. Print what has changed."""
    before: TrainConfig = parse(TrainConfig, [str(folder / "config.toml")])
    for name in ("model", "method", "shards"):
        was, now = getattr(before, name), getattr(config, name)
        if was != now:
            raise ConfigError(f"{folder} was run with {name} {was}, not {now}: its checkpoints do not fit; leave "
                              f"--{name} out, or start under another --name")  # fmt: skip
    done = read_summary(folder)
    if done and not done.stopped and config.steps is not None and config.steps <= done.steps:
        raise ConfigError(f"{folder} finished at step {done.steps}: raise --steps to train further, as in --resume "
                          f"--name {folder.name} --steps {2 * done.steps}")  # fmt: skip
    pairs = ((name, getattr(before, name), getattr(config, name)) for name in names("run", "member"))
    changed = [f"{name} {was} → {now}" for name, was, now in pairs if was != now]
    text = f"; changed: {', '.join(changed)}" if changed else ""
    print(f"resuming with the settings in {folder / 'config.toml'}{text}", file=sys.stderr)  # noqa: T201


def print_notes(config: TrainConfig, processes: int) -> None:
    for text in (*documents.find(config.data, config.text_key).skipped, *notes(config, processes)):
        print(f"note: {text}", file=sys.stderr)  # noqa: T201


def notes(config: TrainConfig, processes: int) -> Iterator[str]:
    """Warn of settings that are allowed but probably a mistake."""
    fixed = config.method in SYNCED and "sync_every" not in config.auto
    if fixed and config.steps and config.steps < FEW_ROUNDS * config.sync_every:
        rounds = config.steps // config.sync_every
        effect = f"each part of the model is synced {rounds} times" if rounds else "the replicas meet at the end only"
        advice = f"--sync-every {config.steps // 10}" if config.steps >= 10 else "more --steps"
        yield f"{config.steps} steps with sync_every {config.sync_every}: {effect}; try {advice}"
    if processes > cores() and config.device in ("auto", "cpu") and not config.bucket:
        yield f"{processes} processes on {cores()} cores: without an accelerator they take turns, and start slowly"
    if config.model.startswith("hf:") and config.tokenizer == "bytes":
        yield f"tokenizer bytes with {config.model}: its weights were trained on other tokens and will be lost"


def outline(config: TrainConfig, replicas: int) -> str:
    """Describe the run that this config would start: derived settings with their reasons, and memory per replica."""
    sources = documents.find(config.data, config.text_key)
    config = replace(config, tokenizer=config.tokenizer or default_tokenizer(config.model))
    parameters = _parameters(config)
    resolved, values = resolve(config, parameters, replicas)
    if config.model.startswith("hf:") and config.steps is None:
        values = [value for value in values if value.name not in ("tokens", "steps")]
        values.append(Derived("steps", "by the data", "one pass; the length is known once the data are read"))
    text = describe(values, parameters, resolved, sources.name, 0)
    assert isinstance(resolved.batch, int)
    share = config.share if isinstance(config.share, int) else resolved.batch // replicas
    tokens = share // config.accumulate * config.context
    return (f"{text}\n  memory of a replica: {units.size(16 * parameters)} for weights, gradients and moments, plus "
            f"the activations of {tokens} tokens at a time, which are not estimated")  # fmt: skip


def _parameters(config: TrainConfig) -> int:
    spec = config.tokenizer or "bytes"
    vocabulary = int(spec[6:]) if spec.startswith("train:") else load_tokenizer(spec).vocabulary
    if not config.model.startswith("hf:"):
        return replace(shape_named(config.model), vocabulary=vocabulary).parameters
    from diloco.train.model import pretrained

    return sum(p.numel() for p in pretrained(config.model[3:], vocabulary, config.context, weights=False).parameters())
