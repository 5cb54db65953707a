"""Keeps the bases of a trainer's pseudo-gradients. A base is a shard's global values as the trainer has loaded them.

Law: while θ equals the values that the trainer has loaded, θ itself is the base, and no copy is made. Before θ changes,
the base is copied to `base`, unless the trainer stands still after sending: then it has no progress beyond what
was sent, and needs no base. A base that fails its checksum is never used, and the progress since that base is lost.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from p2p_diloco.tensors.layout import Layout


class Bases:
    """Keeps the base of each shard. The base is θ itself (`theta`), or a copy in `base`. Both tensors have
    `layout.numel` values, in fp32. Before its first load the trainer has no progress, so no base is kept."""

    def __init__(self, layout: Layout, theta: Tensor, base: Tensor) -> None:
        self._layout, self._theta, self._base = layout, theta, base
        self.kept: set[int] = set()
        """Shards whose base was copied to `base`."""
        self.gone = set(range(len(layout.shards)))
        """Shards without a base, because θ changed while all of their progress had been sent."""
        self.lost: set[int] = set()
        """Shards without a base, because it was corrupted in memory: their progress is unknown."""
        self._sent: frozenset[int] = frozenset()

    @property
    def read(self) -> set[int]:
        """The shards whose base is θ itself."""
        return set(range(len(self._layout.shards))) - self.kept - self.gone - self.lost

    def stand(self, shards: Collection[int]) -> None:
        """Record that these shards' pseudo-gradients were sent, and that training stands still until the result is
        loaded."""
        self._sent = frozenset(shards)

    def keep(self, shard: int, *, damaged: bool = False) -> None:
        """Copy a shard's base if the trainer still needs it. Called before the shard's θ changes. `damaged`: θ has
        changed in memory since it was accepted."""
        if shard not in self.read:
            return
        if shard in self._sent:
            self.gone.add(shard)
        elif damaged:
            self.lost.add(shard)
        else:
            place = self._layout.shards[shard]
            self._base[place.start : place.stop] = self._theta[place.start : place.stop]
            self.kept.add(shard)

    def loaded(self, shards: Collection[int]) -> None:
        """Record that the trainer has loaded the θ of these shards, and goes on training."""
        for those in (self.kept, self.gone, self.lost):
            those.difference_update(shards)
        self._sent = frozenset()
