"""One shard's log in synchronous mode: a round is for one version, and waits for all peers that take part in it.

Law: a contribution counts on the version that it was made on, or not at all. A commit is valid as soon as it is
computed: if its author dies before any other peer has it, the contributors send their contributions to the successor.
"""

from __future__ import annotations

from .admission import countable, unfit
from .attendance import Attendance
from .election import in_tiers
from .events import Accept, Complaint, Effect, Note, Send
from .lending import is_empty
from .messages import Commit, Contribution, Held, Plan, State, Want
from .proposal import Proposal
from .roster import Roster
from .rules import Rules
from .sending import Sending
from .shard import ShardLog
from .waits import Waits


class SynchronousLog(ShardLog):
    """One shard's log in synchronous mode."""

    def __init__(self, shard: int, rules: Rules, roster: Roster, attendance: Attendance) -> None:
        super().__init__(shard, rules, roster, attendance, Sending(roster.me, rules))

    # -- questions

    @property
    def waits(self) -> Waits | None:
        """Which peers the round waits for and how long; None while this replica holds no state of the shard."""
        if self.state is None:
            return None
        return Waits(self.rules, self.roster, self.attendance, self.state, self.round)

    @property
    def needed(self) -> int:
        return self.rules.needed(self.revision_next, first=False) if self.waits is None else self.waits.needed

    def waited_for(self) -> list[str]:
        return [] if self.waits is None else self.waits.missing()

    def watched(self) -> set[str]:
        watched = {self.lead.target()[1]} if self.own.sendable(self.version) else set()
        waits = self.lead.holder == self.me and self.round.inbox
        return {*watched, *self.unpromised(), *(self.waited_for() if waits else ())}

    def closes_at(self) -> float | None:
        waits = self.waits
        open = self.state is not None and not self.frozen and self.round.working is None
        if waits is None or not open or self.round.damaged is not None or not self.aggregating or not self.round.inbox:
            return None
        return waits.closes_at()

    @property
    def awaits_me(self) -> bool:
        """Whether this round still waits for this peer's contribution."""
        return self.waits is not None and not self.own.sendable(self.version) and self.waits.awaits(self.me)

    # -- contributions

    def collect(self, sender: str, contribution: Contribution, now: float) -> list[Effect]:
        if self.final or self.state is None:
            return []
        if why := unfit(sender, contribution, self.state, self.lead, self.rules):
            return [Complaint(sender, f"a contribution to shard {self.shard} is refused: {why}")]
        known, counted = self.round.inbox.get(sender), self.state.counted.get(sender)
        misdirected = sender != self.me and self.lead.target()[1] != self.me
        effects: list[Effect] = [Send(sender, self.lead.refusal())] if misdirected else []
        if known is not None and known.id >= contribution.id:
            return effects
        if counted is not None and contribution.id <= counted:
            return [Note("refused", f"{sender} sent contribution {contribution.id} again after it was counted")]
        if all(map(is_empty, self.round.inbox.values())):
            self.round.open(now, self.rules.settle)
        self.outgoing.reached(sender)
        self.attendance.shows(sender, contribution.base.epoch)
        self.round.inbox[sender] = contribution
        return effects + self.close(now)

    def overtaken(self, sender: str, contribution: Contribution, now: float) -> list[Effect]:
        """Handle a contribution that was made on an earlier version. It comes too late, so send its author the newer
        commit or state."""
        assert self.state is not None
        self.attendance.shows(sender, contribution.base.epoch + 1)
        return self.outgoing.news(self.state, sender, contribution.base)

    # -- writing the next commit

    def close(self, now: float) -> list[Effect]:
        if not self._able():
            return []
        if self.round.trusted:
            return self.work((), now)
        closes = self.waits is not None and self.waits.may_close(now)
        return self.work(countable(self.round.inbox, self.state), now) if closes and self.state is not None else []

    def next_plan(self, contributors: set[str], now: float) -> Plan:
        """Return the plan of the next round. Its group: every live worker that holds a state and is not idle, except
        those that missed the last round that named them. Its succession: this peer, the contributors, and near peers
        that only aggregate or took part before; none that was passed over; reachable peers before private ones."""
        assert self.state is not None
        epoch, present = self.state.version.epoch, self.state.plan
        # (peers that compute the same outer steps, unlike peers): each with its bandwidth
        reachable, private = (dict[str, float](), dict[str, float]()), (dict[str, float](), dict[str, float]())
        group = dict[str, float]()
        for peer, s in self.roster.summaries().items():
            if peer not in contributors and (not s.epochs or self.roster.elsewhere(s)):
                continue
            attends = s.role == "worker" and not s.idle
            if attends and self.attendance.names(peer, present, epoch, contributors):
                group[peer] = s.bandwidth
            took_part = peer in present.succession or self.attendance.has_counted(peer)
            if peer != self.me and self.roster.passed(peer):
                continue
            near = (s.role == "aggregator" or took_part) and self.attendance.is_near(peer, epoch)
            if near or peer in contributors or peer == self.me:
                (reachable if s.eligible else private)[s.unlike][peer] = s.bandwidth
        tiers = [like or unlike for like, unlike in (reachable, private)]
        tiers = tiers if any(tiers) else [{self.me: 0.0}]  # this peer does not hold all shards yet
        plan = in_tiers(self.rules.run, epoch + 1, self.rules.divided(self.fragment, self.shard), tiers, group)
        return Plan(tuple(group), plan[self.shard])

    def publish(self, proposed: Proposal, now: float) -> list[Effect]:
        """Append the commit and send it to all live peers. A peer that still fetches a state stores the commit (see
        `Incoming.keep`)."""
        commit = proposed.commit
        self.append(commit, now)
        assert self.state is not None
        news = [send for p in self.roster.alive() for send in self.outgoing.news(self.state, p, commit.base)]
        return [Accept(((self.shard, commit.version.digest),)), *news, *self.begin(now)]

    # -- a new version

    def append(self, commit: Commit, now: float) -> None:
        if self.state is not None:
            self.attendance.appended(self.state.plan, commit, now)
        super().append(commit, now)

    def begin(self, now: float) -> list[Effect]:
        """Begin the round on a new version with the contributions that arrived early."""
        self.renew(now)
        assert self.state is not None
        epoch = self.state.version.epoch
        self.attendance.planned(self.state.plan, epoch)
        self.attendance.at(self.shard, None if self.final else epoch, now)
        self.attendance.shows(self.me, epoch)  # this peer's own Summary is updated only at the event's end
        effects, early = self.take_kept(), self.incoming.early
        for peer, contribution in sorted(early.items()):
            if contribution.base == self.version:
                del early[peer]
                effects += self.collect(peer, contribution, now)
            elif contribution.base.epoch < epoch:
                del early[peer]  # on another lineage; if this replica joins that one, it asks for contributions again
        return effects

    # -- lost messages, and time

    def undelivered(self, to: str, message: Commit | State | Held) -> None:
        if message.version == self.version and not isinstance(message, Held):
            self.outgoing.undelivered(to, message)

    def insist(self, now: float) -> list[Effect]:
        """Ask peers for missing contributions once the round has lasted a while, then again at growing intervals. At
        the beginning of a round most peers are still training."""
        if self.state is None or self.final or not self.aggregating or now < self.round.asks_at:
            return []
        self.round.ask_later(now, self.rules.dead_after)
        peers = [] if self.waits is None else self.waits.to_ask()
        return [Send(peer, Want(self.shard, self.state.version)) for peer in peers if peer != self.me]
