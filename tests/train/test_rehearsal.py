"""`diloco plan --rehearse`: what the real model takes of a rank is what the plan says."""

import json

import pytest

from diloco.cli.plan import PlanConfig, main
from diloco.errors import ConfigError
from diloco.plan.choose import Settings
from diloco.train.rehearsal import empty_model, rehearse

FLAGS = {"step_seconds": "4", "link": "1gbit", "codec_ns": 2.0, "bus": "25GB/s", "rehearse": True}
LLAMAS = {"8b": (4096, 32, 32, 14336), "70b": (8192, 80, 64, 28672)}


@pytest.fixture(scope="module")
def llamas(tmp_path_factory):
    """Folders with the configs of Llama 3, without weights."""
    transformers = pytest.importorskip("transformers")
    folders = {}
    for name, (width, layers, heads, mlp) in LLAMAS.items():
        folders[name] = tmp_path_factory.mktemp(name)
        transformers.LlamaConfig(
            hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=8,
            intermediate_size=mlp, vocab_size=128256, max_position_embeddings=8192,
        ).save_pretrained(folders[name])  # fmt: skip
    return folders


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shards", "values", "codec"), [("8b", 8, 8.03e9, "e3m0"), ("70b", 64, 70.55e9, "float32")]
)
def test_the_plan_is_within_five_percent_of_the_real_model(llamas, capsys, name, shards, values, codec):
    model = f"hf:{llamas[name]}"
    assert main(PlanConfig(**FLAGS, model=model, shards=shards, codec=codec, fragments="strided:3", json=True)) == 0
    plan = json.loads(capsys.readouterr().out)
    row, real = plan["methods"][-1], plan["rehearsal"]
    assert real["host_bytes"] > 8 * values / shards  # all of the model
    assert 12 * real["largest_fragment"] == real["device_bytes"]
    assert real["largest_burst"] == pytest.approx(row["largest_burst"] / shards, rel=0.05)
    assert real["device_bytes"] == pytest.approx(row["device_bytes"], rel=0.05)
    assert real["host_bytes"] == pytest.approx(row["host_bytes"], rel=0.05)
    assert real["pinned_bytes"] < real["host_bytes"] < real["last_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 8])
def test_the_plan_is_within_five_percent_with_the_state_on_the_device(capsys, replicas):
    settings = {"model": "4b", "shards": 8, "fragments": "strided:3", "replicas": replicas, "state": "device"}
    assert main(PlanConfig(**FLAGS, **settings, json=True)) == 0
    plan = json.loads(capsys.readouterr().out)
    for name in ("device_bytes", "host_bytes"):
        assert plan["rehearsal"][name] == pytest.approx(plan["methods"][-1][name], rel=0.05), name


@pytest.mark.slow
def test_a_rehearsal_is_printed_beside_the_plan(capsys):
    assert main(PlanConfig(**FLAGS, model="4b", shards=8, fragments="strided:3")) == 0
    out = capsys.readouterr().out.partition("Rehearsal")[2]
    assert "one of 8 ranks" in out
    lines = {line[:30].strip(): line.split()[-4:] for line in out.splitlines()}
    assert lines["fragments"][-2:] == ["13", "13"]
    real, _, planned, _ = lines["memory of the accelerator"]
    assert float(real) == pytest.approx(float(planned), rel=0.05)


def test_rank_0_has_its_part_of_every_fragment_and_a_bucket_gets_what_the_host_encodes():
    def taken(shards, reduce="collective"):
        settings = Settings(10, "strided:6", 1, "e3m0")
        return rehearse(empty_model("35m", 2048), settings, replicas=2, shards=shards, reduce=reduce)

    whole, part = taken(1), taken(4)
    assert whole.fragments == part.fragments
    assert part.largest_fragment == pytest.approx(whole.largest_fragment / 4, rel=0.01)
    assert taken(1, "bucket").pinned_bytes > whole.pinned_bytes
    assert taken(1, "bucket").bus_bytes == 12 * whole.largest_fragment


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"model": None, "parameters": 8_000_000_000, "layers": 32}, "set --model"),
        ({"model": "1b", "bus": "none"}, "leave out --bus none"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        main(PlanConfig(**FLAGS | flags))
