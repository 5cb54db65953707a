"""Codecs of 16 bits and fewer: what each may lose, how long it is, and what it makes of bytes that mean nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from p2p_diloco.tensors import codec
from p2p_diloco.tensors.blockwise import BLOCK
from p2p_diloco.tensors.topk import CHUNK, ONE_OF
from tests.tensors.test_codec_laws import vectors

FEW_BITS = ("int8", "int4", "e3m0")


@pytest.mark.parametrize("name", FEW_BITS)
def test_the_bytes_are_those_that_the_documents_tell(name: str) -> None:
    """Peaks first, then codes, written out by hand from docs/math.md."""
    flat = torch.zeros(BLOCK + 3)
    flat[0], flat[1], flat[5] = 4.0, -2.0, 0.25
    flat[BLOCK], flat[BLOCK + 2] = -1.0, 1.0
    raw = bytes(codec.encode(flat, name))
    assert raw[:4] == bytes.fromhex("8040 803f")  # 4 and 1, as bf16
    codes = raw[4:]
    match name:
        case "int8":
            expected = {0: 127, 1: 256 - 64, 5: 8, BLOCK: 256 - 127, BLOCK + 2: 127}  # 63.5 and 7.9
            assert {place: code for place, code in enumerate(codes) if code} == expected
        case "int4":
            expected = {0: 0x7 | (16 - 4) << 4, 64: 16 - 7, 65: 0x7}  # 3.5 to even; 0.25 is nothing
            assert {place: code for place, code in enumerate(codes) if code} == expected
        case "e3m0":
            expected = {0: 0x7 | (0x8 | 6) << 4, 2: 3 << 4, 64: 0x8 | 7, 65: 0x7}
            assert {place: code for place, code in enumerate(codes) if code} == expected


def test_every_code_has_its_value() -> None:
    """All 16 codes of 4 bits, in both halves of a byte, and all 256 of 8."""
    peak = torch.tensor([3.0], dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    signed = [*range(8), -7, *range(-7, 0)]  # -8 is never written
    assert codec.decode(peak + bytes(n | n << 4 for n in range(16)), "int4", 32).tolist() == pytest.approx(
        [3 * n / 7 for n in signed for _ in "ab"]
    )
    powers = [0.0, *(3 / 2 ** (7 - n) for n in range(1, 8))]
    expected = [value for value in (*powers, *(-value for value in powers)) for _ in "ab"]
    assert codec.decode(peak + bytes(n | n << 4 for n in range(16)), "e3m0", 32).tolist() == expected
    eight = codec.decode(2 * peak + bytes(range(256)), "int8", 256)
    assert eight.tolist() == pytest.approx([3 * n / 127 for n in (*range(128), -127, *range(-127, 0))])


@settings(deadline=None, max_examples=60)
@given(vectors)
def test_topk_sends_the_largest_of_each_chunk(flat: Tensor) -> None:
    """As many as documented; what is sent is a bf16's rounding off, what isn't is no larger than anything that is."""
    decoded = codec.decode(bytes(codec.encode(flat, "topk")), "topk", len(flat))
    for start in range(0, len(flat), CHUNK):
        chunk, got = flat[start : start + CHUNK], decoded[start : start + CHUNK]
        kept = -(-len(chunk) // ONE_OF)
        least = chunk.abs().sort(descending=True).values[kept - 1]
        sent = got != 0
        assert int(sent.sum()) <= kept
        assert torch.equal(got[sent], chunk[sent].to(torch.bfloat16).float())
        assert torch.all(sent[chunk.abs() > max(least.item(), 2.0**-120)])
        assert torch.all(chunk[sent].abs() >= least)


def test_topk_sends_the_first_of_equals() -> None:
    """Of each chunk, also of a slice that is decoded in several blocks."""
    flat = torch.full((CHUNK + 130,), -2.0)
    decoded = codec.decode(codec.encode(flat, "topk"), "topk", len(flat))
    assert decoded.nonzero().flatten().tolist() == [*range(64), CHUNK, CHUNK + 1, CHUNK + 2]
    long = torch.zeros(2**18 + 5000)
    long[-1] = 1.0
    blocks = [block.clone() for block in codec.decode_blocks(codec.encode(long, "topk"), "topk", len(long))]
    assert torch.equal(torch.cat(blocks), long)


garbage = st.binary(max_size=400)


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(sorted(codec.CODECS)), st.integers(0, 300), garbage, st.booleans())
@example("topk", 128, b"\x01\x00\x01\x00" + bytes(4), True)
@example("int8", 2, b"\x80\xbf\x01\x01", True)
def test_garbage_is_refused_or_decoded(name: str, numel: int, raw: bytes, fitting: bool) -> None:
    """Whatever comes: ValueError, or as many values as were asked for, none of which exceeds what was said."""
    if fitting:
        length = codec.nbytes(name, numel)
        raw = (raw * (length // max(len(raw), 1) + 1))[:length] if raw else bytes(length)
    try:
        said = codec.peak(raw, name, numel)
        decoded = codec.decode(raw, name, numel)
    except ValueError:
        return
    assert len(decoded) == numel
    assert not numel or math.isnan(said) or decoded.abs().max().item() <= said


@pytest.mark.parametrize("places", [[1, 1], [2, 1], [-1, 1], [0, 128], [5, 32767], [256, -32768]])
def test_places_that_do_not_rise_within_their_chunk_are_refused(places: list[int]) -> None:
    raw = np.array(places, dtype="<i2").tobytes() + bytes(4)
    for read in (codec.decode, codec.peak, codec.decode_blocks):
        with pytest.raises(ValueError, match="must rise"):
            read(raw, "topk", 128)
    assert codec.decode(np.array([0, 127], dtype="<i2").tobytes() + bytes(4), "topk", 128).tolist() == [0.0] * 128


@pytest.mark.parametrize("name", FEW_BITS)
@pytest.mark.parametrize("peak", [math.nan, math.inf, -math.inf, -1.0])
def test_a_peak_that_is_none_is_refused(name: str, peak: float) -> None:
    raw = bytearray(codec.encode(torch.ones(3 * BLOCK), name))
    raw[2:4] = torch.tensor([peak], dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    with pytest.raises(ValueError, match="peak of a block"):
        codec.decode(raw, name, 3 * BLOCK)
