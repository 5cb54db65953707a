"""One shard's log in asynchronous mode, as a peer that submits sees it: its own submission, until it is answered for.

Law: an exchange ends when the peer's own state counts the submission, when it is refused and what is newer has come,
or when it can't be counted any more; the trainer merges then, and at no other time. What is made of submissions is for
`asynchronous`.
"""

from __future__ import annotations

from .attendance import Attendance
from .carry import Progress
from .events import Effect
from .messages import Contribution, Stale
from .roster import Roster
from .rules import Rules
from .shard import ShardLog
from .version import ContributionId, Version, descends

ENDED = "the run has ended"
TOO_OLD = "it was further behind than max_staleness"
LEFT = "the lineage that it was made on was left"
"""Why a submission isn't counted."""


def settled(contribution: Contribution, counted: ContributionId | None) -> bool:
    """Whether nothing of it can be counted any more: it is, or a part of what rides in it."""
    if counted is None or counted < contribution.oldest:
        return False
    ours = counted.incarnation in (contribution.oldest.incarnation, contribution.id.incarnation)
    return ours or counted >= contribution.id


class SubmittingLog(ShardLog):
    def __init__(self, shard: int, me: str, rules: Rules, roster: Roster, attendance: Attendance) -> None:
        super().__init__(shard, me, rules, roster, attendance)
        self.refused: Version | None = None  # where its submission was found to be too stale
        self.over = False  # its exchange is over, and the trainer has not merged the result

    def gives_up(self, carried: Progress) -> bool:
        """What was refused is carried over once."""
        return carried.sends > 1

    def exchanging(self, base: Version, due: bool) -> bool:
        """Until it is answered for: counted, or refused."""
        return self.mine is not None

    def loads(self, base: Version | None) -> bool:
        """The trainer merges when its exchange is over, when its base is of a lineage that was left, and when the run
        has ended: no exchange follows."""
        loads = self.over or self.final or base is None or not self.descends_from(base)
        self.over = False
        return loads

    def submits_on(self, base: Version | None, oldest: Version | None) -> Version | None:
        """The base that a contribution is told to have: where the oldest progress in it began, so that old work can't
        pass as fresh. None: it can't be counted here, for its lineage was left or the run has ended."""
        if base is None or self.final or not self.descends_from(base):
            return None
        return oldest if oldest is not None and self.descends_from(oldest) else base

    def contribute(self, mine: Contribution, now: float) -> list[Effect]:
        """This peer's own pseudo-gradient is ready."""
        self.refused, self.over, self.patience = None, False, self.rules.dead_after
        self.wants = now + self.patience
        return super().contribute(mine, now)

    def insist(self, now: float) -> list[Effect]:
        """An answer stays out: submit again, ever more rarely where it is long."""
        if self.mine is None or self.handed in (None, self.me) or now < self.wants:
            return []
        self.patience = min(2 * self.patience, self.rules.say_again)
        self.wants, self.handed = now + self.patience, None
        return self.deliver(now)

    def stale(self, refusal: Stale) -> None:
        """The aggregator refuses it. The exchange is over once what is newer has come, too."""
        if self.mine is not None and refusal.id == self.mine.id:
            self.refused = refusal.version
            self.end_exchange()

    def end_exchange(self) -> None:
        """If this peer's submission is answered for, or never will be: let the trainer go on."""
        mine, version = self.mine, self.version
        if mine is None or version is None:
            return
        refused = self.refused is not None and version.epoch >= self.refused.epoch
        counts = settled(mine, self.counted.get(self.me))
        if refused or self.final or counts or not self.descends_from(mine.base):
            self.refusals += refused
            self.behind = version.epoch - 1 - mine.base.epoch if counts else None
            self.uncounted = "" if counts else ENDED if self.final else TOO_OLD if refused else LEFT
            self.mine, self.refused, self.over = None, None, True

    def descends_from(self, base: Version) -> bool:
        return self.version is not None and descends(self.version, self.history, base)

    def _sendable(self, mine: Contribution) -> bool:
        return True
