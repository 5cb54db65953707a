"""Remembers since when each other peer has been live without a break.

Law: memory only; nothing is sent. `look` is called at regular intervals. It is a break if a peer is missing at a look,
or if this process was suspended between two looks. An absence that is shorter than an interval may go unseen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

LATE = 2.0
"""If more time than this has passed since the last look, as a multiple of the interval, this process was suspended."""


class Contact:
    """The live peers, each with the time of the look since which it has been live at every look."""

    def __init__(self, interval_s: float) -> None:
        """`interval_s`: the time between two looks, in seconds."""
        self._interval_s, self._looked = interval_s, math.inf
        self._since: dict[str, float] = {}

    def look(self, alive: Iterable[str], now: float) -> None:
        """Record that these peers are live now."""
        suspended = now - self._looked > LATE * self._interval_s
        before, self._looked = {} if suspended else self._since, now
        self._since = {peer: before.get(peer, now) for peer in alive}

    def since(self, peer: str) -> float:
        """Since when the peer has been live without a break; inf if it is not live, or was first seen after the last
        look."""
        return self._since.get(peer, math.inf)
