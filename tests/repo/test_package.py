"""The package as a user meets it: imports, examples, the README."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def command(*words: str, **kwargs) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GLOO")}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    return subprocess.run(words, capture_output=True, text=True, timeout=100, cwd=ROOT, env=environment, **kwargs)


def torchrun(*words: str) -> subprocess.CompletedProcess[str]:
    return command(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *words)


def test_importing_the_package_imports_no_torch_and_knows_its_names():
    code = "import sys, diloco; print('torch' in sys.modules, 'numpy' in sys.modules); print(*dir(diloco))"
    result = command(sys.executable, "-c", code)
    assert result.returncode == 0, result.stderr
    flags, names = result.stdout.splitlines()
    assert flags == "False False"
    assert {"DiLoCo", "E3M0", "Nesterov", "Strided", "Collective", "PeerLost"} <= set(names.split())


def test_every_public_name_can_be_imported_and_a_wrong_one_says_so():
    import diloco

    for name in diloco.__all__:
        assert getattr(diloco, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Diloco'"):
        diloco.Diloco  # noqa: B018


def test_the_minimal_example_ends_with_equal_replicas_and_a_lower_loss():
    result = torchrun("examples/minimal.py")
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    weights = re.findall(r"weights (-?[\d.]+)", result.stdout)
    losses = [float(x) for x in re.findall(r"replica \d: loss ([\d.]+)", result.stdout)]
    assert len(weights) == 2 and weights[0] == weights[1]
    assert max(losses) < 2.5  # ln 256 = 5.5; the bytes' own frequencies alone give about 3.1


def test_a_codec_of_ones_own_works():
    result = command(sys.executable, "examples/new_codec.py")
    assert result.returncode == 0, result.stderr
    losses = dict(re.findall(r"^(\w+) .* loss ([\d.]+)$", result.stdout, re.MULTILINE))
    assert set(losses) == {"Float32", "E3M0", "Sign"}
    assert float(losses["E3M0"]) < 1.5 * float(losses["Float32"])


def test_the_file_budget_holds():
    """At most 400 lines a file: beyond that it holds two ideas."""
    long = {str(f): n for f in (ROOT / "diloco").rglob("*.py") if (n := len(f.read_text().splitlines())) > 400}
    assert not long
