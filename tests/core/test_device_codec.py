"""The codecs and the outer step in torch operations have the bits of those of the host, for any values."""

import pytest
import torch

from diloco.codecs import device, kernels
from diloco.codecs.codec import CHUNK, E3M0, BFloat16, Float32, pack_checked, weighted
from diloco.core.fragment import Piece
from diloco.core.memory import Memory
from diloco.core.next_state import NextState
from diloco.core.outer import SGD, Nesterov, Stage, lr_before
from diloco.core.payload import encode, packed, room
from diloco.core.placement import OnHost
from diloco.core.sync import FragmentSync, InFlight, Work
from diloco.core.view import FlatView
from diloco.exchange import reducer
from diloco.exchange.mean import Encoded, Packed, cuts, decode_cuts
from diloco.exchange.reducer import State
from tests.core.test_kernels import KINDS, LENGTHS, same_bits, values
from tests.support import late_device
from tests.support.fake_reducer import Script
from tests.support.processes import run

CODECS = {"e3m0": E3M0(), "bfloat16": BFloat16()}
codecs = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
levels = pytest.mark.parametrize("level", kernels.levels())


@pytest.fixture(autouse=True)
def short_passes(monkeypatch):
    """Several passes, of which the last is shorter."""
    monkeypatch.setattr(device, "PASS", 2 * CHUNK)


def encoded(codec, x):
    payload = torch.full((codec.nbytes(len(x)),), 170, dtype=torch.uint8)
    finite = device.encode(codec, x, payload)
    return payload, bool(finite)


def minus_mean(codec, payloads, factors, n):
    """What plain averaging makes of an anchor of zeros."""
    old, new = torch.zeros(n), torch.empty(n)
    device.advance(codec, payloads, factors, kernels.Rule(1.0), (old, old), (new, new))
    return new


@levels
@codecs
@pytest.mark.parametrize("kind", KINDS)
def test_encoding_gives_the_bytes_of_the_host(level, codec, kind):
    for n in (*LENGTHS, 5 * CHUNK + 3):
        x = values(kind, n)
        with kernels.at_level(level):
            expected, finite = pack_checked(codec, x)
        payload, found = encoded(codec, x)
        assert found == finite, n
        if finite or codec != BFloat16():  # of which no two processors write the same nan
            assert torch.equal(payload, expected), n


@pytest.mark.slow
@levels
@pytest.mark.parametrize("partner", [0.0, 2.0**-120, 1.0, 2.0**127])
def test_e3m0_has_the_bytes_of_the_host_for_every_upper_half_beside_any_other(level, partner):
    upper = torch.arange(1 << 16, dtype=torch.int32) << 16
    x = torch.zeros(1 << 16, 256)
    x[:, 1] = partner
    x[:, 0] = upper.view(torch.float32)
    x[:, 2] = (upper | 0xFFFF).view(torch.float32)
    x = x.view(-1)
    with kernels.at_level(level):
        expected, finite = pack_checked(E3M0(), x)
    payload, found = encoded(E3M0(), x)
    assert torch.equal(payload, expected) and not finite and not found


@pytest.mark.slow
def test_bfloat16_has_the_bytes_of_the_host_for_every_upper_half_and_the_ties():
    upper = (torch.arange(1 << 16, dtype=torch.int32) << 16)[:, None]
    x = (upper | torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])).to(torch.int32).view(torch.float32)
    x = x[x.isfinite().all(1)].view(-1)
    assert torch.equal(encoded(BFloat16(), x)[0], pack_checked(BFloat16(), x)[0])


@codecs
@pytest.mark.parametrize("at", [0, 255, CHUNK, 2 * CHUNK, 2 * CHUNK + 700])
def test_one_value_that_is_not_finite_is_found_in_any_pass(codec, at):
    for value, finite in ((3.0e38, True), (torch.inf, False), (-torch.inf, False), (torch.nan, False)):
        x = values("gaussian", 2 * CHUNK + 701)
        x[at] = value
        assert encoded(codec, x)[1] == finite


@codecs
def test_a_shard_without_rows_is_encoded_too(codec):
    memory = torch.empty(room(codec, 0, 2))
    encode(codec, torch.empty(0), 2, memory, ())
    delta = packed(memory, codec, 0, 2)
    assert delta.finite and not any(len(payload) for payload in delta.payloads)


@codecs
def test_one_value_that_is_not_finite_is_found_in_any_share(codec):
    n, replicas = 5 * CHUNK + 3, 8
    shares = cuts(n, replicas)
    assert len(shares) == replicas
    memory = torch.empty(room(codec, n, replicas))
    for share in shares:
        delta = torch.ones(n)
        encode(codec, delta, replicas, memory, ())
        assert packed(memory, codec, n, replicas).finite
        delta[share.stop - 1] = torch.nan
        encode(codec, delta, replicas, memory, ())
        assert not packed(memory, codec, n, replicas).finite


@levels
@codecs
@pytest.mark.parametrize("wire", ["encoded", "any bytes"])
def test_the_mean_has_the_bits_of_the_host(level, codec, wire):
    for n in (*LENGTHS, 5 * CHUNK + 3):
        payloads = [encoded(codec, values(KINDS[m % 6], n + m)[:n])[0] for m in range(4)]
        if wire == "any bytes":
            payloads = [torch.randint(0, 256, payload.shape, dtype=torch.uint8) for payload in payloads]
        for factors in ([1.0], [0.25, 0.0, 0.75], [0.1, 0.2, 0.3, 0.4]):
            with kernels.at_level(level):
                expected = weighted(codec, payloads[: len(factors)], factors, n)
            assert same_bits(minus_mean(codec, payloads[: len(factors)], factors, n), 0 - expected), (n, factors)


@levels
@codecs
@pytest.mark.parametrize("rule", [Nesterov(0.4, 0.9), Nesterov(0.4, 0.9, follow=False), SGD(0.7)])
def test_the_outer_step_has_the_bits_and_the_fingerprint_of_the_host(level, codec, rule):
    for n in (*LENGTHS, 5 * CHUNK + 3):
        velocity = values("zeros", len(rule.state(n)))
        velocity[n:] = 0.04  # the learning rate of the round before
        state = State(0, values("tiny and huge", n).clamp(-1e30, 1e30), velocity)
        payloads = [encoded(codec, values("gaussian", n + m)[:n])[0] for m in range(3)]
        with kernels.at_level(level):
            following = NextState(state, rule, Memory(), 0.03)
            following.add(Encoded(0, n, codec, payloads, [0.5, 0.25, 0.25]))
            expected = following.state(1)
        used = (
            kernels.Rule(rule.lr)
            if isinstance(rule, SGD)
            else kernels.Rule(*rule.at(Stage(1, 0.03), lr_before(state.outer)))
        )
        new = torch.empty(n), expected.outer.clone().fill_(torch.nan)
        old, halves = (state.anchor, velocity[:n]), (new[0], new[1][:n])
        device.advance(codec, payloads, [0.5, 0.25, 0.25], used, old, halves)
        new[1][n:] = 0.03
        assert same_bits(new[0], expected.anchor) and same_bits(new[1], expected.outer), n
        sums = [int(device.words(part)) % 2**64 for part in new]
        assert reducer.fingerprint(*sums) == expected.fingerprint(), n


def test_only_codecs_with_the_bits_of_the_host_are_supported():
    assert all(device.supports(codec) for codec in CODECS.values())
    assert not device.supports(Float32())


def _on_the_device(rank):
    late_device.install()
    device.PASS = 2 * CHUNK
    n, rule, out = 5 * CHUNK + 3, kernels.Rule(0.4, 0.9, 0.7), []
    for place in ("cpu", "late"):
        x, state = values("gaussian", n).to(place), [values(kind, n).to(place) for kind in ("zeros", "gaussian")]
        late_device.counters = late_device.Counters()
        new = torch.empty_like(state[0]), torch.empty_like(state[1])
        made = []
        for codec in CODECS.values():
            payload = torch.empty(codec.nbytes(n), dtype=torch.uint8, device=place)
            finite = device.encode(codec, x, payload)
            device.advance(codec, [payload, payload], [0.25, 0.75], rule, (state[0], state[1]), new)
            made += [payload, finite, *(part.clone() for part in new), *map(device.words, new)]
        waits = late_device.counters.waits.copy()
        out.append([tensor.cpu() for tensor in made])
    return all(torch.equal(*pair) for pair in zip(*out, strict=True)), waits, late_device.counters.kernels.total()


@pytest.mark.slow
def test_on_an_accelerator_nothing_waits():
    ((same, waits, launched),) = run(1, _on_the_device)
    assert same and not waits and launched > 100


def sync(packs_for, n=1000):
    """A fragment on a device that encodes for so many replicas, or on a host."""
    pieces, memory = (Piece("w", 0, n),), Memory()
    view = FlatView(pieces, {"w": torch.zeros(n)})
    place = OnHost(view, Nesterov(), memory, E3M0(), None)
    options = {"outer": Nesterov(), "codec": E3M0(), "memory": memory, "packs_for": packs_for}
    return FragmentSync(0, pieces, view, place, reducer=Script(), **options)


@pytest.mark.parametrize("packs_for", [2, 3, 5])
@pytest.mark.parametrize("same", [True, False])
def test_an_encoded_delta_in_flight_is_resumed_as_it_was(packs_for, same):
    """Also what no payload tells: that it was not finite. Elsewhere than before it is decoded."""
    for broken in (False, True):
        before, after = sync(packs_for), sync(packs_for if same else None)
        delta = torch.randn(before.view.size, generator=torch.Generator().manual_seed(0))
        delta[7] = torch.nan if broken else 1.0
        memory = torch.empty(room(E3M0(), len(delta), packs_for))
        encode(E3M0(), delta, packs_for, memory, ())
        work = Work(amount=1.0, steps=1)
        values = before._values(memory, packs_for, lambda: None)
        before.in_flight = InFlight(work, work, memory, values, sent_at=0.0)
        after.load_state_dict(before.state_dict())
        sent = after.delta_later()()
        assert isinstance(sent.values, Packed) == same
        assert (sent.find_non_finite() is not None) == broken
        if not broken:
            sent_before = decode_cuts(E3M0(), before.in_flight.values().payloads, len(delta), packs_for)
            values = decode_cuts(E3M0(), sent.values.payloads, len(delta), packs_for) if same else sent.values
            assert same_bits(values, sent_before)
