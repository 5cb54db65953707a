"""What a trainer's progress is measured from: the global values that it has loaded.

Law: as long as θ is what the trainer has loaded, θ itself is the base, and no copy is made. Before θ changes, the base
is copied to `base`; but not while the trainer stands still after sending: then its progress is what it has sent, and
nothing is left to measure. A base that fails its checksum is never used; its progress counts as lost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import Tensor

from p2p_diloco.tensors.layout import Layout


class Bases:
    """`theta`, `base`: [layout.numel] fp32. Before the trainer loads anything it has no progress, and none is kept."""

    def __init__(self, layout: Layout, theta: Tensor, base: Tensor) -> None:
        self._layout, self._theta, self._base = layout, theta, base
        self.kept: set[int] = set()
        """Shards whose base was copied to `base`."""
        self.gone = set(range(len(layout.shards)))
        """Shards without a base: when θ changed, their progress was what had been sent."""
        self.lost: set[int] = set()
        """Shards without a base: it was changed in memory, so their progress is unknown."""
        self.damaged: set[int] = set()
        """Shards whose base must be mended before a pseudo-gradient is measured from it."""
        self._sent: frozenset[int] = frozenset()

    @property
    def read(self) -> set[int]:
        """Shards whose base is θ."""
        return set(range(len(self._layout.shards))) - self.kept - self.gone - self.lost

    def stand(self, shards: Collection[int]) -> None:
        """These shards were sent, and nothing is trained until the trainer has loaded the result."""
        self._sent = frozenset(shards)

    def before(self, shard: int, was: str, becomes: str, present: Callable[[], str]) -> None:
        """Call before a shard's θ changes. `was`: its digest when it was accepted; `becomes`: that of the new θ, the
        same if it is mended; `present` computes the digest of what is in memory, which may have been changed there.
        """
        self.damaged.discard(shard)
        if shard not in self.read or becomes == was:
            return
        if shard in self._sent:
            self.gone.add(shard)
        elif (found := present()) == becomes:  # there is no better copy
            return
        elif was and found != was:
            self.lost.add(shard)
        else:
            place = self._layout.shards[shard]
            self._base[place.start : place.stop] = self._theta[place.start : place.stop]
            self.kept.add(shard)

    def loaded(self, shards: Collection[int]) -> None:
        """The trainer has loaded these shards' θ, and goes on."""
        for those in (self.kept, self.gone, self.lost):
            those.difference_update(shards)
        self._sent = frozenset()
