"""The planner's choice for what was measured. All numbers are virtual."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from diloco.plan.auto import Facts, lines, pick, pick_first, worst
from diloco.plan.choose import Limits, allowed, method_of
from diloco.plan.model import model_of_layers, model_of_preset
from diloco.plan.simulate import utilization
from diloco.plan.traffic import Link

MODEL = model_of_layers(4e6, 12)
FACTS = Facts(step_seconds=0.05, rate=9e6, round_trip=0.001, hook_ns=1.0,
              codec_ns={"e3m0": 2.0, "twobit": 8.0, "float32": 1.0})  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mbit", [1, 3, 6, 9, 18, 100, 1000])
def test_the_choice_is_within_one_percent_of_the_best_of_all_settings_that_it_may_take(mbit):
    facts = replace(FACTS, rate=mbit * 1e6)
    choice = pick(MODEL, facts, 2, Limits())
    group, link = facts.group(choice.settings.codec, 2), Link.same(facts.rate)
    every = allowed(MODEL, Limits(codec=choice.settings.codec))
    best = max(float(utilization(method_of(s, MODEL), group, link)[0]) for s in every if s.overlap == 5)
    assert choice.utilization >= 0.99 * best


@pytest.mark.slow
def test_a_slower_link_gets_a_larger_sync_every_and_then_a_smaller_codec():
    chosen = [pick(MODEL, replace(FACTS, rate=mbit * 1e6), 2, Limits()).settings for mbit in (100, 9, 3, 0.7)]
    assert [s.sync_every for s in chosen] == sorted(s.sync_every for s in chosen)
    assert [s.codec for s in chosen] == ["e3m0", "e3m0", "e3m0", "twobit"]
    assert chosen[0].sync_every < chosen[2].sync_every


def test_what_is_given_stays_and_says_so():
    choice = pick(MODEL, FACTS, 2, Limits(sync_every=77, codec="float32"))
    assert (choice.settings.sync_every, choice.settings.codec) == (77, "float32")
    said = "\n".join(lines(choice, FACTS))
    assert "sync_every = 77: given" in said and "codec = float32: given" in said
    assert "a step takes 0.05 s; the link gives 9 Mbit/s each way, round trip 1 ms" in said


def test_every_choice_has_a_reason_and_a_smaller_codec_says_what_the_first_would_give():
    said = lines(pick(MODEL, replace(FACTS, rate=0.7e6), 2, Limits()), FACTS)
    assert [line.split(" = ")[0].strip() for line in said[1:5]] == ["sync_every", "fragments", "overlap", "codec"]
    assert "2.06 bits a value, with error feedback" in said[4] and "busy at best with e3m0" in said[4]


def test_the_page_shows_what_is_printed():
    page = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()
    facts = Facts(step_seconds=1.0, rate=94.1e6, round_trip=0.0805, hook_ns=0.0, codec_ns={"e3m0": 2.0, "twobit": 8.0})
    said = lines(pick_first(model_of_preset("1b"), facts, 2, Limits(steps=20_000)), facts)
    assert "```\n" + "\n".join(said) + "\n```" in page


def test_the_slowest_replica_sets_the_pace():
    other = replace(FACTS, step_seconds=0.08, rate=20e6, codec_ns={"e3m0": 1.0, "twobit": 9.0, "float32": 1.0})
    assert worst([asdict(FACTS), asdict(other)]) == replace(
        FACTS, step_seconds=0.08, codec_ns={"e3m0": 2.0, "twobit": 9.0, "float32": 1.0}
    )


@pytest.mark.slow
@pytest.mark.parametrize("mbit", [3, 9, 18, 100, 1000])
def test_the_first_fragments_leave_room_for_a_slower_link_and_cost_nothing_on_this_one(mbit):
    facts = replace(FACTS, rate=mbit * 1e6)
    first, plain = pick_first(MODEL, facts, 2, Limits()), pick(MODEL, facts, 2, Limits())
    assert first.utilization >= 0.99 * plain.utilization
    assert first.settings.sync_every <= plain.settings.sync_every
    slower = replace(facts, rate=facts.rate / 3)
    later = pick(MODEL, slower, 2, Limits(fragments=first.settings.fragments)).utilization
    assert later >= 0.97 * pick(MODEL, slower, 2, Limits()).utilization
