"""Encoded bytes: their length, their rounding (also the stochastic one), and the refusal of invalid ones."""

from __future__ import annotations

import gc
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_diloco.tensors import codec
from p2p_diloco.tensors.codec import to_bf16
from p2p_diloco.tensors.flat import magnitude
from p2p_diloco.tensors.mean import MAGNITUDE_MAX


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False), max_size=40))
def test_bf16_rounds_to_nearest_once(values):
    """The bytes are the upper halves of fp32, rounded to nearest even; decoding adds nothing; twice is
    once.
    """
    vector = torch.tensor(values, dtype=torch.float32)
    raw = bytes(codec.encode(vector, "bf16"))
    bits = vector.numpy().view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    assert raw == rounded.tobytes()
    again = codec.decode(raw, "bf16", len(values))
    assert again.dtype == torch.float32
    assert bytes(codec.encode(again, "bf16")) == raw


def test_bytes_are_views_where_nothing_is_cast():
    """fp32 is sent from, and read in, the memory where it lies."""
    vector = torch.zeros(4)
    raw = codec.encode(vector, "fp32")
    vector[0] = 1.0
    assert bytes(raw[:4]) == b"\x00\x00\x80\x3f"
    buffer = bytearray(8)
    seen = codec.decode(buffer, "fp32", 2)
    buffer[4:] = b"\x00\x00\x80\x3f"
    assert seen.tolist() == [0.0, 1.0]


@pytest.fixture
def every_warning():
    """Makes torch repeat warnings that it otherwise shows only once in a process."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_any_buffer_is_read_without_a_warning_and_kept_alive(kind, name, every_warning):
    """Also read-only ones, also when the caller lets go of them, also where they begin at an odd address."""
    values = torch.arange(1000, dtype=torch.float32) % 128
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seen = codec.decode(kind(bytes(codec.encode(values, name))), name, 1000)
        odd = codec.decode(memoryview(b"x" + bytes(codec.encode(values, name)))[1:], name, 1000)
    gc.collect()
    trash = [bytes([255]) * codec.nbytes(name, 1000) for _ in range(50)]
    assert torch.equal(seen, values)
    assert torch.equal(odd, values)
    assert odd.data_ptr() % 4 == 0  # not every processor reads a number that begins anywhere
    del trash


@pytest.mark.parametrize("name", codec.CODECS)
@pytest.mark.parametrize("length", [1, 7, 64, 1000, 100_003])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_not_finite_is_found_wherever_it_is(name, length, bad):
    """The largest finite values pass; both signs, mixed with a NaN, don't."""
    largest = torch.finfo(torch.float16 if name == "fp16" else torch.bfloat16).max
    vector = torch.full((length,), largest)
    vector[::2] *= -1
    assert math.isfinite(codec.peak(codec.encode(vector, name), name, length))
    for place in {0, length // 2, length - 1}:
        spoiled = vector.clone()
        spoiled[place] = bad
        assert not math.isfinite(codec.peak(codec.encode(spoiled, name), name, length))


@pytest.mark.parametrize(("name", "length"), [("fp32", 11), ("fp32", 16), ("bf16", 5), ("bf16", 12), ("bf16", 0)])
def test_a_wrong_length_is_refused(name, length):
    with pytest.raises(ValueError, match=rf"3 elements in {name} are \d+ bytes, found {length}"):
        codec.decode(bytes(length), name, 3)


@pytest.mark.parametrize("tensor", [torch.zeros(2, 2), torch.zeros(2, dtype=torch.float64)])
def test_only_flat_fp32_is_encoded(tensor):
    with pytest.raises(ValueError, match="flat fp32"):
        codec.encode(tensor, "bf16")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_magnitude_is_the_largest_absolute_value(dtype: torch.dtype) -> None:
    """Of values of one sign, too, and of zeros; a NaN of either sign makes it NaN."""
    values = torch.tensor([0.5, -3.0, 2.0, -0.0, 1e-7], dtype=dtype)
    for some in (
        values,
        -values,
        values.abs(),
        -values.abs(),
        values[3:4],
        torch.tensor([-math.inf, 1.0], dtype=dtype),
    ):
        assert magnitude(some) == some.abs().max().item()
    nan = torch.tensor([math.nan, 1.0], dtype=dtype)
    assert math.isnan(magnitude(nan))
    assert math.isnan(magnitude(-nan))
    assert magnitude(values[:0]) == 0.0


# -- stochastic rounding


DRAWS = 4000

numbers = st.floats(-MAGNITUDE_MAX, MAGNITUDE_MAX, width=32)


def neighbours(value: float) -> tuple[float, float]:
    """The bf16 values about an fp32 one."""
    bits = torch.tensor([value]).view(torch.int32)
    near = (bits & -65536).view(torch.float32).item()
    far = ((bits & -65536) + (65536 if near != value else 0)).view(torch.float32).item()
    return min(near, far), max(near, far)


@settings(deadline=None, max_examples=60)
@given(numbers, st.integers(0, 2**64 - 1))
def test_it_is_right_on_average(value: float, seed: int) -> None:
    """Every draw is one of the neighbours, and the mean of many lies within five standard deviations of the value;
    what needs no rounding stays.
    """
    below, above = neighbours(value)
    drawn = to_bf16(torch.full((DRAWS,), value), seed - 2**63).double()
    assert set(drawn.tolist()) <= {below, above}
    share = (value - below) / (above - below) if above > below else 0.0
    deviation = (above - below) * math.sqrt(share * (1 - share) / DRAWS)
    # at a share next to 0 or 1, a single draw is more than five deviations: it may happen
    assert abs(drawn.mean().item() - value) <= 5 * deviation + 3 * (above - below) / DRAWS


def test_draws_are_even_in_every_lane() -> None:
    """Of four neighbours that share a random word each is rounded up as often as it should."""
    drawn = to_bf16(torch.full((2**16,), 1.0 + 2.0**-9), 5).view(-1, 4)
    assert torch.all(((drawn > 1.0).float().mean(0) - 0.25).abs() < 0.02)
    assert not torch.equal(drawn[:, 0], drawn[:, 1])


def test_a_seed_decides() -> None:
    flat = torch.randn(100_001)
    once = bytes(codec.encode_stochastically(flat, 7))
    assert once == bytes(codec.encode_stochastically(flat, 7))
    assert once != bytes(codec.encode_stochastically(flat, 8))
    assert len(once) == codec.nbytes("bf16", 100_001)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    """Also a NaN whose bits are next to a number's."""
    flat = torch.ones(1000)
    flat[7] = bad
    flat[8] = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)[0]
    assert not math.isfinite(codec.peak(codec.encode_stochastically(flat, 1), "bf16", 1000))
    assert to_bf16(flat, 1)[8].isnan()
