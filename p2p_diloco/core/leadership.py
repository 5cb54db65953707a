"""The right to write the commit that follows one version of a shard: it belongs to the holder of the highest term.

Law: the plan gives term 0 to its first peer. A higher term is claimed and needs the promise of every live peer that
holds a state. A reachable candidate claims before a private one. If two peers claim the same term, the higher peer id
wins. What is known of other peers is read from the roster only. A claim ends when the shard's next version comes.
"""

from __future__ import annotations

from .events import Effect, Send
from .messages import Outdated, Plan, Promise, State, TakeOver
from .roster import Roster


class Leadership:
    """The term for one shard's next commit: which peer holds it and, if this peer claimed it, which peers promised."""

    def __init__(self, roster: Roster, state: State | None) -> None:
        self.me, self.roster, self.state = roster.me, roster, state
        self.plan = Plan((), ()) if state is None else state.plan
        self.term, self.holder = 0, self.plan.succession[0] if self.plan.succession else ""
        # the peers that promised, if this peer holds the term by a claim; else None
        self.promised_by: set[str] | None = None

    # -- questions

    def candidates(self) -> list[str]:
        """Return the peers that the plan lets aggregate, in order: the succession, then the rest of the group."""
        return [*self.plan.succession, *(p for p in self.plan.group if p not in self.plan.succession)]

    def target(self) -> tuple[int, str]:
        """Return (term, peer): which peer should aggregate now, as far as this peer knows, and under which term. That
        is the holder while it lives, even if it has become private. Once the holder is gone, it is the next live
        candidate: a reachable one if there is one, else a private one. If all candidates are gone, it is the peer with
        the lowest id among all that may aggregate, again a reachable one if there is one."""
        if self.roster.may_aggregate(self.holder):
            return self.term, self.holder
        candidates = self.candidates()
        terms, number = range(self.term + 1, self.term + len(candidates) + 1), len(candidates)
        others = [(self.term + number + 1, peer) for peer in self.roster.summaries()]
        for claims in ([(term, candidates[term % number]) for term in terms], others):
            if able := [claim for claim in claims if self.roster.may_aggregate(claim[1])]:
                return next((claim for claim in able if self.roster.reachable(claim[1])), able[0])
        return self.term, self.holder

    def unpromised(self) -> list[str]:
        """Return the peers whose promise is missing: a peer that has claimed the term may write the commit only once it
        has all promises. Empty if this peer has not claimed the term."""
        if self.promised_by is None:
            return []
        return [p for p in self.roster.alive() if self.roster.holds_state(p) and p not in self.promised_by]

    def is_claimed_by_another(self, sender: str, fragment: int) -> bool:
        """Whether the term is held by a live peer that is neither this peer nor ``sender``, and that is not yet at a
        later epoch than this peer."""
        summary = self.roster.summary(self.holder) if self.holder not in (self.me, sender) else None
        if summary is None or self.state is None:
            return False
        return not summary.epochs or summary.epochs[fragment] <= self.state.version.epoch

    # -- claims

    def claim(self, term: int) -> None:
        """Claim the term for this peer."""
        self.term, self.holder, self.promised_by = term, self.me, set()

    def concede(self, term: int, holder: str) -> None:
        """Accept that ``holder`` holds the term."""
        self.term, self.holder, self.promised_by = term, holder, None

    def ask(self) -> list[Effect]:
        """Return requests for promises. The requests are repeated until the commit is made, because a peer that adopts
        the version later does not know the claim."""
        if self.state is None or self.promised_by is None:
            return []
        request = TakeOver(self.state.shard, self.state.version, self.term)
        return [Send(p, request) for p in self.roster.alive() if self.roster.holds_state(p)]

    def refusal(self) -> Outdated:
        """Return the answer to a peer that takes the wrong peer for the aggregator."""
        assert self.state is not None
        return Outdated(self.state.shard, self.state.version, self.term, self.holder)

    def promised(self, sender: str, promise: Promise) -> bool:
        """Record a peer's promise; return whether the promise is for the present claim."""
        mine = self.state is not None and promise.base == self.state.version and promise.term == self.term
        if not mine or self.holder != self.me or self.promised_by is None:
            return False
        self.promised_by.add(sender)
        return True

    def is_overruled(self, sender: str, refusal: Outdated) -> bool:
        """Whether a refusal names a greater claim than the known one, or comes from the known holder but names another
        peer: that holder has then forgotten its own claim."""
        if self.state is None or refusal.base != self.state.version:
            return False
        greater = (refusal.term, refusal.holder) > (self.term, self.holder)
        return greater or sender == self.holder != refusal.holder
