"""Run a script that knows nothing of DiLoCo as a replica:

torchrun --nproc_per_node 2 -m diloco.run --sync-every 50 script.py …

Every transformers or Lightning Trainer that the script creates gets the callback. Other scripts are refused: nothing
would divide their data, or save the model that the replicas agree on.
"""

import argparse
import functools
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from diloco.errors import ConfigError
from diloco.integrations.attached import by_name
from diloco.launch import replica
from diloco.reduce.collective import Collective


def main(argv: Sequence[str] | None = None) -> None:
    given = vars(_parser().parse_args(argv))
    script, arguments, module = given.pop("script"), given.pop("arguments"), given.pop("module")
    settings = by_name({name: value for name, value in given.items() if value is not None})
    reduce, trainers = replica(), list[object]()
    if find_spec("transformers"):
        _in_transformers(reduce, settings, trainers)
    if find_spec("lightning"):
        _in_lightning(reduce, settings, trainers)

    def check(*_: object) -> None:
        if not trainers:
            raise ConfigError(
                f"{script} trains without a transformers or Lightning Trainer, so there is nothing to add DiLoCo to: "
                "see docs/frameworks.md for your own loop"
            )

    register_optimizer_step_pre_hook(check)
    sys.argv = [script, *arguments]
    if module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(script).absolute().parent)
        runpy.run_path(script, run_name="__main__")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("diloco.run", description="Run an unchanged script as a replica of DiLoCo.")
    parser.add_argument("--sync-every", type=int, help="steps between two syncs of the same fragment (100)")
    parser.add_argument("--overlap", type=int, help="steps between sending a fragment and applying the result (1)")
    parser.add_argument("--keep-local", type=float, help="weight of the local value when the result is applied (0)")
    parser.add_argument("--fragments", help="how the model is cut: strided:N, sequential:N, balanced:N (strided:3)")
    parser.add_argument("--codec", help="numbers on the wire (e3m0)")
    parser.add_argument("--outer", help="outer optimizer, such as nesterov:0.4,0.9 or sgd:1")
    parser.add_argument("--no-shard", dest="shard", action="store_false", help="each replica has its own data already")
    parser.add_argument("-m", dest="module", action="store_true", help="the script is a module, as with python -m")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    return parser


def _in_transformers(reduce: Collective, settings: dict[str, Any], trainers: list[object]) -> None:
    from transformers import Trainer

    from diloco.integrations.transformers import DiLoCoCallback

    def create(init: Callable[..., None], trainer: Any, *args: Any, **given: Any) -> None:
        init(trainer, *args, **given)
        callback = DiLoCoCallback(reduce=reduce, **settings)
        callback.on_init_end(trainer.args, trainer.state, trainer.control)
        trainer.add_callback(callback)
        trainers.append(trainer)

    _around_init(Trainer, create)


def _in_lightning(reduce: Collective, settings: dict[str, Any], trainers: list[object]) -> None:
    from lightning.pytorch import Trainer  # pyright: ignore[reportMissingImports]

    from diloco.integrations.lightning import DiLoCoCallback

    def create(init: Callable[..., None], trainer: Any, **given: Any) -> None:
        callbacks = given.pop("callbacks", None) or []
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        folder = Path(given.pop("default_root_dir", None) or "", f"replica-{reduce.replica}")
        callback = DiLoCoCallback(reduce=reduce, **settings)
        init(trainer, callbacks=[callback, *callbacks], default_root_dir=folder, **given)
        trainers.append(trainer)

    _around_init(Trainer, create)


def _around_init(cls: Any, create: Callable[..., None]) -> None:
    init = cls.__init__

    @functools.wraps(init)  # TRL and Lightning's command line read the signature
    def wrapped(self: Any, *args: Any, **given: Any) -> None:
        create(init, self, *args, **given)

    cls.__init__ = wrapped


if __name__ == "__main__":
    main()
