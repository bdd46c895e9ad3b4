"""What every reducer owes: the weighted mean of decoded deltas, the same bits for all, whatever the sizes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco import E3M0, BFloat16, Collective, Diverged, Float32, Mismatch, TwoBit
from diloco.codecs.codec import CHUNK, pack, unpack, weighted
from diloco.exchange import local
from diloco.exchange.header import NBYTES, Header, Kind, check_round
from diloco.exchange.mean import PIECE, PIECES, parts, pieces, shares
from diloco.exchange.reducer import Delta, Dropped, NonFinite, State
from tests.support.fake_reducer import job, reference_mean
from tests.support.processes import message_of, run
from tests.support.ranks import groups

CODECS = [Float32(), BFloat16(), E3M0(), TwoBit()]
SIZES = [1, 2, 3, 5, 0, 255, 256, 257, 1023, 140_001]


def deltas(n, replicas):
    return [torch.randn(n, generator=torch.Generator().manual_seed(100 * m + n)) for m in range(replicas)]


def zeros(*sizes, codec):
    """A job whose anchors are 0: after a round of SGD(1) they are the negative mean, bit for bit."""
    return job([State(0, torch.zeros(n), torch.zeros(0)) for n in sizes], [codec] * len(sizes))


def _all_rounds(reducer, codec, sizes, replica, replicas, weights, needs_own=False):
    """Start a round for every size at once, poll them in another order."""
    reducer.join(zeros(*sizes, codec=codec))
    for f, n in enumerate(sizes):
        value = deltas(n, replicas)[replica]
        reducer.send(f, 1, lambda value=value: Delta(value, weights[replica], True, 0, needs_own=needs_own))
    rounds = {f: reducer.poll(f, 1) for f in reversed(range(len(sizes)))}
    assert reducer.poll(0, 1) is None
    reducer.leave()
    return [(-r.state.anchor, r.members, r.cost.bytes_sent, r.own and r.own()) for _, r in sorted(rounds.items())]


def _collective(rank, replicas, codec, weights, options):
    return _all_rounds(Collective(**options), codec, SIZES, rank, replicas, weights)


def _as_sent(codec, delta):
    return unpack(codec, pack(codec, delta), len(delta))


def _check(results, codec, replicas, weights, mean_codec=None):
    for f, n in enumerate(SIZES):
        values, members, sent, own = results[0][f]
        assert own is None  # nobody asked
        for other in results[1:]:
            assert torch.equal(other[f][0], values)
        assert members == {str(m): weights[m] for m in range(replicas)}
        second = {TwoBit(): E3M0()}.get(codec, codec) if mean_codec is None else mean_codec
        expected = reference_mean(codec, second, deltas(n, replicas), weights)
        assert torch.equal(values, expected)
        # An independent reckoning, up to rounding: the sum in double precision.
        gathered = replicas <= 3
        cuts = parts(n, 1 if gathered else replicas)
        decoded = torch.stack(
            [torch.cat([_as_sent(codec, d[cut]) for cut in cuts]) for d in deltas(n, replicas)]
        ).double()
        exact = (decoded * torch.tensor(weights).double()[:, None]).sum(0) / sum(weights)
        if gathered or mean_codec == Float32():
            torch.testing.assert_close(values.double(), exact, rtol=1e-5, atol=1e-6)
        whole = codec.nbytes(n) if gathered else (codec.nbytes(n) + second.nbytes(n)) / replicas
        if gathered:  # and, of the collective, the header
            assert sent - (replicas - 1) * codec.nbytes(n) in (0, (replicas - 1) * NBYTES)
        if n > 100_000 and mean_codec is None:
            assert sent <= 1.01 * (replicas - 1) * whole + 300
    return True


def _every_codec(rank, replicas, weights):
    return [_collective(rank, replicas, codec, weights, {}) for codec in CODECS]


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [3, 5])  # the deltas of all, and shares
def test_a_collective_gives_all_the_same_weighted_mean_for_any_size_and_order(replicas):
    weights = [1.0, 3.0, 2.0, 0.0, 5.0][:replicas]
    for codec, *results in zip(CODECS, *run(replicas, _every_codec, replicas, weights), strict=True):
        assert _check(results, codec, replicas, weights), codec


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 5])
def test_replicas_in_one_process_get_the_same_mean(codec, replicas):
    weights = [1.0, 3.0, 2.0, 0.0, 5.0][:replicas]
    results = local.run(replicas, lambda r: _all_rounds(r, codec, SIZES, r.replica, replicas, weights))
    assert _check(results, codec, replicas, weights)


@pytest.mark.parametrize("replicas", [4, 5])
def test_in_one_process_too_the_mean_of_parts_is_that_of_an_independent_reckoning(replicas):
    weights = [1.0, 3.0, 2.0, 0.0, 5.0][:replicas]
    results = local.run(
        replicas, lambda r: _all_rounds(r, E3M0(), SIZES, r.replica, replicas, weights), mean_codec=Float32()
    )
    assert _check(results, E3M0(), replicas, weights, Float32())


@pytest.mark.parametrize(("replicas", "sent"), [(1, 0), (2, 129), (3, 2 * 129), (4, round(3 * (129 + 1024) / 4))])
def test_in_one_process_a_round_counts_the_bytes_that_a_collective_would_send(replicas, sent):
    """Each delta to all others; from four replicas on a share to each, and the mean of a share from each."""
    weights = [1.0] * replicas
    results = local.run(
        replicas, lambda r: _all_rounds(r, E3M0(), [256], r.replica, replicas, weights), mean_codec=Float32()
    )
    assert [result[0][2] for result in results] == [sent] * replicas


def test_in_one_process_a_round_that_not_all_have_sent_is_dropped_and_the_next_is_paired_anew():
    def loop(reducer):
        def send(index):
            reducer.send(0, index, lambda: Delta(torch.full((3,), float(reducer.replica)), 1.0, True, 0))

        reducer.join(zeros(3, codec=Float32()))
        if reducer.replica:
            send(1)
        reducer.drain()
        dropped = reducer.poll(0, 1)
        send(1)
        return dropped, reducer.poll(0, 1).state.anchor.tolist()

    assert local.run(2, loop) == [(None, [-0.5] * 3), (Dropped(), [-0.5] * 3)]


@pytest.mark.slow
def test_parallel_streams_give_the_same_bits():
    weights = [1.0] * 4
    assert _check(run(4, _collective, 4, E3M0(), weights, {"streams": 3}), E3M0(), 4, weights)


def _two_of_two(rank):
    across, within = groups(rank)
    return Collective(across, ddp_ranks=within)


def _inner(rank, weights):
    """Every rank has the whole fragment. Then the second replica's delta is not finite, in the half that its first
    rank encodes."""
    rounds = _all_rounds(_two_of_two(rank), E3M0(), [140_001, 3, 0], rank // 2, 2, weights, needs_own=True)
    values, reducer = torch.ones(600), _two_of_two(rank)
    values[7] = float("nan") if rank // 2 else 1.0
    reducer.join(zeros(600, codec=E3M0()))
    reducer.send(0, 1, lambda: Delta(values, 1.0, True, 0, find_non_finite=lambda: 5 if rank // 2 else None))
    outcome = reducer.poll(0, 1)
    reducer.leave()
    return rounds, outcome


@pytest.mark.slow
def test_ranks_inside_a_replica_share_the_traffic_and_all_get_the_whole_mean_or_learn_of_a_nan():
    weights = [1.0, 2.0]
    whole = E3M0().nbytes(140_001)
    results = run(4, _inner, weights)
    for rank, (result, outcome) in enumerate(results):
        assert outcome == NonFinite(1, {"1": 5})
        # Each rank encodes its half, so blocks begin in other places: equal up to what the codec does at the seam.
        halves = [weighted(E3M0(), [pack(E3M0(), d[part]) for d in deltas(140_001, 2)], shares(weights),
                           part.stop - part.start) for part in parts(140_001, 2)]  # fmt: skip
        assert torch.equal(result[0][0], torch.cat(halves))
        assert torch.equal(result[1][0], results[0][0][1][0])
        assert result[0][2] <= 0.51 * whole
        delta = deltas(140_001, 2)[rank // 2]  # what each half became on the wire, on both ranks
        as_sent = [_as_sent(E3M0(), delta[part]) for part in parts(140_001, 2)]
        assert torch.equal(result[0][3], torch.cat(as_sent))


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=9))
def test_shares_sum_to_one_and_are_equal_without_work(weights):
    assert sum(shares(weights)) == pytest.approx(1)
    if not any(weights):
        assert len(set(shares(weights))) == 1


@given(st.integers(0, 1000), st.integers(1, 20))
def test_parts_cover_everything_once_and_the_first_is_the_largest(n, replicas):
    cuts = parts(n, replicas)
    assert len(cuts) == replicas
    assert [i for cut in cuts for i in range(cut.start, cut.stop)] == list(range(n))
    assert all(cut.stop - cut.start <= cuts[0].stop - cuts[0].start for cut in cuts)
    assert cuts[0].stop == -(-n // replicas)


@given(st.integers(0, 100 * CHUNK), st.integers(0, 100 * CHUNK), st.sampled_from([E3M0(), Float32()]),
       st.sampled_from([1, 4]))  # fmt: skip
def test_a_payload_travels_in_a_few_pieces_of_whole_chunks_as_many_as_the_longest_has(n, more, codec, streams):
    cut = pieces(codec, n, n + more, streams)
    assert len(cut) == len(pieces(codec, n + more, n + more, streams)) <= PIECES
    values, data = 0, 0
    for of_values, of_bytes in cut:
        assert (of_values.start, of_bytes.start) == (values, data)
        values, data = of_values.stop, of_bytes.stop
        assert data - of_bytes.start == codec.nbytes(values - of_values.start)
        assert values == n or (values % CHUNK == 0 and (streams > 1 or values - of_values.start >= PIECE))
    assert (values, data) == (n, codec.nbytes(n))


headers = st.builds(
    Header, st.sampled_from(Kind), st.booleans(), st.integers(-1, 2**31 - 1), st.integers(-1, 2**62),
    st.floats(0, 1e30), st.floats(0, 1e30), st.integers(0, 2**63 - 1), st.integers(-1, 2**31 - 1),
)  # fmt: skip


@given(headers)
def test_a_header_comes_back_as_it_was(header):
    assert len(header.pack()) == NBYTES <= 64
    assert Header.unpack(header.pack(), 0) == header


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40), st.data())
def test_a_fingerprint_changes_with_any_bit(values, data):
    anchor = torch.tensor(values)
    outer = torch.zeros(len(values))
    before = State(0, anchor, outer).fingerprint()
    assert State(3, anchor.clone(), outer.clone()).fingerprint() == before
    target = data.draw(st.sampled_from([anchor, outer]))
    where, bit = data.draw(st.integers(0, len(values) - 1)), data.draw(st.integers(0, 31))
    target.view(torch.int32)[where] ^= (1 << bit) if bit < 31 else -(1 << 31)
    assert State(0, anchor, outer).fingerprint() != before


def test_the_mean_rounds_every_multiply_and_add_by_itself():
    """Bit for bit what scalar fp32 arithmetic without fused multiply-adds gives, on any CPU."""
    values, weights = [d.numpy() for d in deltas(20_000, 3)], [1.0, 3.0, 7.0]
    expected = np.float32(1 / 11) * values[0]
    expected = expected + np.float32(3 / 11) * values[1]
    expected = expected + np.float32(7 / 11) * values[2]
    payloads = [pack(Float32(), d) for d in deltas(20_000, 3)]
    assert np.array_equal(weighted(Float32(), payloads, shares(weights), 20_000).numpy(), expected)


@message_of(Mismatch)
def _disagree(rank, options):
    _all_rounds(Collective(**options[rank]), E3M0(), [4], rank, 2, [1.0, 1.0])


@pytest.mark.slow
def test_collectives_that_differ_are_told_so_before_they_wait_for_each_other():
    for message in run(2, _disagree, [{"mean_codec": Float32()}, {"streams": 2}]):
        assert "mean_codec is Float32() on replica 0, None on replica 1" in message
        assert "streams is 1 on replica 0, 2 on replica 1" in message


def _threads_of_rounds(rank):
    torch.set_num_threads(3)
    seen = []

    def delta():
        seen.append(torch.get_num_threads())
        return Delta(torch.zeros(5), 1.0, True, 0)

    reducer = Collective()
    reducer.join(zeros(5, codec=Float32()))
    reducer.send(0, 1, delta)
    reducer.poll(0, 1)
    reducer.leave()
    return seen, torch.get_num_threads()


@pytest.mark.slow
def test_rounds_are_computed_on_one_thread_and_training_keeps_its_own():
    assert run(2, _threads_of_rounds) == [([1], 3)] * 2


@pytest.mark.parametrize(("field", "value", "error"), [
    ("kind", Kind.JOIN, Mismatch),
    ("tokens", True, Mismatch),
    ("fragment", 1, Mismatch),
    ("index", 3, Mismatch),
    ("fingerprint", 8, Diverged),
])  # fmt: skip
def test_each_field_of_a_header_that_must_be_equal_is_compared(field, value, error):
    header = Header(Kind.ROUND, tokens=False, fragment=0, index=2, weight=1.0, fingerprint=7)
    check_round([header, replace(header, weight=3.0, non_finite=1)])  # these may differ
    other = replace(header, **{field: value})
    assert Header.unpack(other.pack(), 0) == other
    with pytest.raises(error, match=r"replica 2 |replicas 0 and 2 "):
        check_round([header, header, other])


@pytest.mark.parametrize("at", [0, 1])
def test_a_header_of_another_protocol_or_kind_names_the_replica(at):
    data = bytearray(Header(Kind.ROUND).pack())
    data[at] = 99
    with pytest.raises(Mismatch, match=r"replica 3 .*99"):
        Header.unpack(bytes(data), 3)


def test_every_stream_has_a_piece_if_there_are_enough_chunks():
    assert [len(pieces(E3M0(), n, n, 4)) for n in (CHUNK, 2 * CHUNK, 4 * CHUNK, 16 * CHUNK)] == [1, 2, 4, 4]
    assert [len(pieces(E3M0(), n, n, 1)) for n in (CHUNK, 4 * CHUNK, 16 * CHUNK, 640 * CHUNK)] == [1, 1, 4, 16]


def _bytes_of_a_round(rank, replicas, n):
    reducer = Collective(mean_codec=BFloat16())
    reducer.join(zeros(n, codec=Float32()))
    reducer.send(0, 1, lambda: Delta(deltas(n, replicas)[rank], 1.0, True, 0))
    cost, headers = reducer.poll(0, 1).cost, (replicas - 1) * NBYTES
    reducer.leave()
    return cost.bytes_sent - headers, cost.bytes_received - headers


@pytest.mark.slow
def test_bytes_sent_and_received_are_counted_apart():
    """Of 5 values, 4 replicas average 2, 2, 1 and none. Deltas take 4 bytes a value, averages 2."""
    counts = [2, 2, 1, 0]
    expected = [(4 * (5 - n) + 2 * 3 * n, 4 * 3 * n + 2 * (5 - n)) for n in counts]
    assert run(4, _bytes_of_a_round, 4, 5) == expected
