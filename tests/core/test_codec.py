"""Codec contracts, the same for all, and what is particular to E3M0 and to the codec below 4 bits."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from diloco import E3M0, BFloat16, ConfigError, Float32, TwoBit
from diloco.codecs import codec, kernels
from diloco.codecs.levels import MAGNITUDES

FINE = [Float32(), BFloat16(), E3M0()]
ALL = [*FINE, TwoBit()]
# Largest error of a value, relative to it and to the largest of its block. E3M0 drops what is below 3/4 of the smallest
# code, 2^-6 of a scale that may be 4/3 of the largest value. 2 bits bound the mean error only, and a value by the
# largest of its block.
ERROR = {"Float32": (0, 0), "BFloat16": (2**-8, 0), "E3M0": (1 / 3, 2**-6), "TwoBit": (0, 1.004)}
every = pytest.mark.parametrize("c", ALL, ids=lambda c: type(c).__name__)
LENGTHS = (0, 1, 2, 3, 255, 256, 257, 511, 512, 513, 4095, 4096, 4097, codec.CHUNK, codec.CHUNK + 1)
finite = hnp.arrays("float32", st.integers(0, 700), elements=st.floats(-(2.0**100), 2.0**100, width=32))


@every
def test_a_payload_is_flat_bytes_of_the_stated_size_and_zeros_stay_zero(c):
    for n in LENGTHS:
        payload = codec.pack(c, torch.zeros(n))
        assert payload.dtype is torch.uint8
        assert payload.shape == codec.pack(c, torch.randn(n)).shape == (c.nbytes(n),)
        decoded = codec.unpack(c, payload, n)
        assert decoded.shape == (n,) and not decoded.any()


@given(x=finite)
def test_the_error_is_bounded(x):
    x = torch.from_numpy(x)
    for c in ALL:
        back = codec.unpack(c, codec.pack(c, x), len(x))
        relative, of_largest = ERROR[type(c).__name__]
        for part, decoded in zip(x.double().split(256), back.double().split(256), strict=True) if len(x) else ():
            # 2^-118: the smallest scales are sent as zero
            bound = relative * part.abs() + of_largest * part.abs().amax() + (2.0**-118 if relative else 2.0**-112)
            assert ((part - decoded).abs() <= bound * (c != Float32())).all(), c


@given(x=finite)
@example(x=np.float32([1.2280365e30, 4.3521334e25]))  # the largest value goes up to a power of two
def test_encoding_what_was_decoded_changes_nothing(x):
    for c in FINE:
        payload = codec.pack(c, torch.from_numpy(x))
        once = codec.unpack(c, payload, len(x))
        twice = codec.unpack(c, codec.pack(c, once), len(x))
        assert torch.equal(once, twice), c


@given(x=finite)
def test_signs_are_kept_and_zero_stays_zero(x):
    x = torch.from_numpy(x)
    for c in ALL:
        back = codec.unpack(c, codec.pack(c, x), len(x))
        assert (back * x.sign() >= 0).all(), c
        assert c == TwoBit() or (back[x == 0] == 0).all(), c


@every
def test_packing_in_chunks_gives_the_values_of_one_piece(c):
    x = torch.randn(2 * codec.CHUNK + 300)
    whole = c.decode(c.encode(x), len(x))
    assert torch.equal(codec.unpack(c, codec.pack(c, x), len(x)), whole)


@every
def test_encoding_leaves_its_input_alone(c):
    x = torch.randn(1000)
    before = x.clone()
    payload = c.encode(x)
    c.decode(payload, len(x)).mul_(2)
    assert torch.equal(x, before)
    assert torch.equal(c.decode(payload, len(x)), c.decode(c.encode(before), len(x)))


@pytest.mark.parametrize("level", kernels.levels())
def test_e3m0_is_exact_at_every_exponent_of_a_float(level):
    """A block for each largest value there is, up to the mantissa: from denormals to the largest float."""
    mantissas = np.float64([1, 1.25, 1.5 - 2**-7, 1.5, 1.75, 2 - 2**-7])
    largest = np.ldexp(mantissas, np.arange(-149, 128)[:, None]).reshape(-1, 1)
    below = np.ldexp(np.append(mantissas, -mantissas), -np.arange(10)[:, None]).reshape(1, -1) / 2  # |x| < 1
    rows = np.float32(np.concatenate([largest, largest * below], axis=1))
    x = np.zeros((len(rows), 256), np.float32)
    x[:, : rows.shape[1]] = rows
    mantissa, exponent = np.frexp(np.abs(np.float64(x)))  # mantissa from 0.5: the border is 0.75
    power = np.where(x == 0, 0, np.ldexp(1.0, exponent - (mantissa < 0.75)))
    power = np.minimum(power, 2.0**127)  # the next power is not a finite float
    scale = power.max(1, keepdims=True)
    expected = np.sign(x) * np.where((power >= scale / 64) & (scale >= 2.0**-119), power, 0)
    with kernels.at_level(level):
        back = codec.unpack(E3M0(), codec.pack(E3M0(), torch.from_numpy(x).view(-1)), x.size)
    assert np.array_equal(back.numpy().reshape(x.shape), expected)
    assert {0.0, 2.0**-119, 2.0**127} <= set(expected[:, 0])


def error(c, x):
    return float((codec.unpack(c, codec.pack(c, x), len(x)) - x).norm() / x.norm())


def test_two_bits_have_the_stated_size_and_error():
    generator, n = torch.Generator().manual_seed(0), 1 << 19
    assert TwoBit().nbytes(n) * 8 / n == 2.0625
    assert error(TwoBit(), torch.randn(n, generator=generator)) == pytest.approx(0.341, abs=0.002)
    signs = torch.rand(n, generator=generator).sub_(0.5).sign_()
    assert error(TwoBit(), torch.empty(n).exponential_(generator=generator) * signs) == pytest.approx(0.415, abs=0.002)


@given(data=st.data())
def test_a_block_has_a_few_levels_of_one_of_two_tables(data):
    n = data.draw(st.sampled_from([1, 5, 255, 256, 700]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    power, exponent = data.draw(st.sampled_from([1, 3])), data.draw(st.integers(-90, 90))
    x = torch.randn(n, generator=generator) ** power * 2.0**exponent
    for values, block in zip(x.split(256), codec.unpack(TwoBit(), codec.pack(TwoBit(), x), n).split(256), strict=True):
        if not block.any():  # it was too small for a scale
            assert values.abs().mean() < 2.0**-99
            continue
        ratios = block.abs() / block.abs().max()
        fits = [np.isclose(ratios[:, None], t / m, rtol=1e-5).any(1).all() for t in MAGNITUDES for m in t]
        assert any(fits)


def test_a_block_with_long_tails_takes_the_other_table():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(512, generator=generator)
    x[256:] = x[256:] ** 3
    heads = codec.pack(TwoBit(), x)[:4].numpy().view(np.uint16)
    assert (heads >> 15).tolist() == [0, 1]


class OneScale:
    """Counts its scale once for a tensor of any length."""

    def nbytes(self, n):
        return 4 + 4 * n


def test_a_codec_whose_sizes_do_not_add_up_over_chunks_is_refused():
    for c in ALL:
        codec.check_sizes(c)
    with pytest.raises(ConfigError, match=r"nbytes\(131072\) \+ nbytes\(1\) is 524300, nbytes\(131073\) is 524296"):
        codec.check_sizes(OneScale())


@pytest.mark.parametrize("format", [Float32(), BFloat16()])
def test_values_whose_sum_overflows_are_finite(format):
    large = torch.full((8,), 3e38)
    assert codec.pack_checked(format, large)[1]
    large[5] = torch.inf
    assert not codec.pack_checked(format, large)[1]
