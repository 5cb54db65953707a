"""Blocks of flat vectors, and the sign of the pseudo-gradient."""

from __future__ import annotations

import pytest
import torch

from p2p_diloco.tensors.flat import BLOCK, blocks, pseudo_gradient


def test_descending_along_the_pseudo_gradient_goes_to_where_the_peer_is():
    """The sign: θ_base − Δ is θ; the flipped one diverges."""
    out = torch.empty(1)
    pseudo_gradient(torch.tensor([1.0]), torch.tensor([0.5]), out)
    assert out.item() == 0.5


def test_a_pseudo_gradient_of_unequal_lengths_is_refused():
    with pytest.raises(ValueError, match=r"shorter|longer"):
        pseudo_gradient(torch.zeros(BLOCK + 1), torch.zeros(BLOCK), torch.zeros(BLOCK))


def test_blocks_cover_vectors_once_side_by_side():
    one, two = torch.arange(2.0 * BLOCK + 3), torch.arange(2.0 * BLOCK + 3).bfloat16()
    pairs = list(blocks(one, two))
    assert [len(a) for a, _ in pairs] == [BLOCK, BLOCK, 3]
    assert torch.equal(torch.cat([a for a, _ in pairs]), one)
    assert torch.equal(torch.cat([b for _, b in pairs]), two)
    pairs[1][0].zero_()
    assert not one[BLOCK : 2 * BLOCK].any()
