"""How often others may send messages, and those that cost this peer much: requests for states or for audits, nudges.

Law: pure; time and progress are arguments. All is counted by group: all peers of one grant in a private run, because
the holder of an invitation can start any number of peers with it; a single peer in an open run, where anyone can make
identities. Even peers that join again and again need far less than their allowance.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

FETCHES_AT_ONCE = 16.0
"""The states of the whole model that a group may ask for at once. After that the allowance grows by one whole state in
`FETCH_EVERY_S` seconds, up to this number again."""
FETCH_EVERY_S = 1.0
FETCH_COST_MIN = 1 / 128
"""The cost of a request that leads to no state or to a small part of one, in whole states."""
NUDGED_EXCHANGES_MAX = 2
"""The most exchanges of the whole model that one nudge brings forward. A peer asks for one exchange; the receiver may
be one exchange behind that peer."""
MESSAGES_AT_ONCE, MESSAGES_PER_S = 64.0, 16.0
"""The messages without a payload that an honest peer sends to another one at most: at once, and for each commit or
second. Five a round are usual, up to 14 on a machine that does much else."""
GROUPS_MAX = 4096
"""The most groups that are remembered; the one that asked longest ago is forgotten first."""


@dataclass(slots=True)
class Budget:
    """What each group may still ask for: `at_once` at once, and one more every `every_s` seconds, up to this number
    again. A group that isn't remembered has its full budget."""

    at_once: float
    every_s: float
    _left: dict[Hashable, tuple[float, float]] = field(default_factory=dict)  # by group: how much was left, and when

    def takes(self, group: Hashable, cost: float, now: float) -> bool:
        """Take `cost` from a group's budget at the time `now`, in seconds. If the budget is too low, take nothing, and
        return False."""
        left, since = self._left.pop(group, (self.at_once, now))
        left = min(left + max(now - since, 0.0) / self.every_s, self.at_once)
        allowed = left >= cost
        self._left[group] = left - cost if allowed else left, now
        if len(self._left) > GROUPS_MAX:
            del self._left[next(iter(self._left))]
        return allowed


@dataclass(slots=True)
class Allowances:
    """How many messages each group may still send, and how many states and nudges it may ask for. A group that isn't
    remembered has its full allowance."""

    _messages: Budget = field(default_factory=lambda: Budget(MESSAGES_AT_ONCE, 1 / MESSAGES_PER_S))
    _states: Budget = field(default_factory=lambda: Budget(FETCHES_AT_ONCE, FETCH_EVERY_S))
    _nudged: dict[Hashable, tuple[int, int]] = field(default_factory=dict)  # by group: see `nudge`

    def message(self, group: Hashable, peers: int, commits: int, now: float) -> bool:
        """Count a message without a payload, at the time `now`; returns whether honest peers send as many. `peers`: how
        many of the group take part in rounds. `commits`: the run's commits so far. A commit counts as a second, because
        honest peers send more if rounds are quick."""
        return self._messages.takes(group, 1 / max(peers, 1), now + commits)

    def fetch(self, group: Hashable, part: float, now: float) -> bool:
        """Count a request for a state, at the time `now`; returns whether it is allowed. `part`: the requested fraction
        of the whole model's state."""
        return self._states.takes(group, max(part, FETCH_COST_MIN), now)

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
        if len(self._nudged) > GROUPS_MAX:
            del self._nudged[next(iter(self._nudged))]
        return True
