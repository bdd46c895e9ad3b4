"""DiLoCo in Axolotl, as a plugin:

plugins: [diloco.integrations.axolotl.DiLoCoPlugin]
diloco: {sync_every: 50}
"""

from pathlib import Path
from typing import Any

from axolotl.integrations.base import BasePlugin  # pyright: ignore[reportMissingImports]
from pydantic import BaseModel

from diloco.integrations.attached import by_name
from diloco.integrations.transformers import DiLoCoCallback


class DiLoCoArgs(BaseModel):
    """The key that the plugin adds to a config: the settings of `DiLoCo`."""

    diloco: dict[str, Any] | None = None


class DiLoCoPlugin(BasePlugin):
    """Make each process a replica, with its own folder and transformers.Trainer's callback, which divides the data."""

    def register(self, cfg: Any) -> None:
        """Called first, before Axolotl reads the variables of torchrun."""
        self.callback = DiLoCoCallback(**by_name(cfg.get("diloco") or {}))
        out = Path(cfg.get("output_dir") or "./model-out")
        cfg["output_dir"] = str(out / self.callback.folder)  # Axolotl saves the model there at the end

    def get_input_args(self) -> str:
        return f"{__name__}.{DiLoCoArgs.__name__}"

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        return [self.callback]

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        if not cfg.get("max_steps") and trainer.args.max_steps > 0:  # Axolotl counted the steps for all of the data
            trainer.args.max_steps = -(-trainer.args.max_steps // self.callback.place[1])
