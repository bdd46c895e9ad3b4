"""`diloco sample RUN|FOLDER "text"`: continue a text with the model of a run."""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from diloco.cli.export import checkpoint_of, load_anchors
from diloco.errors import ConfigError
from diloco.runs.config import TrainConfig
from diloco.runs.flags import REQUIRED, flag, parse

SMALL = 30_000_000
"""Parameters below which threads cost more than they save, when tokens come one at a time."""


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """Continue a text with the agreed weights of a run, or with an exported model."""

    run: Path = flag(REQUIRED, "Folder of a run, or of a model that `diloco export` wrote.", positional=True)
    text: str = flag(REQUIRED, "The text to continue.", positional=True)
    tokens: int = flag(200, "Maximum number of tokens to generate; the end of a document stops it.")
    temperature: float = flag(0.8, "0 takes the likeliest token; higher values are more varied.")
    seed: int = flag(0, "Seed of the sampling.")
    step: int | None = flag(None, "Step of the run's checkpoint.", why="the newest")


CONFIG = SampleConfig
EXAMPLES = ('diloco sample runs/tiny-streaming-1 "def main("', 'diloco sample tiny-hf "class "')


def main(config: SampleConfig) -> int:
    if config.temperature < 0 or config.tokens < 1:
        raise ConfigError(f"temperature={config.temperature:g}, tokens={config.tokens}: use a temperature of at least "
                          "0 and at least 1 token")  # fmt: skip
    folder = config.run
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}: pass the folder of a run or of a model, then the text")
    model, tokenizer, context = _of_run(folder, config.step) if (folder / "config.toml").exists() else _of_model(folder)
    _continue(model, tokenizer, context, config)
    return 0


def _of_run(folder: Path, step: int | None) -> tuple[Any, Any, int]:
    """The model, the tokenizer and the context."""
    checkpoint, _ = checkpoint_of(folder, step)
    settings: TrainConfig = parse(TrainConfig, [str(folder / "config.toml")])
    if settings.shards > 1:
        raise ConfigError(
            f"{folder} is sharded: first write the model with diloco export {folder} --to DIR, then sample DIR"
        )
    model, tokenizer, _ = load_anchors(folder, settings, checkpoint)
    return model.eval(), tokenizer, settings.context


def _of_model(folder: Path) -> tuple[Any, Any, int]:
    from diloco.train.data.tokenizer import load_tokenizer
    from diloco.train.model import build

    if not (folder / "config.json").exists():
        raise ConfigError(f"{folder} holds neither a run (config.toml) nor a model (config.json)")
    tokenizer = load_tokenizer(str(folder))
    model: Any = build(f"hf:{folder}", tokenizer.vocabulary, 1, seed=0).eval()
    return model, tokenizer, getattr(model.network.config, "max_position_embeddings", None) or 2048


def _continue(model: Any, tokenizer: Any, context: int, config: SampleConfig) -> None:
    """Print the text and the tokens that follow, as they come. A character of several tokens waits for its last."""
    import torch

    from diloco.train.model import continuation

    try:
        ids = [int(i) for i in tokenizer.encode(config.text.encode())] or [tokenizer.end]
    except UnicodeError:
        raise ConfigError("the text is not UTF-8: set a UTF-8 locale, or type it in UTF-8") from None
    if sum(parameter.numel() for parameter in model.parameters()) < SMALL:
        torch.set_num_threads(1)
    printed = tokenizer.decode(ids)
    print(printed, end="", flush=True)
    cpu = torch.device("cpu")
    tokens = continuation(model, ids, context, cpu, config.temperature, config.seed)
    for token in islice(tokens, config.tokens):
        if token == tokenizer.end:
            break
        ids.append(token)
        decoded = tokenizer.decode(ids)
        if not decoded.endswith("\ufffd"):
            print(decoded[len(printed) :], end="", flush=True)
            printed = decoded
    print()
