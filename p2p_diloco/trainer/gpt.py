"""A small byte-level GPT in plain torch: the model that the built-in trainer trains.

Law: the model alone, independent of peers, runs, data sets and optimizers.

Letters in the shape comments: B batch, T positions (at most `context`), W width, V vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INIT_GAIN = 0.5
"""Initial weights have a standard deviation of INIT_GAIN / sqrt(width). At width 64 that is three times GPT-2's 0.02,
and early training is a third faster."""


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """The shape of a model, which must be the same on all peers of a run."""

    layers: int = 4
    width: int = 64
    heads: int = 4
    context: int = 64
    """Positions that the model sees at once, in bytes of text."""
    vocab: int = 256
    seed: int = 0
    """Determines the first weights: two models with the same config, seed included, are equal bit by bit."""


class Block(nn.Module):
    """One transformer block, normalised before each branch: causal attention, then the MLP."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm_attention = nn.LayerNorm(config.width, bias=False)
        self.query_key_value = nn.Linear(config.width, 3 * config.width, bias=False)
        self.attention_out = nn.Linear(config.width, config.width, bias=False)
        self.norm_mlp = nn.LayerNorm(config.width, bias=False)
        self.mlp_in = nn.Linear(config.width, 4 * config.width, bias=False)
        self.mlp_out = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output: [B, T, W] -> [B, T, W]."""
        x = x + self.attend(self.norm_attention(x))
        hidden: Tensor = self.mlp_in(self.norm_mlp(x))  # [B, T, 4W]
        out: Tensor = self.mlp_out(F.gelu(hidden))
        return x + out

    def attend(self, x: Tensor) -> Tensor:
        """Return the causal attention for `x`, [B, T, W] -> [B, T, W]: each position attends to itself and to the
        earlier ones."""
        batch, positions, width = x.shape
        fused: Tensor = self.query_key_value(x)  # [B, T, 3W]
        split = fused.view(batch, positions, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each [B, heads, T, W / heads]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, positions, width))
        return out


class GPT(nn.Module):
    """A model that reads bytes and predicts the next byte. The head and the token embedding share one weight."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.head.weight = self.tokens.weight  # one parameter with two names
        self._draw_weights()

    def _draw_weights(self) -> None:
        """Draw all weight matrices from one generator that only this model uses, so that neither the caller's random
        state nor earlier models affect the result."""
        generator = torch.Generator().manual_seed(self.config.seed)
        std = INIT_GAIN / self.config.width**0.5
        branch_std = std / (2 * self.config.layers) ** 0.5  # two branches a layer add up in the residual stream
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue  # the weights of norms stay at one
            ends_branch = name.endswith(("attention_out.weight", "mlp_out.weight"))
            nn.init.normal_(parameter, std=branch_std if ends_branch else std, generator=generator)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the logits [B, T, V] for `tokens`, int64 [B, T]. If `targets`, int64 [B, T], are given, return the
        mean loss in nats a byte instead."""
        place = torch.arange(tokens.shape[1], device=tokens.device)  # [T]
        x: Tensor = self.tokens(tokens) + self.positions(place)  # [B, T, W]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))  # [B, T, V]
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
