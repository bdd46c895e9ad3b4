"""The settings of a run, declared as flags. No torch here: `diloco train --help` must be quick.

They are stored as config.toml in the folder of the run. The trainer, the comparison and the report look up here which
settings all members share, which each member chooses, and which methods read them.
"""

from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal, get_args

from diloco.codecs.formats import FORMATS, format_named
from diloco.core.fragment import fragmenter
from diloco.core.outer import outer_named, syntax
from diloco.core.schedule import Schedule, check_overlap
from diloco.errors import ConfigError
from diloco.runs.flags import Meaning, Scope, flag, meaning, spelled
from diloco.runs.folder import RUNS
from diloco.runs.presets import PRESETS

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
_bucket = partial(_members, methods=SYNCED, needs="bucket")  # help texts continue "With --bucket: "


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train a language model on several replicas.

    Options you do not set are derived and printed with the reason.
    """

    shipped: ClassVar[bool] = True  # see flags.shipped_configs

    # fmt: off
    model: str = _model("tiny",
        f"A preset ({', '.join(PRESETS)}), or hf:PATH_OR_ID for a Hugging Face causal LM.",
        why="trains on two cores in minutes")
    data: tuple[str, ...] = _model((),
        "Files or folders of text, .jsonl or .parquet, or hf:NAME for a dataset.",
        why="the source code of Python's standard library", scope="member")
    text_key: str = _model("text", "Name of the text field in .jsonl, .parquet and hf: datasets.", scope="member",
        expert=True)
    tokenizer: str | None = _model(None,
        "bytes, train:SIZE to train a BPE on the corpus, the path of a tokenizer.json, or hf:NAME for a model's.",
        why="bytes, which needs no training; hf: models use their own")
    context: int = _model(128, "Tokens per sequence.", why="for the tiny model")
    steps: int | None = _optimization(None, "Training steps per replica.", replaces="tokens",
        why="20 tokens per parameter; one pass over the data for hf: models")
    tokens: int | None = _optimization(None, "Total tokens over all replicas, such as 25b. Set this or --steps.",
        why="20 per parameter; one pass over the data for hf: models", scope="member", replaces="steps")
    batch: int | Literal["auto"] | None = _optimization(None, "Sequences per step over all replicas. auto, with "
        "--bucket: as many as this machine trains in the time of one step of the run's creator.", why="by scaling law")
    accumulate: int = _optimization(1, "Micro-batches per step of a replica; more micro-batches need less memory.",
        scope="member")
    inner: Literal["adamw", "muon"] | None = _optimization(None,
        "Inner optimizer. muon: Muon for the weight matrices of the layers, AdamW for the rest.",
        why="muon; adamw for hf: models")
    lr: float | None = _optimization(None, "Peak learning rate of the inner optimizer.",
        why="by scaling law; 2e-5 for hf: models")
    seed: int = _optimization(0, "Seed of the initial weights and the data order.")
    compile: bool = _optimization(False, "Compile the model with torch.compile.", scope="member")
    device: str = _optimization("auto", "auto, cpu, cuda or another torch device. Accelerators compute in bfloat16 "
        "(autocast); weights and optimizer stay in float32.",
        why="the accelerator if there is one", scope="member", result=False)
    method: Method = _sync("streaming",
        "streaming: one fragment at a time, overlapped, quantized. diloco: the whole model at once, blocking, fp32. "
        "dp: data-parallel, torch DDP. local: no sync.")
    sync_every: int = _sync(100, "Steps between two syncs of the same fragment (H).",
        why="the paper uses 30 and 100", methods=SYNCED)
    fragments: str = _sync("strided:3",
        "strided:N or sequential:N for N layers per fragment; or balanced:N for N fragments of equal size.",
        why="as in the paper", methods=STREAMING, expert=True)
    overlap: int | Literal["auto"] = _sync(1, "Steps between sending a fragment and applying the result (tau). auto: "
        "the smallest of 1 to 5 at which this replica never waits; it adapts to the link.",
        why="as in the paper, which saw no loss up to 5", methods=STREAMING)
    codec: str = _sync("e3m0", "Format of the deltas on the wire.", why="4 bits per value, without visible loss",
        methods=STREAMING, choices=FORMATS)
    outer: str = _sync("nesterov", f"Outer optimizer: {syntax()}.",
        why="momentum grows from 0 to the paper's 0.9 over the rounds, to 0.8 with eight replicas or more",
        methods=SYNCED, expert=True)
    auto: tuple[Tuned, ...] = _sync((), "Autopilot: measure the first steps and the link, then set what `diloco plan` "
        "recommends. Without names it chooses all of sync_every, fragments, overlap and codec that you do not set.",
        why="off", scope="member", methods=STREAMING)
    streams: int = _sync(1, "Parallel TCP connections for the deltas.",
        why="enough for a short link; a long one needs more", scope="member", methods=SYNCED, expert=True)
    timeout: float = _sync(600.0,
        "Seconds that an exchange may take, including the wait for slower replicas, before a replica counts as lost.",
        scope="member", methods=SYNCED, result=False, expert=True)
    replicas: int | None = _members(None,
        "Number of replicas, started here unless torchrun or Slurm has started the processes. With --bucket: the "
        "number of members to plan for.", why="2, or the number of started processes")
    shards: int = _members(1, "Ranks per replica; FSDP2 shards its model over them.")
    bucket: str | None = _members(None,
        "Meet the other members in a folder or in s3://, gs://, az://…; this process is one member. The same command "
        "creates a run and joins it.", why="the replicas connect to each other", scope="member", methods=SYNCED)
    member: str | None = _bucket(None, "name of this member; use the same one when it returns.",
        why="the machine's name", scope="member")
    join_only: bool = _bucket(False, "join a run, never create one.", scope="start", expert=True)
    share: int | Literal["auto"] | None = _bucket(None,
        "sequences per step of this member. auto: the same as --batch auto.",
        why="batch ÷ replicas", scope="member", expert=True)
    quorum: int = _bucket(1, "minimum number of members in a round.", scope="member", expert=True)
    preemption: str | None = _bucket(None,
        "stop cleanly when the metadata service of this cloud announces a preemption: aws, gcp, azure, or the URL of a "
        "compatible service.", why="only signals stop it", scope="member", result=False, expert=True)
    announce: str | None = _bucket(None,
        "HOST:PORT where the other members reach this machine, to read its deltas from there instead of the bucket. "
        "Without --key-file only for private networks. A host name is resolved once, here.",
        why="all deltas are read from the bucket", scope="member", expert=True)
    key_file: Path | None = _bucket(None,
        "file with the secret that all members share. It signs all objects; unsigned ones are ignored.",
        why="objects are not signed", scope="member")
    encrypt: Path | None = _bucket(None, "file with the key that encrypts all objects, the same for all members.",
        why="objects are not encrypted", scope="member", expert=True)
    eval_every: int | None = _output(None, "Steps between two evaluations on held-out text.",
        why="a tenth of the steps, from 50 to 1000", scope="member")
    save_every: int = _output(500, "Steps between two checkpoints. A run also saves one when it ends.", scope="member",
        result=False)
    track: tuple[Sink, ...] = _output((), "Also log to these trackers; each needs its extra installed.", why="none",
        scope="member", result=False)
    name: str | None = _output(None, "Name of the run.",
        why="MODEL-METHOD-N; with --bucket, the last part of its address and the member", scope="member", result=False)
    out: Path = _output(RUNS, "Folder for all runs.", scope="member", result=False)
    resume: bool = _output(False, "Continue from the newest checkpoint that all replicas have.", scope="start")
    json: bool = _output(False, "Print the summary as JSON.", scope="start")
    dry_run: bool = _output(False, "Check the settings, the model and the first documents of each file, print the "
        "derived settings and the memory per replica, and exit.", scope="start")
    # fmt: on

    def __post_init__(self) -> None:
        """Check all that can be checked without torch. The core checks its own settings."""
        for name in ("context", "shards", "accumulate", "save_every", "replicas", "steps", "tokens", "batch", "share",
                     "eval_every"):  # fmt: skip
            if isinstance(value := getattr(self, name), int) and value < 1:
                raise ConfigError(f"{name}={value}: use a whole number of at least 1")
        if not -(1 << 63) <= self.seed < 1 << 63:
            raise ConfigError(f"seed={self.seed}: use a number of 64 bits")
        if self.lr is not None and not self.lr > 0:
            raise ConfigError(f"lr={self.lr}: use a positive number")
        Schedule(self.sync_every, 1)
        if self.overlap != "auto":
            check_overlap(self.overlap, self.sync_every)
        if self.steps is not None and self.tokens is not None:
            raise ConfigError(f"steps={self.steps} and tokens={self.tokens}: set one of them; the other follows")
        fragmenter(self.fragments)
        outer_named(self.outer)
        format_named(self.codec)
        for name in ("name", "member"):
            _check_name(name, getattr(self, name))
        self._check_bucket()

    def _check_bucket(self) -> None:
        if self.bucket is not None:
            if self.method not in SYNCED:
                raise ConfigError(f"method={self.method} with a bucket: use streaming or diloco")
            service = self.preemption or "aws"
            if service not in ("aws", "gcp", "azure") and not service.startswith(("http://", "https://")):
                raise ConfigError(f"preemption={service}: use aws, gcp, azure or an http:// address")
            if "auto" in (self.batch, self.share) and self.shards > 1:
                raise ConfigError(f"batch=auto with shards={self.shards}: only members with one rank are timed; use a "
                                  "number, or leave it out")  # fmt: skip
            for name in ("streams", "timeout"):
                if getattr(self, name) != getattr(TrainConfig, name):
                    raise ConfigError(f"{spelled(name)} has no effect with --bucket, where replicas do not connect to "
                                      "each other: leave it out")  # fmt: skip
            return
        if self.batch == "auto":
            raise ConfigError("batch=auto without --bucket: only members of a bucket may have different batches; use a "
                              "number, or leave it out")  # fmt: skip
        for field in fields(self):
            if meaning(field).needs == "bucket" and getattr(self, field.name) != field.default:
                raise ConfigError(
                    f"{spelled(field.name)} without --bucket: it would be ignored; set --bucket, or leave it out"
                )


def _check_name(name: str, value: str | None) -> None:
    if value is not None and not (value.isprintable() and value and value[0] != "." and not set(value) & set("/\\")):
        raise ConfigError(f"{name}={value!r}: use a name such as exp-1, not a path; --out is the folder of all runs")


_MEANINGS: dict[str, Meaning] = {field.name: meaning(field) for field in fields(TrainConfig)}


def names(*scopes: Scope) -> tuple[str, ...]:
    """The settings with these scopes."""
    return tuple(name for name, described in _MEANINGS.items() if described.scope in scopes)


def reads(method: str, name: str) -> bool:
    """Whether the method reads the setting. Settings of other versions count as read."""
    return name not in _MEANINGS or not _MEANINGS[name].methods or method in _MEANINGS[name].methods


def distinguishes(name: str) -> bool:
    """Whether the report treats runs that differ in this setting as different. It orders them by method and seed."""
    return name not in ("method", "seed") and (name not in _MEANINGS or _MEANINGS[name].result)
