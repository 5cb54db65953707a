"""What the promised leader did not send: newer versions and other lineages, and when they are believed.

Law: a peer asks the live holders what they hold, and goes with most of them; of equal halves the greater model version
wins. It counts itself, and leaves out those that have only restored a disk. A newcomer takes what most tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from .events import Effect, Note, Send
from .fragment import FragmentLog
from .messages import NO_MODEL, Ask, Claim, Ready, Told
from .roster import Roster
from .round import Phase
from .rules import Rules
from .state import relation
from .version import ModelVersion, Version, model_version

ASKED_MAX = 16
"""So many live holders are asked, drawn by hash."""
WITNESSES = 2
"""So many peers that tell one newer state of the own lineage are believed, however many are behind. One could lie."""
PATIENCE_MAX = 16
"""While there is a sign and nothing is believed, the time between two questions doubles up to so many times
`Rules.settle`."""


@dataclass(slots=True)
class Inquiry:
    """A question to the live holders. ``began``: when; ``asked``: whom; ``told``: their answers."""

    began: float
    asked: list[str]
    told: dict[str, Told] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Belief:
    """What this peer goes over to: what ``teller`` told, which ``donors`` hold too. ``fork``: another lineage."""

    teller: str
    told: Told
    donors: tuple[str, ...]
    fork: bool
    alone: bool  # no other answered


class Lineage:
    """Notices that this peer may be behind or on another lineage, asks, and decides."""

    def __init__(self, rules: Rules, logs: Sequence[FragmentLog], roster: Roster) -> None:
        self.rules, self.logs, self.roster = rules, logs, roster
        self.inquiry: Inquiry | None = None
        self.since: dict[int, tuple[Version | None, float]] = {}  # by fragment: at which version, since when behind
        self.quiet_until, self.patience = float("-inf"), 1

    # -- noticing

    def tick(self, now: float, *, fetching: bool) -> list[Effect]:
        """Ask if there has been a sign for long enough."""
        for peer, record in self.roster.peers.items():
            record.elsewhere = record.elsewhere and not self._is_kin(peer)
        if self.inquiry is not None or fetching or not (holders := self.roster.holders()):
            return []
        if not self._has_sign(holders, now):
            self.patience = 1
            return []
        if now < self.quiet_until:
            return []
        order = sorted(holders, key=lambda peer: blake2b(f"{self.roster.me}/{peer}".encode(), digest_size=8).digest())
        self.inquiry = Inquiry(now, order[:ASKED_MAX])
        return [Send(peer, Ask()) for peer in self.inquiry.asked]

    def _is_kin(self, peer: str) -> bool:
        """Whether the peer's Summary names versions of this lineage only: it went over, or this peer has caught up."""
        summary = self.roster.summary(peer)
        heads = () if summary is None else summary.heads
        links = [() if log.state is None else log.state.links for log in self.logs]
        return bool(heads) and all(head in known for head, known in zip(heads, links, strict=True))

    def _has_sign(self, holders: list[str], now: float) -> bool:
        if any(log.state is None for log in self.logs):
            return True
        behind = [self._is_behind(log, holders, now) for log in self.logs]  # each notes since when
        return any(behind)

    def _is_behind(self, log: FragmentLog, holders: list[str], now: float) -> bool:
        """Whether others have been ahead, or on another lineage, for longer than a commit is on its way."""
        heads = (summary.heads[log.fragment] for p in holders if (summary := self.roster.summary(p)) is not None)
        ahead = any(epoch > log.epoch for epoch, _ in heads) or any(key[2] > log.epoch for key in log.early)
        apart = not all(log.is_here(peer) for peer in holders)
        if not ahead and not apart:
            self.since.pop(log.fragment, None)
            return False
        if log.gains(now):
            return False
        if self.rules.asynchronous and not apart and _may_be_behind(log, now):
            return False
        if log.fragment not in self.since or (self.since[log.fragment][0] != log.version and not apart):
            self.since[log.fragment] = log.version, now
        since = self.since[log.fragment][1]
        if log.phase in (Phase.LACKING, Phase.APPLYING, Phase.HOLDING):  # parts of the next version come
            since = max(since, min(log.round.moved_at, since + self.rules.fetch_again))
        return now - since >= self.rules.settle

    # -- deciding

    def told(self, sender: str, message: Told) -> None:
        """Record an answer. One that was not asked for is ignored."""
        if self.inquiry is not None and sender in self.inquiry.asked:
            self.inquiry.told[sender] = message

    def decide(self, now: float) -> Belief | None:
        """Return what to go over to, once all have answered or had time to; None: nothing, or not yet."""
        inquiry = self.inquiry
        if inquiry is None:
            return None
        waiting = [p for p in inquiry.asked if p not in inquiry.told and self.roster.live(p)]
        if waiting and now - inquiry.began < self.rules.settle:
            return None
        self.inquiry = None
        empty = any(log.state is None for log in self.logs)
        # a busy peer that answers late is no reason to believe the only one that was quick
        late = [] if empty else [peer for peer in waiting if self._is_kin(peer)]
        judged = [self._judged(peer, inquiry.told, late, now, empty=empty) for peer in sorted(inquiry.told)]
        found = (b for b in judged if b is not None)
        *_, belief = max(found, key=lambda b: b[:3], default=(0, 0, NO_MODEL, None))
        if not empty:
            self._note(inquiry.told, believed=belief is not None)
        again = 1 if belief is not None or empty else min(2 * self.patience, PATIENCE_MAX)
        self.patience, self.quiet_until = again, now + again * self.rules.settle
        return belief

    def _note(self, told: dict[str, Told], *, believed: bool) -> None:
        """Record who is on another lineage, or ahead and not believed: rounds don't wait for these."""
        for peer in filter(self.roster.live, told):
            how = self._relation(told[peer])
            self.roster.peers[peer].elsewhere = how == "fork" or (how == "ahead" and not believed)

    def _judged(
        self, teller: str, told: dict[str, Told], late: list[str], now: float, *, empty: bool
    ) -> tuple[int, int, ModelVersion, Belief | None] | None:
        """Return (how many are for it, how many of these are not doubted, its version, the belief) if what the teller
        tells is to be believed. ``late``: who has not answered, and holds this peer's lineage by its Summary."""
        this = told[teller]
        kin = [peer for peer, other in told.items() if _are_kin(this, other)]
        model, alone = model_version(this.versions), len(told) == 1
        if empty:
            for_it = sum(not told[peer].fresh for peer in kin)
            witnesses = sum(not (told[peer].fresh or self._doubted(peer, now)) for peer in kin)
            return for_it, witnesses, model, Belief(teller, this, tuple(kin), fork=False, alone=alone)
        how = {peer: self._relation(other) for peer, other in told.items()}
        if how[teller] == "held":
            return None
        kin = [peer for peer in kin if how[peer] != "held"]
        for_it = sum(not told[peer].fresh for peer in kin)
        others = [peer for peer in told if how[peer] == "held" and not told[peer].fresh]  # a third lineage is neither
        witnesses = sum(not (told[peer].fresh or self._doubted(peer, now)) for peer in kin)
        if how[teller] == "ahead" and witnesses >= (1 if self.rules.asynchronous else WITNESSES):
            against = 0  # others are behind, this peer too: nobody tells anything else
        else:
            against = len(others) + len(late) + (not any(log.fresh for log in self.logs))
        mine = model_version([log.held.version for log in self.logs])
        in_vain = all(self._doubted(peer, now) for peer in kin)
        if for_it < against or (for_it == against and (model <= mine or in_vain)):
            return None
        fork = how[teller] == "fork"
        this = this if fork else _furthest([told[peer] for peer in kin if how[peer] == "ahead"])
        return for_it, witnesses, model, Belief(teller, this, tuple(kin), fork=fork, alone=alone)

    def _doubted(self, peer: str, now: float) -> bool:
        """Whether the peer's word alone counts for nothing, because fetching what it told was in vain lately. In a
        synchronous run one invitation is doubted so too, whose holder could make one peer after the other."""
        return self.roster.doubted(peer, now) or (not self.rules.asynchronous and self.roster.is_costly(peer))

    def _relation(self, other: Told) -> str:
        """Return ``fork``, ``ahead`` or ``held``: what another peer's model is to this peer's."""
        found = [
            relation(log.held.version, log.held.links, version, links)
            for log, version, links in zip(self.logs, other.versions, other.links, strict=True)
        ]
        if any(log.forgot(version.epoch) for log, version in zip(self.logs, other.versions, strict=True)):
            return "fork"
        return "fork" if "fork" in found else "ahead" if "ahead" in found else "held"

    def tell(self, *, leaves: bool = False) -> Told | None:
        """Return this peer's own answer; None while it lacks a fragment. While it ``leaves`` its lineage for another
        one, it is no voice for it: else two halves whose states travel for long could change places again and again."""
        states = [log.state for log in self.logs if log.state is not None]
        if len(states) < len(self.logs):
            return None
        fresh = leaves or any(log.fresh for log in self.logs)
        return Told(tuple(s.version for s in states), tuple(s.links for s in states), fresh)


def _may_be_behind(log: FragmentLog, now: float) -> bool:
    """In asynchronous mode: whether it is usual to be behind here. This peer is not named, and the answer to its
    submission, which leads to the newer state, is not late."""
    named = log.me in log.held.plan.succession[: log.held.plan.named]
    late = bool(log.round.handed[0]) and now - log.round.handed[1] > log.rules.dead_after
    asked = any(key[0] in (Ready, Claim) for key in log.early)  # others, which are ahead, take this peer for the leader
    return log.phase is Phase.COLLECTING and not (named or late or asked)


def _are_kin(one: Told, other: Told) -> bool:
    """Whether nothing shows that these two are on unlike lineages."""
    pairs = zip(one.versions, one.links, other.versions, other.links, strict=True)
    return all(relation(*pair) != "fork" for pair in pairs)


def _furthest(told: Sequence[Told]) -> Told:
    """Return what the furthest of these tells of each fragment: who leads one may be behind in the others."""
    fragments = zip(*(zip(one.versions, one.links, strict=True) for one in told), strict=True)
    versions, links = zip(*(max(found, key=lambda held: held[0]) for found in fragments), strict=True)
    return Told(versions, links, fresh=False)


def says(belief: Belief) -> list[Effect]:
    """Return the lines that a user should see."""
    if belief.fork:
        text = f"this peer goes over to the lineage that most others hold, told by {belief.teller}; its own is lost"
        return [Note("fork", text)]
    return [Note("alone", f"only {belief.teller} told a state: it is believed")] if belief.alone else []
