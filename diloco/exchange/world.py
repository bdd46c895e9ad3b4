"""Which process of a run this is, as torchrun, Slurm or `diloco train` says in environment variables."""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from diloco.errors import ConfigError

STARTED = "DILOCO_STARTED_HERE"
LAUNCHED = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"),
    *("ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
}
"""Variables by which a framework finds out that it is one of several processes."""


@dataclass(frozen=True)
class World:
    """The place of a process in the run. The ranks of one replica are consecutive."""

    rank: int
    size: int
    local_rank: int
    shards: int = 1

    @property
    def replica(self) -> int:
        return self.rank // self.shards

    @property
    def replicas(self) -> int:
        return self.size // self.shards

    @property
    def shard(self) -> int:
        return self.rank % self.shards


def own_world(shards: int, replicas: int | None, environment: Mapping[str, str] = os.environ) -> World | None:
    """This process's place if torchrun or Slurm gave it one, otherwise None."""
    if {"RANK", "WORLD_SIZE"} <= environment.keys():
        rank, size, local = (int(environment.get(key, 0)) for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    elif _is_slurm_task(environment):
        rank, size, local = (int(environment[key]) for key in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"))
    else:
        return None
    if size % shards or (replicas is not None and replicas * shards != size):
        wanted = f"replicas={replicas}, shards={shards}" if replicas else f"shards={shards}"
        raise ConfigError(f"{wanted} with {size} processes: start replicas · shards processes")
    return World(rank, size, local, shards)


def own_address(environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Where the first process listens: torchrun's variables, or the first node of the Slurm job."""
    if "MASTER_ADDR" in environment:
        return environment["MASTER_ADDR"], int(environment.get("MASTER_PORT", 29500))
    nodes = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", ""))
    job, step = (int(environment.get(key, 0)) for key in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return first_node(nodes), 20_000 + (job + 997 * step) % 10_000  # the same on all nodes; two steps rarely share one


def own_job(environment: Mapping[str, str] = os.environ) -> str:
    """The name of this run at that address, where two steps of one Slurm job may meet."""
    if "MASTER_ADDR" in environment:
        return "diloco"
    return f"diloco/{environment.get('SLURM_JOB_ID', 0)}.{environment.get('SLURM_STEP_ID', 0)}"


def _is_slurm_task(environment: Mapping[str, str]) -> bool:
    """Whether srun started this process. The shell of a batch script has SLURM_NTASKS and SLURM_PROCID too, but it is
    no task: there is nobody to wait for."""
    by_srun = not {"SLURM_STEP_ID", "SLURM_STEP_NODELIST"}.isdisjoint(environment)
    return by_srun and "SLURM_PROCID" in environment and int(environment.get("SLURM_NTASKS", 1)) > 1


def first_node(nodes: str) -> str:
    """
    >>> first_node("gpu[07-09,12],cpu3")
    'gpu07'
    """
    match = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)
    if match is None:
        raise ConfigError(
            "Slurm gives no list of nodes (SLURM_STEP_NODELIST): set MASTER_ADDR to the name of the first node"
        )
    return match[1] + (match[2] or "")


def started_here() -> bool:
    """Whether `supervise.start` has started this process. Then the process that called it shows the run."""
    return STARTED in os.environ


def orphaned() -> bool:
    """Whether the process that started this one with `supervise.start` is gone."""
    return started_here() and os.getppid() != int(os.environ[STARTED])


def hide() -> None:
    """Take away what torchrun and Slurm say, so that a framework finds a process of its own."""
    for key in list(os.environ):
        if key in LAUNCHED or key.startswith(("TORCHELASTIC_", "SLURM_STEP_")):
            del os.environ[key]


def alone() -> None:
    """For a process that talks to no other: keep gloo from resolving the machine's name, which may fail."""
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
