"""Error feedback: what the codec lost of a delta that counted goes into the next one, once, with every reducer."""

import copy

import pytest
import torch

from diloco import E3M0, SGD, Balanced, Collective, ConfigError, DiLoCo, TopK, TwoBit
from diloco.bucket import Bucket
from diloco.codec import pack, unpack
from diloco.reduce import Dropped, Jump, Round, State, local
from diloco.reduce.mean import exact, parts
from tests.support.fake_reduce import Script, start
from tests.support.models import Tiny, adamw, anchors, steps
from tests.support.processes import run

SETTINGS = {"sync_every": 4, "overlap": 1, "fragments": Balanced(2), "codec": E3M0(), "feedback": 0.75}


def counted(index, mean, own):
    return Round(index, exact(torch.tensor([mean])), {"a": 1.0}, own=lambda: torch.tensor([own]))


def residual_of(diloco):
    return diloco._fragments[0].residual.item()


def test_what_the_others_did_not_see_of_a_delta_is_in_the_next_one_once():
    # Sent −4, seen as −3, mean −4: the anchor and local become 4, and half of −1 is kept.
    script = Script({(0, 1): [(6, counted(1, -4.0, -3.0))], (0, 2): [(10, counted(2, -2.0, -2.5))]})
    diloco, step = start(script, feedback=0.5)
    assert [step() for _ in range(6)] == [1, 2, 3, 4, 5, 4]
    assert residual_of(diloco) == -0.5
    # After 8 local is 6: 4 − 6 − 0.5. Sent −2.5 and seen as such: nothing is left for the third.
    assert [step() for _ in range(6)][3] == 6
    assert [d.values.item() for _, _, d in script.sent] == [-4.0, -2.5, -2.0]
    assert residual_of(diloco) == 0
    assert all(d.feedback for _, _, d in script.sent)


@pytest.mark.parametrize(
    "outcome", [Round(2, exact(torch.tensor([-1.0])), {"b": 1.0}, counted=False), Dropped()], ids=repr
)
def test_a_delta_that_did_not_count_leaves_the_residual_as_it_was(outcome):
    script = Script({(0, 1): [(6, counted(1, -4.0, -3.0))], (0, 2): [(10, outcome)]})
    diloco, step = start(script, feedback=0.5)
    for _ in range(12):
        step()
    assert residual_of(diloco) == -0.5
    fragment, last = diloco._fragments[0], script.sent[-1][2]
    assert last.values.item() == fragment.state.anchor.item() - fragment.view.spans[0].rows().item() - 0.5


@pytest.mark.parametrize("outcome", [Jump(State(7, torch.tensor([100.0]), torch.zeros(0))), Dropped(reset=True)])
def test_a_jump_and_giving_up_local_values_begin_with_no_residual(outcome):
    script = Script({(0, 1): [(6, counted(1, -4.0, -3.0))], (0, 2): [(10, outcome)]})
    diloco, step = start(script, feedback=0.5)
    for _ in range(10):
        step()
    assert residual_of(diloco) == 0


def test_a_round_without_work_or_without_the_own_delta_keeps_no_wrong_residual():
    nothing = Round(2, exact(torch.tensor([0.0])), {"a": 0.0})
    unknown = Round(3, exact(torch.tensor([-1.0])), {"a": 1.0})
    script = Script({(0, 1): [(6, counted(1, -4.0, -3.0))], (0, 2): [(10, nothing)], (0, 3): [(14, unknown)]})
    diloco, step = start(script, feedback=0.5)
    assert [(step(), residual_of(diloco))[1] for _ in range(14)] == [0.0] * 5 + [-0.5] * 8 + [0.0]


def test_a_codec_that_is_meant_for_feedback_has_it_unless_told_otherwise():
    def feedback(**settings):
        return start(Script(), **settings)[0]._fragments[0].feedback

    assert [feedback(codec=c, outer=SGD()) for c in (E3M0(), TwoBit(), TopK())] == [0, 0.9, 0.95]
    assert feedback(codec=TwoBit(), feedback=0.0) == 0 and feedback(codec=E3M0(), feedback=0.5) == 0.5


def test_without_feedback_there_is_no_residual_and_nobody_is_asked():
    script = Script()
    diloco, step = start(script)
    for _ in range(4):
        step()
    assert diloco._fragments[0].residual is None
    assert not script.sent[0][2].feedback
    assert "residual" not in diloco.state_dict()["shard 0 of 1"]["parts"]["0"]
    for wrong in (-0.1, 1.5, float("nan")):
        with pytest.raises(ConfigError, match="from 0"):
            start(Script(), feedback=wrong)


class Recorded:
    """A reducer that remembers what was sent in each round."""

    def __init__(self, reduce):
        self._reduce, self.sent = reduce, {}

    def __getattr__(self, name):
        return getattr(self._reduce, name)

    def send(self, fragment, index, delta):
        def recorded():
            made = delta()
            self.sent[fragment, index] = made.values.clone()
            return made

        self._reduce.send(fragment, index, recorded)


def play(replica, reduce, count=14, saved=None, **settings):
    """A run without finish(): the last rounds that were applied, and what is left of them."""
    model = Tiny(seed=replica)
    optimizer = adamw(model)
    recorded = Recorded(reduce)
    diloco = DiLoCo(model, optimizer, reduce=recorded, **SETTINGS | settings)
    first, state = 1, None
    if saved is not None:
        first, model_state, optimizer_state, diloco_state = copy.deepcopy(saved)
        model.load_state_dict(model_state)
        optimizer.load_state_dict(optimizer_state)
        diloco.load_state_dict(diloco_state)
        assert diloco.in_flight == 1
    diloco.join()
    for step in steps(model, optimizer, replica, first, count):
        if step == 8:  # a fragment has just been sent
            state = copy.deepcopy((9, model.state_dict(), optimizer.state_dict(), diloco.state_dict()))
    residuals = [fragment.residual.clone() for fragment in diloco._fragments]
    last = [recorded.sent[fragment.number, fragment.state.index] for fragment in diloco._fragments]
    diloco.finish()
    return {"residuals": residuals, "last": last, "anchors": anchors(diloco), "sent": recorded.sent, "state": state}


def lost(values, replicas, codec):
    cuts = parts(len(values), replicas) if replicas > 3 and codec != TopK() else [slice(0, len(values))]
    decoded = [unpack(codec, pack(codec, values[cut]), cut.stop - cut.start) for cut in cuts]
    return 0.75 * (values - torch.cat(decoded))


def check(results, replicas, codec=SETTINGS["codec"]):
    for result in results:
        assert torch.equal(result["anchors"], results[0]["anchors"])
        for residual, values in zip(result["residuals"], result["last"], strict=True):
            assert residual.any()
            assert torch.equal(residual, lost(values, replicas, codec))


def _collective(rank, settings):
    return play(rank, Collective(), **settings)


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "codec"), [(2, E3M0()), (4, E3M0()), (4, TwoBit()), (4, TopK())])
def test_the_residual_is_exact_and_local_and_collective_have_the_same(replicas, codec):
    settings = {"codec": codec, "outer": SGD(0.7)}
    here = local.run(replicas, lambda reduce: play(reduce.replica, reduce, **settings))
    check(here, replicas, codec)
    for one, other in zip(here, run(replicas, _collective, settings), strict=True):
        assert torch.equal(one["anchors"], other["anchors"])
        for a, b in zip(one["residuals"], other["residuals"], strict=True):
            assert torch.equal(a, b)


def test_a_resumed_replica_sends_the_same_bytes_again_and_goes_on_with_the_same_residual():
    through = local.run(2, lambda reduce: play(reduce.replica, reduce))
    resumed = local.run(2, lambda reduce: play(reduce.replica, reduce, saved=through[reduce.replica]["state"]))
    for one, other in zip(through, resumed, strict=True):
        assert set(other["sent"]) < set(one["sent"])
        for key, values in other["sent"].items():
            assert torch.equal(values, one["sent"][key]), key
        for a, b in zip(one["residuals"], other["residuals"], strict=True):
            assert torch.equal(a, b)
        assert torch.equal(one["anchors"], other["anchors"])


def test_a_state_from_before_feedback_loads_with_no_residual():
    diloco, step = start(Script({(0, 1): [(6, counted(1, -4.0, -3.0))]}), feedback=0.5)
    for _ in range(6):
        step()
    state = diloco.state_dict()
    assert state["shard 0 of 1"]["parts"]["0"].pop("residual").item() == -0.5
    diloco.load_state_dict(state)
    assert residual_of(diloco) == 0


def test_the_bucket_tells_the_own_delta_too(tmp_path):
    result = play(0, Bucket(str(tmp_path), "a", pace="strict"))
    check([result], 1)


def test_feedback_brings_what_a_coarse_codec_would_never_send():
    """A block's largest value hides what is below 1/64 of it. With feedback it arrives in the end."""

    def drift(reduce, feedback):
        model = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        diloco = DiLoCo(model, reduce=reduce, sync_every=1, overlap=0, codec=E3M0(), outer=SGD(1.0),
                        fragments=Balanced(1), feedback=feedback)  # fmt: skip
        for _ in range(200):
            with torch.no_grad():
                model.weight += torch.tensor([[1.0, 0.005]])
            diloco.step()
        return model.weight[0, 1].item()

    without, kept = (local.run(1, lambda reduce, f=f: drift(reduce, f))[0] for f in (0.0, 1.0))
    assert without == 0
    assert kept == pytest.approx(1.0, rel=0.05)


def published(starts, rounds, sync_every, decay=0.95):
    """SparseLoCo as in its paper (arXiv 2508.15706), with outer learning rate 1: e ← β·e + Δ; send the quantised
    largest 64 of each 4,096 of e; e ← e − sent; θ ← θ − mean of what was sent."""
    theta, errors = starts.clone(), [torch.zeros_like(starts) for _ in range(2)]
    for index in range(rounds):
        sent = []
        for replica in range(2):
            here = theta.clone()
            for step in range(sync_every):
                here -= pull(here, replica, index * sync_every + step)
            e = decay * errors[replica] + (theta - here)
            values = unpack(TopK(), pack(TopK(), e), len(e))
            largest = torch.cat([at * 4096 + c.abs().topk(-(-len(c) * 64 // 4096)).indices
                                 for at, c in enumerate(e.split(4096))])  # fmt: skip
            assert set(values.nonzero().flatten().tolist()) == set(largest.tolist())
            errors[replica] = e - values
            sent.append(values)
        theta = theta - (sent[0] + sent[1]) / 2
    return theta


def pull(weights, replica, step):
    """A replica's inner update: to a point of its own, with noise."""
    random = torch.Generator().manual_seed(1000 * replica + step)
    return 0.05 * (weights - 1 - replica + torch.randn(len(weights), generator=random))


def test_top_k_with_outer_sgd_is_the_published_algorithm():
    n, rounds, sync_every = 10_000, 6, 3
    start_at = torch.randn(n, generator=torch.Generator().manual_seed(1))

    def loop(reduce):
        model = torch.nn.Linear(n, 1, bias=False)
        torch.nn.utils.vector_to_parameters(start_at.clone(), model.parameters())
        diloco = DiLoCo(model, reduce=reduce, sync_every=sync_every, overlap=0, codec=TopK(), outer=SGD(1.0),
                        fragments=Balanced(1))  # fmt: skip
        diloco.join()
        for step in range(rounds * sync_every):
            with torch.no_grad():
                model.weight[0] -= pull(model.weight[0], reduce.replica, step)
            diloco.step()
        found = anchors(diloco)
        diloco.finish()
        return found

    expected = published(start_at, rounds, sync_every)
    assert (expected != start_at).float().mean() < rounds * 2 * 64 / 4096 * 1.01
    for found in local.run(2, loop):
        torch.testing.assert_close(found, expected)
