"""`diloco train --bucket`: real processes that begin a run, join it, leave it, are killed and return."""

import json
import re
import shutil
import signal
from dataclasses import replace

import pytest
from torch import nn

import diloco.train.run
from diloco import Balanced, DiLoCo
from diloco.bucket.leases import read_names
from diloco.bucket.members import Phase
from diloco.errors import ConfigError
from diloco.exchange.world import World
from diloco.runs.config import TrainConfig
from diloco.runs.reader import read_fragments
from diloco.train.data.corpus import prepare
from diloco.train.members import Elastic, member_folder
from tests.support.commands import (
    Command,
    ended,
    lines,
    main,
    run,
    run_here,
    start,
    start_ranks,
    training,
    wait_for,
    wait_for_text,
)


def member(place, name, *words, steps=40, bucket="bucket"):
    options = ["--bucket", bucket, "--member", name, "--steps", steps, "--save-every", 10]
    return start(place, *training(f"{bucket}-{name}", *options, *words))


@pytest.mark.slow
def test_one_command_begins_a_run_and_joins_it_and_it_ends_for_all(place):
    a = member(place, "a", "--quorum", 2)  # so that it cannot end before the other one is there
    wait_for((place / "bucket/run.json").exists, a)
    b = member(place, "b", "--quorum", 2, "--lr", "0.1")  # what the run has settled is taken from the bucket
    code, _, err = run_here(place, *training("bucket-a", "--bucket", "bucket", "--member", "a"))
    assert code == 2 and "member 'a' is already training in" in err and "another --member" in err
    results = [ended(process) for process in (a, b)]
    assert [code for code, _, _ in results] == [0, 0], results
    assert re.search(r"created run (\w+), as a", results[0][2]).group(1) in results[1][2]
    assert re.search(r"joined run \w+ at round \d+, as b", results[1][2])
    assert "--lr 0.1 is ignored: the run has" in results[1][2]
    last = [[line for line in lines(place, f"bucket-{name}") if line["event"] == "evaluation"][-1] for name in "ab"]
    assert last[0]["loss"] == last[1]["loss"]  # the anchors are the same
    shown = read_fragments(place / "runs/bucket-a")  # what the dashboard shows while it runs
    assert shown and all(Phase[state.upper()].value == reason for state, _, reason in shown)
    code, out, _ = run_here(place, "watch", "bucket", "--once")
    assert code == 0 and "left" in out and " a " in out and " b " in out
    assert re.search(r"a +left +4–4", out)  # 40 steps of 10
    names = [str(path.relative_to(place / "bucket")) for path in (place / "bucket/leases").rglob("*.*")]
    counted = [ranges.start(20 * number) - 20 * number for (_, number), ranges in read_names(names).items()]
    steps = [max(line["step"] for line in lines(place, f"bucket-{name}") if line["event"] == "step") for name in "ab"]
    assert 0 < sum(counted) <= 2 * sum(steps)  # 2 sequences a step; the run may end before it counts the last steps
    code, out, _ = run_here(place, "watch", "bucket", "--audit")
    assert code == 0 and "ranges of 20 windows" in out and ", 0 taken again" in out, out
    code, out, err = ended(member(place, "c", "--json", "--seed", 1))
    assert code == 0 and "it ended after 4 rounds" in err, err
    assert json.loads(out)["steps"] == 0 and json.loads(out)["loss"] == last[0]["loss"]
    assert "--seed 1 is ignored: the run has 0" in err and "Warning" not in err
    code, out, err = ended(member(place, "d"))
    assert code == 0 and out.startswith("took the result") and len(out.splitlines()) == 1 and "Warning" not in err
    shutil.rmtree(max((place / "runs/bucket-b/replica-0/checkpoints").iterdir()))  # as if it had stopped earlier
    code, _, err = ended(member(place, "b", "--quorum", 2))
    assert code == 0, err
    for name in "abcd":
        code, _, err = run_here(place, "export", f"runs/bucket-{name}", "--to", f"of-{name}")
        assert code == 0, err
    first, *others = [(place / f"of-{name}/model.safetensors").read_bytes() for name in "abcd"]
    assert all(other == first for other in others)


def test_each_run_in_a_bucket_gets_a_folder_of_its_own_and_a_member_finds_it_again(tmp_path):
    def folder(bucket, **settings):
        config = TrainConfig(bucket=str(tmp_path / bucket), member="a", out=tmp_path / "runs", **settings)
        place, resume = member_folder(config)
        place.mkdir(parents=True, exist_ok=True)
        if not resume:
            config = replace(config, batch=4, replicas=2, steps=10, sync_every=5, name=place.name)
            elastic = Elastic(config, World(0, 1, 0), "")
            model = nn.Linear(2, 2)
            elastic.begin(DiLoCo(model, fragments=Balanced(1), sync_every=5, reducer=elastic.reducer), 0, place)
            elastic.reducer.leave()
        return place.name, resume

    assert folder("one/run") == ("run-a", False)
    assert folder("two/run") == ("run-a-2", False)
    assert folder("two/other/") == ("other-a", False)
    assert folder("one/run") == ("run-a", True) and folder("two/run") == ("run-a-2", True)
    assert folder("one/run", name="mine") == ("mine", False)
    with pytest.raises(ConfigError, match="belongs to run"):
        folder("two/run", name="mine")
    (tmp_path / "runs/plain").mkdir()
    (tmp_path / "runs/plain/config.toml").touch()
    with pytest.raises(ConfigError, match="holds a run without a bucket"):
        folder("one/run", name="plain")


def test_watching_a_folder_without_a_run_says_so(tmp_path):
    code, _, err = run_here(tmp_path, "watch", "absent", "--once")
    assert code == 2 and f"there is no folder {tmp_path / 'absent'}" in err
    (tmp_path / "empty").mkdir()
    code, _, err = run_here(tmp_path, "watch", "empty", "--once")
    assert code == 2 and "there is no run in empty: check the address" in err
    assert not list((tmp_path / "empty").iterdir())


@pytest.mark.slow
def test_a_member_leaves_returns_with_its_checkpoint_and_a_killed_one_stops_nobody(place):
    a, b = (member(place, name, bucket="second", steps=1_000_000) for name in "ab")
    events = place / "runs/second-a/replica-0/events.jsonl"
    wait_for_text(events, '"save"', a)
    wait_for_text(place / "runs/second-b/replica-0/events.jsonl", '"round"', b)
    a.send_signal(signal.SIGINT)
    code, _, err = ended(a)
    assert code == 130, err
    b.kill()
    b.wait()
    before = lines(place, "second-a", kind="events")
    a = member(place, "a", bucket="second", steps=1_000_000)

    def rounds_after_the_return():
        kinds = [event["event"] for event in lines(place, "second-a", kind="events")]
        return kinds[kinds.index("resume") :].count("round") if "resume" in kinds else 0

    wait_for(lambda: rounds_after_the_return() > 6, a)  # with the other one dead
    a.send_signal(signal.SIGINT)
    code, _, err = ended(a)
    assert code == 130 and "joined run" in err, err
    ((stopped, lost),) = [(event["step"], event["steps_lost"]) for event in before if event["event"] == "stop"]
    assert lost == 0  # b has taken what a had trained since the last rounds
    assert [e["step"] for e in lines(place, "second-a", kind="events") if e["event"] == "resume"] == [stopped]


def first_windows(tmp_path, folder, start=0, position=0):
    """The first windows of text in one life of member a, with the folder of an earlier life or without."""
    corpus = prepare([str(tmp_path / "corpus.txt")], "bytes", tmp_path / "cache")
    config = TrainConfig(bucket=str(tmp_path / "bucket"), member="a", batch=4, replicas=2, steps=10, sync_every=5,
                         context=16)  # fmt: skip
    elastic = Elastic(config, World(0, 1, 0), "")
    folder.mkdir(exist_ok=True)
    elastic.begin(DiLoCo(nn.Linear(2, 2), fragments=Balanced(1), sync_every=5, reducer=elastic.reducer), start, folder)
    data = elastic.batches(corpus, 4)
    if start:
        data.load_state_dict({"position": position})
    elastic.reducer.leave()
    return [window for _ in range(3) for window in data.take().tolist()], data.state_dict()["position"]


def test_one_that_returns_with_nothing_sees_other_windows_and_one_that_resumes_goes_on_with_its_own(tmp_path):
    (tmp_path / "corpus.txt").write_bytes(bytes(range(32, 127)) * 200)
    first, position = first_windows(tmp_path, tmp_path / "one")
    again, _ = first_windows(tmp_path, tmp_path / "two")
    assert len(set(first) & set(again)) < 6
    name = tmp_path / "one/run-id"
    before = name.stat().st_mtime_ns
    resumed, _ = first_windows(tmp_path, tmp_path / "one", start=3, position=position)
    assert name.stat().st_mtime_ns == before  # a full disk must not empty it
    assert not set(first) & set(resumed)
    replayed, _ = first_windows(tmp_path, tmp_path / "one", start=3, position=0)
    assert replayed == first


def _fail_when_saving(words):
    def save(run, step):
        raise RuntimeError("the disk is gone")

    diloco.train.run.save = save
    return main(words)


@pytest.mark.slow
def test_a_member_that_fails_leaves_so_that_nobody_waits_for_it(place):
    words = training("failing-a", "--bucket", "failing", "--member", "a", "--steps", 100, "--save-every", 3)
    code, _, err = ended(Command(place, _fail_when_saving, [str(word) for word in words]))
    assert code == 1 and "the disk is gone" in err
    code, out, _ = run_here(place, "watch", "failing", "--once")
    assert code == 0 and re.search(r"^a +left", out, re.MULTILINE), out


@pytest.mark.slow
def test_a_member_that_is_refused_after_it_has_joined_leaves_too(place):
    words = training("greedy-a", "--bucket", "greedy", "--member", "a", "--steps", 10, "--share", 100_000)
    code, _, err = run(place, *words)
    assert code == 2 and "add more --data" in err, err
    code, out, _ = run_here(place, "watch", "greedy", "--once")
    assert code == 0 and re.search(r"^a +left", out, re.MULTILINE), out


@pytest.mark.slow
def test_the_ranks_of_a_member_are_started_by_torchrun(place):
    words = training("sharded-a", "--shards", 2, "--bucket", "sharded", "--member", "a", "--steps", 10)
    results = [ended(process) for process in start_ranks(place, 2, main, [str(word) for word in words])]
    assert [code for code, _, _ in results] == [0, 0], results
    assert re.search(r"created run \w+, as a", results[0][2])
    assert (place / "sharded/shard-0/run.json").exists() and (place / "sharded/shard-1/run.json").exists()
    code, out, _ = run_here(place, "watch", "sharded", "--once")
    assert code == 0 and re.search(r"^a +(left|training|joining)", out, re.MULTILINE)
