"""What a round costs a replica whose steps run on an accelerator. Run, as root: python -m benchmarks.accelerator

No accelerator is needed: a step is a pause of the host, as if the device worked meanwhile, and the parameters are in
the memory of the host. Two processes with one core each, in network namespaces, whose links a token bucket holds at
each of several rates. Settings as in `diloco plan --model 1b --step-seconds 1 --link 1gbit`, all divided by four.

Utilisation is the time of the pauses over all time. Waited: the share of the time in which the training thread waited
for a round. Hook: the rest of what DiLoCo takes from the training thread. Its bound is what a CPU cannot avoid for each
parameter and round: read local and anchor, write the delta; read the anchor, write local. These two passes are
timed in the same processes, over the same tensors. The planner predicts utilisation for the same settings, with this
machine's own costs, and the settings that it recommends are measured too.
"""

import argparse
import json
import os
import statistics
import time
from functools import cache

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import processes
from benchmarks.record import RESULTS, Record, Target, write
from diloco import DiLoCo
from diloco.autopilot.speed import measured
from diloco.codecs.codec import codec_named
from diloco.core.fragment import fragmenter
from diloco.exchange.collective import Collective
from diloco.plan.choose import Limits, Settings, choose, method_of
from diloco.plan.methods import model_of_layers
from diloco.plan.simulate import Group, utilization
from diloco.plan.traffic import ROUND_SECONDS, WIRE
from tests.support.netns import DEVICE, Network, Rate, impossible, network

LAYERS, WIDTH, STEP_SECONDS = 24, 3640, 0.25
GIVEN = Settings(sync_every=30, fragments="strided:3", overlap=1, codec="e3m0")
GBITS = (0.3, 1.0, 2.5)


def main() -> None:
    parser = argparse.ArgumentParser(description="what a round costs a replica that trains on an accelerator")
    parser.add_argument("--steps", type=int, default=60, help="measured at least, in whole periods of sync_every")
    parser.add_argument("--settings", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.settings:
        print(json.dumps(worker(Settings(**json.loads(arguments.settings)), arguments.steps)), flush=True)
        os._exit(0)
    if reason := impossible():
        print(f"benchmarks.accelerator is skipped: {reason}")
        return
    values: Record = {}
    with network(2, offload=True) as net:
        for gbit in GBITS:
            net.shape(Rate(mbit=1000 * gbit, burst_kbyte=256))
            for name, settings in (("given", GIVEN), ("recommended", recommended(gbit))):
                if name == "recommended" and settings == GIVEN:
                    continue
                found = values[f"{gbit:g} {name}"] = row(run(net, settings, arguments.steps), settings, gbit)
                print(f"{gbit:g} Gbit/s, {name}: " + ", ".join(f"{k} {v}" for k, v in found.items()))
    settings = {"parameters": LAYERS * WIDTH**2, "step_seconds": STEP_SECONDS, "steps": arguments.steps}
    write(RESULTS / "accelerator.json", settings, values, targets(values))


def targets(values: Record) -> list[Target]:
    out = []
    for name, found in values.items():
        out.append(Target(f"{name}: hook, times its bound", found["hook_over_passes"], at_most=1.3))
        apart = 100 * abs(found["planned"] - found["measured"])
        out.append(Target(f"{name}: between plan and measurement, points", apart, at_most=5))
        if "recommended" in name or f"{name.split()[0]} recommended" not in values:
            out.append(Target(f"{name}: waiting, share of the time", found["waited"], at_most=0.01))
            out.append(Target(f"{name}: utilisation over what the passes leave", found["of_possible"], at_least=0.9))
    return out


@cache
def group() -> Group:
    speed = measured()
    return Group(
        STEP_SECONDS, codec_ns=speed.codec_ns("e3m0", 2), hook_ns=speed.hook, round_seconds=ROUND_SECONDS, wire=WIRE
    )


def recommended(gbit: float) -> Settings:
    model = model_of_layers(LAYERS * WIDTH**2, LAYERS)
    return choose(model, lambda codec: group(), 1e9 * gbit, Limits()).settings


def planned(settings: Settings, gbit: float) -> float:
    model = model_of_layers(LAYERS * WIDTH**2, LAYERS)
    return float(utilization(method_of(settings, model), group(), 1e9 * gbit)[0])


def row(reports: list[Record], settings: Settings, gbit: float) -> Record:
    """The mean of both processes."""
    mean = {key: statistics.mean(report[key] for report in reports) for key in reports[0]}
    possible = STEP_SECONDS / (STEP_SECONDS + mean["passes_seconds"])
    return {
        **vars(settings),
        **mean,
        "hook_over_passes": mean["hook_seconds"] / mean["passes_seconds"],
        "of_possible": mean["measured"] / possible,
        "planned": planned(settings, gbit),
    }


def run(net: Network, settings: Settings, least: int) -> list[Record]:
    environment = {"MASTER_ADDR": net.address(0), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": DEVICE}
    environment["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # addresses in a namespace have no names: a warning
    arguments = [f"--settings={json.dumps(vars(settings))}", f"--steps={least}"]
    return processes.run("benchmarks.accelerator", arguments, 2, environment, net.command, seconds=900)


def worker(settings: Settings, least: int) -> Record:
    processes.pin()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))})
    diloco = DiLoCo(
        model,
        sync_every=settings.sync_every,
        fragments=fragmenter(settings.fragments),
        overlap=settings.overlap,
        codec=codec_named(settings.codec),
        reducer=Collective(),
    )
    diloco.join()
    for _ in range(settings.sync_every + settings.overlap):  # nothing is sent before, so there is no need to pause
        diloco.step()
    steps = -(-least // settings.sync_every) * settings.sync_every
    waited, hooks = diloco.stats.seconds_waited, []
    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        hooks.append(step(diloco))
    seconds = time.perf_counter() - began
    waited = diloco.stats.seconds_waited - waited
    return {
        "measured": steps * STEP_SECONDS / seconds,
        "waited": waited / seconds,
        "hook_seconds": (sum(hooks) - waited) / steps,
        "longest_hook_seconds": max(hooks),
        "passes_seconds": passes(diloco) / settings.sync_every,
    }


def step(diloco: DiLoCo) -> float:
    time.sleep(STEP_SECONDS)
    began = time.perf_counter()
    diloco.step()
    return time.perf_counter() - began


def passes(diloco: DiLoCo) -> float:
    """Seconds of the passes that every parameter needs in a round, all fragments in turn; the median of three."""
    dist.barrier()
    times = []
    for _ in range(3):
        began = time.perf_counter()
        for fragment in diloco._fragments:
            out = fragment.memory.deltas.take(fragment.view.size)
            for span in fragment.view.spans:
                torch.sub(span.of(fragment.state.anchor), span.rows(), out=span.of(out))
            for span in fragment.view.spans:
                span.rows().copy_(span.of(fragment.state.anchor))
            fragment.memory.deltas.give(out, lambda: None)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


if __name__ == "__main__":
    main()
