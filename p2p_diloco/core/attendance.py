"""Attendance at the rounds of one fragment: which peers the next commit names, and how long a round waits for a peer.

Law: uses only local knowledge, from contributions, commits and Summaries. This module proposes members and limits
waits; the commit decides. All shards of a fragment share one `Attendance`: a peer that is counted in one shard is
expected in all of them, and a peer that is left out of one is soon left out of all.

The plan of a commit names every worker that holds a state. If the round closes without one of these workers, later
plans name this worker again only once it shows that it has reached a later epoch (a peer announces each epoch that it
reaches without being counted). A round waits until its deadline for a named peer that holds the round's base or was
counted in the commit that made this base. Any other named peer may still be fetching a state, so the round waits for it
only for a grace, which doubles with each miss in a row.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from .level import Level
from .messages import Commit, Plan
from .roster import Roster
from .rules import Rules

ROUNDS_KEPT = 9
"""The usual length of a round is the median over the last rounds without a miss, at most this many."""
STRANGERS_MAX = 16
"""Peers unknown to the roster are forgotten here once there are more of them than this."""
DOUBLINGS_MAX = 5
"""A grace doubles at most this many times."""


@dataclass(slots=True)
class Missed:
    """The last round that named a peer and closed without its contribution. ``epoch``: the epoch of the round's base.
    ``when``: the time at which the round closed. ``in_a_row``: the number of such rounds since a commit last counted
    the peer."""

    epoch: int
    when: float
    in_a_row: int


class Attendance:
    """What is known of each peer's attendance at the rounds of one fragment."""

    def __init__(self, fragment: int, rules: Rules, roster: Roster) -> None:
        self.fragment, self.rules, self.roster = fragment, rules, roster
        self._named = dict[str, int]()  # peer → highest epoch for which a plan of any shard names it
        self._shown = dict[str, int]()  # peer → highest epoch that it must hold, judging by what it sent
        self._counted = dict[str, int]()  # peer → highest epoch made by a commit that counts it
        self._missed = dict[str, Missed]()  # by peer
        self._rounds = deque[float](maxlen=ROUNDS_KEPT)  # seconds that each of the last rounds without a miss took
        self._newest, self._since = -1, 0.0  # the highest epoch that was appended, and when
        self._news = False  # a wait of another shard may have become shorter
        self.level = Level()

    # -- what is seen

    def shows(self, peer: str, epoch: int) -> None:
        """Record that the peer has reached this epoch: it sent a message that only a peer at this epoch can send."""
        self._shown[peer] = max(epoch, self._shown.get(peer, -1))

    def at(self, shard: int, epoch: int | None, now: float) -> None:
        """Record that a shard has reached this epoch; None: the run has ended for it."""
        self._news = self.level.at(shard, epoch, now) or self._news

    def planned(self, plan: Plan, epoch: int) -> None:
        """Record that a shard has reached this epoch; ``plan`` names the peers of the round that follows."""
        self._named |= {peer: epoch for peer in plan.group if epoch > self._named.get(peer, -1)}

    def appended(self, plan: Plan, commit: Commit, now: float) -> None:
        """Record which peers a commit counts and which it leaves out; ``plan`` is the plan of the commit's base."""
        counted = {c.peer for c in commit.contributions}
        epoch, base = commit.version.epoch, commit.base.epoch
        for peer in counted:
            self._counted[peer] = max(epoch, self._counted.get(peer, -1))
            self._missed.pop(peer, None)
        # a commit without contributions only mends damaged tensors: no peer could have been counted
        left_out = [peer for peer in self.group(plan, base) if peer not in counted] if counted else []
        for peer in left_out:
            before = self._missed.get(peer)
            if before is None or before.epoch < base:
                self._missed[peer] = Missed(base, now, 1 + (0 if before is None else before.in_a_row))
                if self.misses_often(peer):
                    self.roster.costs_a_deadline("works", peer, now)
        self.shows(commit.aggregator, epoch)
        self._news = self._news or bool(left_out)
        if epoch > self._newest:
            self._forget_strangers()
            if counted and not left_out and epoch == self._newest + 1:
                self._rounds.append(now - self._since)
            self._newest, self._since = epoch, now

    def forget(self, peer: str) -> None:
        """Forget what is known of a peer that has restarted: its new incarnation may lack what the earlier one held."""
        for known in (self._named, self._shown, self._counted, self._missed):
            known.pop(peer, None)

    def _forget_strangers(self) -> None:
        """Forget peers that the roster no longer remembers, once there are many of them."""
        here = self.roster.members
        for known in (self._named, self._shown, self._counted, self._missed):
            if len(known) > len(here) + STRANGERS_MAX:
                for peer in [p for p in known if p not in here and p != self.roster.me]:
                    del known[peer]

    def has_news(self) -> bool:
        """Whether a round has closed without one of its members, or the level has changed, since the last call. If so,
        the waits of other shards may now end earlier: a peer given up in one shard is given up sooner in the others."""
        news, self._news = self._news, False
        return news

    def clear(self) -> None:
        """Forget which peers attended. Called when this replica adopts a state of another lineage, because the recorded
        epochs belong to the old one."""
        self._named, self._shown, self._counted, self._missed = {}, {}, {}, {}
        self._newest = -1

    # -- questions

    def group(self, plan: Plan, epoch: int) -> list[str]:
        """Return the peers that take part in a shard's round on a base of this epoch, sorted. They are the peers that
        the shard's ``plan`` names, the peers that another shard's plan names for this epoch, and the workers that are
        sure to take part, except newcomers."""
        named = (peer for peer, latest in self._named.items() if latest == epoch)
        return sorted({*plan.group, *named, *self._sure(epoch, new=False)})

    def newcomers(self, plan: Plan, epoch: int) -> list[str]:
        """Return the workers that hold this epoch's base, though no plan names them for the round, and have sent no
        contribution yet. They joined in the middle of the round, and contribute their progress to the next round."""
        return [peer for peer in self._sure(epoch, new=True) if not self.is_named(peer, plan, epoch)]

    def _sure(self, epoch: int, *, new: bool) -> list[str]:
        known = self._counted.keys() | self._shown.keys()
        came = self.roster.came_at(self.fragment, epoch) - known
        return [peer for peer in self.roster.workers() if (peer in came) is new and self.sure(peer, epoch)]

    def is_named(self, peer: str, plan: Plan, epoch: int) -> bool:
        """Whether the peer is expected in the round whose base has this epoch: ``plan``, or the plan of another shard
        of the fragment, names it."""
        return peer in plan.group or self._named.get(peer) == epoch

    def names(self, peer: str, plan: Plan, epoch: int, contributors: Collection[str]) -> bool:
        """Whether the next commit's plan should name the peer. It should if that commit counts the peer, or if the peer
        has shown a later epoch than that of the last round that left it out. ``plan`` and ``epoch`` are those of the
        commit's base; ``contributors`` are the peers that the commit counts."""
        if peer in contributors:
            return True
        missed = self._missed.get(peer)
        last = max(-1 if missed is None else missed.epoch, epoch if peer in self.group(plan, epoch) else -1)
        return self._evidence(peer) > last

    def sure(self, peer: str, epoch: int) -> bool:
        """Whether the peer is sure to take part in the round on a base of this epoch: it holds the base or was counted
        in the commit that made the base, no shard's round of this epoch has closed without the peer, and the peer has
        not missed several rounds in a row, nor have others of its grant."""
        missed = self._missed.get(peer)
        attends = (missed is None or missed.epoch < epoch) and not self.roster.behind("works", peer)
        return self._evidence(peer) >= epoch and attends and not self.misses_often(peer)

    def misses_often(self, peer: str) -> bool:
        """Whether the peer has missed several rounds in a row, whatever it says of itself."""
        missed = self._missed.get(peer)
        return missed is not None and missed.in_a_row >= self.rules.misses_max

    def waits_until(self, peer: str, opened: float) -> float:
        """Return the time at which a round stops waiting for a peer that is not sure to take part. ``opened``: when the
        round opened."""
        missed = self._missed.get(peer)
        if missed is None:
            return opened + self.grace
        return max(opened, missed.when) + self.grace * (1 << min(missed.in_a_row, DOUBLINGS_MAX))

    def has_counted(self, peer: str) -> bool:
        """Whether a commit that this replica has seen counts the peer."""
        return peer in self._counted

    def is_near(self, peer: str, epoch: int) -> bool:
        """Whether the peer is known to be at most one epoch behind this epoch, or may have come so near since it sent
        its last Summary."""
        unheard = round(self.rules.settle / self._usual) if self._rounds and self._usual > 0 else 0
        return self._evidence(peer) >= epoch - 1 - unheard

    @property
    def grace(self) -> float:
        """How long, in seconds, a round waits for a peer that its plan names but that has not shown that it holds the
        round's base. For a peer that has missed rounds, `waits_until` makes the wait longer."""
        return max(self.rules.settle, self._usual)

    @property
    def _usual(self) -> float:
        """The usual length of a round in seconds; 0 while it is unknown."""
        return statistics.median(self._rounds) if self._rounds else 0.0

    def _evidence(self, peer: str) -> int:
        """Return the highest epoch that the peer is known to have reached; -1 if none is known."""
        summary = self.roster.summary(peer)
        said = summary.epochs[self.fragment] if summary is not None and summary.epochs else -1
        return max(said, self._shown.get(peer, -1), self._counted.get(peer, -1))
