"""The laws of every codec, for vectors of any length, the empty one included, with values of all magnitudes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from p2p_diloco.core.carry import Outcome
from p2p_diloco.core.version import ContributionId
from p2p_diloco.tensors import codec
from p2p_diloco.tensors.blockwise import BLOCK, LEAST_PEAK
from p2p_diloco.tensors.feedback import Feedback
from p2p_diloco.tensors.mean import MAGNITUDE_MAX
from p2p_diloco.tensors.topk import CHUNK

NAMES = sorted(codec.CODECS)
LOSSY = [name for name in NAMES if codec.feeds_back(name)]
LEAST, TOP = -149, 29
"""Exponents of the least denormal fp32, and of the largest that may be sent but for 2^30 itself."""
lengths = st.sampled_from([0, 1, 2, 3, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2**15 + 3])
lengths |= st.integers(0, 3 * BLOCK)
exponents = st.tuples(st.integers(LEAST, TOP), st.integers(0, TOP - LEAST))


def wild(length: int, seed: int, exponents: tuple[int, int]) -> Tensor:
    """Magnitudes over so many powers of two from the first on, either sign; zeros, and the outermost, among them."""
    source = torch.Generator().manual_seed(seed)
    least, span = exponents
    powers = torch.randint(least, min(least + span, TOP) + 1, (length,), generator=source)
    made = torch.ldexp(1 + torch.rand(length, generator=source, dtype=torch.float64), powers)
    made = made * (torch.randint(0, 2, (length,), generator=source) * 2 - 1)
    made[torch.rand(length, generator=source) < 0.05] = 0.0
    flat = made.clamp(-MAGNITUDE_MAX, MAGNITUDE_MAX).to(torch.float32)
    if seed % 3 == 0 and length:
        flat[seed % length] = (MAGNITUDE_MAX, -MAGNITUDE_MAX, 2.0**-149, LEAST_PEAK, 65520.0)[seed % 5]
    return flat


vectors = st.builds(wild, lengths, st.integers(0, 10**6), exponents)


def through(flat: Tensor, name: str) -> Tensor:
    return codec.decode(bytes(codec.encode(flat, name)), name, len(flat))


def peaks_of(flat: Tensor) -> Tensor:
    """The largest magnitude of each element's block: fp64."""
    padded = torch.nn.functional.pad(flat.double().abs(), (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    return padded.amax(1, keepdim=True).expand(-1, BLOCK).reshape(-1)[: len(flat)]


def half_a_step(levels: int) -> Callable[[Tensor], Tensor]:
    return lambda flat: peaks_of(flat) * (1 + 2**-7) / levels * 0.5001 + LEAST_PEAK


def third(flat: Tensor) -> Tensor:
    magnitudes, peaks = flat.double().abs(), peaks_of(flat)
    return torch.where(magnitudes < peaks / 64, peaks * (1 + 2**-7) / 128, magnitudes / 3) * 1.0001 + LEAST_PEAK


MAY_LOSE: dict[str, Callable[[Tensor], Tensor]] = {
    "fp32": lambda flat: torch.zeros(len(flat)),
    "bf16": lambda flat: flat.double().abs() * 2**-8 + 2.0**-134,
    "fp16": lambda flat: (flat.double().abs() - 65504).clamp(min=0).maximum(flat.double().abs() * 2**-11 + 2.0**-25),
    "int8": half_a_step(127),
    "int4": half_a_step(7),
    "e3m0": third,
    "topk": lambda flat: flat.double().abs(),
}


@settings(deadline=None, max_examples=120)
@given(st.sampled_from(NAMES), vectors)
def test_no_element_loses_more_than_its_codec_may(name: str, flat: Tensor) -> None:
    """Whatever its neighbours are. None changes its sign or grows beyond what `peak` tells, and 0 stays 0."""
    raw = bytes(codec.encode(flat, name))
    decoded, said = codec.decode(raw, name, len(flat)), codec.peak(raw, name, len(flat))
    assert torch.isfinite(decoded).all()
    assert torch.all((decoded.double() - flat.double()).abs() <= MAY_LOSE[name](flat))
    assert torch.all((decoded == 0) | (decoded.sign() == flat.sign()))
    assert not len(flat) or decoded.abs().max().item() <= said <= MAGNITUDE_MAX


@settings(deadline=None, max_examples=70)
@given(st.sampled_from(NAMES), vectors)
def test_bytes_follow_from_the_values_alone(name: str, flat: Tensor) -> None:
    """The same from any memory; as many as are told beforehand; and nothing is written to what was given."""
    before, strided = flat.clone(), torch.stack((flat, flat), 1)[:, 0]
    raw = bytes(codec.encode(flat, name))
    assert len(raw) == codec.nbytes(name, len(flat))
    assert raw == bytes(codec.encode(flat, name)) == bytes(codec.encode(strided, name))
    assert torch.equal(flat, before)
    pieces = [piece.clone() for piece in codec.decode_blocks(raw, name, len(flat))]
    assert torch.equal(torch.cat(pieces), codec.decode(raw, name, len(flat)))


@settings(deadline=None, max_examples=70)
@given(st.sampled_from(NAMES), vectors)
def test_no_codec_leans_to_a_side(name: str, flat: Tensor) -> None:
    """The negative of a vector decodes to the negative: what is lost has no sign of its own to add up."""
    assert torch.equal(through(-flat, name), -through(flat, name))


@settings(deadline=None, max_examples=70)
@given(st.sampled_from(LOSSY), lengths, st.lists(st.integers(0, 10**6), min_size=1, max_size=6), exponents)
@example("e3m0", 0, [1, 2], (0, 1))
def test_a_residual_is_the_error_of_the_encoded_bytes(
    name: str, length: int, seeds: list[int], exponents: tuple[int, int]
) -> None:
    """After each that is counted, to the bit: (Δ + r) − q, and no more than the codec may lose of Δ + r."""
    feedback = Feedback(length)
    for sequence, seed in enumerate(seeds, 1):
        delta, before = wild(length, seed, exponents) / 64, feedback.residual.clone()
        raw = bytes(codec.encode(feedback.added(delta), name))
        feedback.sent(ContributionId(1, sequence), codec.decode_blocks(raw, name, length))
        feedback.merge(Outcome(counted=True), ContributionId(1, sequence))
        asked = delta + before
        assert torch.equal(feedback.residual, asked - codec.decode(raw, name, length))
        assert torch.all(feedback.residual.double().abs() <= MAY_LOSE[name](asked) * (1 + 1e-6))
