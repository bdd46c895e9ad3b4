"""`--batch auto`: the choice from injected times, and members that make it, keep it and show it."""

import re
import signal
import tomllib
from dataclasses import replace

import pytest
from torch import nn

from diloco import Balanced, DiLoCo
from diloco.bucket import find_run
from diloco.errors import ConfigError
from diloco.exchange.world import World
from diloco.runs.config import TrainConfig
from diloco.train.members import Elastic
from diloco.train.pace import batch_for, measure
from tests.support.commands import ended, lines, run_here, start, training, wait_for, wait_for_text


def machine(per_sequence, overhead=0.0, fits=1 << 30):
    """Seconds of a step of this many sequences; None if they do not fit into its memory."""
    return lambda sequences: overhead + per_sequence * sequences if sequences <= fits else None


@pytest.mark.parametrize("overhead", [0.0, 0.3])
@pytest.mark.parametrize(("per_sequence", "sequences"), [(0.01, 100), (0.02, 50), (0.05, 20), (1.0, 1), (7.0, 1)])
def test_speeds_give_batches_whose_steps_take_equally_long(per_sequence, sequences, overhead):
    seconds = machine(per_sequence, overhead)
    pace = measure(seconds, until=1.0 + overhead, most=1000)
    batch = batch_for(pace, 1.0 + overhead)
    assert (batch.sequences, batch.accumulate) == (sequences, 1)
    assert max(pace) < 2 * sequences or sequences == 1  # nothing far longer than a step of the run was timed


def test_a_machine_that_lacks_memory_takes_the_same_batch_in_several_passes():
    pace = measure(machine(0.01, fits=13), until=1.0, most=1000)
    assert max(pace) == 8
    batch = batch_for(pace, 1.0)
    assert batch.sequences / batch.accumulate <= 8 and abs(batch.sequences - 100) <= batch.accumulate / 2
    assert batch.sequences % batch.accumulate == 0
    with pytest.raises(ConfigError, match="does not fit"):
        measure(machine(0.01, fits=0), until=1.0, most=1000)


def test_a_member_that_accumulates_anyway_takes_a_multiple_of_its_micro_batches():
    pace = measure(machine(0.01), first=4, until=1.0, most=1000)
    assert set(pace) == {4, 8, 16, 32, 64, 128}
    assert (batch_for(pace, 0.5, accumulate=4).sequences, batch_for(pace, 0.5, accumulate=4).accumulate) == (48, 4)


@pytest.mark.parametrize("until", [1.0, float("inf")])
def test_nobody_times_more_sequences_than_count(until):
    assert max(measure(machine(1e-6), until=until, most=12)) == 12


def test_a_step_that_something_else_slowed_down_does_not_change_the_share_of_the_creator():
    pace = {1: 0.1, 32: 0.9, 44: 0.4}
    assert batch_for(pace, pace[44]).sequences == 44


def elastic(tmp_path, name, pace, share="auto"):
    config = TrainConfig(bucket=str(tmp_path / "bucket"), member=name, batch=12, replicas=3, share=share, steps=10,
                         sync_every=5)  # fmt: skip
    members = Elastic(config, World(0, 1, 0), "", pace=pace)
    folder = tmp_path / name
    folder.mkdir()
    model = nn.Linear(2, 2)
    members.begin(DiLoCo(model, fragments=Balanced(1), sync_every=5, reducer=members.reducer), 0, folder)
    members.reducer.leave()
    return members


def test_all_take_the_step_time_of_the_run_even_if_several_tried_to_create_it(tmp_path):
    first = elastic(tmp_path, "a", {1: 0.1, 2: 0.2, 4: 0.4})
    assert first.batch.sequences == 4 and find_run(str(tmp_path / "bucket")).note["step_seconds"] == 0.4
    twice = elastic(tmp_path, "b", {4: 0.2, 8: 0.4})
    late_creator = elastic(tmp_path, "c", {1: 0.025, 2: 0.05, 4: 0.1})  # it had timed its own share only
    assert twice.batch.sequences == 8
    assert (late_creator.batch.sequences, late_creator.batch.accumulate) == (16, 4)
    assert "0.4 s, a step of the run" in twice.batch.why
    assert twice.reducer.session.entry.published["batch"] == 8
    assert elastic(tmp_path, "d", None, share=5).batch.sequences == 5
    assert elastic(tmp_path, "e", None, share=None).batch.sequences == 4


def test_in_a_run_without_a_step_time_a_member_takes_an_equal_part_and_says_so(tmp_path):
    elastic(tmp_path, "a", None, share=None)
    batch = elastic(tmp_path, "b", {4: 0.2}).batch
    assert batch.sequences == 4 and "created without --batch auto" in batch.why


def test_it_needs_a_bucket_and_members_with_one_rank():
    with pytest.raises(ConfigError, match="batch=auto without --bucket"):
        TrainConfig(batch="auto")
    with pytest.raises(ConfigError, match="batch=auto with shards=2"):
        TrainConfig(batch="auto", bucket="x", shards=2)
    with pytest.raises(ConfigError, match="share=0"):
        TrainConfig(share=0, bucket="x")
    with pytest.raises(ConfigError, match="--share without --bucket"):
        TrainConfig(share=4)
    assert replace(TrainConfig(batch="auto", bucket="x"), batch=4).batch == 4


@pytest.mark.slow
def test_a_member_chooses_its_batch_stores_it_resumes_with_it_and_shows_it(place):
    words = ["--bucket", "auto", "--member", "a", "--steps", 20, "--save-every", 10, "--batch", "auto"]
    code, out, err = ended(start(place, *training("auto-a", *words)))
    assert code == 0, err
    stored = tomllib.loads((place / "runs/auto-a/config.toml").read_text())
    note = find_run(str(place / "auto")).note
    assert stored["share"] == note["batch"] // 2 and stored["batch"] == note["batch"] and note["step_seconds"] > 0
    assert re.search(rf"share = {stored['share']}: what this member trains in [\d.]+ s", err)
    assert "part in the rounds" in out and "100.00 %" in out  # it was alone
    tokens = [line["tokens"] for line in lines(place, "auto-a") if line["event"] == "step"]
    assert tokens[0] == stored["share"] * 32
    code, out, _ = run_here(place, "watch", "auto", "--once")
    (row,) = [line.split() for line in out.splitlines() if line.startswith("a ")]
    assert row[-1] == "100%" and row[-4:-3] == [str(stored["share"])], out
    # The weights are those of a run in which nobody was timed.
    code, _, err = ended(start(place, *training("plain-a", "--bucket", "plain", "--member", "a", "--steps", 10,
                                                "--batch", note["batch"])))  # fmt: skip
    assert code == 0, err
    before = [next(line["loss"] for line in lines(place, name) if line["event"] == "evaluation")
              for name in ("auto-a", "plain-a")]  # fmt: skip
    assert before[0] == before[1]


@pytest.mark.slow
def test_a_member_that_resumes_takes_the_batch_in_its_config_and_its_steps_follow_the_learning_rate_of_the_run(place):
    words = ["--bucket", "again", "--member", "a", "--save-every", 10]
    auto = training("again-a", *words, "--steps", 1_000_000)
    auto[auto.index("--batch") + 1] = "auto"
    process = start(place, *auto)
    wait_for_text(place / "runs/again-a/replica-0/events.jsonl", '"save"', process)
    process.send_signal(signal.SIGINT)
    assert ended(process)[0] == 130
    path = place / "runs/again-a/config.toml"
    chosen = tomllib.loads(path.read_text())["share"]
    path.write_text(re.sub("share = .*", "share = 3", path.read_text()))  # as no measurement would choose
    assert chosen != 3
    stopped = max(line["step"] for line in lines(place, "again-a") if line["event"] == "step")
    for step_words in (auto, ["train", "--resume", "--name", "again-a"]):
        process = start(place, *step_words)

        def steps(stopped=stopped):
            return [x for x in lines(place, "again-a") if x["event"] == "step" and x["step"] > stopped]

        wait_for(lambda steps=steps: len(steps()) > 3, process)
        process.send_signal(signal.SIGINT)
        code, _, err = ended(process)
        assert code == 130 and "is ignored" not in err, err
        first = steps()[0]
        assert first["tokens"] == first["step"] * 3 * 32
        assert tomllib.loads(path.read_text())["share"] == 3
        stopped = max(line["step"] for line in steps())
