"""What a trainer's progress is measured from: the global values that it has loaded.

Law: as long as θ is still that, there is no other copy of it. Before it becomes something else it is kept beside, in
memory that nothing takes before; unless the trainer stands still since it has sent: then all its progress is what was
sent, and nothing has to be measured any more.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from p2p_diloco.tensors.layout import Layout


class Bases:
    """`theta`, `base`: [layout.numel] fp32. Before the trainer loads anything it has no progress, and none is kept."""

    def __init__(self, layout: Layout, theta: Tensor, base: Tensor) -> None:
        self._layout, self._theta, self._base = layout, theta, base
        self.kept: set[int] = set()
        """Shards whose base is beside θ."""
        self.gone = set(range(len(layout.shards)))
        """Shards whose base is nowhere: of their progress there is what was sent."""
        self.damaged: dict[int, frozenset[str]] = {}
        """Shards whose θ was changed in memory: digests of θ as it was, and as it is."""
        self._sent: frozenset[int] = frozenset()

    @property
    def read(self) -> set[int]:
        """Shards whose base is θ."""
        return set(range(len(self._layout.shards))) - self.kept - self.gone

    def stand(self, shards: Collection[int]) -> None:
        """These were sent, and nothing is trained until the trainer has loaded what comes of them."""
        self._sent = frozenset(shards)

    def before(self, shard: int, digest: str) -> None:
        """The shard's θ is about to become something else, which has this digest."""
        damaged = self.damaged.pop(shard, None)
        if shard in self.kept or shard in self.gone:
            return
        if damaged is not None and digest in damaged:  # it is mended, or nobody has anything better
            return
        if damaged is not None or shard in self._sent:
            self.gone.add(shard)
            return
        place = self._layout.shards[shard]
        self._base[place.start : place.stop] = self._theta[place.start : place.stop]
        self.kept.add(shard)

    def loaded(self, shards: Collection[int]) -> None:
        """The trainer has loaded these shards' θ, and goes on."""
        self.kept.difference_update(shards)
        self.gone.difference_update(shards)
        self._sent = frozenset()
