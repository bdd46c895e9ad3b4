"""`diloco train` as it is used: real commands, real processes, killed, stopped, resumed, misused."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from diloco.errors import ConfigError
from diloco.train.compare import CompareConfig, plan

ROOT = Path(__file__).parent.parent
SMALL = ["--model", "tiny", "--batch", "4", "--context", "32", "--sync-every", "10", "--fragments", "balanced:3",
         "--overlap", "2", "--eval-every", "1000", "--eval-tokens", "2048"]  # fmt: skip


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """A folder with a small corpus, and a cache of its own."""
    folder = tmp_path_factory.mktemp("train")
    text = Path(os.__file__).read_text() + Path(subprocess.__file__).read_text()
    (folder / "corpus.txt").write_text("\n\n".join(text.split("\n\n")))
    return folder


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


@pytest.fixture(scope="session")
def whole(place):
    """An uninterrupted run of 60 steps, to compare with, from a recipe that the command line overrides."""
    (place / "recipe.toml").write_text(
        'data = ["corpus.txt"]\nsteps = 7\nbatch = 4\ncontext = 32\nsync_every = 10\nfragments = "balanced:3"\n'
        "overlap = 2\neval_every = 1000\neval_tokens = 2048\ncompile = false\n"
    )
    words = ["--name", "whole", "--steps", "60", "--save-every", "20", "--json"]
    code, out, err = run(place, "train", "recipe.toml", *words)
    assert code == 0, err
    assert "lr = 0.008: scaling law" in err and "outer_lr = 0.7: best with outer momentum 0.5" in err
    return json.loads(out)


def check_same(place, name, step=60):
    for replica in (0, 1):
        assert losses(place, name, replica) == losses(place, "whole", replica)
        one, two = weights(place, name, step, replica), weights(place, "whole", step, replica)
        assert one.keys() == two.keys() and len(one) > 100
        assert all(torch.equal(one[key], two[key]) for key in one if "rank" not in key)


def test_a_run_leaves_a_summary_metrics_events_checkpoints_and_a_report(place, whole):
    folder = place / "runs/whole"
    assert whole["steps"] == 60 and whole["replicas"] == 2 and whole["stopped"] is False
    assert whole["eval/loss"] < whole["unigram_loss"] + 0.5
    # The bound for two replicas: 4 bits a parameter and round, every fragment 6 times, or 5 and once at the end.
    assert whole["bytes_sent"] == pytest.approx(6.5 * 0.504 * whole["parameters"], rel=0.1)
    assert whole["bytes_data_parallel"] == 2 * whole["parameters"] * 60
    assert whole["largest_burst"] == pytest.approx(0.504 * whole["parameters"] / 3, rel=0.05)
    rounds = [e for e in lines(place, "whole", kind="events") if e["event"] == "round"]
    assert sum(r["bytes_sent"] for r in rounds) == whole["bytes_sent"]
    assert all(r["step"] == r["sent_step"] + 2 for r in rounds if r["sent_step"] < 58)
    assert sorted(p.name for p in (folder / "replica-1/checkpoints").iterdir()) == ["step-00000040", "step-00000060"]
    assert "<html" in (folder / "report.html").read_text()
    assert 'data = ["corpus.txt"]' in (folder / "config.toml").read_text()
    assert list(losses(place, "whole", 1)) == list(range(1, 61))


def test_a_run_killed_at_any_moment_resumes_to_the_same_trajectory(place, whole):
    """With a checkpoint after every step the kill falls into a save more often than not."""
    name = "killed"
    process = start(
        place, "train", *SMALL, "--data", "corpus.txt", "--name", name, "--steps", "60", "--save-every", "1"
    )
    metrics = place / f"runs/{name}/replica-0/metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 12, process)
    children = [int(p) for p in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    for child in children:
        os.kill(child, signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "was killed by signal 9" in err.splitlines()[-1]
    code, _, err = train(place, name, "--steps", "60", "--save-every", "20", "--resume")
    assert code == 0, err
    check_same(place, name)
    assert any(e["event"] == "resume" for e in lines(place, name, kind="events"))


def wait_for(condition, process, seconds=90):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_ctrl_c_leaves_a_checkpoint_of_one_step_and_a_report_and_resumes(place):
    process = start(place, "train", *SMALL, "--data", "corpus.txt", "--name", "stopped", "--steps", "2000",
                    "--save-every", "5000")  # fmt: skip
    metrics = place / "runs/stopped/replica-0/metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 5, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "loss of the anchors" in out
    stops = [e["step"] for m in (0, 1) for e in lines(place, "stopped", m, "events") if e["event"] == "stop"]
    assert len(stops) == 2 and len(set(stops)) == 1 and stops[0] < 2000
    assert (place / "runs/stopped/report.html").exists()
    assert "stopping after a few steps, with a checkpoint" in err
    # Only what is given changes; all else is as the run had it.
    before = (place / "runs/stopped/config.toml").read_text()
    code, out, err = run(place, "train", "--resume", "--name", "stopped", "--steps", str(stops[0] + 5), "--json")
    assert code == 0, err
    assert f"changed: steps 2000 → {stops[0] + 5}\n" in err
    assert json.loads(out)["steps"] == stops[0] + 5
    assert (place / "runs/stopped/config.toml").read_text() == before.replace("= 2000", f"= {stops[0] + 5}")


def test_one_dead_process_stops_all_with_its_reason_on_the_last_line(place):
    process = start(place, "train", *SMALL, "--data", "corpus.txt", "--name", "dead", "--steps", "5000")
    metrics = place / "runs/dead/replica-1/metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 5, process)
    child = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[1]
    os.kill(int(child), signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "process 1 was killed by signal 9" in err.splitlines()[-1]
    assert "Traceback" not in err


def test_sharded_replicas_with_accumulation_save_and_resume(place):
    words = ["--shards", "2", "--batch", "8", "--accumulate", "2", "--save-every", "10"]
    code, out, err = train(place, "sharded", "--steps", "10", *words, "--json")
    assert code == 0, err
    code, out, err = train(place, "sharded", "--steps", "14", *words, "--resume", "--json")
    assert code == 0, err
    assert json.loads(out)["steps"] == 14
    assert list(losses(place, "sharded")) == list(range(1, 15))


def test_torchrun_starts_the_same_trainer(place, whole):
    code, out, err = run(place, "--nproc_per_node", "2", "--standalone", "-m", "diloco", "train", *SMALL, "--data",
                       "corpus.txt", "--name", "torchrun", "--steps", "60", "--save-every", "20",
                       tool=("-m", "torch.distributed.run"))  # fmt: skip
    assert code == 0, err
    assert "loss of the anchors" in out and "report.html" in out
    check_same(place, "torchrun")


def test_a_full_disk_ends_the_run_with_the_remedy_and_the_old_checkpoint_survives(place, whole):
    shutil.copytree(place / "runs/whole", place / "runs/full")
    # A limit on the size of files makes writing fail as a full disk does.
    limited = ("-c", "import resource, sys, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000));"
               "sys.argv = sys.argv[1:]; runpy.run_module('diloco', run_name='__main__')", "diloco")  # fmt: skip
    code, _, err = train(place, "full", "--steps", "65", "--resume", tool=limited)
    assert code == 2, err
    assert "no space left to save" in err.splitlines()[-1] and "step 60 is whole" in err.splitlines()[-1]
    assert weights(place, "full", 60).keys() == weights(place, "whole", 60).keys()


def test_a_run_is_not_overwritten_and_not_shared(place, whole):
    code, _, err = train(place, "whole", "--steps", "5")
    assert code == 2 and "holds a run already: add --resume" in err
    process = start(place, "train", *SMALL, "--data", "corpus.txt", "--name", "busy", "--steps", "3000")
    wait_for(lambda: (place / "runs/busy/lock").exists(), process)
    code, _, err = train(place, "busy", "--steps", "5")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert code == 2 and "is in use by another process" in err


@pytest.mark.parametrize(("words", "message"), [
    (["--resume", "--name", "nothing"], "nothing to resume in runs/nothing: leave --resume out"),
    (["--resume", "--out", "nowhere"], "nothing to resume in nowhere"),
    (["--overlap", "100"], "overlap=100 with sync_every=100"),
    (["--fragments", "diagonal:2"], "give strided:N, sequential:N or balanced:N"),
    (["--steps", "5", "--tokens", "500"], "give one of them"),
    (["--batch", "0"], "batch=0: give a whole number of at least 1"),
    (["--keep", "1"], "keep=1"),
    (["no-such.toml"], "there is no recipe no-such.toml"),
])  # fmt: skip
def test_wrong_input_is_one_line_with_the_remedy_before_anything_starts(place, words, message):
    code, out, err = run(place, "train", *words)
    assert code == 2
    assert out == ""
    assert message in err and "Traceback" not in err


@pytest.mark.parametrize(("words", "message"), [
    (["--data", "corpus.txt", "--model", "tinny"], "did you mean tiny?"),
    (["--data", "short.txt"], "give more --data, or lower --batch or --context"),
    (["--data", "corpus.txt", "--batch", "3"], "batch=3: give a multiple of"),
    (["--data", "corpus.txt", "--model", "35m", "--name", "whole", "--resume"], "does not fit this run"),
])  # fmt: skip
def test_what_only_the_replicas_can_find_is_one_line_too(place, whole, words, message):
    (place / "short.txt").write_text("short")
    words = [*words, *([] if "--name" in words else ["--out", "wrong"]), "--steps", "61"]
    code, _, err = run(place, "train", *words)
    assert code == 2, err
    assert message in err.splitlines()[-1] and "Traceback" not in err
    assert not (place / "wrong").exists() or not list((place / "wrong").iterdir())  # nothing is left behind


def test_a_recipe_is_stored_flags_and_a_typo_in_it_gets_the_same_suggestion_as_on_the_line(place, whole):
    written = (place / "runs/whole/config.toml").read_text()
    assert "steps = 60" in written and "context = 32" in written and "lr = 0.008" in written
    (place / "typo.toml").write_text("sync_evry = 7\n")
    for words in (["typo.toml"], ["--sync-evry", "7"]):
        code, _, err = run(place, "train", *words)
        assert code == 2
        assert "--sync-every" in err


def test_compare_runs_the_methods_at_equal_tokens_and_goes_on_where_it_was_interrupted(place):
    words = ["compare", *SMALL, "--data", "corpus.txt", "--steps", "20", "--methods", "dp,diloco,local", "--name",
             "compared", "--vary", "overlap=0,2"]  # fmt: skip
    code, out, err = run(place, *words, "--json")
    assert code == 0, err
    assert "3 runs in runs/compared" in err  # none of the three reads the overlap
    summaries = {summary["method"]: summary for summary in json.loads(out)}
    assert {summary["tokens"] for summary in summaries.values()} == {20 * 4 * 32}
    parameters = summaries["dp"]["parameters"]
    assert summaries["diloco"]["bytes_sent"] == pytest.approx(2 * 4 * parameters, rel=0.01)
    assert summaries["diloco"]["largest_burst"] == pytest.approx(4 * parameters, rel=0.01)
    assert summaries["dp"]["bytes_sent"] == 20 * 4 * parameters
    assert summaries["local"]["bytes_sent"] == 0
    for method in summaries:
        one, two = (weights(place, f"compared/{method}-seed0", 20, replica) for replica in (0, 1))
        equal = all(torch.equal(one[key], two[key]) for key in one if key.startswith("/model/"))
        assert equal == (method != "local")
    before = (place / "runs/compared/dp-seed0/summary.json").stat().st_mtime
    code, out, err = run(place, *words)
    assert code == 0, err
    assert "%" in out and "report.html" in out
    assert (place / "runs/compared/dp-seed0/summary.json").stat().st_mtime == before


def test_compare_plans_every_combination_that_a_method_reads_for_every_seed():
    config = CompareConfig(methods="dp,streaming", vary=("overlap=0,1", "codec=int8,e3m0"), seeds=2)
    labels = [label for label, _ in plan(config)]
    assert len(labels) == 2 + 8
    assert labels[:2] == ["dp-seed0", "dp-seed1"]
    chosen = dict(plan(config))["streaming-overlap=1-codec=int8-seed1"]
    assert (chosen.overlap, chosen.codec, chosen.seed, chosen.method) == (1, "int8", 1, "streaming")
    for wrong, message in (({"methods": "dp,sgd"}, "'sgd' is none of"), ({"vary": ("speed=1",)}, "with a setting of"),
                           ({"vary": ("overlap=a",)}, "give numbers"), ({"seeds": 0}, "seeds=0")):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            plan(CompareConfig(**wrong))


def test_report_and_export_read_a_finished_run(place, whole):
    code, out, err = run(place, "report", "runs/whole")
    assert code == 0 and "loss of the anchors" in out, err
    code, out, err = run(place, "report", "runs/whole", "--json")
    assert json.loads(out)[0]["steps"] == 60, err
    code, out, err = run(place, "export", "runs/whole", "--to", "exported")
    assert code == 0, err
    exported = load_file(place / "exported/model.safetensors")
    saved = weights(place, "whole", 60)
    assert all(torch.equal(value, saved[f"/model/{name}"]) for name, value in exported.items())
    code, _, err = run(place, "export", "runs/absent", "--to", "elsewhere")
    assert code == 2 and "holds no run" in err
    code, _, err = run(place, "export", "runs/whole", "--to", "exported")
    assert code == 2 and "holds a model already" in err
    code, _, err = run(place, "report")
    assert code == 2 and "which run?" in err


def test_export_of_a_step_on_the_way_is_the_anchors_not_the_replica(place, whole):
    code, _, err = run(place, "export", "runs/whole", "--to", "half", "--step", "40")
    assert code == 0, err
    exported, saved = load_file(place / "half/model.safetensors"), weights(place, "whole", 40)
    anchors = torch.cat([saved[f"/diloco/shard 0 of 1/parts/{i}/anchor"] for i in range(3)])
    names = [name.removeprefix("/model/") for name in saved if name.startswith("/model/")]
    flat = torch.cat([exported[name].flatten() for name in names])
    assert torch.equal(flat.sort().values, anchors.sort().values)
    assert not all(torch.equal(exported[name], saved[f"/model/{name}"]) for name in names)
