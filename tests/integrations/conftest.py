"""Tests that need what only `make test-frameworks` or `make test-slurm` installs."""

import os
from importlib.util import find_spec

NAMES = ("clusters", "frameworks", "lora", "nanochat", "preferences", "ray", "torchtitan")
PACKAGES = ("accelerate", "kubeflow_trainer_api", "lightning", "peft", "ray", "torchtitan")
collect_ignore = [] if all(map(find_spec, PACKAGES)) else [f"test_{name}.py" for name in NAMES]
if not find_spec("axolotl"):
    collect_ignore = [*collect_ignore, "test_axolotl.py"]
if not all(map(find_spec, ("wandb", "trackio", "tensorboard"))):
    collect_ignore = [*collect_ignore, "test_tracking.py"]
if "DILOCO_SLURM" not in os.environ:  # it starts daemons
    collect_ignore = [*collect_ignore, "test_slurm.py"]
