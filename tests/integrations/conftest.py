"""Tests that need what only `make test-frameworks` or `make test-slurm` installs."""

import os
from importlib.util import find_spec

FRAMEWORKS = ["test_frameworks.py", "test_preferences.py", "test_torchtitan.py"]
collect_ignore = [] if all(map(find_spec, ("lightning", "accelerate", "torchtitan"))) else FRAMEWORKS
if find_spec("peft") is None:
    collect_ignore = [*collect_ignore, "test_lora.py"]
if "DILOCO_SLURM" not in os.environ:  # it starts daemons
    collect_ignore = [*collect_ignore, "test_slurm.py"]
