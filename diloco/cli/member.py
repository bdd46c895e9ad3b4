"""`diloco train --bucket URL`: this process is one member of the run, or one rank of it under torchrun. No other
process is started or waited for."""

import contextlib
import logging
import sys
from dataclasses import replace

from diloco.errors import ConfigError
from diloco.runs import folder as folders
from diloco.runs.config import TrainConfig
from diloco.world import World, alone, own_world


def be_member(config: TrainConfig) -> int:
    import torch
    import torch.distributed as dist

    from diloco.cli import train as command
    from diloco.rendezvous import meet
    from diloco.train.elastic import as_the_run, check_folder, member_name
    from diloco.train.run import train

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("diloco").setLevel(logging.INFO)
    world = own_world(config.shards, 1) if config.shards > 1 else World(0, 1, 0)
    if world is None:
        raise ConfigError(f"shards={config.shards} with a bucket: start the ranks of this member with torchrun "
                          f"--nproc-per-node {config.shards} -m diloco train …")  # fmt: skip
    config = as_the_run(config)
    folder = config.out / (config.name or f"bucket-{member_name(config)}")
    config = replace(config, name=folder.name)
    taken = f"member {member_name(config)!r} trains here already, in {folder}: give this one another --member"
    with folders.locked(folder, taken) if world.shard == 0 else contextlib.nullcontext():
        config = replace(config, resume=check_folder(folder, config))
        if world.size > 1:
            meet(world, "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        else:  # the loop and its checkpoints speak to a group; this one has a single process and no address
            alone()
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            summary = train(config, world, folder)
        finally:
            dist.destroy_process_group()
        if world.rank > 0:
            return 0
        command.write_summary(folder, summary)
        command.show_run(folder, config.json)
    return 130 if summary["stopped"] else 0
