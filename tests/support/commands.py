"""Real commands in a folder of their own, and what they leave there."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

ROOT = Path(__file__).parents[2]
SMALL = ["--model", "tiny", "--batch", "4", "--context", "32", "--sync-every", "10", "--fragments", "balanced:3",
         "--overlap", "2", "--eval-every", "1000", "--eval-tokens", "2048"]  # fmt: skip


def start(place, *words, tool=("-m", "diloco"), **kwargs):
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    environment |= {"XDG_CACHE_HOME": str(place / "cache"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
                    "GLOO_SOCKET_IFNAME": "lo", "NO_COLOR": "1", "COLUMNS": "120"}  # fmt: skip
    return subprocess.Popen([sys.executable, *tool, *map(str, words)], cwd=place, env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, **kwargs)  # fmt: skip


def run(place, *words, **kwargs):
    process = start(place, *words, **kwargs)
    out, err = process.communicate(timeout=110)
    return process.returncode, out, err


def train(place, name, *words, **kwargs):
    return run(place, "train", *SMALL, "--data", "corpus.txt", "--name", name, *words, **kwargs)


def lines(place, name, replica=0, kind="metrics"):
    text = (place / f"runs/{name}/replica-{replica}/{kind}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def losses(place, name, replica=0):
    return {line["step"]: line["train/loss"] for line in lines(place, name, replica) if "train/loss" in line}


def weights(place, name, step, replica=0):
    """All tensors of a checkpoint: model, moments, anchors, outer state."""
    checkpoint = place / f"runs/{name}/replica-{replica}/checkpoints/step-{step:08d}"
    dcp_to_torch_save(checkpoint, place / "whole.pt")
    found = torch.load(place / "whole.pt", weights_only=False)

    def tensors(value, path=""):
        if isinstance(value, torch.Tensor):
            yield path, value
        elif isinstance(value, dict):
            for key, part in value.items():
                yield from tensors(part, f"{path}/{key}")

    return dict(tensors(found))


def wait_for(condition, process, seconds=90):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def check_same(place, name, step=60):
    for replica in (0, 1):
        assert losses(place, name, replica) == losses(place, "whole", replica)
        one, two = weights(place, name, step, replica), weights(place, "whole", step, replica)
        assert one.keys() == two.keys() and len(one) > 100
        assert all(torch.equal(one[key], two[key]) for key in one if "rank" not in key)


def check_anchors(place, name, saved, shards=1):
    """The exported model is the anchors of the checkpoint, not the replica's own weights."""
    exported = load_file(place / name / "model.safetensors")
    anchors = [saved[f"/diloco/shard {k} of {shards}/parts/{i}/anchor"] for k in range(shards) for i in range(3)]
    names = [name.removeprefix("/model/") for name in saved if name.startswith("/model/")]
    flat = torch.cat([exported[name].flatten() for name in names])
    assert torch.equal(flat.sort().values, torch.cat(anchors).sort().values)
    assert not any(torch.equal(exported[name], saved[f"/model/{name}"]) for name in names if "norm" not in name)
