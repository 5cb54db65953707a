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
    """The term for a shard's next commit: its number, the peer that holds it and, if this peer claimed it, the peers
    that have promised."""

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
        """Return (term, peer): the peer that should aggregate now, as far as this peer knows, and its term. While the
        holder of the term lives, that is the holder, even if it has become private. After its death, that is the next
        live candidate or, if no candidate is live, the peer with the lowest id among all that may aggregate. In both
        cases a reachable peer goes before a private one."""
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
        """Return the live peers that hold a state and have not yet promised to accept this peer's claim to the term.
        This peer may write the commit only once all have promised. The list is empty if this peer has not claimed the
        term."""
        if self.promised_by is None:
            return []
        return [p for p in self.roster.alive() if self.roster.holds_state(p) and p not in self.promised_by]

    def is_claimed_by_another(self, sender: str, fragment: int) -> bool:
        """Whether another peer's claim stands against a commit sent by ``sender``: a third, live peer holds the term,
        and it has not reached a later epoch than this peer."""
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
        """Return requests for promises if this peer has claimed the term. They are repeated until the commit is made,
        because a peer that adopts the version later does not know of the claim."""
        if self.state is None or self.promised_by is None:
            return []
        request = TakeOver(self.state.shard, self.state.version, self.term)
        return [Send(p, request) for p in self.roster.alive() if self.roster.holds_state(p)]

    def refusal(self) -> Outdated:
        """Return the refusal for a peer that takes the wrong peer for the aggregator. It names the peer that holds the
        term."""
        assert self.state is not None
        return Outdated(self.state.shard, self.state.version, self.term, self.holder)

    def promised(self, sender: str, promise: Promise) -> bool:
        """Record a peer's promise, and return whether it was given for this peer's present claim."""
        mine = self.state is not None and promise.base == self.state.version and promise.term == self.term
        if not mine or self.holder != self.me or self.promised_by is None:
            return False
        self.promised_by.add(sender)
        return True

    def is_overruled(self, sender: str, refusal: Outdated) -> bool:
        """Whether a refusal shows that this peer takes the wrong peer for the holder of the term. The refusal does so
        if it names a claim that wins against the known one. It also does so if the known holder sent it and names
        another peer, because that holder has forgotten its own claim."""
        if self.state is None or refusal.base != self.state.version:
            return False
        greater = (refusal.term, refusal.holder) > (self.term, self.holder)
        return greater or sender == self.holder != refusal.holder
