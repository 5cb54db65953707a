"""This peer's own contribution in asynchronous mode. It is called a submission, and can be counted on any later version
of its lineage.

Law: an exchange ends when the peer's own state counts the submission, when the submission was refused and the newer
state has arrived, or when it can no longer be counted. The trainer merges then, and also when this peer has left the
lineage of the trainer's base. `asynchronous` is the aggregator's side.
"""

from __future__ import annotations

from .carry import Carried
from .events import Effect, Note, Send
from .messages import Contribution, Outdated, Stale, State
from .rules import Rules
from .sending import Sending
from .state import final, grown_from, relation
from .version import ContributionId, Version

ENDED = "the run has ended"
TOO_OLD = "the submission was further behind than max_staleness"
MISUSED = "the submission was made from data that another peer had used or leased"
LEFT = "this peer has left the lineage that the submission was made on"
"""Reasons why a submission is not counted."""


def settled(contribution: Contribution, counted: ContributionId | None) -> bool:
    """Whether the submission can no longer be counted, because it, or a part of the progress that it carries, is
    counted already. ``counted``: its author's last counted contribution."""
    if counted is None or counted < contribution.oldest:
        return False
    ours = counted.incarnation in (contribution.oldest.incarnation, contribution.id.incarnation)
    return ours or counted >= contribution.id


class Submitting(Sending):
    """This peer's present submission to one shard, and what became of the last one."""

    def __init__(self, me: str, rules: Rules) -> None:
        super().__init__(me, rules)
        # when to send the submission again, and how many seconds to wait after that; kept from round to round
        self.again_at, self.patience = 0.0, 0.0
        self.refused: Version | None = None  # the version at which the submission was refused as too stale
        self.referral: Outdated | None = None  # a refusal of the present submission that may be followed
        self.followed: set[str] = set()  # the peers that gave such refusals, and those that they named
        self.over = False  # the exchange is over, but the trainer has not merged the result yet
        self.behind: int | None = 0  # staleness of the last submission; None: not counted
        self.uncounted = ""  # the reason why the last submission was not counted

    def gives_up(self, carried: Carried) -> bool:
        """Whether the progress was refused more than once. It is then dropped instead of sent again."""
        return carried.sends > 1

    def loads(self, state: State, base: Version | None) -> bool:
        """Whether the trainer should merge this shard now, because the exchange is over, this peer has left the lineage
        of ``base``, or the run has ended."""
        over, self.over = self.over, False
        return over or final(state, self.rules) or base is None or not grown_from(state, base)

    def goes_on(self, state: State | None, base: Version, due: bool) -> bool:
        """Whether the trainer must still wait for the submission: until it is counted, is refused, or can no longer be
        counted."""
        return self.mine is not None

    def base_of(self, state: State | None, base: Version | None, oldest: Version | None) -> Version | None:
        """Return the version that a new submission names as its base: ``oldest``, the base of the oldest progress that
        the submission carries. So old work can't pass as fresh. Return None if the present state does not descend from
        ``base``, the trainer's base, or the run has ended."""
        leads_on = base is not None and grown_from(state, base) and not final(state, self.rules)
        return oldest if leads_on else None

    def begin(self, mine: Contribution) -> None:
        """Begin to send a new submission."""
        super().begin(mine)
        self.refused, self.over, self.referral, self.followed = None, False, None, set()

    def refers(self, sender: str, refusal: Outdated) -> None:
        """Handle a refusal by the last receiver of the submission, which names the aggregator of a newer version. In
        one exchange no peer is named twice, and a peer that was named or has refused names no other, because hostile
        peers may name any others."""
        last, named = self.under_way or self.handed, refusal.holder
        if sender == last and not self.followed & {sender, named} and named not in (self.me, self.handed, last):
            self.followed |= {sender, named}
            self.referral = refusal

    def follow(self, state: State | None) -> list[Effect]:
        """Send a copy of the submission to the peer that, by a refusal, aggregates on a newer version, if that version
        has not come since. Its state may take so long that its aggregator changes again."""
        referral, self.referral = self.referral, None
        if self.mine is None or referral is None or referral.holder in (self.handed, self.under_way):
            return []
        if relation(state, referral.base) != "ahead":
            return []
        return [Send(referral.holder, self.mine)]

    def sendable(self, version: Version | None) -> bool:
        """Whether an aggregator could still count the submission. The shard's version does not matter."""
        return self.mine is not None

    def wait(self, now: float, patience: float) -> None:
        """Wait for an answer for ``patience`` seconds before the submission is sent again."""
        self.patience, self.again_at = patience, now + patience

    def sends_again(self, now: float) -> bool:
        """Return whether to send the submission again now, because its answer may have been lost. It is sent again at
        growing intervals, the first of which begins when the aggregator has received the submission."""
        if self.mine is None or self.handed in (None, self.me):
            self.wait(now, self.patience)
        elif now >= self.again_at:
            self.wait(now, min(2 * self.patience, self.rules.say_again))
            self.handed = None
            return True
        return False

    def stale(self, refusal: Stale, state: State | None) -> None:
        """Handle the aggregator's refusal of a submission that is too stale. The exchange ends once this peer has
        reached the epoch at which the submission was refused."""
        if self.mine is not None and refusal.id == self.mine.id:
            self.refused = refusal.version
            if state is not None:
                self.settle(state)

    def settle(self, state: State) -> list[Effect]:
        """Handle a new version: end the exchange if the submission is counted, refused, or can't be counted any
        more. If this version does not count the submission, and the submission is too stale for it, end the exchange
        without a refusal: where the aggregator changes often and states take long, the submission may never reach the
        peer that would refuse it."""
        mine, version, ended = self.mine, state.version, final(state, self.rules)
        if mine is None:
            return []
        counts, grown = settled(mine, state.counted.get(self.me)), grown_from(state, mine.base)
        most, behind = self.rules.max_staleness, version.epoch - mine.base.epoch
        told = self.refused is not None and version.epoch >= self.refused.epoch
        too_stale = most is not None and behind > most and grown and not (counts or ended or told)
        refused = told or too_stale
        if refused or ended or counts or not grown:
            self.refusals += refused
            self.behind = behind - 1 if counts else None
            refusal = TOO_OLD if most is not None and behind > most else MISUSED
            self.uncounted = "" if counts else ENDED if ended else refusal if refused else LEFT
            self.mine, self.refused, self.over = None, None, True
        why = f"its base is {behind} epochs behind"
        text = f"shard {mine.shard}: this peer's submission counts as refused, because {why}"
        return [Note("stale", text)] if too_stale else []
