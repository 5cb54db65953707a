"""How often one peer may send the messages that cost this peer much: requests for states, and nudges.

Law: pure; time and progress are arguments. The allowances are far above what a peer needs that joins again and again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FETCHES_AT_ONCE = 16.0
"""The states of the whole model that a peer may ask for at once. After that the allowance grows by one whole state in
`FETCH_EVERY_S`, up to this number again."""
FETCH_EVERY_S = 1.0
FETCH_COST_MIN = 1 / 128
"""The cost of a request that leads to no state or to a small part of one, in whole states."""
PEERS_MAX = 4096
"""The most peers that are remembered; the one that asked longest ago is forgotten first."""


@dataclass(slots=True)
class Allowances:
    """What each peer has left. A peer that isn't remembered has its full allowance."""

    _left: dict[str, tuple[float, float]] = field(default_factory=dict)  # whole states, and since when
    _nudged: dict[str, int] = field(default_factory=dict)

    def fetch(self, peer: str, part: float, now: float) -> bool:
        """Count a request for this part of the whole model's state; returns whether it is allowed at this time."""
        left, since = self._left.pop(peer, (FETCHES_AT_ONCE, now))
        left = min(left + (now - since) / FETCH_EVERY_S, FETCHES_AT_ONCE)
        cost = max(part, FETCH_COST_MIN)
        allowed = left >= cost
        self._left[peer] = left - cost if allowed else left, now
        if len(self._left) > PEERS_MAX:
            del self._left[next(iter(self._left))]
        return allowed

    def nudge(self, peer: str, commits: int, fragments: int) -> bool:
        """Count a nudge; returns whether it is allowed: again only once every fragment has had a commit more than the
        one that the peer's last nudge asked for. So at most every other exchange comes early at one peer's request.
        `commits`: the run's commits so far, summed over fragments."""
        if commits < self._nudged.get(peer, 0):
            return False
        self._nudged.pop(peer, None)
        self._nudged[peer] = commits + 2 * fragments
        if len(self._nudged) > PEERS_MAX:
            del self._nudged[next(iter(self._nudged))]
        return True
