"""sync_every and codec change in mid-run: one rule, the same decision and the same step everywhere, exact resume."""

import io
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco import E3M0, Balanced, DiLoCo, Mismatch, TwoBit
from diloco.codec import Float32
from diloco.formats import FORMATS
from diloco.reduce import local
from diloco.schedule import Schedule
from diloco.terms import Terms, agree, from_numbers, to_numbers
from diloco.tuning import Tuning
from tests.support.fake_reduce import Script
from tests.support.models import Tiny, adamw, anchors, flat, steps
from tests.support.processes import run

pytestmark = pytest.mark.slow  # replicas train for many rounds

HELD = Terms(30, "e3m0")
TERMS = st.builds(Terms, st.integers(1, 300), st.sampled_from(list(FORMATS)))


def test_all_must_wish_the_same_direction_and_the_slowest_link_decides():
    assert agree([Terms(50, "e3m0"), Terms(75, "e3m0"), Terms(50, "e3m0")], HELD) == Terms(75, "e3m0")
    assert agree([Terms(50, "twobit"), Terms(75, "e3m0")], HELD) == Terms(75, "twobit")
    assert agree([Terms(30, "e3m0"), Terms(50, "e3m0")], Terms(100, "e3m0")) == Terms(50, "e3m0")
    assert agree([Terms(50, "e3m0"), Terms(20, "e3m0")], HELD) is None  # one to send less, one to send more
    assert agree([Terms(50, "e3m0"), None], HELD) is None
    assert agree([HELD, HELD], HELD) is None
    assert agree([Terms(300, "e3m0"), Terms(150, "twobit")], Terms(200, "twobit")) == Terms(300, "e3m0")  # both: more
    assert (
        agree([Terms(300, "bfloat16"), Terms(150, "twobit")], Terms(200, "twobit")) is None
    )  # no terms are more for all
    assert agree([], HELD) is None


def test_a_codec_without_a_name_stays():
    assert agree([Terms(50, ""), Terms(75, "")], Terms(30, "")) == Terms(75, "")
    assert agree([Terms(50, "e3m0"), Terms(75, "e3m0")], Terms(30, "")) is None


@given(st.lists(st.one_of(st.none(), TERMS), min_size=1, max_size=5), TERMS)
def test_the_order_of_the_replicas_does_not_matter_and_nobody_gets_less_sync_every_than_it_wished(wishes, held):
    found = agree(wishes, held)
    assert found == agree(wishes[::-1], held)
    if found is not None:
        assert all(wish is not None and found.sync_every >= wish.sync_every for wish in wishes)


@given(st.one_of(st.none(), TERMS, st.builds(Terms, st.integers(1, 300), st.just(""))))
def test_a_wish_survives_the_header(wish):
    assert from_numbers(*to_numbers(wish)) == wish


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 12), st.integers(1, 5))
def test_at_a_change_no_fragment_is_sent_sooner_or_later_than_the_two_schedules_do(old, new, fragments, periods):
    first = Schedule(old, fragments)
    change = (periods + 1) * old  # a send of fragment 0
    then = Schedule(new, fragments, origin=change - new)
    sent = [[s for s in range(1, change) if first.sends_at(f, s)] for f in range(fragments)]
    after = [[s for s in range(change, change + 3 * new) if then.sends_at(f, s)] for f in range(fragments)]
    assert after[0][0] == change
    for before, later in zip(sent, after, strict=True):
        gaps = [b - a for a, b in zip([*before[-1:], *later], later, strict=False)]
        assert all(min(old, new) <= gap <= max(old, new) for gap in gaps)


def test_a_fixed_overlap_wishes_no_sync_every_below_it():
    tuning = Tuning(30, 1, 20, E3M0())
    tuning.wish = Terms(15, "e3m0")
    assert tuning.said(0) is None
    tuning.wish = Terms(50, "e3m0")
    assert tuning.said(0) == Terms(50, "e3m0") and tuning.said(1) is None


SETTINGS = {"sync_every": 6, "fragments": Balanced(3), "codec": E3M0()}
OTHER = Terms(10, "twobit")


def _start(reduce, overlap):
    model = Tiny()
    optimizer = adamw(model)
    return model, optimizer, DiLoCo(model, optimizer, overlap=overlap, reduce=reduce, **SETTINGS)


def _changing(replica, last, reduce=None, overlap=2, wishes=(8, OTHER)):
    """All wish other terms from a step on, and what was applied when."""
    model, optimizer, diloco = _start(reduce, overlap)
    saves, history = {}, {}
    with diloco:
        for step in steps(model, optimizer, replica, 1, last):
            if wishes and step == wishes[0]:
                diloco.tuning.wish = wishes[1]
            history |= {(p.number, p.state.index): p.state.fingerprint() for p in diloco._fragments}
            buffer = io.BytesIO()
            torch.save((model.state_dict(), optimizer.state_dict(), diloco.state_dict()), buffer)
            saves[step] = buffer.getvalue()
    sent = [(r.fragment, r.sent_step, r.bytes_sent) for r in diloco.stats.last if r.sent_step < last]
    return {"weights": flat(model), "anchors": anchors(diloco), "sent": sent, "held": diloco.tuning.held,
            "history": history, "saves": saves, "residual": diloco._fragments[0].residual}  # fmt: skip


def _check_change(results):
    assert all(r["held"] == OTHER for r in results)
    for other in results[1:]:
        assert torch.equal(other["anchors"], results[0]["anchors"])
        assert torch.equal(other["weights"], results[0]["weights"])
        assert all(
            other["history"][key] == mark for key, mark in results[0]["history"].items() if key in other["history"]
        )
    sends = {f: [step for g, step, _ in sorted(results[0]["sent"], key=lambda s: s[1]) if g == f] for f in range(3)}
    # Wished at step 8, said with fragment 0 at 12, holds from its next send at 18 on.
    assert sends[0] == [6, 12, 18, 28, 38]
    assert sends[1] == [8, 14, 21, 31]
    assert sends[2] == [10, 16, 24, 34]


@pytest.mark.parametrize("replicas", [2, 4])
def test_replicas_with_different_overlaps_change_at_the_same_step_and_stay_equal(replicas):
    _check_change(local.run(replicas, lambda r: _changing(r.replica, 39, r, overlap=(1, 5, 3, 0)[r.replica])))


def test_after_the_change_deltas_are_sent_in_the_new_codec_and_its_feedback_begins():
    results = local.run(2, lambda r: _changing(r.replica, 39, r))
    by_step = {step: nbytes for fragment, step, nbytes in results[0]["sent"] if fragment == 0}
    values = sum(p.numel() for p in Tiny().parameters()) / 3
    assert by_step[12] == pytest.approx(E3M0().nbytes(values), rel=0.02)
    assert by_step[18] == pytest.approx(TwoBit().nbytes(values), rel=0.02)
    assert bool(results[0]["residual"].any())


def test_what_a_coarse_codec_has_lost_is_sent_once_more_by_the_next_one_and_then_there_is_no_feedback():
    back = {**SETTINGS, "codec": TwoBit()}

    def loop(reduce):
        model = Tiny()
        optimizer = adamw(model)
        diloco = DiLoCo(model, optimizer, overlap=1, reduce=reduce, **back)
        residuals = []
        with diloco:
            for step in steps(model, optimizer, reduce.replica, 1, 40):
                if step == 8:
                    diloco.tuning.wish = Terms(6, "float32")
                residuals.append(bool(diloco._fragments[0].residual.any()))
        return residuals, diloco.tuning.codec

    for residuals, codec in local.run(2, loop):
        assert codec == Float32()
        assert residuals[18] is False and any(residuals[6:18])  # sent at 18, applied at 19


def _collective(rank):
    return _changing(rank, 39, overlap=(1, 4)[rank])


def test_over_real_processes_the_header_carries_the_wish_and_all_change_together():
    _check_change(run(2, _collective))


def test_if_one_replica_does_not_wish_it_nothing_changes():
    results = local.run(2, lambda r: _changing(r.replica, 30, r, wishes=() if r.replica else (8, OTHER)))
    plain = local.run(2, lambda r: _changing(r.replica, 30, r, wishes=()))
    assert results[0]["held"] == Terms(6, "e3m0")
    assert torch.equal(results[0]["weights"], plain[0]["weights"])


def _resumed(replica, saved, at, last, reduce, overlap=2):
    model, optimizer, diloco = _start(reduce, overlap)
    states = torch.load(io.BytesIO(saved), weights_only=True)
    for part, state in zip((model, optimizer, diloco), states, strict=True):
        part.load_state_dict(state)
    with diloco:
        for _ in steps(model, optimizer, replica, at + 1, last):
            pass
    return flat(model), diloco.tuning.held


@cache
def _whole(wishes):
    return local.run(2, lambda r: _changing(r.replica, 36, r, wishes=wishes))


@pytest.mark.parametrize("at", [5, 18, 19, 21, 23, 26, 30, 33])
def test_a_run_resumes_exactly_before_the_wish_and_after_the_change(at):
    """At 19 and 21 deltas of the old codec are in flight, at 33 residuals of the new one are held."""
    wishes = (8, OTHER) if at > 12 else ()
    whole = _whole(wishes)
    again = local.run(2, lambda r: _resumed(r.replica, whole[r.replica]["saves"][at], at, 36, r))
    for (weights, held), expected in zip(again, whole, strict=True):
        assert held == expected["held"] == (OTHER if wishes else Terms(6, "e3m0"))
        assert torch.equal(weights, expected["weights"])


def test_resumed_between_decision_and_change_all_forget_it_alike():
    """Replica 0 has applied the deciding round, replica 1 with its longer overlap has not."""
    overlaps = (1, 5)
    whole = local.run(2, lambda r: _changing(r.replica, 36, r, overlap=overlaps[r.replica]))
    again = local.run(2, lambda r: _resumed(r.replica, whole[r.replica]["saves"][15], 15, 36, r, overlaps[r.replica]))
    assert again[0][1] == again[1][1] == Terms(6, "e3m0")
    assert torch.equal(again[0][0], again[1][0])


def test_a_state_with_other_terms_does_not_join_one_without():
    whole = local.run(2, lambda r: _changing(r.replica, 26, r))

    def loop(reduce):
        return _resumed(reduce.replica, whole[reduce.replica]["saves"][26 - 16 * reduce.replica], 26, 30, reduce)

    with pytest.raises(Mismatch, match=r"sync_every is (10|6) on replica 0, (10|6) on replica 1"):
        local.run(2, loop)


def test_settings_that_are_given_anew_on_resume_hold():
    whole = local.run(2, lambda r: _changing(r.replica, 26, r))
    state = torch.load(io.BytesIO(whole[0]["saves"][26]), weights_only=True)[2]
    model = Tiny()
    diloco = DiLoCo(model, adamw(model), overlap=2, reduce=Script(), **{**SETTINGS, "sync_every": 7})
    diloco.load_state_dict(state)
    assert diloco.tuning.held == Terms(7, "e3m0") and diloco.schedule.origin == 0


@pytest.mark.parametrize("last", [(15, 20), (17, 18), (13, 39)])
def test_replicas_that_end_at_different_steps_have_the_same_terms_in_their_last_round(last):
    """Agreed on at step 12 for step 18: one replica ends before it, the other has changed already."""
    results = local.run(2, lambda r: _changing(r.replica, last[r.replica], r, overlap=1))
    assert results[0]["held"] == results[1]["held"] == OTHER
    assert torch.equal(results[0]["weights"], results[1]["weights"])


def test_before_the_first_round_fragments_can_be_cut_anew_without_a_trace():
    """As if the run had begun with them: nothing was sent, and the anchors are the start."""
    given = {"sync_every": 12, "fragments": Balanced(4), "overlap": 1, "codec": Float32()}

    def loop(reduce, late):
        model = Tiny()
        optimizer = adamw(model)
        begun = {**given, "sync_every": 100, "fragments": Balanced(2)} if late else given
        diloco = DiLoCo(model, optimizer, reduce=reduce, **begun)
        with diloco:
            for step in steps(model, optimizer, reduce.replica, 1, 40):
                if late and step == 9:
                    diloco.settle_on(**given)
        with pytest.raises(Exception, match="only before the first round"):
            diloco.settle_on(**given)
        return flat(model)

    whole, changed = (local.run(2, lambda r, late=late: loop(r, late)) for late in (False, True))
    assert torch.equal(whole[0], changed[0]) and torch.equal(whole[1], changed[1])
