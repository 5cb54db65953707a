"""Since when this peer has heard of each other one without a break.

Law: memory only; nothing is sent. `look` is called at regular intervals: a peer that is missing once, or an interval in
which this process was suspended, is a break. A break may be as short as an interval to be seen for certain.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

LATE = 2.0
"""A look that is late by more than this, as a multiple of the interval, comes after a suspension of this process."""


class Contact:
    """The live peers, with the time since which each has been live at each look."""

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
