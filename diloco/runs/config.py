"""The settings of a run, as flags with their meanings. No torch here: `diloco train --help` must be quick.

Stored as config.toml in the folder of the run. The trainer, the comparison and the report ask here which settings are
shared by the run, which are a member's own, and which methods read them.
"""

from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from diloco.errors import ConfigError
from diloco.flags import Meaning, Scope, flag, meaning, spelled
from diloco.formats import FORMATS, Sparse, format_named
from diloco.fragment import fragmenter
from diloco.outer import OUTERS, forms, numbers, outer_named
from diloco.presets import PRESETS
from diloco.schedule import check_overlap

Method = Literal["streaming", "diloco", "dp", "local"]
Sink = Literal["tensorboard", "wandb", "trackio"]
Tuned = Literal["sync_every", "fragments", "overlap", "codec"]
TUNED: tuple[Tuned, ...] = get_args(Tuned)
"""The settings that the autopilot chooses."""
METHODS: tuple[str, ...] = get_args(Method)
STREAMING, SYNCED = ("streaming",), ("streaming", "diloco")
_model, _optimization, _sync, _members, _output = (
    partial(flag, group=group) for group in ("model and data", "optimization", "sync", "members", "output")
)
_bucket = partial(_members, methods=SYNCED, needs="bucket")  # its texts continue "With --bucket: "


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train a language model on several replicas.

    Options you do not set are derived and printed with the reason.
    """

    # fmt: off
    model: str = _model("tiny",
        f"A preset ({', '.join(PRESETS)}), or hf:PATH_OR_ID for a Hugging Face causal LM.",
        why="trains on two cores in minutes")
    data: tuple[str, ...] = _model((),
        "Files or folders of text, .jsonl, .parquet or token shards (.bin), or hf:NAME for a dataset.",
        why="the sources of Python's standard library", scope="member")
    text_key: str = _model("text", "The field of .jsonl, .parquet and hf:NAME that holds the text.", scope="member",
        expert=True)
    tokenizer: str | None = _model(None,
        "bytes, train:SIZE for a BPE trained on the corpus, the path of a tokenizer.json, or hf:NAME for a model's.",
        why="bytes, which need no training; hf: models use their own")
    context: int = _model(128, "Tokens per sequence.", why="for the tiny model")
    steps: int | None = _optimization(None, "Steps of every replica.", why="from the tokens")
    tokens: int | None = _optimization(None, "Tokens of all replicas together, such as 25b. Set this or --steps.",
        why="20 per parameter; one pass over the data for hf: models", scope="member")
    batch: int | None = _optimization(None, "Sequences per step, all replicas together.", why="by scaling law")
    accumulate: int = _optimization(1, "Micro-batches per step of a replica. More of them need less memory.",
        scope="member")
    inner: Literal["adamw", "muon"] | None = _optimization(None,
        "Inner optimizer: adamw; or muon for the matrices of the layers, with adamw for the rest.",
        why="muon; adamw for hf: models")
    lr: float | None = _optimization(None, "Peak learning rate of the inner optimizer.",
        why="by scaling law; 2e-5 for hf: models")
    warmup: int | None = _optimization(None,
        "Steps of linear warm-up, after which the learning rate follows a cosine down to 5 %.",
        why="a tenth of the steps, at most 1000", expert=True)
    weight_decay: float | None = _optimization(None, "Weight decay, applied to matrices only.",
        why="1 / steps, as in the scaling laws", expert=True)
    clip: float = _optimization(1.0, "Clip the norm of the gradient to this value.", expert=True)
    seed: int = _optimization(0, "Seed of weights and data order.")
    compile: bool = _optimization(False, "Compile the model with torch.compile.", scope="member")
    device: str = _optimization("auto", "auto, cpu, cuda or another torch device. Accelerators compute in bfloat16 "
        "(autocast); weights and optimizer stay in float32.",
        why="the accelerator if there is one", scope="member", result=False)
    method: Method = _sync("streaming",
        "streaming: one fragment at a time, overlapped, quantized. diloco: everything at once, blocking, fp32. dp: "
        "data-parallel, torch DDP. local: no sync.")
    sync_every: int = _sync(100, "Steps between two syncs of the same fragment (H).",
        why="the paper uses 30 and 100", methods=SYNCED)
    fragments: str = _sync("strided:3",
        "strided:N or sequential:N for N layers per fragment; balanced:N for N fragments of equal size; or "
        "named:PATTERN,PATTERN;PATTERN for parameters by name, with \";\" between fragments.",
        why="as in the paper", methods=STREAMING, expert=True)
    overlap: int | Literal["auto"] = _sync(1, "Steps between sending a fragment and applying the result (tau). auto: "
        "the fewest, from 1 to 5, with which this replica does not wait; it follows the link.",
        why="as in the paper, which saw no loss up to 5", methods=STREAMING)
    keep_local: float = _sync(0.0, "Weight of the local value when the result is applied (alpha).",
        why="the agreed value replaces the local one", methods=STREAMING, expert=True)
    codec: str = _sync("e3m0", "Format of the deltas on the wire.", why="4 bits per value, without visible loss",
        methods=STREAMING, choices=FORMATS)
    mean_codec: str | None = _sync(None, "Format of the averaged shares, which 4 or more replicas exchange.",
        why="same as --codec, but never below e3m0", methods=STREAMING, choices=FORMATS, expert=True)
    feedback: float | None = _sync(None,
        "Error feedback: share of the codec's error that is added to the next delta, from 0 (off) to 1.",
        why="by the codec: 0.9 for twobit, 0.95 for topk, 0 for others", methods=SYNCED, expert=True)
    outer: str = _sync("nesterov", f"Outer optimizer: {forms()}.", why="as in the paper", methods=SYNCED, expert=True)
    outer_lr: float | None = _sync(None, "Learning rate of the outer optimizer.",
        why="falls from 1 to 0.4 as the momentum grows; 1 for sgd", methods=SYNCED, expert=True)
    outer_momentum: float | None = _sync(None, "Momentum of the outer optimizer.",
        why="grows with the rounds, from 0 to 0.9", methods=SYNCED, expert=True)
    outer_follow: bool = _sync(True, "Decay outer momentum with the inner learning rate.",
        why="prevents overshooting once the learning rate reaches its end", methods=SYNCED, expert=True)
    auto: bool = _sync(False, "Autopilot: measure the first steps and the link, and use the sync_every, fragments, "
        "overlap and codec that `diloco plan` recommends for them. Options you set explicitly are kept.",
        scope="member", methods=STREAMING)
    kept: tuple[Tuned, ...] = _sync((), "With --auto: settings that it does not change.",
        why="those set explicitly", scope="member", methods=STREAMING, expert=True)
    streams: int = _sync(1, "TCP connections that carry the deltas.",
        why="enough on a short link; a long one needs more", scope="member", methods=SYNCED, expert=True)
    timeout: float = _sync(600.0,
        "Seconds that an exchange may take, including the wait for slower replicas, before a replica counts as lost.",
        scope="member", methods=SYNCED, result=False, expert=True)
    replicas: int | None = _members(None,
        "Number of replicas. They are started here, unless torchrun or Slurm has started the processes. With "
        "--bucket: how many members the run is planned for.", why="2, or as many as were started")
    shards: int = _members(1, "Ranks per replica, over which FSDP2 shards its model.")
    bucket: str | None = _members(None,
        "Meet the other members in a folder or in s3://, gs://, az://…: this process is one member. The same "
        "command creates the run and joins it.", why="the replicas connect to each other", scope="member",
        methods=SYNCED)
    member: str | None = _bucket(None, "the name of this member, which it keeps when it returns.",
        why="the machine's name", scope="member")
    join_only: bool = _bucket(False, "join a run, never create one.", scope="start", expert=True)
    pace: Literal["decoupled", "strict"] = _bucket("decoupled",
        "decoupled never waits for other members; strict waits for all of them in every round.", scope="member",
        expert=True)
    quorum: int = _bucket(1, "the fewest members in a round.", scope="member", expert=True)
    grace: float | None = _bucket(None, "seconds that a round waits for stragglers.",
        why="by their step time", scope="member", expert=True)
    key_file: Path | None = _bucket(None,
        "a file with the secret that all members share. It signs all objects; unsigned ones are ignored.",
        why="objects are not signed", scope="member")
    encrypt: Path | None = _bucket(None, "a file whose content encrypts all objects. All members need the same.",
        why="objects are not encrypted", scope="member", expert=True)
    eval_every: int | None = _output(None, "Steps between two evaluations on held-out text.",
        why="a tenth of the steps, from 50 to 1000", scope="member")
    eval_tokens: int = _output(16_384, "Held-out tokens per evaluation.", expert=True)
    save_every: int = _output(500, "Steps between two checkpoints. There is always one at the end.", scope="member",
        result=False)
    keep: int = _output(2, "Checkpoints to keep.", why="after a crash the newest may be incomplete", scope="member",
        result=False, expert=True)
    track: tuple[Sink, ...] = _output((), "Also log to these; each needs its extra.", why="none", scope="member",
        result=False)
    name: str | None = _output(None, "Name of the run.",
        why="MODEL-METHOD-N; with --bucket, the last part of its address and the member", scope="member", result=False)
    out: Path = _output(Path("runs"), "Folder of all runs.", scope="member", result=False)
    dashboard: bool = _output(False, "Serve a live page of the run on this machine while it trains.", scope="start")
    resume: bool = _output(False, "Continue from the newest checkpoint that all replicas have.", scope="start")
    json: bool = _output(False, "Print the summary as JSON.", scope="start")
    dry_run: bool = _output(False, "Check the settings, the model and the first documents of every file, print the "
        "derived settings and the memory, and exit.", scope="start")
    # fmt: on

    def __post_init__(self) -> None:
        for name in ("context", "shards", "accumulate", "sync_every", "save_every", "streams"):
            _at_least(1, name, getattr(self, name))
        for name in ("replicas", "steps", "tokens", "batch", "quorum", "eval_every", "eval_tokens"):
            _at_least(1, name, getattr(self, name))
        _at_least(2, "keep", self.keep)  # a crash while saving may leave the newest on some replicas only
        _at_least(0, "warmup", self.warmup)
        if not -(1 << 63) <= self.seed < 1 << 63:
            raise ConfigError(f"seed={self.seed}: give one of 64 bits")
        if self.overlap != "auto":
            check_overlap(self.overlap, self.sync_every)
        for name in ("keep_local", "feedback", "weight_decay", "outer_momentum"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ConfigError(f"{name}={value}: give a number from 0 to 1")
        for name in ("lr", "clip", "timeout", "outer_lr", "grace"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name}={value}: give a positive number")
        for name in ("name", "member"):
            value = getattr(self, name)
            if value is not None and not (
                value.isprintable() and value and value[0] != "." and not set(value) & set("/\\")
            ):
                raise ConfigError(
                    f"{name}={value!r}: give a name, not a path, as in exp-1; --out is the folder of all runs"
                )
        if self.steps is not None and self.tokens is not None:
            raise ConfigError(f"steps={self.steps} and tokens={self.tokens}: give one of them, the other follows")
        fragmenter(self.fragments)
        outer_rule(self)
        format_named(self.codec)
        if format_named(self.mean_codec or "float32").feedback:
            raise ConfigError(f"mean_codec={self.mean_codec}: nothing brings back what averaged shares lose, so give a "
                              "codec that needs no feedback, such as e3m0")  # fmt: skip
        self._check_bucket()

    def _check_bucket(self) -> None:
        for each in fields(self):
            ignored = meaning(each).needs == "bucket" and getattr(self, each.name) != each.default
            if self.bucket is None and ignored:
                raise ConfigError(f"{spelled(each.name)} without --bucket: it would be ignored; give --bucket, or "
                                  "leave it out")  # fmt: skip
        if self.bucket is not None and self.method not in SYNCED:
            raise ConfigError(f"method={self.method} with a bucket: give streaming or diloco")
        if isinstance(FORMATS[self.codec], Sparse) and self.mean_codec is not None:
            raise ConfigError(f"mean_codec={self.mean_codec} with codec={self.codec}: leave it out, any number of "
                              "replicas gathers sparse deltas, and no averages are exchanged")  # fmt: skip
        if self.bucket is not None and self.mean_codec is not None:
            raise ConfigError(f"mean_codec={self.mean_codec} with a bucket: leave it out, members choose the "
                              "format of averaged shares by the codec")  # fmt: skip


def outer_settings(*rules: str) -> tuple[str, ...]:
    """The settings that hold the values of these outer rules.

    >>> outer_settings("nesterov")
    ('outer_lr', 'outer_momentum')
    """
    return tuple(dict.fromkeys(f"outer_{name}" for rule in rules for name in numbers(OUTERS[rule])))


def outer_rule(config: TrainConfig) -> dict[str, Any]:
    """`outer` without its values, and those that it gives as the settings that hold them.

    >>> outer_rule(TrainConfig(outer="nesterov:0.6,0.9"))
    {'outer': 'nesterov', 'outer_lr': 0.6, 'outer_momentum': 0.9}
    """
    rule, colon, _ = config.outer.partition(":")
    made, names = outer_named(config.outer), outer_settings(rule)
    for name in outer_settings(*OUTERS):
        if colon and getattr(config, name) is not None:
            raise ConfigError(
                f"outer={config.outer!r} and {name}={getattr(config, name)}: give the values in one place, "
                f"--outer {rule} with {name} or --outer alone"
            )
        if name not in names and getattr(config, name) is not None:
            raise ConfigError(f"outer={rule} with {name}={getattr(config, name)}: {rule} does not read {name}")
    values = {name: getattr(made, name.removeprefix("outer_")) for name in names}
    return {"outer": rule, **(values if colon else {})}


def _at_least(least: int, name: str, value: int | None) -> None:
    if value is not None and value < least:
        raise ConfigError(f"{name}={value}: give a whole number of at least {least}")


_MEANING: dict[str, Meaning] = {field.name: meaning(field) for field in fields(TrainConfig)}


def names(*scopes: Scope) -> tuple[str, ...]:
    """The settings with these scopes."""
    return tuple(name for name, known in _MEANING.items() if known.scope in scopes)


def reads(method: str, name: str) -> bool:
    """Whether the method reads the setting. A setting of another version counts as read."""
    return name not in _MEANING or not _MEANING[name].methods or method in _MEANING[name].methods


def distinguishes(name: str) -> bool:
    """Whether runs that differ in it are different settings; method and seed, which order the runs, apart."""
    return name not in ("method", "seed") and (name not in _MEANING or _MEANING[name].result)
