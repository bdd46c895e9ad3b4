"""What a run is made of, as flags. No torch here: `diloco train --help` must be quick."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from diloco.errors import ConfigError
from diloco.formats import FORMATS
from diloco.fragment import fragmenter
from diloco.schedule import check_overlap

Method = Literal["streaming", "diloco", "dp", "local"]
if TYPE_CHECKING:
    CodecName = str
else:
    CodecName = Literal[tuple(FORMATS)]
Sink = Literal["tensorboard", "wandb", "trackio"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train a language model on several replicas. What is not given is derived, and printed with its reason."""

    model: str = "tiny"
    """A preset (tiny, 35m, 100m, 200m, 300m, 500m, 1b, 4b), or hf:PATH_OR_ID for a Hugging Face causal LM."""
    data: tuple[str, ...] = ()
    """Files or folders of .txt, .jsonl, .parquet or token shards, or hf:NAME. Default: the sources of Python's own
    standard library."""
    tokenizer: str = "bytes"
    """bytes, train:SIZE for a BPE trained on the corpus, or the path of a tokenizer.json."""
    context: int = 128
    """Tokens of a sequence."""
    method: Method = "streaming"
    """streaming (fragments in turn, overlapped, quantised); diloco (all at once, blocking, fp32); dp (data-parallel,
    torch DDP); local (no sync at all)."""
    replicas: int | None = None
    """Replicas. Started here, unless torchrun or Slurm has started the processes; with --bucket, how many members the
    run is planned for. Default: 2 here, else as started."""
    shards: int = 1
    """Ranks in a replica, over which its model is sharded by FSDP2."""
    steps: int | None = None
    """Steps of every replica. Default: from tokens."""
    tokens: int | None = None
    """Tokens of all replicas together. Default: 20 for each parameter."""
    batch: int | None = None
    """Sequences of a step, all replicas together. Default: by scaling law."""
    accumulate: int = 1
    """Parts in which a replica computes its share of the batch, to save memory."""
    lr: float | None = None
    """Peak inner learning rate of AdamW. Default: by scaling law."""
    warmup: int | None = None
    """Steps of linear warm-up; then a cosine to 5 %. Default: a tenth of the steps, at most 1000."""
    weight_decay: float | None = None
    """Of matrices. Default: 1 / steps."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    sync_every: int = 100
    """Steps between two syncs of the same fragment (H)."""
    fragments: str = "strided:3"
    """strided:N or sequential:N (N layers to a fragment), balanced:N (N fragments of equal size), or
    named:PATTERN,PATTERN;PATTERN (parameters by name, ";" between fragments)."""
    overlap: int = 1
    """Steps between sending a fragment and applying the result (tau)."""
    keep_local: float = 0.0
    """Weight of the local value when the result is applied (alpha)."""
    codec: CodecName = "e3m0"
    """Numbers on the wire."""
    outer_lr: float | None = None
    """Learning rate of the outer Nesterov step. Default: by the number of replicas, and of rounds."""
    outer_momentum: float | None = None
    """Momentum of the outer Nesterov step. Default: 0.9, in short runs 0.5."""
    streams: int = 1
    """TCP connections for the deltas; more on a long link."""
    timeout: float = 600.0
    """Seconds that an exchange may take, waiting for slower replicas included; then a replica counts as lost."""
    bucket: str | None = None
    """Meet the other members in a folder or in s3://, gs://, az://…: this process is one member. The same command
    begins the run and joins it."""
    member: str | None = None
    """With --bucket: the name of this member, the same when it returns. Default: the machine's name."""
    join_only: bool = False
    """With --bucket: do not begin a new run."""
    pace: Literal["decoupled", "strict"] = "decoupled"
    """With --bucket: decoupled never waits for other members; strict waits for all of them in every round."""
    quorum: int = 1
    """With --bucket: the fewest members of a round."""
    grace: float | None = None
    """With --bucket: seconds that a round waits for members that are expected. Default: by their step time."""
    key_file: Path | None = None
    """With --bucket: a file whose content signs all objects; what is not signed with it is ignored."""
    seed: int = 0
    """Of weights and data order."""
    eval_every: int = 100
    """Steps between two evaluations on held-out text."""
    eval_tokens: int = 16_384
    """Held-out tokens of an evaluation."""
    save_every: int = 500
    """Steps between two checkpoints; there is one at the end in any case."""
    keep: int = 2
    """Checkpoints that are kept."""
    compile: bool = False
    """torch.compile the model."""
    device: str = "auto"
    """auto, cpu, cuda, …"""
    track: tuple[Sink, ...] = ()
    """Also log to tensorboard, wandb or trackio (extras)."""
    name: str | None = None
    """Name of the run. Default: model-method and the first free number."""
    out: Path = Path("runs")
    """Folder of all runs."""
    resume: bool = False
    """Go on from the newest checkpoint that all replicas have."""
    json: bool = False
    """Print the summary as JSON."""

    def __post_init__(self) -> None:
        for name in ("context", "shards", "accumulate", "sync_every", "eval_every", "save_every", "streams"):
            _at_least(1, name, getattr(self, name))
        for name in ("replicas", "steps", "tokens", "batch", "quorum", "eval_tokens"):
            _at_least(1, name, getattr(self, name))
        _at_least(2, "keep", self.keep)  # a crash while saving may leave the newest on some replicas only
        _at_least(0, "warmup", self.warmup)
        check_overlap(self.overlap, self.sync_every)
        if not 0 <= self.keep_local <= 1:
            raise ConfigError(f"keep_local={self.keep_local}: give a number from 0 to 1")
        for name in ("lr", "clip", "timeout", "outer_lr"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name}={value}: give a positive number")
        if self.steps is not None and self.tokens is not None:
            raise ConfigError(f"steps={self.steps} and tokens={self.tokens}: give one of them, the other follows")
        fragmenter(self.fragments)
        if self.bucket is not None and self.method not in ("streaming", "diloco"):
            raise ConfigError(f"method={self.method} with a bucket: give streaming or diloco")


def _at_least(least: int, name: str, value: int | None) -> None:
    if value is not None and value < least:
        raise ConfigError(f"{name}={value}: give a whole number of at least {least}")


def to_toml(config: TrainConfig) -> str:
    """The config as a recipe that gives the same run. What is None, or concerns only this start, is left out."""
    lines = []
    for field in fields(config):
        value = getattr(config, field.name)
        if value is None or field.name in ("resume", "json", "join_only"):
            continue
        if isinstance(value, bool):
            text = "true" if value else "false"
        elif isinstance(value, (int, float)):
            text = repr(value)
        elif isinstance(value, tuple):
            text = "[" + ", ".join(_quoted(v) for v in value) + "]"
        else:
            text = _quoted(str(value))
        lines.append(f"{field.name} = {text}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


METHODS: tuple[str, ...] = get_args(Method)
