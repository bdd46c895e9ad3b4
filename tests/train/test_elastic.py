"""`diloco train --bucket`: real processes that begin a run, join it, leave it, are killed and return."""

import json
import os
import re
import signal
import time

from torch import nn

from diloco import Balanced, DiLoCo
from diloco.runs.config import TrainConfig
from diloco.train.data.corpus import prepare
from diloco.train.elastic import Elastic
from diloco.world import World
from studies.bucket.chaos import chaos
from tests.support.commands import SMALL, lines, run, start


def member(place, name, *words, steps=200, bucket="bucket"):
    return start(place, "train", *SMALL, "--data", "corpus.txt", "--bucket", bucket, "--member", name, "--name",
                 f"{bucket}-{name}", "--steps", steps, "--save-every", 10, *words)  # fmt: skip


def ended(process):
    out, err = process.communicate(timeout=110)
    return process.returncode, out, err


def wait_for(path, text="", seconds=60):
    deadline = time.monotonic() + seconds
    while not path.exists() or text.encode() not in path.read_bytes():
        assert time.monotonic() < deadline, f"{path} does not come"
        time.sleep(0.05)


def test_one_command_begins_a_run_and_joins_it_and_it_ends_for_all(place):
    a = member(place, "a")
    wait_for(place / "bucket/run.json")
    b = member(place, "b", "--lr", "0.1")  # what the run has settled is taken from the bucket
    code, _, err = ended(member(place, "a"))
    assert code == 2 and "member 'a' trains here already" in err and "another --member" in err
    results = [ended(process) for process in (a, b)]
    assert [code for code, _, _ in results] == [0, 0], results
    assert re.search(r"created run (\w+), as a", results[0][2]).group(1) in results[1][2]
    assert re.search(r"joined run \w+ at round \d+, as b", results[1][2])
    assert "lr: the run has" in results[1][2]
    last = [[line for line in lines(place, f"bucket-{name}") if "eval/loss" in line][-1] for name in "ab"]
    assert last[0]["eval/loss"] == last[1]["eval/loss"]  # the anchors are the same
    code, out, _ = run(place, "watch", "bucket", "--once")
    assert code == 0 and "left" in out and " a " in out and " b " in out
    assert re.search(r"a +left +20–20", out)  # 200 steps of 10
    late = member(place, "c", "--json")
    code, out, err = ended(late)
    assert code == 0 and "it has ended, after 20 rounds" in err, err
    assert json.loads(out)["steps"] == 0 and json.loads(out)["eval/loss"] == last[0]["eval/loss"]
    code, _, err = run(place, "export", "runs/bucket-c", "--to", "of-a-late-one")
    assert code == 0, err


def test_a_member_leaves_returns_with_its_checkpoint_and_a_killed_one_stops_nobody(place):
    a, b = (member(place, name, bucket="second", steps=500) for name in "ab")
    wait_for(place / "runs/second-a/replica-0/events.jsonl", '"save"')
    wait_for(place / "runs/second-b/replica-0/events.jsonl", '"round"')
    a.send_signal(signal.SIGINT)
    code, _, err = ended(a)
    assert code == 130, err
    b.kill()
    b.communicate()
    a = member(place, "a", bucket="second")
    wait_for(place / "runs/second-a/replica-0/events.jsonl", '"resume"')
    code, _, err = ended(a)
    assert code == 0, err
    assert "joined run" in err


def first_windows(tmp_path, folder, start=0, position=0):
    """Of one life of member a, with the folder of an earlier one or without."""
    corpus = prepare([str(tmp_path / "corpus.txt")], "bytes", tmp_path / "cache")
    config = TrainConfig(bucket=str(tmp_path / "bucket"), member="a", steps=10, sync_every=5, context=16)
    elastic = Elastic(config, 16, World(0, 1, 0), "")
    folder.mkdir(exist_ok=True)
    elastic.begin(DiLoCo(nn.Linear(2, 2), fragments=Balanced(1), sync_every=5, reduce=elastic.reduce), start, folder)
    data = elastic.data(corpus, 4)
    if start:
        data.load_state_dict({"position": position})
    elastic.reduce.leave()
    return [window for _ in range(3) for window in data.take().tolist()], data.state_dict()["position"]


def test_one_that_returns_with_nothing_sees_other_windows_and_one_that_resumes_goes_on_with_its_own(tmp_path):
    (tmp_path / "corpus.txt").write_bytes(bytes(range(32, 127)) * 200)
    first, position = first_windows(tmp_path, tmp_path / "one")
    again, _ = first_windows(tmp_path, tmp_path / "two")
    assert len(set(first) & set(again)) < 6
    resumed, _ = first_windows(tmp_path, tmp_path / "one", start=3, position=position)
    assert not set(first) & set(resumed)
    replayed, _ = first_windows(tmp_path, tmp_path / "one", start=3, position=0)
    assert replayed == first


def test_the_ranks_of_a_member_are_started_by_torchrun(place):
    words = ["--standalone", "--nproc-per-node", 2, "-m", "diloco", "train", *SMALL, "--data", "corpus.txt", "--shards",
             2, "--bucket", "sharded", "--member", "a", "--name", "sharded-a", "--steps", 20]  # fmt: skip
    code, _, err = ended(start(place, *words, tool=("-m", "torch.distributed.run")))
    assert code == 0, err
    assert re.search(r"created run \w+, as a", err)
    assert (place / "sharded/shard-0/run.json").exists() and (place / "sharded/shard-1/run.json").exists()
    code, out, _ = run(place, "watch", "sharded", "--once")
    assert code == 0 and " a " in out


def test_wrong_use_is_one_line(place):
    for words, text in (
        (["--bucket", "nowhere", "--join-only"], "there is no folder"),
        (["--bucket", "b", "--method", "dp"], "give streaming or diloco"),
        (["--bucket", "b", "--member", "A B"], "member name"),
        (["--bucket", "ftp://x"], "s3://"),
        (["--bucket", "b", "--key-file", "missing"], "No such file"),
        (["--bucket", "b", "--shards", "2"], "torchrun --nproc-per-node 2"),
    ):
        code, _, err = run(place, "train", *SMALL, "--data", "corpus.txt", "--name", "wrong", "--steps", 10, *words)
        assert code == 2 and text in err and "Traceback" not in err, err


def test_chaos_in_short(tmp_path):
    found = chaos(tmp_path, 3, events=4, steps=150, every=2.0, seed=1, kill_all=True, words=["--eval-tokens", "2048"])
    assert sum(found["events"].values()) >= 3
    assert found["records changed or lost"] == 0
    assert found["states with several fingerprints"] == 0 and found["states compared"] > 15
    assert found["rounds"] == 3 * 15
    assert set(found["exit codes"].values()) == {0}
    assert os.listdir(tmp_path / "bucket")
