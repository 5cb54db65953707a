"""The right to write the commit that follows one version of a shard: it belongs to the holder of the highest term.

Law: the plan gives term 0 to its first peer. A higher term is claimed and needs the promise of every live peer that
holds a state. A reachable candidate claims before a private one. Of two claims to one term, that of the higher peer id
wins. Each term belongs to one candidate of the plan, in turns; another peer may hold a term only once no candidate is
left, so it can't take a round from the peers that the plan names. A claim ends with the shard's next version.
"""

from __future__ import annotations

import itertools

from .events import Effect, Send
from .messages import Outdated, Plan, Promise, State, TakeOver
from .roster import Roster

TERMS_AHEAD_MAX = 64
"""A claim may be ahead of the known term by at most this many turns of all candidates. A peer that was cut off may have
missed claims, but never more than that."""


class Leadership:
    """The term for a shard's next commit: its number, the peer that holds it and, if this peer claimed it, the peers
    that have promised."""

    def __init__(self, roster: Roster, state: State | None) -> None:
        self.me, self.roster, self.state = roster.me, roster, state
        self.plan = Plan((), ()) if state is None else state.plan
        self.term, self.holder = 0, self.plan.succession[0] if self.plan.succession else ""
        self.promised_by: set[str] | None = None  # the peers that promised, if this peer has claimed the term
        self.claimed_at = float("-inf")  # when a claim of the holder last arrived, if another peer holds the term
        self.disowned: tuple[str, Outdated] | None = None  # the holder and its refusal that names another peer
        self.passed_over: set[str] = set()  # the peers that this round goes on without
        self.overdue = False  # the round lasts so long that peers passed over earlier may win claims again
        self.forgiven: set[str] = set()  # the peers for which the waits of this round began anew (`passing`)
        self.asked: set[str] = set()  # the peers that were asked for a promise; one that is ahead is asked once
        self.ahead: set[str] = set()  # the peers that have said that they hold a newer version
        self.outbid: set[str] = set()  # the peers whose claims this peer has answered with a higher one (`contest`)

    # -- questions

    def candidates(self) -> list[str]:
        """Return the peers that the plan lets aggregate, in order: the succession, then the rest of the group."""
        return [*self.plan.succession, *(p for p in self.plan.group if p not in self.plan.succession)]

    def target(self) -> tuple[int, str]:
        """Return (term, peer): which peer should aggregate now, as far as this peer knows, and under which term. That
        is the holder of the present term, even a private one, while it is `able`; else this peer, if it is a candidate
        and has passed the holder over; else the next able candidate; if none is left, the able peer with the lowest id.
        In the last two cases reachable peers come before private ones."""
        if self.able(self.holder):
            return self.term, self.holder
        candidates = self.candidates()
        if self.holder in self.passed_over and self.me in candidates:  # other candidates may not pass the holder over
            return self.next_term_of(self.me), self.me
        terms, number = range(self.term + 1, self.term + len(candidates) + 1), len(candidates)
        others = [(self.term + number + 1, peer) for peer in self.roster.summaries() if peer not in candidates]
        for claims in ([(term, candidates[term % number]) for term in terms], others):
            if able := [claim for claim in claims if self.able(claim[1])]:
                return next((claim for claim in able if self.roster.reachable(claim[1])), able[0])
        return self.term, self.holder

    def able(self, peer: str) -> bool:
        """Whether the peer may aggregate, and was not passed over in this round."""
        return peer not in self.passed_over and self.roster.may_aggregate(peer)

    def entitles(self, peer: str, term: int) -> bool:
        """Whether the plan lets this peer hold this term: the term is its turn as a candidate, or it is no candidate
        and none is left. The term must not be far above the known one; for a peer passed over, not above it at all."""
        candidates = self.candidates()
        if term > self.term + (0 if peer in self.passed_over else TERMS_AHEAD_MAX * (len(candidates) + 1)):
            return False
        if peer in candidates:
            return candidates[term % len(candidates)] == peer
        return term > len(candidates) and not any(map(self.able, candidates))

    def rank(self, term: int, holder: str) -> tuple[bool, int, str]:
        """Return the rank of a claim; the claim of higher rank wins. A candidate outranks any other peer. So a peer
        that claimed the term while all candidates were gone yields once a candidate is back."""
        return holder in self.candidates(), term, holder

    @property
    def present(self) -> tuple[bool, int, str]:
        """The rank of the known claim; lower than that of any other claim if its holder is gone."""
        return self.rank(self.term, self.holder) if self.able(self.holder) else (False, -1, "")

    def next_term_of(self, peer: str) -> int:
        """Return the lowest term above the present one that the plan lets this peer hold."""
        candidates = self.candidates()
        if peer not in candidates:
            return self.term + len(candidates) + 1
        return next(t for t in itertools.count(self.term + 1) if candidates[t % len(candidates)] == peer)

    def unpromised(self) -> list[str]:
        """Return the live peers that hold a state and have not yet promised to accept this peer's claim to the term.
        This peer may write the commit only once all have promised. Empty if this peer has not claimed the term."""
        if self.promised_by is None:
            return []
        answered = self.promised_by | (self.passed_over - self.ahead)
        return [p for p in self.roster.alive() if self.roster.holds_state(p) and p not in answered]

    def is_claimed_by_another(self, sender: str, fragment: int) -> bool:
        """Whether another peer's claim forbids a commit sent by ``sender``: a third, live peer holds the term, and that
        peer has not reached a later epoch than this one."""
        summary = self.roster.summary(self.holder) if self.holder not in (self.me, sender) else None
        if summary is None or self.state is None:
            return False
        return not summary.epochs or summary.epochs[fragment] <= self.state.version.epoch

    # -- claims

    def claim(self, term: int) -> None:
        """Claim the term for this peer."""
        self.term, self.holder, self.promised_by = term, self.me, set()

    def concede(self, term: int, holder: str) -> None:
        """Accept that ``holder`` holds the term. If it is this peer, which forgot its claim, ask for promises anew."""
        self.promised_by = set() if holder == self.me else None
        self.term, self.holder, self.claimed_at, self.disowned = term, holder, float("-inf"), None

    def seize(self) -> None:
        """Take the next term of this peer without any promise."""
        self.term, self.holder, self.promised_by = self.next_term_of(self.me), self.me, None

    def ask(self) -> list[Effect]:
        """Return requests for promises if this peer has claimed the term. They are repeated until the commit is made,
        because a peer that adopts the version later does not know of the claim."""
        if self.state is None or self.promised_by is None:
            return []
        request = TakeOver(self.state.shard, self.state.version, self.term)
        peers = [p for p in self.roster.alive() if self.roster.holds_state(p) and p not in self.ahead & self.asked]
        self.asked |= set(peers)
        return [Send(p, request) for p in peers]

    def refusal(self) -> Outdated:
        """Return the refusal that names the peer that should aggregate now: the holder of the term may be gone."""
        assert self.state is not None
        return Outdated(self.state.shard, self.state.version, *self.target())

    def promised(self, sender: str, promise: Promise) -> bool:
        """Record a peer's promise, and return whether it was given for this peer's present claim."""
        mine = self.state is not None and promise.base == self.state.version and promise.term == self.term
        if not mine or self.holder != self.me or self.promised_by is None:
            return False
        self.promised_by.add(sender)
        return True

    def forgotten_by(self, peer: str) -> None:
        """Handle a peer's restart: it has lost its promise."""
        self.promised_by = None if self.promised_by is None else self.promised_by - {peer}
