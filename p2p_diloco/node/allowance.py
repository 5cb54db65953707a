"""How often one peer may send the messages that cost this peer much: requests for states or for audits, and nudges.

Law: pure; time and progress are arguments. Nudges are counted by group, not by peer. A group is all peers of one grant
in a private run, because the holder of an invitation can start any number of peers with it. Even a peer that joins
again and again needs far less than its allowance.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

FETCHES_AT_ONCE = 16.0
"""The states of the whole model that a peer may ask for at once. After that the allowance grows by one whole state in
`FETCH_EVERY_S` seconds, up to this number again."""
FETCH_EVERY_S = 1.0
FETCH_COST_MIN = 1 / 128
"""The cost of a request that leads to no state or to a small part of one, in whole states."""
NUDGED_EXCHANGES_MAX = 2
"""The most exchanges of the whole model that one nudge brings forward. A peer asks for one exchange; the receiver may
be one exchange behind that peer."""
PEERS_MAX = 4096
"""The most peers, and the most groups, that are remembered; the one that asked longest ago is forgotten first."""


@dataclass(slots=True)
class Budget:
    """What each peer may still ask for: `at_once` at once, and one more every `every_s` seconds, up to this number
    again. A peer that isn't remembered has its full budget."""

    at_once: float
    every_s: float
    _left: dict[str, tuple[float, float]] = field(default_factory=dict)  # by peer: how much was left, and when

    def takes(self, peer: str, cost: float, now: float) -> bool:
        """Take `cost` from a peer's budget at the time `now`, in seconds. If the budget is too low, take nothing, and
        return False."""
        left, since = self._left.pop(peer, (self.at_once, now))
        left = min(left + (now - since) / self.every_s, self.at_once)
        allowed = left >= cost
        self._left[peer] = left - cost if allowed else left, now
        if len(self._left) > PEERS_MAX:
            del self._left[next(iter(self._left))]
        return allowed


@dataclass(slots=True)
class Allowances:
    """How many states each peer, and how many nudges each group, may still ask for. A peer or
    group that isn't remembered has its full allowance."""

    _states: Budget = field(default_factory=lambda: Budget(FETCHES_AT_ONCE, FETCH_EVERY_S))
    _nudged: dict[Hashable, tuple[int, int]] = field(default_factory=dict)  # by group: see `nudge`

    def fetch(self, peer: str, part: float, now: float) -> bool:
        """Count a request for a state, at the time `now`; returns whether it is allowed. `part`: the requested fraction
        of the whole model's state."""
        return self._states.takes(peer, max(part, FETCH_COST_MIN), now)

    def nudge(self, group: Hashable, goal: int, commits: int, fragments: int) -> bool:
        """Count a nudge by a peer of this group; returns whether it is allowed. `goal`: the number of commits that the
        nudge asks for. `commits`: the run's commits so far. Both are summed over fragments. A goal up to the last
        granted one is always allowed. A higher goal is allowed only once further commits have followed that goal: as
        many as its nudge brought forward. So one group makes at most every other exchange come early."""
        granted, until = self._nudged.get(group, (0, 0))
        if goal <= granted:
            return True
        if commits < until:
            return False
        early = min(max(goal - commits, fragments), NUDGED_EXCHANGES_MAX * fragments)
        self._nudged.pop(group, None)
        self._nudged[group] = commits + early, commits + 2 * early
        if len(self._nudged) > PEERS_MAX:
            del self._nudged[next(iter(self._nudged))]
        return True
