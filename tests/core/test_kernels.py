"""The native kernels give the bits of the code in Python, at every level that this processor has."""

import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from diloco.codecs import kernels
from diloco.codecs.codec import CHUNK, E3M0, BFloat16, Float32, TwoBit, pack, weighted
from diloco.core.memory import Buffers, Memory
from diloco.core.next_state import NextState
from diloco.core.outer import SGD, Nesterov
from diloco.exchange.mean import Encoded
from diloco.exchange.reducer import State, words
from diloco.exchange.thread import CommThread
from tests.support.models import train
from tests.support.processes import run

ENCODED = {"e3m0": E3M0(), "twobit": TwoBit()}
CODECS = {"float32": Float32(), "bfloat16": BFloat16(), **ENCODED}
LENGTHS = (1, 2, 129, 255, 256, 257, 2047, 2048, 2305, 4097, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 771)
NATIVE = kernels.levels()[1:]
native = pytest.mark.parametrize("level", NATIVE)


def reference(codec, payloads, factors, n):
    with kernels.at_level("reference"):
        return weighted(codec, payloads, factors, n)


def same_bits(a, b):
    """Equal bit for bit; of a nan only the place counts, which no encoder sends."""
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and torch.equal(a[~nan].view(torch.int32), b[~nan].view(torch.int32))


def values(kind, n):
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, generator=generator)
    if kind == "tiny and huge":
        return x * torch.exp2(torch.randint(-149, 127, (n,), generator=generator).float())
    if kind == "zeros":
        x[torch.rand(n, generator=generator) < 0.5] = 0.0
        x[torch.rand(n, generator=generator) < 0.3] = -0.0
        x[: 256 * (n // 512)] = -0.0
        return x
    if kind == "denormal":
        return x * 2.0**-130
    if kind == "equal":
        return x.sign() * torch.randint(0, 3, (n,), generator=generator)
    if kind == "one":  # far above the others of its block, which may be all there is
        return torch.where(torch.arange(n) % 300 == 7, x * 2.0**100, x * (torch.arange(n) % 512 < 256))
    if kind == "any bits":
        bits = torch.randint(-(2**31), 2**31, (n,), generator=generator, dtype=torch.int64).to(torch.int32)
        return bits.view(torch.float32)
    return x


KINDS = ("gaussian", "tiny and huge", "zeros", "denormal", "equal", "one", "any bits")


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler: apt-get install gcc")
def test_a_machine_with_a_compiler_has_the_kernels():
    assert "plain" in kernels.levels(), kernels.missing


@pytest.mark.parametrize("name", ENCODED)
@pytest.mark.parametrize("kind", KINDS)
def test_encoding_gives_the_same_bytes(kind, name):
    for n in LENGTHS:
        x = values(kind, n)
        with kernels.at_level("reference"):
            expected = pack(ENCODED[name], x)
        for level in NATIVE:
            payload = torch.full_like(expected, 170)
            with kernels.at_level(level):
                finite = kernels.encode(name, x, payload)
            assert torch.equal(payload, expected), (level, n)
            assert finite == bool(x.isfinite().all()), (level, n)


@native
@pytest.mark.parametrize("name", ENCODED)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_encoding_finds_one_value_that_is_not_finite(level, value, name):
    payload = torch.empty(ENCODED[name].nbytes(CHUNK + 701), dtype=torch.uint8)
    for at in (0, 255, 256, CHUNK - 1, CHUNK, CHUNK + 700):
        x = torch.randn(CHUNK + 701)
        with kernels.at_level(level):
            assert kernels.encode(name, x, payload), at
            x[at] = 3.0e38  # the largest exponent is finite
            assert kernels.encode(name, x, payload), at
            x[at] = value
            assert not kernels.encode(name, x, payload), at


@pytest.mark.parametrize("name", CODECS)
def test_the_mean_has_the_same_bits_for_any_number_of_members(name):
    n, codec = 2 * CHUNK + 771, CODECS[name]
    payloads = [pack(codec, values(KINDS[m % 4], n + m)[:n]) for m in range(9)]
    for members in range(1, 10):
        factors = [float(f) for f in np.random.default_rng(members).dirichlet(np.ones(members))]
        expected = reference(codec, payloads[:members], factors, n)
        for level in NATIVE:
            with kernels.at_level(level):
                kernels.mean(name, payloads[:members], factors, out := torch.empty(n))
            assert same_bits(out, expected), (level, members)


@pytest.mark.parametrize("name", CODECS)
def test_the_mean_has_the_same_bits_for_any_bytes_and_any_length(name):
    for n in LENGTHS:
        codec = CODECS[name]
        size = len(pack(codec, torch.zeros(n)))
        generator = torch.Generator().manual_seed(n)
        payloads = [torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8) for _ in range(3)]
        expected = reference(codec, payloads, [0.25, 0.0, 0.75], n)
        for level in NATIVE:
            with kernels.at_level(level):
                kernels.mean(name, payloads, [0.25, 0.0, 0.75], out := torch.empty(n))
            assert same_bits(out, expected), (level, n)


def next_state(level, state, rule, parts):
    with kernels.at_level(level):
        made = NextState(state, rule, Memory(), 0.03)
        for part in parts:
            made.add(part)
        return made.state(1)


def state_for(rule, n):
    velocity = values("zeros", len(rule.state(n)))
    velocity[n:] = 0.04  # the sum of learning rates of the round before
    return State(0, values("tiny and huge", n).clamp(-1e30, 1e30), velocity)


@native
@pytest.mark.parametrize("rule", [Nesterov(0.4, 0.9), Nesterov(0.4, 0.9, follow=False), SGD(0.7)])
def test_the_next_state_has_the_same_bits_and_the_fingerprint_of_its_bits(level, rule):
    for n in LENGTHS:
        state = state_for(rule, n)
        before = state.fingerprint()
        payloads = [pack(E3M0(), values("gaussian", n + m)[:n]) for m in range(3)]
        mean = [Encoded(0, n, E3M0(), payloads, [0.5, 0.25, 0.25])]
        expected, found = next_state("reference", state, rule, mean), next_state(level, state, rule, mean)
        assert n < 255 or not torch.equal(expected.anchor, state.anchor), n
        assert same_bits(found.anchor, expected.anchor) and same_bits(found.outer, expected.outer), n
        assert (
            found.cached_fingerprint == expected.fingerprint() == State(1, found.anchor, found.outer).fingerprint()
        ), n
        assert state.fingerprint() == before, n


@native
@pytest.mark.parametrize("members", [1, 2, 3, 9, 32, 33])
@pytest.mark.parametrize("wire", ["encoded", "any bytes"])
@pytest.mark.parametrize("shift", [0, 1])
def test_the_next_state_has_the_same_bits_for_any_members_any_bytes_and_any_place(level, members, wire, shift):
    """Shift: the state does not begin where a vector of the processor does."""
    n, rule = CHUNK + 771, kernels.Rule(0.4, 0.9, 0.7)
    state = [values("zeros", n + 1)[shift:][:n], values("gaussian", n + 1)[shift:][:n]]
    payloads = [pack(E3M0(), values("gaussian", n + m)[:n]) for m in range(members)]
    if wire == "any bytes":
        payloads = [torch.randint(0, 256, p.shape, dtype=torch.uint8) for p in payloads]
    factors = [float(f) for f in np.random.default_rng(members).dirichlet(np.ones(members))]
    mean = reference(E3M0(), payloads, factors, n)
    velocity = state[1] * 0.7 + mean
    anchor = state[0] - (velocity * 0.9 + mean) * 0.4
    new = torch.empty(n + 1)[shift:][:n], torch.empty(n + 1)[shift:][:n]
    with kernels.at_level(level):
        sums = kernels.advance("e3m0", payloads, factors, rule, (state[0], state[1]), new)
    assert same_bits(new[0], anchor) and same_bits(new[1], velocity)
    assert [total % 2**64 for total in sums] == [words(made[: n // 2 * 2].clone()) % 2**64 for made in new]


@native
@pytest.mark.parametrize("shift", [0, 1, 3])
def test_what_the_hook_writes_has_the_same_bits_and_nothing_beside_it_changes(level, shift):
    for n in (0, 1, 7, 8, 9, 257, 4099):
        a, b, out = values("any bits", n + 1)[1:], values("any bits", n), torch.full((n + 16,), 5.0)
        target = out[shift:][:n]
        with kernels.at_level(level):
            kernels.subtract(a, b, target)
            assert same_bits(target, a - b), n
            kernels.copy(a, target)
        assert torch.equal(target.view(torch.int32), a.view(torch.int32)), n
        assert (out[:shift] == 5).all() and (out[shift + n :] == 5).all(), n


@native
def test_the_last_round_leaves_the_state_of_the_rule_before_as_it_is(level):
    n = 2305
    state, x = state_for(Nesterov(0.4, 0.9), n), values("gaussian", n)
    before, outer = state.fingerprint(), state.outer.clone()
    mean = [Encoded(0, n, E3M0(), [pack(E3M0(), x)], [1.0])]
    expected, found = next_state("reference", state, SGD(1.0), mean), next_state(level, state, SGD(1.0), mean)
    assert same_bits(found.anchor, expected.anchor) and found.fingerprint() == expected.fingerprint()
    assert torch.equal(found.outer, outer) and torch.equal(expected.outer, outer) and state.fingerprint() == before


@native
@pytest.mark.parametrize("codec", [*CODECS.values()], ids=repr)
@pytest.mark.parametrize("cut", [CHUNK, CHUNK + 1])
def test_a_state_that_is_made_in_parts_has_the_same_bits(level, codec, cut):
    """Also where a part begins at an odd value, as with five replicas, or its codec has no kernel."""
    n, rule = 2 * CHUNK + 771, Nesterov(0.4, 0.9)
    x, state = values("gaussian", n), state_for(rule, n)
    parts = [
        Encoded(at, len(x[at : at + cut]), codec, [pack(codec, x[at : at + cut])], [1.0]) for at in range(0, n, cut)
    ]
    expected, found = next_state("reference", state, rule, parts), next_state(level, state, rule, parts[::-1])
    assert same_bits(found.anchor, expected.anchor) and same_bits(found.outer, expected.outer)
    assert found.fingerprint() == expected.fingerprint() and (found.cached_fingerprint is None) == (cut % 2 == 1)


@native
@pytest.mark.parametrize("name", ENCODED)
def test_any_number_of_threads_gives_the_same_bits(level, name):
    n, rule, codec = 5 * CHUNK + 771, kernels.Rule(0.4, 0.9, 0.7), ENCODED[name]
    x, old = values("gaussian", n), (values("zeros", n), values("gaussian", n + 1)[:n])

    def work(threads):
        kernels.use_threads(threads)
        try:
            payload, out, new = pack(codec, x), torch.empty(n), (torch.empty(n), torch.empty(n))
            kernels.mean(name, [payload, payload], [0.25, 0.5], out)
            sums = kernels.advance(name, [payload], [1.0], rule, old, new)
            spoiled = x.clone()
            spoiled[-1] = float("nan")
            assert not kernels.encode(name, spoiled, payload.clone())
            return payload, out, *new, torch.tensor([total % 2**62 for total in sums])
        finally:
            kernels.use_threads(1)

    with kernels.at_level(level):
        for one, many in zip(work(1), work(3), strict=True):
            assert torch.equal(one, many)


def test_the_communication_thread_encodes_with_as_many_threads_as_it_was_given():
    thread = CommThread(3)
    runs = thread.submit(
        kernels._each, 5 * CHUNK, lambda at, count: (at, count, threading.current_thread().name)
    ).result()
    thread.close(lambda: None)
    assert [(at, count) for at, count, _ in runs] == [(0, 2 * CHUNK), (2 * CHUNK, 2 * CHUNK), (4 * CHUNK, CHUNK)]
    assert all(name.startswith("diloco-kernels") for *_, name in runs)
    assert len(kernels._each(5 * CHUNK, lambda at, count: at)) == 1  # of this thread


def test_memory_of_a_state_is_used_again_once_its_copies_are_done():
    waited, buffers = [], Buffers()
    first, other = buffers.take(100), buffers.take(100)
    assert first.data_ptr() != other.data_ptr()
    buffers.give(torch.empty(70), lambda: waited.append("never"))
    buffers.give(first, lambda: waited.append("copied"))
    assert not waited
    assert buffers.take(100) is first and waited == ["copied"]
    for tensor in (first, other):
        buffers.give(tensor, lambda: None)
    assert buffers.take(100) is first and buffers.take(100) is other
    buffers.give(first, lambda: waited.append("again"))
    assert len(buffers.take(50)) == 50  # another size: what was kept is freed
    assert buffers.take(100) is not first and waited == ["copied"]


def _train(rank, settings):
    with kernels.at_level(kernels.levels()[-1] if rank % 2 else "reference"):
        return train(rank, 25, sync_every=10, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("codec", [E3M0(), BFloat16(), TwoBit()])
def test_a_replica_without_the_kernels_agrees_with_one_that_has_them(replicas, codec):
    results = run(replicas, _train, {"codec": codec})
    assert len({tuple(h) for h in results[0]["history"]}) > 2  # they moved
    assert all(other["history"] == results[0]["history"] for other in results[1:])


FLAGS = ["-O3", "-std=c11", "-ffp-contract=off", "-fno-math-errno"]
DIGEST = Path(__file__).parents[1] / "support" / "kernels_digest.c"


def compiled(tmp_path, compiler, *flags):
    """The kernels as a program of their own."""
    program = tmp_path / "-".join(["digest", compiler, *flags])
    subprocess.run([compiler, *FLAGS, *flags, "-o", program, DIGEST], check=True)
    return program


def digest(*command, level):
    """What the kernels compute from fixed input."""
    done = subprocess.run([*command, level], check=True, capture_output=True, text=True)
    assert len(done.stdout.splitlines()) == 6 * len(CODECS) + len(ENCODED)
    return done.stdout


@pytest.mark.slow
def test_no_kernel_reads_or_writes_where_it_must_not(tmp_path):
    """Under the address and undefined-behaviour sanitizers; also: their code computes the same."""
    plain = digest(compiled(tmp_path, "cc", "-O1"), level="plain")
    sanitized = compiled(tmp_path, "cc", "-O0", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover")
    for level in kernels.levels()[1:]:
        assert digest(sanitized, level=level) == plain


@pytest.mark.slow
@pytest.mark.skipif(
    not shutil.which("aarch64-linux-gnu-gcc") or not shutil.which("qemu-aarch64"),
    reason="needs an ARM compiler and emulator: apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user",
)
def test_an_arm_processor_computes_the_same_bits(tmp_path):
    arm = compiled(tmp_path, "aarch64-linux-gnu-gcc", "-static")
    assert digest("qemu-aarch64", arm, level="plain") == digest(compiled(tmp_path, "cc"), level="plain")
