"""`diloco doctor`: check this machine and, if torchrun starts it on every machine of a run, the links between them."""

import importlib.util
import json
import platform
import secrets
import shutil
import socket
import sys
import textwrap
import time
from dataclasses import asdict, dataclass
from typing import Any

from diloco.errors import ConfigError, DiLoCoError, install_command
from diloco.flags import flag
from diloco.report import units
from diloco.speed import remeasured
from diloco.world import World, cores, own_world

EXTRAS = {
    "bucket": ("obstore",),
    "hf": ("transformers", "datasets"),
    "bpe": ("tokenizers",),
    "parquet": ("pyarrow",),
    "plots": ("matplotlib",),
    "tensorboard": ("tensorboardX",),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
}
SMALL_DISK = 10e9
"""Bytes below which the free space is remarked on."""
APART = 1.0
"""Seconds from which on clocks that differ are remarked on."""


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Check this machine; under torchrun also the link between replicas, and their clocks."""

    bucket: str | None = flag(None, "Also check a folder or s3://, gs://, az://… in which members are to meet.")
    megabytes: float = flag(8.0, "Size of the message, or object, that measures the bandwidth.")
    json: bool = flag(False, "Print the findings as JSON.")


CONFIG = DoctorConfig
EXAMPLES = (
    "diloco doctor",
    "diloco doctor --bucket s3://bucket/run",
    "torchrun --nnodes 2 --nproc_per_node 1 --node_rank 0 --master_addr FIRST -m diloco doctor",
)


@dataclass(frozen=True)
class Finding:
    what: str
    value: str
    good: bool | None = True  # None: a remark
    remedy: str = ""


def main(config: DoctorConfig) -> int:
    if not 0 < config.megabytes < 1e6:
        raise ConfigError(f"megabytes={config.megabytes:g}: give a size above 0")
    world = own_world(1, None)
    findings = look_here() + ([] if config.bucket is None else [_bucket(config.bucket, int(config.megabytes * 1e6))])
    findings += measure(world, config.megabytes) if world and world.size > 1 else []
    if world is None or world.rank == 0:
        show(findings, config.json)
    return 1 if any(f.good is False for f in findings) else 0


def look_here() -> list[Finding]:
    version = platform.python_version()
    found = [Finding("python", version, sys.version_info >= (3, 11), "install Python 3.11 or newer")]
    found.append(Finding("cores", str(cores())))
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        return [*found, Finding("torch", f"not found ({error})", False, "pip install torch")]
    found.append(Finding("torch", torch.__version__))
    gloo = dist.is_available() and dist.is_gloo_available()
    found.append(Finding("gloo", "yes" if gloo else "no", gloo, "install a torch build with distributed support"))
    count = torch.accelerator.device_count()
    name = torch.accelerator.current_accelerator()
    found.append(Finding("accelerators", f"{count} × {name}" if count else "none: training runs on the CPU", None))
    for number in range(count):
        free, total = torch.accelerator.get_memory_info(number)
        found.append(Finding(f"memory of {name} {number}", f"{units.size(free)} of {units.size(total)} free"))
    if count and name is not None and name.type == "cuda":
        found.append(Finding("nccl", "yes" if dist.is_nccl_available() else "no", dist.is_nccl_available(),
                             "only --shards needs NCCL; install a torch build with it"))  # fmt: skip
    found += [_kernels(), _speed(), _disk(), _hostname(), _port()]
    extras = [name for name, modules in EXTRAS.items() if all(map(importlib.util.find_spec, modules))]
    absent = [name for name in EXTRAS if name not in extras]
    how = f"optional: {', '.join(absent)}. To add one: {install_command(absent[0])}" if absent else ""
    return [*found, Finding("extras installed", ", ".join(extras) or "none", None, how)]


def _kernels() -> Finding:
    from diloco import kernels

    texts = {"reference": "in Python", "plain": "in C", "wide": "in C, with AVX2"}
    return Finding("codecs and outer step", texts[kernels.level], None if kernels.missing else True, kernels.missing)


def _speed() -> Finding:
    """Measured now; `diloco plan` uses it from now on."""
    return Finding("a round of 2 replicas", str(remeasured()))


def _disk() -> Finding:
    free = shutil.disk_usage(".").free
    remedy = "a checkpoint takes up to 24 bytes a parameter, and --keep of them are kept; give --out elsewhere"
    little = free < SMALL_DISK
    return Finding("disk", f"{units.size(free)} free here", None if little else True, remedy if little else "")


def _bucket(url: str, size: int) -> Finding:
    """Whether this machine may use it, whether it is fit for members, and how fast it is from here."""
    from diloco.bucket.store.backend import open_store, patiently, probe
    from diloco.bucket.store.operations import Delete, Read, Write

    name, body = f"probe/{secrets.token_hex(8)}", bytes(size)
    try:
        store = open_store(url, create=False)
        probe(store)
        began = time.perf_counter()
        patiently(lambda: store.attempt(Write(name, body)), url)
        written = time.perf_counter()
        read = patiently(lambda: store.attempt(Read(name, size)), url)
        end = time.perf_counter()
        patiently(lambda: store.attempt(Delete(name)), url)
    except DiLoCoError as error:
        return Finding(f"bucket {url}", str(error), False)
    up, down = (units.rate(8 * size / seconds) for seconds in (written - began, end - written))
    if read != body:
        return Finding(f"bucket {url}", "what is read is not what was written", False, "use another store")
    return Finding(f"bucket {url}", f"{up} up, {down} down")


def _hostname() -> Finding:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        remedy = "set GLOO_SOCKET_IFNAME to the interface that reaches the other machines (`ip addr` lists them)"
        return Finding("host name", f"{name} has no address", False, remedy)
    if address.startswith("127."):
        remedy = "for several machines set GLOO_SOCKET_IFNAME to the interface that reaches them"
        return Finding("host name", f"{name} is {address}, this machine only", None, remedy)
    return Finding("host name", f"{name} is {address}")


def _port() -> Finding:
    with socket.socket() as s:
        try:
            s.bind(("", 29500))
        except OSError:
            return Finding("port 29500", "in use", None, "give torchrun another --master_port")
    return Finding("port 29500", "free")


def measure(world: World, megabytes: float) -> list[Finding]:
    """Round trip and bandwidth, in both directions at once, between the first replica and each other one."""
    import torch
    import torch.distributed as dist

    from diloco.rendezvous import meet

    meet(world, patience=60)
    found = []
    for other in range(1, world.size):
        if world.rank in (0, other):
            peer = other if world.rank == 0 else 0
            trip = _seconds(peer, torch.zeros(1, dtype=torch.uint8), 5)
            message = torch.zeros(int(megabytes * 1e6), dtype=torch.uint8)
            rate = message.numel() * 8 / (_seconds(peer, message, 3) - trip / 2) / 1e6
            found.append(Finding(f"replica 0 ↔ {other}", f"round trip {trip * 1e3:.2f} ms, {rate:.0f} Mbit/s each way"))
            found.append(_clocks(other, peer, trip))
        dist.barrier()
    dist.destroy_process_group()
    return found


def _clocks(other: int, peer: int, trip: float) -> Finding:
    """Both send their time at once, after they have met: what arrives is older by half a round trip, or less."""
    import torch

    _seconds(peer, torch.zeros(1, dtype=torch.uint8), 1)
    own = torch.tensor([time.time()], dtype=torch.float64)
    apart = abs(float(_exchanged(peer, own) - own))
    far = apart > APART
    remedy = "set them by NTP: object stores refuse requests of a clock that is minutes off" if far else ""
    what = "differ by less than" if apart < trip else "differ by"
    return Finding(f"clocks 0 and {other}", f"{what} {units.duration(max(apart, trip))}", None if far else True, remedy)


def _exchanged(peer: int, message: Any) -> Any:
    """The peer's message of the same size."""
    import torch
    import torch.distributed as dist

    received = torch.empty_like(message)
    work = dist.irecv(received, peer)
    dist.send(message, peer)
    assert work is not None
    work.wait()
    return received


def _seconds(peer: int, message: Any, times: int) -> float:
    """The quickest of several exchanges."""
    best = float("inf")
    for _ in range(times):
        began = time.perf_counter()
        _exchanged(peer, message)
        best = min(best, time.perf_counter() - began)
    return best


def show(findings: list[Finding], as_json: bool) -> None:
    if as_json:
        print(json.dumps([asdict(f) for f in findings]))
        return
    width, columns = max(len(f.what) for f in findings), shutil.get_terminal_size((80, 24)).columns
    marks = {True: "ok", False: "problem", None: ""}
    for f in findings:
        head = f"{marks[f.good]:7}  {f.what:{width}}  "
        below = " " * len(head)
        print(textwrap.fill(f.value, columns, initial_indent=head, subsequent_indent=below))
        if f.remedy and f.good is not True:
            print(textwrap.fill(f.remedy, columns, initial_indent=below, subsequent_indent=below,
                                break_long_words=False, break_on_hyphens=False))  # fmt: skip
    problems = [f.what for f in findings if f.good is False]
    print(f"\nproblems: {', '.join(problems)}" if problems else "\nno problems: this machine can train")
