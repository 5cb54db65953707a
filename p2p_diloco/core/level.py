"""How far the shards of one fragment are, as this replica holds them.

Law: the round of a shard that is ahead of another shard of its fragment waits until the other one has caught up
(`waits`). Otherwise only a peer that skips the other shard would contribute in time, and the peers that skip none would
seem to miss each round of the shard that is ahead.
"""

from __future__ import annotations

import math


class Level:
    """The epochs of a fragment's shards; those that are not held here, or have reached the run's end, are left out."""

    def __init__(self) -> None:
        self._at = dict[int, int]()  # by shard
        self.lowest, self.since = math.inf, 0.0  # the lowest epoch, inf if there is none, and when it last changed

    def at(self, shard: int, epoch: int | None, now: float) -> bool:
        """Record that a shard has reached this epoch; None: the run has ended for the shard. Return whether the lowest
        epoch of the fragment has changed."""
        if epoch is None:
            self._at.pop(shard, None)
        else:
            self._at[shard] = epoch
        before, self.lowest = self.lowest, min(self._at.values(), default=math.inf)
        self.since = now if self.lowest != before else self.since
        return self.lowest != before
