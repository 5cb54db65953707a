"""The right to write the commit that follows one version of a shard: it belongs to the holder of the highest term.

Law: the plan gives term 0. A higher term is claimed and needs the promise of every live peer that holds a state. Among
claims of one term the higher peer id wins. It reads other peers only through the roster and ends with its version.
"""

from __future__ import annotations

from .events import Effect, Send
from .messages import Outdated, Plan, Promise, State, TakeOver
from .roster import Roster


class Leadership:
    def __init__(self, roster: Roster, state: State | None) -> None:
        self.me, self.roster, self.state = roster.me, roster, state
        self.plan = Plan((), ()) if state is None else state.plan
        self.term, self.holder = 0, self.plan.succession[0] if self.plan.succession else ""
        # the promises for this peer's claim; None unless it has the term by a claim
        self.promised_by: set[str] | None = None

    # -- questions

    def candidates(self) -> list[str]:
        """The peers that the plan lets aggregate, in order: the succession, then the rest of the group."""
        return [*self.plan.succession, *(p for p in self.plan.group if p not in self.plan.succession)]

    def target(self) -> tuple[int, str]:
        """Which peer should aggregate now, and under which term, as this peer sees it: the holder while it lives, else
        the next live candidate, else (all candidates are gone) the lowest id among the other peers that hold a
        state."""
        if self.roster.may_aggregate(self.holder):
            return self.term, self.holder
        candidates = self.candidates()
        for step in range(1, len(candidates) + 1):
            peer = candidates[(self.term + step) % len(candidates)]
            if self.roster.may_aggregate(peer):
                return self.term + step, peer
        others = [p for p in self.roster.summaries() if self.roster.may_aggregate(p)]
        return (self.term + len(candidates) + 1, others[0]) if others else (self.term, self.holder)

    def unpromised(self) -> list[str]:
        """The peers that must still promise before this peer, having claimed the term, may write the commit."""
        if self.promised_by is None:
            return []
        return [p for p in self.roster.alive() if self.roster.holds_state(p) and p not in self.promised_by]

    def is_claimed_by_another(self, sender: str, fragment: int) -> bool:
        """Whether a live third peer holds the term and has not moved on to a later epoch itself."""
        summary = self.roster.summary(self.holder) if self.holder not in (self.me, sender) else None
        if summary is None or self.state is None:
            return False
        return not summary.epochs or summary.epochs[fragment] <= self.state.version.epoch

    # -- claims

    def claim(self, term: int) -> None:
        """This peer claims the term."""
        self.term, self.holder, self.promised_by = term, self.me, set()

    def concede(self, term: int, holder: str) -> None:
        """Accept another peer's claim."""
        self.term, self.holder, self.promised_by = term, holder, None

    def ask(self) -> list[Effect]:
        """Ask for promises. Repeated until the commit is made, because a peer that adopts the version later knows of no
        claim."""
        if self.state is None or self.promised_by is None:
            return []
        request = TakeOver(self.state.shard, self.state.version, self.term)
        return [Send(p, request) for p in self.roster.alive() if self.roster.holds_state(p)]

    def refusal(self) -> Outdated:
        """The answer to a peer that takes another peer for the aggregator."""
        assert self.state is not None
        return Outdated(self.state.shard, self.state.version, self.term, self.holder)

    def promised(self, sender: str, promise: Promise) -> bool:
        """A peer promises; returns whether the promise is for the present claim."""
        mine = self.state is not None and promise.base == self.state.version and promise.term == self.term
        if not mine or self.holder != self.me or self.promised_by is None:
            return False
        self.promised_by.add(sender)
        return True

    def is_overruled(self, sender: str, refusal: Outdated) -> bool:
        """Whether a refusal names a greater claim, or comes from the holder, which has forgotten its own claim."""
        if self.state is None or refusal.base != self.state.version:
            return False
        greater = (refusal.term, refusal.holder) > (self.term, self.holder)
        return greater or sender == self.holder != refusal.holder
