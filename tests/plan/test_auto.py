"""The planner's choice for measured facts. All numbers are virtual."""

from dataclasses import asdict, replace
from functools import partial

import pytest

from diloco.autopilot.pilot import Facts, lines, worst
from diloco.plan.choose import Limits, choose
from diloco.plan.methods import model_of_layers

MODEL = model_of_layers(4e6, 12)
FACTS = Facts(step_seconds=0.05, rate=9e6, round_trip=0.001, hook_ns=1.0,
              codec_ns={"e3m0": 2.0, "twobit": 8.0, "float32": 1.0})  # fmt: skip


def chosen(facts, **limits):
    return choose(MODEL, partial(facts.group, replicas=2), facts.rate, Limits(**limits))


@pytest.mark.slow
def test_a_slower_link_gets_a_larger_sync_every_and_then_a_smaller_codec():
    settings = [chosen(replace(FACTS, rate=mbit * 1e6)).settings for mbit in (100, 9, 3, 0.7)]
    assert [s.sync_every for s in settings] == sorted(s.sync_every for s in settings)
    assert [s.codec for s in settings] == ["e3m0", "e3m0", "e3m0", "twobit"]
    assert settings[0].sync_every < settings[2].sync_every


def test_explicit_settings_are_kept_and_every_setting_has_a_reason():
    choice = chosen(FACTS, sync_every=77, codec="float32")
    assert (choice.settings.sync_every, choice.settings.codec) == (77, "float32")
    facts, *reasons, _ = lines(choice, FACTS)
    assert "a step takes 0.05 s; the link carries 9 Mbit/s each way, round trip 1 ms" in facts
    assert [line.split(" = ")[0].strip() for line in reasons] == ["sync_every", "fragments", "overlap", "codec"]
    assert reasons[0].endswith("77: set explicitly") and reasons[3].endswith("float32: set explicitly")


def test_the_reason_for_a_smaller_codec_names_the_utilization_of_the_first():
    reason = chosen(replace(FACTS, rate=0.7e6)).reasons["codec"]
    assert "2.06 bits per value" in reason and "e3m0 reaches at most" in reason


def test_the_slowest_replica_sets_the_pace():
    other = replace(FACTS, step_seconds=0.08, rate=20e6, codec_ns={"e3m0": 1.0, "twobit": 9.0, "float32": 1.0})
    assert worst([asdict(FACTS), asdict(other)]) == replace(
        FACTS, step_seconds=0.08, codec_ns={"e3m0": 2.0, "twobit": 9.0, "float32": 1.0}
    )
