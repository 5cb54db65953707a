"""Copies between parameters and the flat vector, and the sign of the pseudo-gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from p2p_diloco.tensors.flat import BLOCK, blocks, gather, pseudo_gradient, scatter


def odd_parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    """Longer than a block, a scalar, transposed, channels last, with gaps."""
    torch.manual_seed(0)
    tensors = [
        torch.randn(BLOCK + 7),
        torch.randn(()),
        torch.randn(5, 3).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(40)[::2],
    ]
    return [nn.Parameter(t.to(dtype) if t.is_contiguous() else _strided_like(t, dtype)) for t in tensors]


def _strided_like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    same = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
    return same.copy_(tensor)


def plain(params: list[nn.Parameter]) -> torch.Tensor:
    return torch.cat([p.detach().float().reshape(-1) for p in params])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_gather_and_pseudo_gradient_are_the_plain_formula_to_the_bit(dtype):
    """Whatever the strides and the dtype: out = base − θ in fp32, of the base as the parameters would hold it, and no
    more than rounded where it is kept in less."""
    params = odd_parameters(dtype)
    flat = torch.empty(sum(p.numel() for p in params))
    gather(params, flat)
    assert torch.equal(flat, plain(params))
    base, out = torch.randn(flat.numel()), torch.empty(flat.numel())
    pseudo_gradient(base, params, out)
    base = base.to(dtype).float()
    assert torch.equal(out, base - plain(params))
    short = torch.empty(flat.numel(), dtype=torch.bfloat16)
    pseudo_gradient(base, params, short)
    assert torch.equal(short, (base - plain(params)).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scatter_then_gather_rounds_to_the_models_dtype_and_leaves_no_progress(dtype):
    """A pseudo-gradient taken right after loading is zero, also for a model that rounds."""
    params = odd_parameters(dtype)
    versions = [p._version for p in params]
    value = torch.randn(sum(p.numel() for p in params))
    scatter(value, params)
    assert torch.equal(plain(params), value.to(dtype).float())
    assert all(p._version > v for p, v in zip(params, versions, strict=True))
    assert all(p.requires_grad and p.grad_fn is None for p in params)
    base, out = torch.empty_like(value), torch.ones_like(value)
    gather(params, base)
    pseudo_gradient(base, params, out)
    assert not out.any()


def test_descending_along_the_pseudo_gradient_goes_to_where_the_peer_is():
    """The sign: θ_base − Δ is θ; the flipped one diverges."""
    params = [nn.Parameter(torch.tensor([0.5]))]
    out = torch.empty(1)
    pseudo_gradient(torch.tensor([1.0]), params, out)
    assert out.item() == 0.5


def test_only_the_given_slice_is_written():
    whole = torch.full((6,), 9.0)
    gather([nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2))], whole[1:5])
    assert whole.tolist() == [9, 0, 0, 1, 1, 9]


@pytest.mark.parametrize("flat", [torch.zeros(3), torch.zeros(4, dtype=torch.bfloat16), torch.zeros(2, 2)])
def test_a_flat_vector_of_another_kind_is_refused(flat):
    params = [nn.Parameter(torch.zeros(4))]
    for call in (lambda: gather(params, flat), lambda: scatter(flat, params)):
        with pytest.raises(ValueError, match="flat fp32 vector of 4 elements"):
            call()
    with pytest.raises(ValueError, match="base has 5 elements, out 4"):
        pseudo_gradient(torch.zeros(5), params, torch.zeros(4))


def test_blocks_cover_vectors_once_side_by_side():
    one, two = torch.arange(2.0 * BLOCK + 3), torch.arange(2.0 * BLOCK + 3).bfloat16()
    pairs = list(blocks(one, two))
    assert [len(a) for a, _ in pairs] == [BLOCK, BLOCK, 3]
    assert torch.equal(torch.cat([a for a, _ in pairs]), one)
    assert torch.equal(torch.cat([b for _, b in pairs]), two)
    pairs[1][0].zero_()
    assert not one[BLOCK : 2 * BLOCK].any()
