"""`diloco plan`: what it recommends, prints, writes and refuses."""

import json
import math
import re
import subprocess
import sys
import tomllib
from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from diloco import laws, speed
from diloco.cli.plan import PlanConfig, main
from diloco.errors import ConfigError
from diloco.plan import quantity
from diloco.plan.check import compare
from diloco.plan.choose import Limits, Settings, choose, method_of
from diloco.plan.model import model_of_layers, model_of_preset, parse_fragments
from diloco.plan.simulate import Group, utilization
from diloco.plan.traffic import CODECS, Link
from diloco.presets import PRESETS
from diloco.runs.config import TrainConfig
from diloco.train.defaults import resolve

GIVEN = {"model": "1b", "step_seconds": "1", "link": ("100mbit",), "codec_ns": 0.0, "hook_ns": 0.0}

CASES = [
    ("1b", Group(0.1), 1e9),
    ("1b", Group(1.0, round_trip=0.08), 1e8),
    ("1b", Group(0.1), 5e7),
    ("35m", Group(0.3, replicas=4, round_trip=0.05), 1e8),
    ("tiny", Group(0.05, round_trip=0.1), 2e7),
    ("4b", Group(2.0, replicas=8), 3e8),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "group", "rate"), CASES)
def test_the_recommendation_is_within_one_percent_of_the_best(name, group, rate):
    model, link = model_of_preset(name), Link.same(rate)
    choice = choose(model, group, link, Limits())
    layers = sorted({k for k in (1, 2, 3, 4, 6, 8, 12) if k <= len(model.layers)})
    fragments = [f"{kind}:{k}" for kind in ("strided", "sequential") for k in layers] + ["balanced:15", "balanced:30"]
    grid = [*product((30, 60, 90, 175, 240, 300), fragments, (2, 5), ("e3m0",)), (300, "strided:3", 5, "bfloat16")]
    best = max(utilization(method_of(Settings(h, f, o, c), model), group, link)[0] for h, f, o, c in grid)
    own = utilization(method_of(choice.settings, model), group, link)[0]
    assert own == choice.utilization >= best - 0.01
    assert choice.settings.overlap <= 5 and choice.settings.sync_every <= 300


@pytest.mark.slow
def test_a_fast_link_gets_gentle_settings_and_a_slow_one_the_widest():
    model = model_of_preset("1b")
    fast = choose(model, Group(1.0), Link.same(1e11), Limits()).settings
    assert (fast.sync_every, fast.overlap, fast.fragments) == (30, 0, "strided:3")
    slow = choose(model, Group(0.1), Link.same(1e7), Limits()).settings
    assert slow.sync_every == 300


def test_what_is_given_is_taken_and_more_overlap_must_be_asked_for():
    model, group, link = model_of_preset("1b"), Group(0.1), Link.same(1e8)
    fixed = Limits(sync_every=40, overlap=9, fragments="balanced:4", codec="bfloat16")
    assert choose(model, group, link, fixed).settings == Settings(40, "balanced:4", 9, "bfloat16")
    few = model_of_layers(1e9, 2)
    coarse = Limits(fragments="strided:1", sync_every=100)
    asked = Limits(fragments="strided:1", sync_every=100, most_overlap=50)
    rate = Link.same(4e8 * 1.2)
    assert choose(few, group, rate, coarse).settings.overlap <= 5
    assert choose(few, group, rate, asked).settings.overlap > 5
    assert choose(few, group, rate, asked).utilization > choose(few, group, rate, coarse).utilization + 0.1


def test_a_short_run_gets_enough_rounds():
    choice = choose(model_of_preset("tiny"), Group(0.2), Link.same(1e5), Limits(steps=2000))
    assert 2000 / choice.settings.sync_every >= 50


def test_a_target_is_reached_with_the_gentlest_settings():
    model, group, link = model_of_preset("1b"), Group(1.0), Link.same(1e8)
    easy = choose(model, group, link, Limits(target=0.4))
    assert easy.utilization >= 0.4
    assert easy.settings.sync_every < choose(model, group, link, Limits()).settings.sync_every


@pytest.mark.parametrize(
    ("parameters", "replicas", "sync_every", "published"),
    [(35e6, 2, 30, 0.57), (35e6, 2, 100, 1.42), (184e6, 2, 100, 1.01), (559e6, 2, 100, 0.75), (1.27e9, 2, 100, 0.40),
     (35e6, 4, 30, 2.56), (559e6, 4, 100, 2.25), (1.27e9, 4, 100, 1.61)],
)  # fmt: skip
def test_loss_estimates_are_near_the_published_tables(parameters, replicas, sync_every, published):
    estimate = laws.loss_gap(parameters, replicas, sync_every, 1)
    assert 100 * estimate.gap == pytest.approx(published, abs=0.75)
    assert "2503.09799" in estimate.source and "2501.18512" in estimate.source and not estimate.caution


def test_loss_estimates_outside_what_was_published_say_so():
    assert "model size" in laws.loss_gap(7e9, 2, 100, 1).caution
    assert "replicas" in laws.loss_gap(1e9, 16, 100, 1).caution
    assert "sync_every" in laws.loss_gap(1e9, 2, 300, 1).caution
    assert "overlap" in laws.loss_gap(1e9, 2, 100, 6).caution
    gaps = [laws.loss_gap(1e9, m, 100, 1).gap for m in (1, 2, 3, 4, 6, 8, 12)]
    assert gaps == sorted(gaps)


@pytest.mark.parametrize(("replicas", "context", "batch", "tokens"), [(2, 2048, None, None), (3, 128, None, 10**7),
                                                                        (8, 512, 64, None)])  # fmt: skip
def test_steps_are_those_of_the_trainer(replicas, context, batch, tokens):
    parameters = PRESETS["35m"].parameters
    config, _ = resolve(TrainConfig(context=context, batch=batch, tokens=tokens), parameters, replicas)
    assert laws.steps(parameters, replicas, context, batch, tokens) == config.steps


def test_json_holds_every_method_and_agrees_with_itself(capsys):
    assert main(PlanConfig(**GIVEN, json=True)) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in plan["methods"]] == [
        "data-parallel", "DiLoCo", "streaming, as in the paper", "streaming, recommended",
    ]  # fmt: skip
    gradients, _, papers, best = plan["methods"]
    assert gradients["utilization"] < papers["utilization"] < best["utilization"]
    assert best["needed"]["90%"] <= 1e8
    n = model_of_preset("1b").parameters
    rounds = 86400 * papers["utilization"] / 100
    assert papers["bytes_per_day"] == pytest.approx(rounds * n * 4.03125 / 8, rel=1e-4)
    assert gradients["largest_burst"] == 2 * n
    assert plan["recommended"]["settings"]["overlap"] <= 5


def test_the_table_names_settings_reasons_and_sources(capsys):
    assert main(PlanConfig(**GIVEN, memory="80gb", mtbf="7d")) == 0
    out = " ".join(capsys.readouterr().out.split())  # however wide the terminal is
    for text in ("sync_every", "estimate", "arXiv 2503.09799", "goodput", "fit in 80 GB"):
        assert text in out


@pytest.mark.parametrize(
    ("link", "words", "answer"),
    [
        ("100Mbps", {}, "Yes: 100 Mbit/s is enough. 99.0 % busy"),
        (
            "1kbit",
            {},
            "No: 1 kbit/s is too slow. 0.0 % busy with the settings below (data-parallel: 0.0 %); the run takes",
        ),
        ("100mbit", {"memory": "12GiB"}, "But it does not fit: weights, gradients and optimizer take 20.4 GB"),
        ("60mbit", {"target": 0.5}, "Yes: 60 Mbit/s is enough"),
    ],
)
def test_the_plan_begins_with_yes_or_no_and_what_is_needed(capsys, link, words, answer):
    assert main(PlanConfig(**GIVEN | {"link": (link,)} | words)) == 0
    said = " ".join(capsys.readouterr().out.partition("\n\n")[0].split())
    assert answer in said
    assert link != "1kbit" or re.search(r"years, and \d+ Mbit/s would give 95 %\.$", said)


@pytest.mark.parametrize("width", [60, 80, 100])
def test_the_tables_fit_the_terminal_and_cut_no_number(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    main(PlanConfig(**GIVEN | {"link": ("1kbit",)}, mtbf="7 days"))
    out = capsys.readouterr().out
    assert "…" not in out and max(map(len, out.splitlines())) <= width
    assert "goodput" in out and "for 95 %" in out


def test_a_bucket_has_a_price(capsys):
    prices = {"egress_price": 0.09, "put_price": 0.005, "get_price": 0.0004}
    main(PlanConfig(**GIVEN, reduce="bucket", **prices, json=True, sync_every=100, overlap=5, fragments="balanced:20"))
    row = json.loads(capsys.readouterr().out)["methods"][-1]
    periods = 86400 * row["utilization"] / 100
    read = CODECS["e3m0"](model_of_preset("1b").parameters) / 1e9 * 0.09
    assert row["price_per_day"] == pytest.approx(2 * periods * (read + 20 * (2 * 0.005 + 2 * 0.0004) / 1000), rel=1e-4)


@pytest.mark.slow
def test_a_plan_with_top_k_has_plain_sgd_and_says_from_how_many_replicas_on_e3m0_sends_less(tmp_path, capsys):
    path = tmp_path / "recipe.toml"
    for replicas, said in ((35, False), (36, True)):
        main(PlanConfig(**GIVEN, codec="topk", replicas=replicas, write=path))
        note = f"With {replicas} replicas e3m0 sends fewer bytes than topk"
        assert (note in " ".join(capsys.readouterr().out.split())) == said
    config = TrainConfig(**tomllib.loads(path.read_text()))
    assert (config.codec, config.outer, config.outer_lr) == ("topk", "sgd", None)


@pytest.mark.slow
def test_a_link_that_does_not_suffice_is_told_what_top_k_would_give(capsys):
    for link, told in (("1mbit", True), ("1gbit", False)):
        main(PlanConfig(**GIVEN | {"link": (link,)}, json=True))
        reason = json.loads(capsys.readouterr().out)["recommended"]["reasons"]["codec"]
        assert ("--codec topk (0.23 bits) would be" in reason and "7.6 % more loss" in reason) == told


def test_the_residual_of_a_codec_with_feedback_is_in_the_memory(capsys):
    host = {}
    for codec in ("e3m0", "twobit"):
        main(PlanConfig(**GIVEN, codec=codec, sync_every=100, overlap=1, fragments="strided:3", json=True))
        host[codec] = json.loads(capsys.readouterr().out)["methods"][-1]["host_bytes"]
    parameters = model_of_preset("1b").parameters
    assert host["twobit"] - host["e3m0"] == pytest.approx(4 * parameters, rel=0.05)


def test_the_recipe_is_one_that_train_accepts(tmp_path, capsys):
    path = tmp_path / "recipe.toml"
    main(PlanConfig(**GIVEN, write=path, tokens="1b", json=True))
    chosen = json.loads(capsys.readouterr().out)["recommended"]
    text = path.read_text()
    config = TrainConfig(**tomllib.loads(text))
    assert config.model == "1b" and config.method == "streaming" and config.tokens == 10**9
    for name, value in chosen["settings"].items():
        assert getattr(config, name) == value
    lines = text.splitlines()
    assert all(comment.startswith("# ") and len(comment) > 2 for comment in lines[::2])


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["html", "svg", "png"])
def test_plots_are_drawn(tmp_path, capsys, ending):
    path = tmp_path / f"out.{ending}"
    assert main(PlanConfig(**GIVEN, plot=path)) == 0
    data = path.read_bytes()
    if ending == "png":
        assert data.startswith(b"\x89PNG")
    elif ending == "svg":
        assert data.count(b"<polyline") == 4 and b"your link, 100 Mbit/s" in data
    else:
        text = data.decode()
        said = " ".join(capsys.readouterr().out.partition("\n\n")[0].split())
        assert said in text, "the page begins with the answer too"
        shown = json.loads(re.findall(r'<script type="application/json" id="data">(.*)</script>', text)[0])["plot"]
        assert len(shown["curves"]) == 4 and shown["mark"] == [1e8, "your link, 100 Mbit/s"]
        assert (shown["share"], shown["unit"]) == ("utilization", "bit/s")
        for part in ("What it costs", '<th scope="row">streaming, recommended</th>', "without visible loss",
                     "others would be recommended", "Times are for"):  # fmt: skip
            assert part in text, part


@pytest.mark.slow
def test_planning_on_a_machine_whose_speed_is_known_needs_no_torch_and_names_the_assumption(remembered):
    program = (
        "import sys; from diloco.cli.plan import PlanConfig, main;"
        "main(PlanConfig(model='1b', step_seconds='1', link=('1gbit',), json=True)); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, text=True)
    assert done.returncode == 0, done.stderr
    notes = " ".join(json.loads(done.stdout)["notes"])
    assert "takes 7.5 ns of the communication thread" in notes and "30.0 ns of the training thread" in notes
    assert "as measured on this machine. Give those of the machines that will train" in notes


@pytest.fixture
def remembered(tmp_path, monkeypatch):
    """A machine that encodes in 1.5 ns, decodes in 2, steps in 2 and copies in 30."""
    encode, decode = dict.fromkeys(CODECS, 1.5), dict.fromkeys(CODECS, 2.0)
    figures = {"encode": encode, "decode": decode, "outer": 2.0, "hook": 30.0}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "diloco").mkdir()
    (tmp_path / "diloco/speed.json").write_text(json.dumps({speed._key(): figures}))


def test_the_recommendation_syncs_less_often_where_the_hook_is_slow(remembered, capsys):
    def recommended(**given):
        main(PlanConfig(model="1b", step_seconds="1", link=("10gbit",), json=True, **given))
        return json.loads(capsys.readouterr().out)["recommended"]

    slow, quick = recommended(), recommended(codec_ns=0.0, hook_ns=0.0)
    assert quick["settings"]["sync_every"] == 30 and quick["utilization"] == pytest.approx(1.0, abs=0.01)
    assert slow["settings"]["sync_every"] > 100
    assert slow["utilization"] < 0.95  # 30 s a round of all fragments


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"link": ("-1gbit",)}, "above 0"),
        ({"link": ("0gbit",)}, "above 0"),
        ({"link": ("1gigawatt",)}, "allowed: bit, bps, kbit"),
        ({"link": ("1",)}, "allowed: bit, bps"),
        ({"link": ("fast",)}, "write 1gbit"),
        ({"link": ("1.2.3gbit",)}, "write 1gbit"),
        ({"link": ("up=1gbit",)}, "up=50mbit,down=500mbit"),
        ({"link": ()}, "give --link 1gbit"),
        ({"link": ("1gbit",) * 3}, "one for all"),
        ({"round_trip": "80"}, "allowed: us, ms, s"),
        ({"round_trip": "-1ms"}, "0 or more"),
        ({"fragments": "25"}, "give 1 to 24"),
        ({"fragments": "strided:25"}, "strided:1 to strided:24"),
        ({"fragments": "woven:3"}, "strided:N"),
        ({"overlap": 100, "sync_every": 100}, "give 0 .* to 99"),
        ({"overlap": -1}, "give 0"),
        ({"sync_every": 0}, "at least 1"),
        ({"codec": "int3"}, "give one of e3m0"),
        ({"model": "2b"}, "give one of nano, tiny"),
        ({"model": None}, "give --model 1b, or"),
        ({"layers": 3}, "either"),
        ({"step_seconds": None}, "give --step-seconds"),
        ({"step_seconds": "-1"}, "above 0"),
        ({"step_seconds": "fast"}, "write 80ms, 1.5s"),
        ({"link": ("100MB/s",)}, "bits or bytes.* 100Mbit if bits were meant, 800Mbit if bytes"),
        ({"link": ("1gb",)}, "bits or bytes"),
        ({"replicas": 0}, "at least 1"),
        ({"speeds": (1.0,)}, "2 numbers above 0"),
        ({"jitter": -0.1}, "from 0 to 1"),
        ({"codec_ns": -1.0}, "codec_ns=-1.0: give 0 or more"),
        ({"hook_ns": -1.0}, "hook_ns=-1.0: give 0 or more"),
        ({"target": 95.0}, "up to 1"),
        ({"batch": 0}, "at least 1"),
        ({"tokens": "many"}, "write 25b"),
        ({"memory": "80"}, "allowed: b, kb"),
        ({"quorum": 3, "reduce": "bucket"}, "give 1 to 2"),
        ({"quorum": 1}, "only --reduce bucket"),
        ({"plot": "out.pdf"}, "end in .html, .svg or .png"),
    ],
)
def test_bad_input_is_refused_in_one_line_that_says_what_is_allowed(change, says, tmp_path):
    if "plot" in change:
        change = {"plot": tmp_path / change["plot"]}
    with pytest.raises(ConfigError, match=says) as error:
        main(PlanConfig(**GIVEN | change))
    assert "\n" not in str(error.value)


def test_a_number_of_fragments_becomes_layers_to_a_fragment():
    assert parse_fragments("8", 24) == "strided:3"
    assert parse_fragments("balanced:90", 24) == "balanced:90"


def run_folder(path, *, steps=100, compute=0.1, flight=0.5, sync_every=10, overlap=0, fragments=1, nbytes=10**6):
    """A run in which every round takes `flight` seconds, as `diloco train` would have written it."""
    config = f'method = "streaming"\nsync_every = {sync_every}\noverlap = {overlap}\nreplicas = 2\n'
    path.mkdir()
    (path / "config.toml").write_text(config)
    offsets = [f * sync_every // fragments for f in range(fragments)]
    for replica in range(2):
        folder = path / f"replica-{replica}"
        folder.mkdir()
        clock = exposed = 0.0
        free, under_way, metrics, events = 0.0, [], [], []
        for step in range(1, steps + 1):
            began = clock
            clock += compute
            for f, offset in enumerate(offsets):
                if step - offset > 0 and (step - offset) % sync_every == 0:
                    free = max(clock, free) + flight
                    under_way.append((step, f, clock, free))
            while under_way and under_way[0][0] + overlap <= step:
                sent_step, f, sent, arrives = under_way.pop(0)
                waited = max(arrives - clock, 0.0)
                clock, exposed = clock + waited, exposed + waited
                events.append({"event": "round", "seconds": clock, "step": step, "fragment": f,
                               "index": (sent_step - offsets[f]) // sync_every - 1, "sent_step": sent_step,
                               "sent_seconds": sent, "flight_seconds": arrives - sent, "exposed_seconds": waited,
                               "bytes_sent": nbytes, "bytes_received": nbytes, "members": 2})  # fmt: skip
            metrics.append({"step": step, "tokens": step, "seconds": clock, "train/loss": 1.0, "train/lr": 0.1,
                            "train/grad_norm": 1.0, "train/step_seconds": clock - began,
                            "train/tokens_per_second": 1.0, "sync/bytes_sent": 0, "sync/bytes_received": 0,
                            "sync/seconds_hidden": 0.0, "sync/seconds_exposed": exposed,
                            "sync/in_flight": len(under_way)})  # fmt: skip
        (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in metrics))
        (folder / "events.jsonl").write_text("".join(json.dumps(x) + "\n" for x in events))
    return path


def test_a_blocking_run_is_measured_and_predicted_alike(tmp_path, capsys):
    folder = run_folder(tmp_path / "run")
    comparison = compare(folder)
    assert comparison.measured == pytest.approx(10 / 15)
    assert comparison.predicted == pytest.approx(10 / 15, rel=1e-6)
    assert comparison.rate == pytest.approx(16e6)
    assert str(compare(folder)) == "utilization: predicted 66.7 %, measured 66.7 % (link 16 Mbit/s, as its rounds ran)"
    assert main(PlanConfig(check=folder)) == 0
    assert capsys.readouterr().out == f"run: {compare(folder)}\n"
    assert main(PlanConfig(check=folder, json=True)) == 0
    assert json.loads(capsys.readouterr().out)["measured"] == pytest.approx(10 / 15)


def test_an_overlapped_run_is_predicted_from_its_link(tmp_path):
    folder = run_folder(tmp_path / "run", overlap=2, fragments=3, flight=0.25, steps=103)
    rate = Link.same(8e6 / 0.25)
    comparison = compare(folder, rate)
    # The two sends whose result the last steps no longer await are in the prediction's total only.
    assert comparison.measured == pytest.approx(comparison.predicted, abs=0.02)
    assert 0.7 < comparison.measured < 0.9
    faster = compare(folder, Link.same(1e12))
    assert faster.predicted == pytest.approx(1.0, abs=1e-4)
    assert math.isclose(faster.measured, comparison.measured)


def test_the_rate_is_that_of_a_usual_round_of_the_replica_that_waited_for_nobody(tmp_path):
    folder = run_folder(tmp_path / "run")
    early, late = (folder / f"replica-{m}" / "events.jsonl" for m in range(2))
    rounds = [json.loads(text) for text in early.read_text().splitlines()]
    early.write_text("".join(json.dumps(each | {"flight_seconds": 2.0}) + "\n" for each in rounds))
    rounds[0]["flight_seconds"] = 0.001
    late.write_text("".join(json.dumps(each) + "\n" for each in rounds))
    assert compare(folder).rate == pytest.approx(16e6)


def test_a_folder_that_is_not_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="diloco train"):
        compare(tmp_path)


QUANTITIES = st.one_of(st.text(max_size=30), st.text("0123456789.eE+-_ kmgtbKMGTBipsd/uonw=,²∞", max_size=30),
                       st.from_regex(r"[0-9.]{1,9}(e[0-9]{1,4})?[kmgtKMGT]?(B|b|bit|bps|B/s|ms|min|gb|t)?",
                                     fullmatch=True))  # fmt: skip


@given(QUANTITIES)
@example("1.2.3MB/s")
@example("1e308t")
@example("1e308tbit")
@example("up=..MB,down=1gbit")
@example("up=1gbit,down=..MB")
def test_any_text_is_a_finite_quantity_or_a_config_error(text):
    for read in (quantity.rate, quantity.seconds, quantity.count, quantity.size, quantity.up_down):
        try:
            value = read(text)
        except ConfigError:
            continue
        assert all(0 <= number < float("inf") for number in (value if isinstance(value, tuple) else [value]))
