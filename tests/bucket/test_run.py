"""What a run says about itself: a joiner and `diloco watch` believe none of it before it was checked."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from diloco.bucket import Bucket, find_run
from diloco.bucket.members import Member, MemberOptions, Phase, Timing
from diloco.bucket.run import Session
from diloco.bucket.store.envelope import PREFIX, PROTOCOL, Envelope
from diloco.errors import ConfigError, Mismatch
from diloco.exchange.reducer import Shard
from diloco.report.bucket import Watch, table
from diloco.runs.config import TrainConfig
from diloco.train.members import adopt_settings
from tests.support.fake_reducer import job
from tests.support.members import Member as Trainer
from tests.support.members import until
from tests.support.players import one_member


def begin(folder, **note):
    """A run without fragments, with these published settings."""
    bucket = Bucket(str(folder), "a", note=note)
    bucket.join(job([], []))
    bucket.leave()


def test_one_that_asks_for_a_snapshot_keeps_nobody_from_deleting_and_one_that_joins_does():
    session = Session(Envelope("r"), Member("a", 0), Timing(MemberOptions(), 2), None, 1.0, 4)
    session.members.update([Member("b", 0, joining=False, wants=((0, 100),))], session.clock())
    assert not session.somebody_joins
    session.members.update([Member("c", 0)], session.clock())
    assert session.somebody_joins


@pytest.mark.parametrize(
    "note",
    [
        {"context": 1e12},
        {"context": 1 << 40},
        {"context": "long"},
        {"steps": [1]},
        {"lr": "low"},
        {"lr": True},
        {"lr": 1e300},
        {"sync_every": None},
        {"method": "steal"},
        {"codec": "x"},
        {"fragments": "\x1b[2J"},
        {"outer": {"a": 1}},
        {"batch": 2.5},
    ],
    ids=repr,
)
def test_a_setting_that_is_not_a_value_of_its_flag_is_not_taken(note, tmp_path):
    begin(tmp_path, **note)
    with pytest.raises(ConfigError, match="do not join a run that you do not trust"):
        adopt_settings(TrainConfig(bucket=str(tmp_path)))


def test_what_is_loaded_from_outside_is_taken_only_by_who_asks_for_it(tmp_path):
    begin(tmp_path, model="hf:attacker/x", data=["/etc/passwd"], lr=0.5)
    with pytest.raises(ConfigError, match="--model hf:attacker/x, which is loaded from elsewhere"):
        adopt_settings(TrainConfig(bucket=str(tmp_path)))
    with pytest.raises(ConfigError, match="set --data"):
        adopt_settings(TrainConfig(bucket=str(tmp_path), model="hf:attacker/x"))
    taken = adopt_settings(TrainConfig(bucket=str(tmp_path), model="hf:attacker/x", data=("corpus.txt",)))
    assert taken.data == ("corpus.txt",) and taken.lr == 0.5
    begin(tmp_path / "two", tokenizer="/etc/passwd")
    with pytest.raises(ConfigError, match="--tokenizer /etc/passwd"):
        adopt_settings(TrainConfig(bucket=str(tmp_path / "two")))


def forge(folder, run="0" * 16, protocol=None, **changes):
    value = {"contract": {}, "snapshots": [], "note": {}} | changes
    body = Envelope(run).seal("run.json", "run", {"signed": False}, json.dumps(value).encode()).body
    if protocol is not None:
        length = PREFIX.unpack_from(body)[1]
        header = body[PREFIX.size : PREFIX.size + length].replace(
            b'"protocol":%d' % PROTOCOL, b'"protocol":%d' % protocol
        )
        body = PREFIX.pack(b"DLCO", len(header), bytes(32)) + header + body[PREFIX.size + length :]
    (folder / "run.json").write_bytes(body)


@pytest.mark.parametrize(
    "changes",
    [{"run": "[/x]"}, {"contract": 3}, {"snapshots": {}}, {"snapshots": [3]}, {"snapshots": ["../../x"]}, {"note": []}],
    ids=repr,
)
def test_a_run_that_is_not_one_is_refused_with_a_sentence(changes, tmp_path):
    forge(tmp_path)
    assert find_run(str(tmp_path)) is not None
    forge(tmp_path, **changes)
    with pytest.raises(ConfigError, match=r"run\.json in the bucket is unusable"):
        find_run(str(tmp_path))


def test_a_bucket_of_the_protocol_before_is_refused_with_a_sentence(tmp_path):
    forge(tmp_path, protocol=PROTOCOL - 1)
    message = f"its protocol is {PROTOCOL - 1}, this is {PROTOCOL}: another version of diloco"
    with pytest.raises(ConfigError, match=message):
        find_run(str(tmp_path))


def shown(watch):
    console = Console(file=io.StringIO(), width=200)
    console.print(table(watch.see()))
    return console.file.getvalue()


def test_watching_survives_a_member_that_claims_a_round_of_far_ahead(tmp_path):
    a = Trainer(tmp_path, "a")
    until(lambda: min(a.held) > 2, a)
    a.stop().end()
    liar = Member("z", 0, held=(1 << 40, 1 << 40, 1 << 40), joining=False, published={"loss": -1e30})
    envelope = Envelope(find_run(str(tmp_path)).id)
    (tmp_path / "members/z").mkdir()
    (tmp_path / liar.object_name).write_bytes(liar.sealed(envelope))
    text = shown(Watch(str(tmp_path), None))
    assert text.count("a 100%") >= 3 and "\x1b" not in text


def test_watching_a_place_whose_name_looks_like_markup_shows_it_as_it_is(tmp_path):
    place = tmp_path / "[bold]x"
    begin(place)
    assert "[bold]x" in shown(Watch(str(place), None)).replace("\n", "")


def test_a_member_that_is_not_heard_of_is_quiet_then_lost_and_the_run_says_how_far_it_is(tmp_path):
    a = Trainer(tmp_path, "a")
    until(lambda: min(a.held) > 2, a)
    a.stop().end()
    silent = Member("z", 0, counter=3, held=(1, 1, 1), joining=False)
    (tmp_path / "members/z").mkdir()
    (tmp_path / silent.object_name).write_bytes(silent.sealed(Envelope(find_run(str(tmp_path)).id)))
    now = [100.0]
    watch = Watch(str(tmp_path), None, clock=lambda: now[0])

    def states():
        return [(row.kind, row.cells[1]) for row in watch.see().members if row.cells[0] == "z"]

    seen = {}
    for later in (0.0, 12.0, 33.0):
        now[0] = 100.0 + later
        seen[later] = states()
    sight = watch.see()
    assert seen == {0.0: [("unknown", "unknown")], 12.0: [("quiet", "quiet for 12 s")],
                    33.0: [("lost", "lost for 33 s")]}  # fmt: skip
    alive = replace(silent, counter=4)
    (tmp_path / silent.object_name).write_bytes(alive.sealed(Envelope(find_run(str(tmp_path)).id)))
    assert states() == [("training", "training")]
    reached = min(int(round) for _, round, _, _ in sight.rounds)
    assert sight.progress.startswith(f"round {reached}") and "the last one 33 s ago" in sight.progress


def test_a_single_look_waits_until_a_dead_member_is_lost_and_no_longer(tmp_path):
    begin(tmp_path)
    envelope = Envelope(find_run(str(tmp_path)).id)
    for name in ("dead", "live"):
        (tmp_path / f"members/{name}").mkdir(parents=True)
    members = {name: Member(name, 0, counter=3, held=(1,), joining=False) for name in ("dead", "live")}
    now = [0.0]

    def pause(seconds):
        now[0] += seconds
        members["live"] = replace(members["live"], counter=3 + int(now[0] // 5))
        for member in members.values():
            (tmp_path / member.object_name).write_bytes(member.sealed(envelope))

    pause(0.0)
    sight = Watch(str(tmp_path), None, clock=lambda: now[0]).settle(pause)
    assert {row.cells[0]: row.kind for row in sight.members} == {"a": "left", "dead": "lost", "live": "training"}
    members.pop("dead")
    (tmp_path / "members/dead/000000").unlink()
    began = now[0]
    Watch(str(tmp_path), None, clock=lambda: now[0]).settle(pause)
    assert now[0] - began <= 5


def test_watching_tells_what_each_fragment_does_and_what_it_waits_for(tmp_path):
    begin(tmp_path)
    envelope = Envelope(find_run(str(tmp_path)).id)
    members = [
        Member("x", 0, joining=False, phases="30033"),
        Member("y", 0, joining=False, phases="3"),
        Member("z", 0, left=True, phases="99999"),
    ]
    watch = Watch(str(tmp_path), None)
    for counter in (1, 2):
        for member in members:
            (tmp_path / f"members/{member.name}").mkdir(exist_ok=True)
            beating = replace(member, counter=counter)
            (tmp_path / beating.object_name).write_bytes(beating.sealed(envelope))
        sight = watch.see()
    assert sight.phases == (
        ("idle", "x: 1–2", Phase.IDLE.value),
        ("delivered", "x: 0, 3–4; y: 0", Phase.DELIVERED.value),
    )
    assert Phase.DELIVERED.value in shown(watch)


def test_a_member_publishes_what_its_fragments_do():
    _, a = one_member()
    while a.reduce._fragments[1].machine.phase is not Phase.ENCODING:
        a.step()
    a.finish_tick(0)
    entry = a.reduce.session.entry
    assert [entry.phase(f) for f in range(3)] == [a.reduce._fragments[0].machine.phase, Phase.ENCODING, None]


def test_a_run_that_says_how_long_it_is_has_an_estimate(tmp_path):
    begin(tmp_path, steps=1000, sync_every=100)
    now = [0.0]
    watch = Watch(str(tmp_path), None, clock=lambda: now[0])
    assert watch._progress([2, 3]) == "round 2 of 10"
    now[0] = 60.0
    assert watch._progress([4, 4]) == "round 4 of 10, the last one now, 3 min 00 s left"
    now[0] = 65.0
    assert watch._progress([4, 4]) == "round 4 of 10, the last one 5 s ago, 3 min 00 s left"


KEY = b"k" * 32


@pytest.mark.parametrize("encrypt", [None, KEY])
@pytest.mark.parametrize("planted", [b"", b"garbage", "a run without the secret"])
@pytest.mark.parametrize("shard", [Shard(0, 1), Shard(0, 2)], ids=str)
def test_what_is_not_signed_does_not_tell_how_many_ranks_the_members_have(tmp_path, planted, encrypt, shard):
    """Anyone who may write can put something where a run of sharded or unsharded members would be."""
    other = tmp_path / ("shard-0" if shard.count == 1 else "")
    other.mkdir(exist_ok=True)
    if isinstance(planted, str):
        begin(other)
    else:
        (other / "run.json").write_bytes(planted)
    for name in "ab":
        bucket = Bucket(str(tmp_path), name, key=KEY, encrypt=encrypt)
        bucket.join(replace(job([], []), shard=shard))
        bucket.leave()
    bucket = Bucket(str(tmp_path), "c", key=KEY, encrypt=encrypt)
    with pytest.raises(Mismatch, match="same number of ranks"):
        bucket.join(replace(job([], []), shard=Shard(0, 3 - shard.count)))
