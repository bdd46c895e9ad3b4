"""`diloco doctor`: check this machine; under torchrun also the links between the machines of a run."""

import json
import platform
import secrets
import shutil
import socket
import textwrap
import time
from dataclasses import asdict, dataclass
from typing import Any

from diloco.errors import DiLoCoError
from diloco.exchange.world import World, cores, own_world
from diloco.runs import units
from diloco.runs.flags import flag

SMALL_DISK = 10e9
"""Free bytes below which doctor warns."""
CLOCK_SKEW = 1.0
"""Seconds above which doctor warns."""
MESSAGE = 8_000_000
"""Bytes of the message or object that measures bandwidth."""


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Check this machine; under torchrun also the links between replicas, and their clocks."""

    bucket: str | None = flag(None, "Also check a folder or s3://, gs://, az:// address for a bucket run.")
    device: bool = flag(False, "Also measure, in half a minute, what DiLoCo costs the accelerator.")
    json: bool = flag(False, "Print the findings as JSON.")


CONFIG = DoctorConfig
EXAMPLES = (
    "diloco doctor",
    "diloco doctor --bucket s3://bucket/run",
    "diloco doctor --device",
    "torchrun --nnodes 2 --nproc_per_node 1 --node_rank 0 --master_addr FIRST -m diloco doctor",
)


@dataclass(frozen=True)
class Finding:
    what: str
    value: str
    good: bool | None = True
    """None: worth a remark, but not a problem."""
    remedy: str = ""


def main(config: DoctorConfig) -> int:
    world = own_world(1, None)
    findings = check_machine()
    if config.bucket is not None:
        findings.append(_bucket(config.bucket))
    report = ""
    if config.device:
        more, report = check_accelerator()
        findings += more
    if world and world.size > 1:
        findings += measure_links(world)
    if world is None or world.local_rank == 0:  # on each machine: its findings are its own
        show(findings, config.json)
        if report and not config.json:
            print("\nNobody has run diloco on a GPU yet. Please open an issue with this line, whatever it says.\n")
            print(report)
    return 1 if any(finding.good is False for finding in findings) else 0


def check_machine() -> list[Finding]:
    findings = [Finding("python", platform.python_version()), Finding("cores", str(cores()))]
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        return [*findings, Finding("torch", f"not found ({error})", False, "pip install torch")]
    gloo = dist.is_available() and dist.is_gloo_available()
    remedy = "install a torch build with distributed support"
    findings += [Finding("torch", torch.__version__), Finding("gloo", "yes" if gloo else "no", gloo, remedy)]
    count, name = torch.accelerator.device_count(), torch.accelerator.current_accelerator()
    findings.append(Finding("accelerators", f"{count} × {name}" if count else "none: training runs on the CPU", None))
    for number in range(count):
        free, total = torch.accelerator.get_memory_info(number)
        findings.append(Finding(f"memory of {name} {number}", f"{units.size(free)} of {units.size(total)} free"))
    if count and name is not None and name.type == "cuda":
        nccl = dist.is_nccl_available()
        remedy = "needed for --shards only; install a torch build with NCCL"
        findings.append(Finding("nccl", "yes" if nccl else "no", nccl, remedy))
    from diloco.autopilot import speed

    pace = Finding("a round of 2 replicas", str(speed.measured()))
    return [*findings, _kernels(), pace, _disk(), _hostname()]


def _kernels() -> Finding:
    from diloco.codecs import kernels

    languages = {"reference": "in Python", "plain": "in C", "wide": "in C, with AVX2"}
    good = None if kernels.missing else True
    return Finding("codecs and outer step", languages[kernels.level], good, kernels.missing)


def _disk() -> Finding:
    free = shutil.disk_usage(".").free
    remedy = "a checkpoint takes up to 24 bytes per parameter, and two are kept; set --out to another disk"
    return Finding("disk", f"{units.size(free)} free", None if free < SMALL_DISK else True, remedy)


def check_accelerator() -> tuple[list[Finding], str]:
    """DiLoCo's overhead on the accelerator, and a line to paste into an issue."""
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        remedy = "install the torch build for your accelerator, and its driver"
        return [Finding("cost on the accelerator", "torch sees no accelerator", False, remedy)], ""

    from diloco.autopilot import accelerator

    cost = accelerator.measure(device)
    steps = f"{units.duration(cost.alone)} a step alone, {units.duration(cost.attached)} with DiLoCo"
    slower = units.size(min(cost.up, cost.down)).replace(" ", "")
    copies = f"{units.size(cost.up)}/s up, {units.size(cost.down)}/s down: diloco plan --bus {slower}/s"
    bits = f"other bits than here: {', '.join(cost.other_bits)}" if cost.other_bits else "the bits of this host"
    return [
        Finding("cost on the accelerator", f"{steps}: diloco plan --hook-ns {cost.hook_ns:.2f}"),
        Finding("copies", copies, cost.pinned or None, "the memory is not pinned, so they stop training"),
        Finding("codecs on it", bits, None if cost.other_bits else True, "replicas may differ: please report it"),
    ], cost.line()


def _hostname() -> Finding:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        remedy = "set GLOO_SOCKET_IFNAME to the interface that reaches the other machines (`ip addr` lists them)"
        return Finding("host name", f"{name} has no address", False, remedy)
    if address.startswith("127."):
        remedy = "with several machines, set GLOO_SOCKET_IFNAME to the interface that reaches them"
        return Finding("host name", f"{name} is {address}, reachable from this machine only", None, remedy)
    return Finding("host name", f"{name} is {address}")


def _bucket(url: str) -> Finding:
    """Whether this machine can use the store, whether the store is suitable, and its bandwidth."""
    from diloco.bucket.store import Delete, Read, Write
    from diloco.bucket.store.backend import open_store, patiently
    from diloco.bucket.store.contract import broken_promises, probe

    name, body = f"probe/{secrets.token_hex(8)}", bytes(MESSAGE)
    try:
        store = open_store(url, create=False)
        probe(store)
        start = time.perf_counter()
        patiently(lambda: store.attempt(Write(name, body)), url)
        written = time.perf_counter()
        copy = patiently(lambda: store.attempt(Read(name, MESSAGE)), url)
        end = time.perf_counter()
        patiently(lambda: store.attempt(Delete(name)), url)
    except DiLoCoError as error:
        return Finding(f"bucket {url}", str(error), False)
    if copy != body:
        return Finding(f"bucket {url}", "an object was read back with different contents", False, "use another store")
    if broken := list(broken_promises(store)):
        return Finding(f"bucket {url}", f"breaks what a bucket needs: {' '.join(broken)}", False, "use another store")
    up, down = (units.rate(8 * MESSAGE / seconds) for seconds in (written - start, end - written))
    return Finding(f"bucket {url}", f"{up} up, {down} down")


def measure_links(world: World) -> list[Finding]:
    """Round trip, bandwidth with both directions busy, and clocks, between the first replica and each of the others."""
    import torch
    import torch.distributed as dist

    from diloco.exchange.rendezvous import meet

    meet(world, patience=60)
    findings = []
    for other in range(1, world.size):
        if world.rank in (0, other):
            peer = other if world.rank == 0 else 0
            byte, message = torch.zeros(1, dtype=torch.uint8), torch.zeros(MESSAGE, dtype=torch.uint8)
            trip = _best_seconds(peer, byte, 5)
            rate = 8 * MESSAGE / (_best_seconds(peer, message, 3) - trip / 2) / 1e6
            link = f"round trip {trip * 1e3:.2f} ms, {rate:.0f} Mbit/s each way"
            _exchange(peer, byte)  # so that both read their clocks at the same moment
            findings += [Finding(f"replica 0 ↔ {other}", link), _clocks(other, peer, trip)]
        dist.barrier()
    dist.destroy_process_group()
    return findings


def _clocks(other: int, peer: int, trip: float) -> Finding:
    """Both send their time at once; it is about half a round trip old when it arrives."""
    import torch

    now = torch.tensor([time.time()], dtype=torch.float64)
    skew = abs(float(_exchange(peer, now) - now))
    text = f"differ by {'less than ' if skew < trip else ''}{units.duration(max(skew, trip))}"
    remedy = "synchronize them with NTP: object stores refuse requests from a clock that is minutes off"
    return Finding(f"clocks 0 and {other}", text, None if skew > CLOCK_SKEW else True, remedy)


def _exchange(peer: int, message: Any) -> Any:
    """Send a message, and return the peer's message of the same size."""
    import torch
    import torch.distributed as dist

    received = torch.empty_like(message)
    work = dist.irecv(received, peer)
    dist.send(message, peer)
    assert work is not None
    work.wait()
    return received


def _best_seconds(peer: int, message: Any, times: int) -> float:
    """The fastest of several exchanges."""
    best = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        _exchange(peer, message)
        best = min(best, time.perf_counter() - start)
    return best


def show(findings: list[Finding], as_json: bool) -> None:
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings]))
        return
    width, columns = max(len(finding.what) for finding in findings), shutil.get_terminal_size((80, 24)).columns
    marks = {True: "ok", False: "problem", None: ""}
    for finding in findings:
        head = f"{marks[finding.good]:7}  {finding.what:{width}}  "
        indent = " " * len(head)
        print(textwrap.fill(finding.value, columns, initial_indent=head, subsequent_indent=indent))
        if finding.remedy and not finding.good:
            print(textwrap.fill(finding.remedy, columns, initial_indent=indent, subsequent_indent=indent,
                                break_long_words=False, break_on_hyphens=False))  # fmt: skip
    problems = [finding.what for finding in findings if finding.good is False]
    print(f"\nproblems: {', '.join(problems)}" if problems else "\nno problems: this machine can train")
