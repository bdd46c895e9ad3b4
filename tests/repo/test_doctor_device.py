"""`diloco doctor --device`, with an accelerator and without one."""

import contextlib
import io
import json
import os
import re

import pytest
import torch

from diloco.autopilot import accelerator
from diloco.cli import doctor
from diloco.codecs import device
from diloco.plan import quantity
from tests.support import late_device
from tests.support.commands import run_here
from tests.support.processes import run

SMALL = {"SECONDS": 0.0, "WIDTH": 64, "LAYERS": 4, "BATCH": 8, "SYNC_EVERY": 4, "COPY": 1 << 20}


def _asked(rank, folder, broken):
    os.environ["XDG_CACHE_HOME"] = folder
    late_device.install()
    for name, value in SMALL.items():
        setattr(accelerator, name, value)
    if broken:
        right = device.words
        device.words = lambda x: right(x) + (x.device.type == late_device.NAME)
    out = []
    for as_json in (False, True):
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            code = doctor.main(doctor.DoctorConfig(device=True, json=as_json))
        out.append((code, text.getvalue()))
    return out


@pytest.mark.slow
@pytest.mark.parametrize("broken", [False, True])
def test_the_doctor_measures_an_accelerator_and_gives_a_line_to_report(tmp_path, broken):
    (((code, text), (json_code, as_json)),) = run(1, _asked, str(tmp_path), broken)
    assert code == json_code == 0
    *_, plea, _, line = text.splitlines()
    assert "Nobody has run diloco on a GPU yet" in plea
    assert re.search(rf"torch {re.escape(torch.__version__)}, late, 16.4 k values, sync_every 4: step [\d.]+ ms", line)
    bits = "E3M0() fingerprint, BFloat16() fingerprint" if broken else "none"
    assert re.search(rf"[\d.]+ kB pinned; other bits: {re.escape(bits)}$", line)
    findings = {finding["what"]: finding for finding in json.loads(as_json)}
    assert re.fullmatch(r"[\d.]+ m?s a step alone, .* with DiLoCo: diloco plan --hook-ns [\d.]+",
                        findings["cost on the accelerator"]["value"])  # fmt: skip
    assert findings["copies"]["good"]
    (bus,) = re.findall(r"diloco plan --bus (\S+)$", findings["copies"]["value"])
    assert quantity.bandwidth(bus) > 0
    assert findings["codecs on it"]["good"] is (None if broken else True)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_without_an_accelerator_the_doctor_says_so_and_fails(tmp_path):
    code, out, err = run_here(tmp_path, "doctor", "--device", "--json")
    assert code == 1 and "no accelerator" in json.loads(out)[-1]["value"], err
