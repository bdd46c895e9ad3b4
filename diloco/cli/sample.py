"""`diloco sample RUN|FOLDER "text"`: the model goes on with a text, word by word; without a text, as a conversation."""

import copy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from diloco.cli.export import checkpoint_of, with_anchors
from diloco.errors import ConfigError
from diloco.flags import flag, parse, stored
from diloco.runs import folder as folders
from diloco.runs.config import TrainConfig

RUNS = Path("runs")
SMALL = 30_000_000
"""Parameters below which threads cost more than they save, when tokens come one at a time."""


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """Let the agreed weights of a run, or an exported model, go on with a text.

    Without a text it asks for one, again and again; Ctrl-D ends.
    """

    run: Path | None = flag(None, "Folder of a run, or of a model that `diloco export` wrote.", positional=True,
        why="the newest in runs")  # fmt: skip
    text: str | None = flag(None, "What to go on with.", positional=True, why="asked for")
    tokens: int = flag(200, "Tokens to write, at most; the end of a document ends it.")
    temperature: float = flag(0.8, "0 takes the likeliest token, more is more varied.")
    seed: int = flag(0, "Seed of the choice of tokens.")
    step: int | None = flag(None, "Step of the run's checkpoint.", why="the newest")


CONFIG = SampleConfig
EXAMPLES = ('diloco sample runs/tiny-streaming-1 "def main("', "diloco sample tiny-hf", "diloco sample")


@dataclass(frozen=True)
class Speaker:
    model: Any
    tokenizer: Any
    context: int


def main(config: SampleConfig) -> int:
    if not 0 <= config.temperature < float("inf") or config.tokens < 1:
        raise ConfigError(f"temperature={config.temperature:g}, tokens={config.tokens}: give 0 or more, and at least 1")
    folder = config.run or _newest()
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}: give that of a run or of a model, then the text")
    speaker = _of_run(folder, config.step) if (folder / "config.toml").exists() else _of_model(folder)
    if config.text is not None:
        _say(speaker, config.text, config)
        return 0
    for text in _asked():
        _say(speaker, text, config)
    return 0


def _newest() -> Path:
    if not (found := folders.by_age(RUNS)):
        raise ConfigError(f"there is no run in {RUNS}: give the folder of one, or of a model")
    print(f"run {found[-1]}", file=sys.stderr)
    return found[-1]


def _of_run(folder: Path, step: int | None) -> Speaker:
    checkpoint, _ = checkpoint_of(folder, step)
    settings: TrainConfig = parse(TrainConfig, stored(folder / "config.toml"))
    if settings.shards > 1:
        raise ConfigError(f"{folder} has shards: write the model with diloco export {folder} --to DIR, and give DIR")
    held: list[Speaker] = []
    with_anchors(settings, checkpoint, lambda model, tokenizer: held.append(
        Speaker(copy.deepcopy(model).eval(), tokenizer, settings.context)))  # fmt: skip
    return held[0]


def _of_model(folder: Path) -> Speaker:
    from diloco.train.data.tokenizer import load_tokenizer
    from diloco.train.model import build

    if not (folder / "config.json").exists():
        raise ConfigError(f"{folder} holds neither a run (config.toml) nor a model (config.json)")
    tokenizer = load_tokenizer(str(folder))
    model: Any = build(f"hf:{folder}", tokenizer.vocabulary, 1, seed=0).eval()
    return Speaker(model, tokenizer, getattr(model.network.config, "max_position_embeddings", None) or 2048)


def _asked() -> Iterator[str]:
    if not sys.stdin.isatty():
        yield sys.stdin.read()
        return
    while True:
        try:
            yield input("› ")
        except EOFError:
            print()
            return


def _say(speaker: Speaker, text: str, config: SampleConfig) -> None:
    """Print the text and what follows, as soon as it is there. A character of several tokens waits for its last."""
    import torch

    from diloco.train.model import continuation

    try:
        ids = [int(i) for i in speaker.tokenizer.encode(text.encode())] or [speaker.tokenizer.end]
    except UnicodeError:
        raise ConfigError("the text to go on with is not UTF-8: set a UTF-8 locale, or type it in UTF-8") from None
    if sum(parameter.numel() for parameter in speaker.model.parameters()) < SMALL:
        torch.set_num_threads(1)
    said = speaker.tokenizer.decode(ids)
    print(said, end="", flush=True)
    cpu = torch.device("cpu")
    for token in islice(
        continuation(speaker.model, ids, speaker.context, cpu, config.temperature, config.seed), config.tokens
    ):
        if token == speaker.tokenizer.end:
            break
        ids.append(token)
        now = speaker.tokenizer.decode(ids)
        if not now.endswith("\ufffd"):
            print(now[len(said) :], end="", flush=True)
            said = now
    print()
