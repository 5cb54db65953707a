"""Which peers a synchronous round waits for, for how long, and when it may close.

Law: answers questions about one round from the shard's state, the round's inbox, the fragment's attendance and the
roster; changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .attendance import Attendance
from .messages import State
from .roster import Roster
from .round import Round
from .rules import Rules


@dataclass(frozen=True, slots=True)
class Waits:
    """Answers which peers one round of one shard waits for, and until when."""

    rules: Rules
    roster: Roster
    attendance: Attendance
    state: State
    round: Round

    @property
    def epoch(self) -> int:
        """The epoch of the round's base."""
        return self.state.version.epoch

    def missing(self) -> list[str]:
        """Return the members of the group that are expected to contribute and have not done so."""
        group = self.attendance.group(self.state.plan, self.epoch)
        return [p for p in group if p not in self.round.inbox and self._expected(p)]

    def awaits(self, peer: str) -> bool:
        """Whether a plan names the peer for this round."""
        return self.attendance.is_named(peer, self.state.plan, self.epoch)

    @property
    def needed(self) -> int:
        """The lowest number of contributions that an outer step needs, by the revision that its commit will name. So a
        revision that lowers ``min_peers`` also helps a round that has begun."""
        revision = max(self.state.revision, self.roster.mine.revision)
        return self.rules.needed(revision, first=not self.epoch)

    def quorum(self, now: float) -> int:
        """Return the lowest number of contributions with which the round may close: half of the peers that take part,
        newcomers included, but at least two if several take part, and never fewer than ``needed``. One peer's data
        would carry the model away, so of a pair one is enough only if the founder says so, by a revision."""
        newcomers = self.attendance.newcomers(self.state.plan, self.epoch)
        taking_part = len({*self.round.inbox, *self._taking_part(now), *newcomers})
        least = 1 if max(self.state.revision, self.roster.mine.revision).min_peers == 1 else 2
        return max(self.needed, min(taking_part, max(least, math.ceil(taking_part / 2))))

    def may_close(self, now: float) -> bool:
        """Whether the round may close with the contributions that it has; not while its shard is ahead (`level`)."""
        if self.epoch > self.attendance.level.lowest or len(self.round.inbox) < self.quorum(now):
            return False
        return now >= self.deadline or not self._taking_part(now)

    def closes_at(self) -> float | None:
        """Return the time at which the round will close if no more messages arrive; None: it will not close."""
        moments = {self.deadline, *(self._given_up_at(p) for p in self.missing())} - {math.inf}
        return next(filter(self.may_close, sorted(moments)), None)

    @property
    def deadline(self) -> float:
        """The time at which the round stops waiting for missing members: from then on a quorum of contributions is
        enough."""
        return self.opened + self.rules.round_timeout

    @property
    def opened(self) -> float:
        """When the round opened; not before its shard was level with the others of the fragment."""
        return max(self.round.opened, self.attendance.level.since)

    def to_ask(self) -> list[str]:
        """Return the peers to ask for contributions: the missing members of the group; if none is missing and more
        contributions are needed, all working peers."""
        if (missing := self.missing()) or len(self.round.inbox) >= self.needed:
            return missing
        working = [p for p, s in self.roster.summaries().items() if s.role == "worker" and s.epochs and not s.idle]
        return [p for p in working if p not in self.round.inbox]

    def _taking_part(self, now: float) -> list[str]:
        """Return the missing members for which the round still waits: they are sure to take part, or their grace has
        not ended."""
        return [p for p in self.missing() if now < self._given_up_at(p)]

    def _given_up_at(self, peer: str) -> float:
        """Return the time at which the round stops waiting for a missing member; inf: it is sure to take part."""
        sure = self.roster.presumed(peer) or self.attendance.sure(peer, self.epoch)
        return math.inf if sure else self.attendance.waits_until(peer, self.opened)

    def _expected(self, peer: str) -> bool:
        """Whether the peer is expected to contribute: it is a worker that is not idle, or it is presumed live."""
        summary = self.roster.summary(peer)
        return self.roster.presumed(peer) if summary is None else summary.role == "worker" and not summary.idle
