"""`diloco train --bucket URL`: this process is one member of the run. No other process is started or waited for."""

import logging
import sys
from dataclasses import replace

from diloco import launch
from diloco.launch import World
from diloco.train import folder as folders
from diloco.train.config import TrainConfig


def be_member(config: TrainConfig) -> int:
    import torch.distributed as dist

    from diloco.train import command
    from diloco.train.elastic import as_the_run, check_folder, member_name
    from diloco.train.loop import train

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("diloco").setLevel(logging.INFO)
    config = as_the_run(config)
    folder = config.out / (config.name or f"bucket-{member_name(config)}")
    config = replace(config, name=folder.name)
    with folders.locked(folder):
        config = replace(config, resume=check_folder(folder, config))
        # The loop and its checkpoints speak to a group; this one has a single process and no address.
        launch.alone()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            summary = train(config, World(0, 1, 0), folder)
        finally:
            dist.destroy_process_group()
        command.write_summary(folder, summary)
        command.show_run(folder, config.json)
    return 130 if summary["stopped"] else 0
