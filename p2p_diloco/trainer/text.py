"""Text as tensors: chooses the blocks that a peer trains on, and draws windows from them.

Law: pure. Every result is a function of the text, a seed and a key, so that a restarted peer draws the same windows as
before.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from p2p_diloco.errors import ConfigError
from p2p_diloco.trainer.blocks import Block, Text, hash_of

OWN_PART = 3
"""A peer's own part is one of every OWN_PART blocks."""


def joined(blocks: tuple[Block, ...]) -> Tensor:
    """Return the blocks' bytes, one block after another, as uint8 [bytes]."""
    return torch.frombuffer(bytearray(b"".join(block.content for block in blocks)), dtype=torch.uint8)


def training_part(text: Text, num_shards: int = 1, shard_index: int = 0) -> Tensor:
    """Return every `num_shards`-th training block, beginning with block `shard_index`, as uint8 [bytes]. The parts are
    disjoint and together make up the whole text. Raises ConfigError when there are fewer blocks than parts."""
    if num_shards > len(text.training):
        raise ConfigError(
            f"is more than the {len(text.training)} blocks that the training text has",
            key="num_shards",
            value=num_shards,
            mend="give more text or fewer parts",
        )
    return joined(text.training[shard_index::num_shards])


def own_part(text: Text, key: str, context: int) -> Tensor:
    """Return a third of the training blocks, chosen by the peer's identity (`key`), as uint8 [bytes].

    Each peer ranks all blocks by a hash of its key and the block's name, and takes the first third (and further blocks
    while the sum is no longer than `context`). So no peer needs to know the others. Two peers share about a third of
    their parts, and k peers together train on 1 − (2/3)^k of the text.
    """
    ranked = sorted(text.training, key=lambda block: (hash_of(f"{key}/{block.name}"), block.name))
    count = -(-len(ranked) // OWN_PART)
    while count < len(ranked) and sum(len(block.content) for block in ranked[:count]) <= context:
        count += 1
    return joined(tuple(ranked[:count]))


class Batches:
    """Draws an endless sequence of batches of windows from a peer's text. Batch n depends only on the text, the seed,
    the key and n, so it is enough to save `position`, the number of the next batch."""

    def __init__(self, content: Tensor, *, batch_size: int, context: int, seed: int, key: str) -> None:
        """`content` is uint8 [bytes]; `key` tells peers apart (their identity). Raises ConfigError when the
        text is shorter than one window.
        """
        _check_length(content, context)
        self.content = content
        self.batch_size = batch_size
        self.context = context
        self.position = 0
        self._seed = hash_of(f"{seed}:{key}")

    def __next__(self) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of the next batch, each int64 [batch_size, context]. A target is the byte after
        its input."""
        generator = torch.Generator().manual_seed((self._seed + self.position) % 2**63)
        self.position += 1
        last = len(self.content) - self.context
        starts = torch.randint(last, (self.batch_size,), generator=generator)
        return _windows(self.content, starts, self.context)


def held_out_batches(text: Text, *, count: int, batch_size: int, context: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield `count` batches that are spread evenly over the held-out text. They are the same on every peer and at every
    call.

    Raises ConfigError when the held-out text is shorter than one window.
    """
    content = joined(text.held_out)
    _check_length(content, context)
    last = len(content) - context - 1
    starts = torch.linspace(0, last, count * batch_size, dtype=torch.float64).long()
    for first in range(0, len(starts), batch_size):
        yield _windows(content, starts[first : first + batch_size], context)


def _windows(content: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    windows = content[starts[:, None] + torch.arange(context + 1)].long()  # [batch, context + 1]
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _check_length(content: Tensor, context: int) -> None:
    if len(content) <= context:
        raise ConfigError(
            f"needs {context + 1} bytes of text in each part, but one part has {len(content)}",
            key="context",
            value=context,
            mend="give more text in data, or make context smaller",
        )
