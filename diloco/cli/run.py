"""`torchrun … -m diloco run SCRIPT [args]`: run a script that knows nothing of DiLoCo as a replica.

Every transformers or Lightning Trainer that the script creates gets the callback. Scripts without one are refused:
nothing would divide their data, or save the model that the replicas agree on.
"""

import functools
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from diloco.codecs.formats import FORMATS
from diloco.errors import ConfigError
from diloco.runs.flags import REQUIRED, flag


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Run an unchanged transformers or Lightning script as a replica. Start one process per replica with torchrun."""

    script: tuple[str, ...] = flag(REQUIRED, "The script and its arguments, or -m MODULE and its arguments.",
        positional=True)  # fmt: skip
    sync_every: int = flag(100, "Steps between two syncs of the same fragment.")
    overlap: int = flag(1, "Steps between sending a fragment and applying the result.")
    fragments: str = flag("strided:3", "How to cut the model: strided:N, sequential:N or balanced:N.")
    codec: str = flag("e3m0", "Format of the deltas on the wire.", choices=FORMATS)
    outer: str = flag("nesterov", "Outer optimizer, such as nesterov:0.4,0.9 or sgd:1.")
    shard: bool = flag(True, "Give every replica all of the training data.")


CONFIG = RunConfig
EXAMPLES = (
    "torchrun --nproc_per_node 2 -m diloco run --sync-every 50 train.py --output_dir out",
    "torchrun --nproc_per_node 2 -m diloco run -m trl.scripts.sft --model_name_or_path gpt2",
)


def complete(words: Sequence[str]) -> list[str]:
    """Put -- before the script: flags after it belong to the script."""
    first = 0
    while words[first : first + 1] and words[first].startswith("--"):
        if words[first] == "--":
            return [*words]
        first += 1 if words[first] in ("--no-shard", "--shard") or "=" in words[first] else 2
    return [*words[:first], "--", *words[first:]]


def main(config: RunConfig) -> int:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from diloco.exchange.launch import replica
    from diloco.integrations.attached import by_name

    settings = by_name({name: value for name, value in asdict(config).items() if name != "script"})
    module = config.script[0] == "-m"
    if config.script == ("-m",):
        raise ConfigError("-m needs the name of a module: diloco run -m MODULE [arguments]")
    script, *arguments = config.script[1:] if module else config.script
    trainers: list[object] = []
    patch_trainers(replica(), settings, trainers)

    def check(*_: object) -> None:
        if not trainers:
            raise ConfigError(
                f"{script} trains without a transformers or Lightning Trainer, so DiLoCo has nothing to attach to: "
                "see docs/frameworks.md for your own loop"
            )

    register_optimizer_step_pre_hook(check)
    sys.argv = [script, *arguments]
    try:
        if module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(script).absolute().parent)
            runpy.run_path(script, run_name="__main__")
    except OSError:  # in the script, where it was raised matters
        traceback.print_exc()
        return 1
    return 0


def patch_trainers(reduce: Any, settings: dict[str, Any], trainers: list[object]) -> None:
    """Add the callback to every Trainer that is created from now on, and collect them in `trainers`."""
    if find_spec("transformers"):
        _patch_transformers(reduce, settings, trainers)
    if find_spec("lightning"):
        _patch_lightning(reduce, settings, trainers)


def _patch_transformers(reduce: Any, settings: dict[str, Any], trainers: list[object]) -> None:
    from transformers import Trainer

    from diloco.integrations.transformers import DiLoCoCallback

    def create(init: Callable[..., None], trainer: Any, *args: Any, **kwargs: Any) -> None:
        init(trainer, *args, **kwargs)
        callback = DiLoCoCallback(reducer=reduce, **settings)
        callback.on_init_end(trainer.args, trainer.state, trainer.control)
        trainer.add_callback(callback)
        trainers.append(trainer)

    _wrap_init(Trainer, create)


def _patch_lightning(reduce: Any, settings: dict[str, Any], trainers: list[object]) -> None:
    from lightning.pytorch import Trainer  # pyright: ignore[reportMissingImports]

    from diloco.integrations.lightning import DiLoCoCallback

    def create(init: Callable[..., None], trainer: Any, **kwargs: Any) -> None:
        callbacks = kwargs.pop("callbacks", None) or []
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        folder = Path(kwargs.pop("default_root_dir", None) or "", f"replica-{reduce.replica}")
        callback = DiLoCoCallback(reducer=reduce, **settings)
        init(trainer, callbacks=[callback, *callbacks], default_root_dir=folder, **kwargs)
        trainers.append(trainer)

    _wrap_init(Trainer, create)


def _wrap_init(cls: Any, create: Callable[..., None]) -> None:
    init = cls.__init__

    @functools.wraps(init)  # TRL and Lightning's command line read the signature
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        create(init, self, *args, **kwargs)

    cls.__init__ = wrapped
