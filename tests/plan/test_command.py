"""`diloco plan`: its recommendations, output, files and errors."""

import json
import re
import subprocess
import sys
from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from diloco.cli.plan import PlanConfig, main
from diloco.codecs import device
from diloco.codecs.codec import codec_named
from diloco.errors import ConfigError
from diloco.plan import laws, quantity
from diloco.plan.choose import Limits, Settings, choose, method_of
from diloco.plan.methods import model_of_preset
from diloco.plan.simulate import Group, utilization
from diloco.plan.traffic import CODECS, bus_bytes
from diloco.runs.config import TUNED, TrainConfig
from diloco.runs.flags import parse
from diloco.runs.presets import PRESETS
from diloco.train.settings import resolve

FLAGS = {"model": "1b", "step_seconds": "1", "link": "100mbit", "codec_ns": 0.0, "hook_ns": 0.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "group", "rate"),
    [("1b", Group(0.1), 1e9), ("1b", Group(1.0, round_trip=0.08), 1e8), ("1b", Group(0.1), 5e7),
     ("35m", Group(0.3, replicas=4, round_trip=0.05), 1e8), ("tiny", Group(0.05, round_trip=0.1), 2e7),
     ("4b", Group(2.0, replicas=8), 3e8)],
)  # fmt: skip
def test_the_recommendation_is_within_one_percent_of_the_best(name, group, rate):
    model, link = model_of_preset(name), rate
    choice = choose(model, lambda codec: group, link, Limits())
    layers = sorted({k for k in (1, 2, 3, 4, 6, 8, 12) if k <= len(model.layers)})
    fragments = [f"{kind}:{k}" for kind in ("strided", "sequential") for k in layers] + ["balanced:15", "balanced:30"]
    grid = [*product((30, 60, 90, 175, 240, 300), fragments, (2, 5), ("e3m0",)), (300, "strided:3", 5, "bfloat16")]
    best = max(utilization(method_of(Settings(h, f, o, c), model), group, link)[0] for h, f, o, c in grid)
    assert utilization(method_of(choice.settings, model), group, link)[0] == choice.utilization >= best - 0.01
    assert choice.settings.overlap <= 5 and choice.settings.sync_every <= 300


def test_a_short_run_gets_enough_rounds():
    choice = choose(model_of_preset("tiny"), lambda codec: Group(0.2), 1e5, Limits(steps=2000))
    assert 2000 / choice.settings.sync_every >= 50


@pytest.mark.parametrize(
    ("parameters", "replicas", "sync_every", "published"),
    [(35e6, 2, 30, 0.57), (35e6, 2, 100, 1.42), (184e6, 2, 100, 1.01), (559e6, 2, 100, 0.75), (1.27e9, 2, 100, 0.40),
     (35e6, 4, 30, 2.56), (559e6, 4, 100, 2.25), (1.27e9, 4, 100, 1.61)],
)  # fmt: skip
def test_loss_estimates_are_near_the_published_tables(parameters, replicas, sync_every, published):
    estimate = laws.loss_gap(parameters, replicas, sync_every, 1)
    assert 100 * estimate.gap == pytest.approx(published, abs=0.75)
    assert not estimate.caution


def test_loss_estimates_outside_the_published_range_say_so():
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
    assert main(PlanConfig(**FLAGS, json=True)) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in plan["methods"]] == ["data-parallel", "DiLoCo", "streaming, recommended"]
    gradients, _, best = plan["methods"]
    assert gradients["utilization"] < best["utilization"] and best["needed"]["90%"] <= 1e8
    n, chosen = model_of_preset("1b").parameters, plan["recommended"]["settings"]
    rounds = 86400 * best["utilization"] / chosen["sync_every"]
    assert best["bytes_per_day"] == pytest.approx(rounds * n * 4.03125 / 8, rel=1e-4)
    assert gradients["largest_burst"] == 2 * n
    assert chosen["overlap"] <= 5


def test_json_says_null_where_no_rate_is_enough(capsys):
    assert main(PlanConfig(**FLAGS | {"round_trip": "10s"}, json=True)) == 0
    plan = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert plan["methods"][0]["needed"]["99%"] is None


@pytest.mark.parametrize(
    ("link", "answer"),
    [
        ("100Mbps", r"Yes: 100 Mbit/s is enough. .* 99.9 % utilization"),
        ("1kbit", r"No: 1 kbit/s is too slow. .* 0.0 % utilization .* years. 95 % would take \d+ Mbit/s."),
    ],
)
def test_the_plan_starts_with_yes_or_no_and_the_rate_needed(capsys, link, answer):
    assert main(PlanConfig(**FLAGS | {"link": link})) == 0
    assert re.match(answer, " ".join(capsys.readouterr().out.partition("\n\n")[0].split()))


@pytest.mark.parametrize("width", [60, 100])
def test_the_tables_fit_the_terminal_and_cut_no_number(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    main(PlanConfig(**FLAGS | {"link": "1kbit"}))
    out = capsys.readouterr().out
    assert "…" not in out and max(map(len, out.splitlines())) <= width
    for text in ("for 95 %", "sync_every", "estimate", "2503.09799"):
        assert text in out


def test_the_recommended_flags_are_those_of_train(capsys):
    main(PlanConfig(**FLAGS))
    out = capsys.readouterr().out.partition("Recommended settings")[2]
    words = [word for flag in re.findall(r"^(--\S+ \S+)", out, re.MULTILINE) for word in flag.split()]
    main(PlanConfig(**FLAGS, json=True))
    recommended = json.loads(capsys.readouterr().out)["recommended"]["settings"]
    config = parse(TrainConfig, words)
    assert {name: getattr(config, name) for name in TUNED} == recommended


@pytest.mark.slow
def test_planning_needs_no_torch():
    program = (
        "import sys; from diloco.cli.plan import PlanConfig, main;"
        "main(PlanConfig(model='1b', step_seconds='1', link='1gbit', json=True)); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, text=True)
    assert done.returncode == 0, done.stderr


def planned(capsys, **flags):
    assert main(PlanConfig(**FLAGS | flags, json=True)) == 0
    return json.loads(capsys.readouterr().out)


def test_an_accelerator_pays_memory_for_its_buffers_and_rounds_wait_for_its_copies(capsys):
    settings = {"fragments": "balanced:10", "sync_every": 100, "overlap": 1, "codec": "e3m0"}
    n = model_of_preset("1b").parameters
    cpu = planned(capsys, **settings, bus="none")["methods"][-1]
    assert cpu["device_bytes"] == 0
    assert cpu["host_bytes"] == pytest.approx(8 * n + n / 10 * (8 + 4 + 0.504), rel=2e-3)
    host = planned(capsys, **settings, bus="50GB/s")["methods"][-1]
    assert host["device_bytes"] == pytest.approx(3 * 4 * n / 10, rel=1e-3)
    assert host["host_bytes"] == pytest.approx(8 * n + n / 10 * (8 + 0.504), rel=2e-3)  # it encodes by itself
    assert host["needed"] == pytest.approx(cpu["needed"], rel=0.05)
    device = planned(capsys, **settings, bus="1GB/s", state="device")["methods"][-1]
    assert device["device_bytes"] == pytest.approx(8.504 * n + 3 * 4 * n / 10, rel=2e-3)
    assert device["host_bytes"] == pytest.approx(2 * 0.504 * n / 10, rel=0.03)
    crowded = planned(capsys, **settings, bus="1GB/s")["methods"][-1]  # 1.08 s of copies a round
    assert crowded["utilization"] < host["utilization"] - 0.03 and crowded["utilization"] < device["utilization"] - 0.03
    shard = planned(capsys, **settings, bus="1GB/s", shards=8)["methods"][-1]
    for name in ("device_bytes", "host_bytes"):
        assert shard[name] == pytest.approx(host[name] / 8, rel=2e-3)
    assert shard["utilization"] == pytest.approx(host["utilization"], abs=0.02)
    assert shard["largest_burst"] == host["largest_burst"]


@pytest.mark.parametrize("name", CODECS)
def test_a_delta_takes_on_the_bus_what_the_device_leaves_of_it(name):
    codec = codec_named(name)
    encoded = codec.nbytes(1 << 20) / (1 << 20) if device.supports(codec) else 4.0
    assert bus_bytes(name, 2) == pytest.approx(8 + encoded) and bus_bytes(name, 2, "bucket") == 12.0


def test_what_is_assumed_is_said_in_one_line_and_nothing_that_was_set(capsys):
    def assumed(**flags):
        unset = {"codec_ns": None, "hook_ns": None}
        return [note for note in planned(capsys, **{**unset, **flags})["notes"] if note.startswith("Assumed")]

    (line,) = assumed()
    assert "--codec-ns 5.7, --bus 20GB/s." in line and "with --device" in line
    assert assumed(bus="25GB/s", codec_ns=2.0) == assumed(bus="25GB/s", state="device") == []
    assert assumed(bus="none")[0].startswith("Assumed, not measured: --codec-ns 5.7, --hook-ns 2.7.")


def test_the_recommendation_syncs_less_often_where_the_hook_is_slow(capsys):
    slow, quick = (planned(capsys, link="10gbit", hook_ns=ns)["recommended"] for ns in (30.0, 0.0))
    assert quick["settings"]["sync_every"] == 30 and quick["utilization"] == pytest.approx(1.0, abs=0.01)
    assert slow["settings"]["sync_every"] > 100
    assert slow["utilization"] < 0.95  # 30 s per round of all fragments


@pytest.mark.parametrize(("members", "egress"), [(8, 68.75), (64, 77.80)])
def test_a_bucket_costs_what_its_requests_were_counted_to_cost_and_little_with_direct_payloads(capsys, members, egress):
    """In docs/bucket.md, for a model of 1B in 24 fragments."""
    flags = {"model": None, "parameters": 10**9, "layers": 24, "replicas": members, "reduce": "bucket"}
    flags |= {"link": "100gbit", "sync_every": 100, "fragments": "strided:1", "overlap": 1}
    cost = r"about \$([\d.]+) a day: \$([\d.]+) for requests, and \$([\d.]+) for .*announce\): \$([\d.]+)\."

    def dollars(**more):
        notes = " ".join(planned(capsys, **flags, **more)["notes"])
        return [float(figure) for figure in re.search(cost, notes).groups()]

    total, requests, read, direct = dollars()
    assert total == pytest.approx(requests + read, abs=0.011) and requests == pytest.approx(1.1, abs=0.1)
    assert read == pytest.approx(egress, rel=0.02) and direct == pytest.approx(1.40, abs=0.1)
    free = dollars(prices=(5.0, 0.4, 0.0))
    assert free == [requests, requests, 0.0, requests]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"link": "0gbit"}, "above 0"),
        ({"link": "1gigawatt"}, "allowed: bit, bps, kbit"),
        ({"link": "fast"}, "write 1gbit"),
        ({"link": "100MB/s"}, "bits or bytes.* 100Mbit, or 800Mbit"),
        ({"round_trip": "80"}, "allowed: us, ms, s"),
        ({"round_trip": "-1ms"}, "0 or more"),
        ({"fragments": "strided:25"}, "strided:1 to strided:24"),
        ({"fragments": "woven:3"}, "strided:N"),
        ({"overlap": 100, "sync_every": 100}, "overlap=100"),
        ({"overlap": -1}, "overlap=-1"),
        ({"sync_every": 0}, "sync_every=0"),
        ({"codec": "int3"}, "e3m0"),
        ({"model": "2b"}, "use one of nano, tiny"),
        ({"model": None}, "set --model 1b, or"),
        ({"parameters": 7}, "either"),
        ({"layers": 0}, "at least 1"),
        ({"replicas": 0}, "at least 1"),
        ({"batch": 0}, "at least 1"),
        ({"step_seconds": "-1"}, "above 0"),
        ({"bus": "50gbit"}, "large B: 50GB/s"),
        ({"bus": "0GB/s"}, "above 0"),
        ({"shards": 0}, "shards=0"),
        ({"state": "device", "bus": "none"}, "use --state host"),
        ({"state": "device", "codec": "float32"}, "--codec e3m0 or bfloat16"),
        ({"state": "device", "reduce": "bucket"}, "--reduce collective"),
        ({"prices": (5.0, 0.4)}, "three numbers"),
        ({"hook_ns": -1.0}, "hook_ns=-1.0: must be 0 or more"),
        ({"tokens": 0}, "at least 1"),
    ],
)
def test_bad_input_is_refused_in_one_line_that_says_what_is_allowed(change, message):
    with pytest.raises(ConfigError, match=message) as error:
        main(PlanConfig(**FLAGS | change))
    assert "\n" not in str(error.value)


QUANTITIES = st.one_of(st.text(max_size=30), st.text("0123456789.eE+-_ kmgtbKMGTBipsd/uonw=,²∞", max_size=30),
                       st.from_regex(r"[0-9.]{1,9}(e[0-9]{1,4})?[kmgtKMGT]?(B|b|bit|bps|B/s|ms|min|gb|t)?",
                                     fullmatch=True))  # fmt: skip


@given(QUANTITIES)
@example("1.2.3MB/s")
@example("1e308t")
@example("1e308tbit")
def test_any_text_is_a_finite_quantity_or_a_config_error(text):
    for read in (quantity.rate, quantity.bandwidth, quantity.seconds):
        try:
            value = read(text)
        except ConfigError:
            continue
        assert 0 <= value < float("inf")
