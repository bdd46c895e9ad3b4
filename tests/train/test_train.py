"""`diloco train` as it is used and misused: real processes, what they leave and what they refuse."""

import json
from unittest import mock

import pytest

from diloco.cli import main
from tests.support.commands import (
    SMALL,
    check_anchors,
    check_same,
    ended,
    lines,
    losses,
    run,
    run_here,
    start_ranks,
    training,
    weights,
)

pytestmark = pytest.mark.slow  # processes


def test_a_run_leaves_a_summary_metrics_events_checkpoints_and_a_report(place, whole):
    folder = place / "runs/whole"
    assert whole["steps"] == 40 and whole["replicas"] == 2 and whole["stopped"] is False
    assert whole["loss"] < whole["unigram_loss"] + 0.5
    # The bound for two replicas: 4 bits a parameter and round, every fragment 4 times.
    assert whole["bytes_sent"] == pytest.approx(4 * 0.504 * whole["parameters"], rel=0.01)
    assert whole["bytes_data_parallel"] == 2 * whole["parameters"] * 40
    assert whole["largest_burst"] == pytest.approx(0.504 * whole["parameters"] / 3, rel=0.05)
    rounds = [e for e in lines(place, "whole", kind="events") if e["event"] == "round"]
    assert sum(r["bytes_sent"] for r in rounds) == whole["bytes_sent"]
    assert all(r["applied_step"] == r["sent_step"] + 2 for r in rounds if r["sent_step"] < 38)
    assert sorted(p.name for p in (folder / "replica-1/checkpoints").iterdir()) == ["step-00000020", "step-00000040"]
    assert "<html" in (folder / "report.html").read_text()
    assert 'data = ["corpus.txt"]' in (folder / "config.toml").read_text()
    assert list(losses(place, "whole", 1)) == list(range(1, 41))


def test_four_replicas_with_another_outer_optimizer(place):
    words = ["--replicas", "4", "--outer", "sgd:1"]
    code, out, err = run(place, *training("chosen", "--steps", "12", *words, "--json"))
    assert code == 0, err
    summary, rounds = json.loads(out), [e for e in lines(place, "chosen", kind="events") if e["event"] == "round"]
    # Each replica sends 3 quarters of its delta, and its quarter of the mean to 3 others, in 4 bits.
    a_round = 2 * 4.03 / 8 * 3 / 4 * summary["parameters"] / 3  # of a third of the parameters
    assert summary["bytes_sent"] == pytest.approx(len(rounds) * a_round, rel=0.02) and len(rounds) > 3
    written = (place / "runs/chosen/config.toml").read_text()
    assert 'outer = "sgd:1"\n' in written
    saved = weights(place, "chosen", 12)
    assert not any(len(value) for key, value in saved.items() if key.endswith("/outer"))  # sgd has no state


def test_processes_that_torchrun_started_are_the_same_trainer(place, whole):
    """As torchrun tells them their ranks; with a real one it is the README's test of two machines."""
    words = training("torchrun", "--steps", "40", "--save-every", "20", "--inner", "muon")
    results = [ended(process) for process in start_ranks(place, 2, main, words)]
    assert [code for code, _, _ in results] == [0, 0], results
    out = results[0][1]
    assert "loss of the anchors" in out and "report.html" in out
    check_same(place, "torchrun")


@pytest.mark.parametrize(("words", "message"), [
    (["--resume", "--name", "nothing"], "nothing to resume in runs/nothing: leave --resume out"),
    (["--resume", "--out", "nowhere"], "nothing to resume in nowhere"),
    (["--overlap", "100"], "overlap=100 with sync_every=100"),
    (["--sync-every", "0"], "sync_every=0"),
    (["--fragments", "diagonal:2"], "strided:N, sequential:N or balanced:N"),
    (["--batch", "0"], "batch=0: use a whole number of at least 1"),
    (["--outer", "nesterov:0.4,2"], "outer momentum=2.0"),
    (["--name", "exp/first"], "name='exp/first': use a name"),
    (["--name", "../evil"], "name='../evil': use a name"),
    (["--name", ""], "name='': use a name"),
    (["--member", "a/../../evil", "--bucket", "b"], "member='a/../../evil': use a name"),
    (["--lr", "-1"], "lr=-1.0: use a positive number"),
    (["--seed", "99999999999999999999"], "seed=99999999999999999999"),
    (["--name", "a\0b"], "use a name"),
    (["--model", "tinny"], "did you mean tiny?"),
    (["--model", "hf:/no/such"], "there is no folder /no/such"),
    (["--data", "no/such"], "data='no/such': no such file or folder"),
    (["--data", "empty"], "the folder holds no text"),
    (["--data", "picture.png"], "a binary file"),
    (["--data", "content.jsonl"], "content.jsonl, line 1: not of the form"),
    (["--batch", "3"], "batch=3: use a multiple of ranks · accumulate, 2, such as 4"),
    (["--device", "gpu"], "did you mean cuda?"),
    (["--tokenizer", "train:abc"], "train:SIZE with at least 257"),
    (["--tokenizer", "no/tokenizer.json"], "no such file"),
    (["--track", "wandb"], "track=wandb is not installed"),
    (["--key-file", "none"], "--key-file without --bucket: it would be ignored"),
    (["--bucket", "nowhere", "--join-only"], "there is no folder"),
    (["--bucket", "b", "--method", "dp"], "use streaming or diloco"),
    (["--auto", "--method", "dp"], "--auto with method dp"),
    (["--bucket", "b", "--preemption", "heroku"], "use aws, gcp, azure"),
    (["--bucket", "b", "--member", "A B"], "member name 'A B': use 1 to 63 of"),
    (["--bucket", "ftp://x"], "s3://"),
    (["--bucket", "b", "--key-file", "missing"], "No such file"),
    (["--bucket", "b", "--shards", "2"], "torchrun --nproc-per-node 2"),
    (["--bucket", "b", "--batch", "30", "--replicas", "4"], "batch=30: use a multiple of ranks · accumulate, 4"),
])  # fmt: skip
def test_wrong_input_is_one_line_with_the_remedy_before_anything_starts(place, tmp_path, words, message):
    words = words if "--out" in words or "--resume" in words else [*words, "--out", tmp_path]
    with mock.patch("diloco.cli.supervise.start", side_effect=AssertionError("a process was started")):
        code, out, err = run_here(place, "train", *words)
    assert code == 2
    assert out == ""
    assert message in err and "Traceback" not in err and len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("words", "notes"), [
    (["--replicas", "100", "--batch", "100"], ["100 processes on"]),
    (["--steps", "400"], ["each part of the model is synced 4 times; try --sync-every 40"]),
    (["--steps", "12", "--sync-every", "4"], ["synced 3 times; try --sync-every 1"]),
    (["--steps", "4"], ["the replicas meet at the end only; try more --steps"]),
    (["--steps", "400", "--auto"], []),
    (["--steps", "400", "--method", "dp"], []),
])  # fmt: skip
def test_what_is_probably_not_meant_is_noted_before_anything_starts(place, tmp_path, words, notes):
    with mock.patch("diloco.train.settings.cores", return_value=2):
        code, _, err = run_here(place, "train", "--data", "corpus.txt", *words, "--dry-run", "--out", tmp_path)
    assert code == 0
    lines = err.splitlines()
    assert len(lines) == len(notes)
    assert all(line.startswith("note: ") and note in line for line, note in zip(lines, notes, strict=True))


@pytest.mark.parametrize(("words", "message"), [
    (["--model", "35m"], "runs/whole was run with model nano, not 35m"),
    (["--method", "dp"], "runs/whole was run with method streaming, not dp"),
    ([], "runs/whole finished at step 40: raise --steps"),
])  # fmt: skip
def test_a_resume_that_cannot_go_on_is_refused_before_anything_starts(place, whole, words, message):
    before = (place / "runs/whole/summary.json").read_bytes()
    with mock.patch("diloco.cli.supervise.start", side_effect=AssertionError("a process was started")):
        code, _, err = run_here(place, "train", "--resume", "--name", "whole", *words)
    assert code == 2 and message in err
    assert (place / "runs/whole/summary.json").read_bytes() == before


def test_a_dry_run_prints_what_is_derived_and_starts_nothing(place, whole, tmp_path):
    with mock.patch("diloco.cli.supervise.start", side_effect=AssertionError("a process was started")):
        words = ["train", "--data", "corpus.txt", "--steps", "90", "--dry-run", "--out", tmp_path]
        code, out, err = run_here(place, *words)
    assert code == 0
    assert out.startswith("streaming: 0.69M parameters on corpus.txt, 90 steps")
    assert "lr = 0.008: scaling law" in out and "memory of a replica: 11 MB" in out
    assert "90 steps with sync_every 100: the replicas meet at the end only; try --sync-every 9" in err
    assert not list(tmp_path.iterdir())
    _, out, _ = run_here(place, "train", "--model", "nano", "--data", "corpus.txt", "--steps", "90", "--dry-run")
    assert out.startswith(f"streaming: {whole['parameters'] / 1e6:.3g}M parameters")


def test_a_dry_run_of_a_member_begins_no_run_in_the_bucket(place, tmp_path):
    words = ["--data", "corpus.txt", "--steps", "90", "--dry-run"]
    words += ["--bucket", tmp_path / "b", "--out", tmp_path / "runs"]
    code, out, _ = run_here(place, "train", *words)
    assert code == 0 and out.startswith("streaming: 0.69M parameters on corpus.txt, 90 steps")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("words", "message"), [
    (["--data", "short.txt"], "more --data"),
    (["--data", "corpus.txt", "--context", "64", "--name", "whole", "--resume", "--tokenizer", "train:300"],
     "this run was started with another tokenizer"),
    (["--data", "corpus.txt", "--name", "whole", "--resume", "--inner", "adamw"], "does not fit this run"),
])  # fmt: skip
def test_what_only_the_replicas_can_find_is_one_line_too(place, whole, tmp_path, words, message):
    (place / "short.txt").write_text("short")
    words = [*words, *([] if "--name" in words else ["--out", tmp_path]), "--steps", "41"]
    code, _, err = run(place, "train", *words)
    assert code == 2, err
    assert message in err.splitlines()[-1] and "Traceback" not in err
    assert not list(tmp_path.iterdir())  # nothing is left behind


def test_the_model_of_a_run_and_an_exported_one_go_on_with_a_text(place, whole):
    words = ["--tokens", "12", "--temperature", "0"]
    code, first, err = run_here(place, "sample", "runs/whole", "def ", *words)
    assert code == 0 and first.startswith("def ") and len(first) > 5, err
    assert run_here(place, "sample", "runs/whole", "def ", *words)[1] == first
    pytest.importorskip("transformers")
    code, _, err = run_here(place, "export", "runs/whole", "--to", "spoken")
    assert code == 0 and 'diloco sample spoken "text"' in err
    code, second, err = run_here(place, "sample", "spoken", "def ", *words)
    assert code == 0 and second == first, err
    for words, message in ((["absent", "x"], "there is no folder absent"), (["absent"], "required: TEXT"),
                           (["cache", "x"], "holds neither a run"),
                           (["runs/whole", "x", "--temperature", "-1"], "temperature of at least 0"),
                           (["runs/whole", "x", "y"], "unexpected argument 'y'")):  # fmt: skip
        code, _, err = run_here(place, "sample", *words)
        assert code == 2 and message in err


def test_export_of_a_step_on_the_way_is_the_anchors_not_the_replica(place, whole):
    code, _, err = run_here(place, "export", "runs/whole", "--to", "half", "--step", "20")
    assert code == 0, err
    check_anchors(place, "half", weights(place, "whole", 20))
    code, _, err = run_here(place, "export", "runs/whole", "--to", "half")
    assert code == 2 and "not an empty folder" in err


@pytest.mark.slow
def test_a_run_is_exported_where_its_data_is_not(place, whole, tmp_path):
    code, out, err = run_here(tmp_path, "export", place / "runs/whole", "--to", "exported")
    assert (code, out) == (0, "exported\n"), err
    assert (tmp_path / "exported/model.safetensors").exists()


@pytest.mark.slow
def test_a_run_keeps_the_tokenizer_that_it_has_trained(place):
    pytest.importorskip("tokenizers")
    text = place / "changing.txt"
    text.write_text("the cat sat on the mat\n" * 2000)
    words = ["--data", "changing.txt", "--tokenizer", "train:300", "--steps", "5", "--name", "trained"]
    code, _, err = run(place, "train", *SMALL, *words)
    assert code == 0, err
    text.write_text("a dog ran in a park\n" * 2000)
    code, _, err = run_here(place, "export", "runs/trained", "--to", "trained")
    assert code == 0 and "sat" in (place / "trained/tokenizer.json").read_text(), err
    code, _, err = run(place, "train", "--resume", "--name", "trained", "--steps", "6")
    assert code == 2 and "started with another tokenizer" in err
