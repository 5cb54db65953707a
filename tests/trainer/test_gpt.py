"""The model: causal, tied, deterministic, and able to learn."""

from __future__ import annotations

import torch

from p2p_diloco.trainer.gpt import GPT, GPTConfig

SMALL = GPTConfig(layers=2, width=16, heads=2, context=12)


def test_a_byte_alters_no_logits_before_it() -> None:
    """A change at position t leaves the logits before t as they are, to the bit, and alters those at t."""
    model = GPT(SMALL)
    tokens = torch.randint(0, 256, (3, SMALL.context), generator=torch.Generator().manual_seed(1))
    for t in range(1, SMALL.context):
        changed = tokens.clone()
        changed[:, t] = (changed[:, t] + 1) % 256
        before, after = model(tokens), model(changed)
        assert torch.equal(before[:, :t], after[:, :t])
        assert not torch.allclose(before[:, t], after[:, t])


def test_one_seed_is_one_model_whatever_was_drawn_before() -> None:
    """Equal seeds give equal bits, other seeds other models; torch's own random state has no say."""
    first = GPT(SMALL)
    torch.rand(17)
    second, other = GPT(SMALL), GPT(GPTConfig(layers=2, width=16, heads=2, context=12, seed=1))
    for mine, same, different in zip(first.parameters(), second.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, same)
        assert mine.dim() == 1 or not torch.equal(mine, different)
