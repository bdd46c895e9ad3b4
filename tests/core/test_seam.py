"""The core against a reducer that does what an elastic one may do: rounds without us, jumps, drops, calls, delays."""

import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from diloco import SGD, Balanced, ConfigError, DiLoCo, DiLoCoError, Float32, Nesterov, NotFinite, PeerLost, run_replicas
from diloco.core.fragment import Piece
from diloco.core.sync import Work
from diloco.core.view import FlatView
from diloco.exchange.reducer import Dropped, Jump, Round, State
from tests.support.fake_reducer import Script, mean, start
from tests.support.models import Tiny, train


def test_a_round_that_did_not_count_this_replica_is_carried_and_no_local_work_is_lost():
    # Sent after 4 (delta −4); the record is of others, mean −10: anchor 0 → 10, local 6 → 16.
    script = Script({(0, 1): [(5, mean(-10.0, counted=False))], (0, 2): [(9, mean(-6.0, counted=True))]})
    diloco, step = start(script)
    assert [step() for _ in range(8)] == [1, 2, 3, 4, 5, 16, 17, 18]
    # The next delta is against the new anchor, 10, and holds all 8 steps; so does its weight.
    assert [(f, i, d.values.item(), d.weight) for f, i, d in script.sent] == [(0, 1, -4.0, 4.0), (0, 2, -8.0, 8.0)]
    # Counted at last: anchor 10 − −6 = 16, local 20 → 16, and the weight starts anew.
    assert [step() for _ in range(4)] == [19, 16, 17, 18]
    assert script.sent[-1][2].weight == 4.0
    assert diloco.stats.last[0].counted is False


@pytest.mark.parametrize("steps", [0, 1])
def test_work_that_an_earlier_life_has_sent_is_not_sent_again(steps):
    """The state is saved after 6 steps, of which 4 have counted; the other 2 count in round 2, with 4 later ones."""
    before, step = start(Script({(0, 1): [(4, mean(-4.0, counted=True))]}), overlap=0)
    assert [step() for _ in range(6)][-1] == 6
    earlier = mean(-8.0, counted=False, earlier=True)
    script = Script({(0, 2): [(steps, earlier)], (0, 3): [(3, earlier)]})
    diloco, step = start(script, overlap=0)
    with torch.no_grad():
        diloco.model.weight.fill_(6.0)
    diloco.load_state_dict(before.state_dict())
    diloco.join()
    # Round 2: anchor 4 → 12, and local 6 or 7 → 12. Only the steps made since the state was saved are lost.
    assert [step() for _ in range(2)] == ([12, 13] if steps else [13, 14])
    (fragment,) = diloco._fragments
    assert fragment.lost == ((6, 7) if steps else (0, 0))
    assert [(i, d.values.item(), d.weight) for _, i, d in script.sent] == [(3, -(2.0 - steps), 2.0 - steps)]
    assert step() == 12 + 8 + 3 - steps  # it has nothing of that life any more: round 3 is carried


def test_a_round_that_this_replica_did_not_send_is_applied_at_once():
    script = Script({(0, 1): [(1, mean(-10.0, counted=False))], (0, 2): [(1, mean(-1.0, counted=False))]})
    diloco, step = start(script)
    assert step() == 12 and diloco.indices == [2]  # both rounds
    assert [step() for _ in range(3)] == [13, 14, 15]
    assert [(i, d.values.item()) for _, i, d in script.sent] == [(3, 11.0 - 15.0)]  # index = index held + 1


def test_a_replica_that_was_away_catches_up_over_several_steps_and_at_once_when_it_joins():
    def rounds(there):
        return Script({(0, k): [(there, mean(-1.0, counted=False))] for k in range(1, 8)})

    diloco, step = start(rounds(there=1))
    indices = []
    for _ in range(4):
        step()
        indices += diloco.indices
    assert indices == [2, 4, 6, 7]
    diloco, _ = start(rounds(there=0))
    diloco.join()
    assert diloco.indices == [7]


def test_a_round_that_was_not_sent_costs_the_training_thread_its_wait_and_its_hook():
    states = [State(k, torch.zeros(1), torch.empty(0)) for k in (1, 2)]
    rounds = [Round(state, {"me": 3.0, "b": 1.0}, counted=state.index == 2) for state in states]
    script = Script({(0, round.state.index): [(round.state.index, round)] for round in rounds})
    diloco, step = start(script, overlap=0, sync_every=2)
    (fragment,) = diloco._fragments
    wait, poll, take, merge = time.sleep, script.poll, fragment.place.send, fragment.view.merge
    script.poll = lambda *place: (wait(0.05), poll(*place))[1]
    fragment.place.send = lambda out: (wait(0.1), take(out))[1]
    fragment.view.merge = lambda *values: (wait(0.2), merge(*values))[1]
    step()
    (figures,) = diloco.stats.last
    assert figures.sent_step is None and 0.05 <= figures.seconds_waited <= figures.seconds_exposed
    step()
    figures = diloco.stats.last[-1]
    assert (figures.sent_step, figures.applied_step, figures.share) == (2, 2, 0.75)
    assert figures.seconds_waited >= 0.05 and figures.seconds_exposed >= figures.seconds_waited + 0.1 + 0.2


def test_a_state_that_the_reducer_has_made_is_taken_as_it_is():
    made = State(1, torch.tensor([40.0]), torch.empty(0))
    script = Script({(0, 1): [(4, Round(made, {"a": 1.0}))]})
    diloco, step = start(script, overlap=0)
    assert [step() for _ in range(5)] == [1, 2, 3, 40, 41]
    assert diloco._fragments[0].state is made


def test_states_and_deltas_take_turns_in_the_same_memory():
    script = Script({(0, k): [(4 * k, mean(-4.0, counted=True))] for k in range(1, 9)})
    diloco, step = start(script, overlap=0, outer=Nesterov(1.0, 0.5))
    seen = set()
    for _ in range(32):
        step()
        state = diloco._fragments[0].state
        seen |= {state.anchor.data_ptr(), state.outer.data_ptr()}
    assert diloco.indices == [8] and len(seen) == 4


def test_buffers_that_training_changes_are_averaged_at_the_end_and_stay_local_until_then():
    def loop(reducer):
        model = Tiny()
        model.register_buffer("seen", torch.tensor(0.0))
        with DiLoCo(model, sync_every=2, reducer=reducer) as diloco:
            for _ in range(4):
                model.seen += 1 + 2 * reducer.replica
                diloco.step()
            before = model.seen.item()
        return before, model.seen.item()

    assert run_replicas(2, loop) == [(4.0, 8.0), (12.0, 8.0)]


def test_float_buffers_are_restored_after_an_evaluation_of_the_anchors():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.BatchNorm1d(2).double())
    model[1].running_mean.fill_(0.3)
    model[2].running_mean.fill_(1 / 3)
    before = [b.clone() for b in model.buffers() if b.is_floating_point()]
    with DiLoCo(model, reducer=Script(), fragments=Balanced(1)).anchors():
        model[1](torch.randn(8, 2))  # in training mode: it changes the running statistics
        model[2].running_var = torch.full((2,), 9.0, dtype=torch.float64)
    after = [b for b in model.buffers() if b.is_floating_point()]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_a_jump_takes_anchor_outer_state_and_index_and_overwrites_local():
    state = State(7, torch.tensor([100.0]), torch.tensor([0.5, 0.0]))
    script = Script({(0, 1): [(1, Jump(state))], (0, 8): [(5, mean(1.0, counted=True))]})
    diloco, step = start(script, outer=Nesterov(lr=1.0, momentum=0.5))
    assert [step() for _ in range(4)] == [100, 101, 102, 103]
    fragment, index, delta = script.sent[0]
    assert (fragment, index, delta.values.item(), delta.weight) == (0, 8, -3.0, 3.0)
    # v = 1 + 0.5·0.5 = 1.25; θ = 100 − (1 + 0.5·1.25): the state that came with the jump was used
    assert [step() for _ in range(2)] == [104, 98.375]
    assert state.anchor.item() == 100 and not delta.needs_own  # the state was copied
    assert diloco._fragments[0].state.index == 8


def test_a_result_that_is_late_is_applied_at_the_first_step_at_which_it_is_there():
    script = Script({(0, 1): [(7, mean(-4.0, counted=True))]})
    diloco, step = start(script, keep_local=0.25)
    # due after 6, there after 7: a quarter of 7 and three quarters of 4
    assert [step() for _ in range(7)] == [1, 2, 3, 4, 5, 6, 4.75]
    assert diloco.stats.last[0].applied_step == 7


def test_a_dropped_round_changes_nothing_and_its_work_is_in_the_next_delta():
    script = Script({(0, 1): [(6, Dropped()), (10, mean(-8.0, counted=True))]})
    _, step = start(script)
    assert [step() for _ in range(6)] == [1, 2, 3, 4, 5, 6]
    assert [step() for _ in range(4)] == [7, 8, 9, 8]
    assert [(i, d.values.item(), d.weight) for _, i, d in script.sent] == [(1, -4.0, 4.0), (1, -8.0, 8.0)]


def test_a_replica_sends_when_it_is_called_and_is_asked_with_its_own_steps():
    script = Script(calls=[2])
    _, step = start(script)
    for _ in range(4):
        step()
    assert [(i, d.values.item()) for _, i, d in script.sent] == [(1, -2.0), (1, -4.0)]  # called after 2, slot after 4
    assert script.asked == [(0, 1, False), (0, 2, False), (0, 1, False), (0, 2, True)]


def test_a_round_in_which_nobody_trained_moves_nothing_not_even_by_momentum():
    script = Script({(0, 1): [(1, mean(0.0, counted=False, weight=0.0))]})
    diloco, step = start(script, outer=Nesterov(lr=1.0, momentum=0.5))
    diloco._fragments[0].state.outer.fill_(8.0)
    assert step() == 1
    assert diloco._fragments[0].state.anchor.item() == 0
    assert diloco._fragments[0].state.index == 1


class Lost(Script):
    """Its last round breaks."""

    def poll(self, fragment, index):
        if self.broken:
            raise PeerLost("another replica is gone")
        return super().poll(fragment, index)

    def drain(self, seconds=None):
        self.broken = True
        return super().drain(seconds)

    broken = False


def test_a_finish_that_failed_is_not_taken_for_one_that_succeeded():
    script = Lost()
    diloco, step = start(script)
    step()
    with pytest.raises(PeerLost):
        diloco.finish()
    with pytest.raises(DiLoCoError, match="has left the other replicas"):
        diloco.finish()
    diloco.leave()
    diloco.leave()
    assert script.left == 1


def test_finish_is_a_last_round_for_every_fragment_then_leaves_once():
    script = Script({(0, 1): [(0, mean(-2.5, counted=True))]})
    diloco, step = start(script, keep_local=0.5)
    assert [step() for _ in range(3)] == [1, 2, 3]
    diloco.finish()
    diloco.finish()
    assert diloco._fragments[0].state.anchor.item() == 2.5
    assert diloco._fragments[0].view.spans[0].rows().item() == 2.5  # keep_local is 0 here
    assert script.left == 1


def test_a_dropped_round_may_put_local_back_to_the_anchor():
    script = Script({(0, 1): [(6, Dropped(reset=True))]})
    _, step = start(script)
    assert [step() for _ in range(8)] == [1, 2, 3, 4, 5, 0, 1, 2]
    assert [(i, d.values.item(), d.weight) for _, i, d in script.sent] == [(1, -4.0, 4.0), (1, -2.0, 2.0)]


def test_work_that_is_given_up_again_and_again_is_an_error_only_if_it_was_not_finite():
    """A member that was away too long gives up its work, perhaps for each fragment at another time."""

    def resets(non_finite):
        return Script({(0, 1): [(step, Dropped(reset=True, non_finite=non_finite)) for step in (6, 14)]})

    _, step = start(resets(False))
    assert [step() for _ in range(16)][-4:] == [7, 0, 1, 2]
    _, step = start(resets(True))
    with pytest.raises(NotFinite, match="inf or nan again"):
        [step() for _ in range(16)]


@pytest.mark.parametrize(("outcome", "trained", "weight"), [
    (Dropped(), 3.0, 3.0),
    (mean(0.0, counted=False), 3.0, 3.0),
    (mean(0.0, counted=True), 1.0, 4.0),  # as always: all steps since the send
])  # fmt: skip
def test_work_that_was_given_up_does_not_weigh_if_the_delta_in_flight_does_not_count(outcome, trained, weight):
    """Fragment 0, sent after 4, is not finite: both go back after 7, while fragment 1, sent after 6, is in flight."""
    script = Script({(0, 1): [(7, Dropped(reset=True))], (1, 1): [(9, outcome)]})
    model = nn.Linear(1, 2, bias=False)
    nn.init.zeros_(model.weight)
    settings = {"sync_every": 4, "overlap": 3, "outer": SGD(1.0), "codec": Float32(), "fragments": Balanced(2)}
    diloco = DiLoCo(model, reducer=script, **settings)
    diloco.join()
    for step in range(1, 11):
        with torch.no_grad():
            model.weight += 1
        script.now = step
        diloco.step()
    sent = [(delta.values.item(), delta.weight) for fragment, _, delta in script.sent if fragment == 1]
    assert sent == [(-6.0, 6.0), (-trained, weight)]


def test_inf_or_nan_that_comes_with_the_last_copy_is_found():
    diloco, _ = start(Script())
    (fragment,) = diloco._fragments
    fragment.take_delta(Work(1.0))
    sent = fragment.in_flight
    fragment.in_flight = replace(sent, values=lambda: sent.memory.fill_(float("nan")))
    assert fragment.delta_later()().find_non_finite() == 0


def test_an_uncounted_round_leaves_the_state_that_a_sent_delta_is_against_as_it_was():
    """The thread that sends may still be reading it."""
    script = Script({(0, 1): [(5, mean(-10.0, counted=False))]})
    diloco, step = start(script)
    for _ in range(5):
        step()
    against = diloco._fragments[0].state
    step()
    assert (against.index, against.anchor.item()) == (0, 0.0)
    assert (diloco._fragments[0].state.index, diloco._fragments[0].state.anchor.item()) == (1, 10.0)


def test_a_lost_peer_does_not_swallow_what_is_due_in_the_same_step():
    class Lost(Script):
        def poll(self, fragment, index):
            if fragment == 0 and self.sent:
                raise PeerLost("gone")

    model = nn.Linear(1, 2, bias=False)
    script = Lost()
    diloco = DiLoCo(model, reducer=script, sync_every=4, overlap=2, fragments=Balanced(2))
    diloco.join()
    for _ in range(5):
        diloco.step()
    with pytest.raises(PeerLost):
        diloco.step()
    assert [(f, i) for f, i, _ in script.sent] == [(0, 1), (1, 1)]  # sent after 4 and, with the loss, after 6
    saved = diloco.state_dict()["shard 0 of 1"]["fragments"]
    assert saved["0"]["flight"] and saved["1"]["flight"]


def test_after_leaving_every_call_says_so():
    diloco, step = start(Script())
    step()
    diloco.finish()
    for act in (step, lambda: diloco.load_state_dict(diloco.state_dict()), diloco.join):
        with pytest.raises(DiLoCoError, match="finish"):
            act()


def test_weights_loaded_before_the_first_step_are_the_start_and_not_progress():
    script = Script()
    model = nn.Linear(1, 1, bias=False)
    diloco = DiLoCo(model, reducer=script, sync_every=2, fragments=Balanced(1))
    nn.init.constant_(model.weight, 100.0)
    with diloco:
        diloco.step()
        diloco.step()
    assert script.sent[0][2].values.item() == 0


@pytest.mark.parametrize(("tokens", "weight"), [(torch.tensor(3), 12.0), (0.25, 1.0)])
def test_tokens_may_be_a_tensor_or_a_fraction(tokens, weight):
    script = Script({(0, i): [(4 * i + 1, mean(0.0, counted=True))] for i in (1, 2)})
    diloco, step = start(script)
    for _ in range(12):
        diloco.count(tokens)
        step()
    assert [d.weight for _, _, d in script.sent] == [weight] * 3
    with pytest.raises(ConfigError, match="0 or more"):
        diloco.count(float("nan"))


@pytest.mark.parametrize("place", [0, 2, 3, 7])
def test_inf_or_nan_is_found_in_any_value_of_any_span(place):
    one, two = torch.zeros(3), torch.zeros(5)
    view = FlatView((Piece("one", 0, 3), Piece("two", 0, 5)), {"one": one, "two": two})
    values = torch.zeros(8)
    assert view.find_non_finite(values) is None
    values[place] = float("nan")
    assert view.find_non_finite(values) == (0 if place < 3 else 1)


def test_a_delta_holds_the_mean_learning_rate_of_its_steps_over_all_groups_and_optimizers():
    model = nn.Linear(1, 1, bias=False)
    groups = [{"params": [model.weight], "lr": 0.5}, {"params": [], "lr": torch.tensor(0.25)}]
    optimizer, other = torch.optim.SGD(groups, lr=1.0), torch.optim.SGD([{"params": [], "lr": 1.0}], lr=1.0)
    script = Script({(0, 1): [(0, mean(0.0, counted=True))]})
    diloco = DiLoCo(model, [optimizer, other], sync_every=2, overlap=1, fragments=Balanced(1), reducer=script)
    for lr in (0.5, 0.25, 0.125, 0.0):
        optimizer.param_groups[0]["lr"] = lr
        model(torch.ones(1)).backward()
        optimizer.step()
        other.step()
    assert [delta.lr for _, _, delta in script.sent] == [0.375 + 1.25, 0.0625 + 1.25]
    assert diloco.state_dict()["shard 0 of 1"]["work"] == (4.0, 0.875 + 4 * 1.25, 4, False)


def test_finish_ends_with_the_mean_of_the_replicas_and_without_momentum():
    """A step with momentum on the delta of a few steps makes the model worse than the mean."""
    settings = {"sync_every": 10, "overlap": 0, "codec": Float32(), "outer": Nesterov(0.7, 0.9)}
    one, two = run_replicas(2, lambda reducer: train(reducer.replica, 25, reducer=reducer, **settings))
    assert torch.equal(one["weights"], two["weights"]) and not torch.equal(one["local"], two["local"])
    torch.testing.assert_close(one["weights"], (one["local"] + two["local"]) / 2, rtol=0, atol=1e-6)
