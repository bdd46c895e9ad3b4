"""The autopilot in the trainer: what it chooses becomes the run's settings, and is shown and written down."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from diloco.diloco import DiLoCo
from diloco.flags import to_toml
from diloco.pilot import autopilot
from diloco.runs import folder as folders
from diloco.runs.config import TUNED, TrainConfig
from diloco.runs.schema import Event
from diloco.runs.writer import Writer
from diloco.world import World

STORED = tuple(name for name in TUNED if name != "overlap")
"""Settings without which a checkpoint cannot be loaded, so config.toml gets them as chosen. The overlap stays auto."""
log = logging.getLogger("diloco")


def engage(diloco: DiLoCo, config: TrainConfig, world: World, folder: Path, writer: Writer) -> None:
    def say(text: str, values: Mapping[str, Any]) -> None:
        if values and world.shard == 0:
            writer.write(Event("autopilot", writer.seconds(), diloco.step_count, values))
        if values and world.local_rank == 0:  # on every machine, each of which may resume
            stored = {name: values[name] for name in STORED}
            folders.store(folder, to_toml(replace(config, **stored)), world.rank)
        if world.rank:
            return
        log.info(text)
        with (folder / "derived.txt").open("a") as file:
            file.write(text + "\n")

    autopilot(diloco, keep=config.kept, steps=config.steps, say=say)
