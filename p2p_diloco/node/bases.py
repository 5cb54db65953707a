"""What a trainer's progress is measured from: the global values that it has loaded.

Law: as long as θ is still that, there is no other copy of it. Before it becomes something else it is kept beside, in
memory that nothing takes before; unless the trainer stands still since it has sent: then all its progress is what was
sent, and nothing has to be measured any more. What was changed in memory is nobody's base.
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
        """Shards whose base is beside θ."""
        self.gone = set(range(len(layout.shards)))
        """Shards whose base is nowhere, and whose progress was what was sent when θ changed."""
        self.lost: set[int] = set()
        """Shards whose base is nowhere, for it was changed in memory: what was trained on it can't be told."""
        self.damaged: set[int] = set()
        """Shards whose base is to be mended before anything is measured from it."""
        self._sent: frozenset[int] = frozenset()

    @property
    def read(self) -> set[int]:
        """Shards whose base is θ."""
        return set(range(len(self._layout.shards))) - self.kept - self.gone - self.lost

    def stand(self, shards: Collection[int]) -> None:
        """These were sent, and nothing is trained until the trainer has loaded what comes of them."""
        self._sent = frozenset(shards)

    def before(self, shard: int, was: str, becomes: str, present: Callable[[], str]) -> None:
        """The shard's θ is about to become what has another digest than it had when it was accepted, or is mended to
        that. `present`: of what is there, which may have been changed in memory."""
        self.damaged.discard(shard)
        if shard not in self.read or becomes == was:
            return
        if shard in self._sent:
            self.gone.add(shard)
        elif (found := present()) == becomes:  # nobody has anything better
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
