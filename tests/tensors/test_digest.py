"""Equal digests mean equal bits."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_diloco.tensors import flat
from p2p_diloco.tensors.digest import digest, look


def flipped(tensor: torch.Tensor, bit: int) -> torch.Tensor:
    raw = tensor.clone().view(torch.uint8)
    raw[bit // 8] ^= 1 << bit % 8
    return raw.view(torch.float32)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.data())
def test_one_flipped_bit_anywhere_changes_it(numel, data):
    """In θ, in m, in the metadata."""
    theta, m, meta = torch.randn(numel), torch.randn(numel), b"epoch 3"
    whole = digest(theta, {"m": m}, meta)
    bit = data.draw(st.integers(0, 32 * numel - 1))
    byte = data.draw(st.integers(0, len(meta) - 1))
    assert digest(flipped(theta, bit), {"m": m}, meta) != whole
    assert digest(theta, {"m": flipped(m, bit)}, meta) != whole
    assert digest(theta, {"m": m}, meta[:byte] + bytes([meta[byte] ^ 1]) + meta[byte + 1 :]) != whole
    assert digest(theta.clone(), {"m": m.clone()}, meta) == whole


def test_a_look_block_by_block_sees_the_same(monkeypatch):
    """However an outer state is cut, and in whichever order its tensors are seen: the same digest; and one value
    that is not finite, anywhere, is seen."""
    theta, m = torch.randn(1000), torch.randn(1000)
    monkeypatch.setattr(flat, "BLOCK", 33)
    seen = look(theta, {"m": m})
    assert seen.finite
    assert seen.digest(b"meta") == digest(theta, {"m": m}, b"meta")
    for bad in (torch.nan, torch.inf, -torch.inf):
        for place in (0, 32, 33, 999):
            spoilt = m.clone()
            spoilt[place] = bad
            assert not look(theta, {"m": spoilt}).finite
            assert not look(spoilt, {"m": m}).finite


def test_finite_values_whose_sum_is_not_are_finite():
    largest = torch.full((100,), torch.finfo(torch.float32).max)
    assert look(largest, {"m": -largest}).finite
    assert look(torch.empty(0), {"m": torch.empty(0)}).finite


def test_what_lies_where_counts():
    """The same bytes under other names, or divided otherwise, are another state."""
    a, b = torch.tensor([1.0]), torch.tensor([2.0])
    assert digest(a, {"x": a, "y": b}, b"") != digest(a, {"x": b, "y": a}, b"")
    assert digest(a, {"x": b}, b"") != digest(a, {"z": b}, b"")
    assert digest(torch.cat([a, b]), {}, b"") != digest(a, {"x": b}, b"")
    assert digest(a, {}, b"x") != digest(a, {"x": torch.empty(0)}, b"")
    assert digest(torch.tensor([0.0]), {}, b"") != digest(torch.tensor([-0.0]), {}, b"")


def test_the_order_of_a_dictionary_doesnt_count():
    a, b = torch.tensor([1.0]), torch.tensor([2.0])
    assert digest(a, {"x": a, "y": b}, b"") == digest(a, {"y": b, "x": a}, b"")


def test_it_is_the_same_everywhere():
    """A fixed value: digests are compared between machines and stored in checkpoints."""
    assert digest(torch.tensor([1.0, 2.0]), {"m": torch.tensor([0.5])}, b"meta") == "7bb9b4c8cc1f69debc6c45f8d435a8a3"
