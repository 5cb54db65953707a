"""Passes each message and each result of tensor work to the part of the replica that handles it: a shard's log or
`catchup`.

Law: a message is handled by how its base relates to the shard's present version. If they are the same, the shard's log
handles the message. Otherwise this replica may have missed a commit, or the peers may be on two lineages, which
`catchup` handles.
"""

from __future__ import annotations

from . import damage
from .catchup import CatchUp
from .donating import tell_versions
from .events import Complaint, Effect, Note, Send
from .logs import Logs
from .mending import Mending
from .messages import Commit, Contribution, Fetch, Held, Message, Outdated, Promise, Stale, State, TakeOver, Want
from .mismatches import Mismatches, astray
from .training import Training
from .version import Version


class Rounds:
    """Passes each message and each result of tensor work to the log of its shard, or to `catchup`."""

    def __init__(
        self, logs: Logs, catchup: CatchUp, mending: Mending, mismatches: Mismatches, training: Training
    ) -> None:
        self.logs, self.catchup, self.mending = logs, catchup, mending
        self.mismatches, self.training = mismatches, training
        self.asked = mismatches.roster.asked

    def received(self, sender: str, message: Message, now: float) -> list[Effect]:
        """Handle a message about a round of one shard, or about fetching newer states."""
        match message:
            case Contribution():
                return self._contributed(sender, message, now)
            case Commit():
                return self._committed(sender, message, now)
            case Want(shard, base):
                return [*self.training.wanted(shard, base, now), *self.logs[shard].wanted(sender, base, now)]
            case Held(shard, version):
                return self.logs[shard].held(sender, version, now)
            case Stale(shard):
                log = self.logs[shard]
                if self.asked.open(sender, now):
                    log.own.stale(message, log.state)
                return []
            case TakeOver():
                return self._asked(sender, message, now)
            case Promise(shard):
                return self.logs[shard].promised(sender, message, now)
            case Outdated(shard):
                return self.logs[shard].outdated(sender, message, now)
        return self.catchup.received(sender, message, now)

    def delivered(self, to: str, message: Message) -> None:
        """Record that the peer ``to`` has received a message."""
        match message:
            case Contribution(shard):
                self.logs[shard].own.delivered(to, message, ok=True)
            case Commit(shard, version=version) if version == self.logs[shard].version:
                self.logs[shard].outgoing.reached(to)

    def undelivered(self, to: str, message: Message, now: float) -> list[Effect]:
        """Handle a message that could not be delivered."""
        match message:
            case Contribution(shard):
                self.logs[shard].own.delivered(to, message, ok=False)
            case Commit(shard) | State(shard) | Held(shard):
                self.logs[shard].undelivered(to, message)
            case Fetch():
                return self.catchup.gone(to, now)
        return []

    def applied(self, shard: int, base: Version, digest: str, now: float) -> list[Effect]:
        """Handle the result of Apply, the outer step of another peer's commit. If it has another digest than the commit
        names, fetch the shard again."""
        wrong, effects = self.logs[shard].applied(base, digest, now)
        if wrong is None:
            if effects:
                self.mismatches.agreed()
            return effects
        sender = self.logs[shard].round.told_by
        effects += [Complaint(sender, astray(shard, base)), *self.mismatches.found(shard, base, sender, now)]
        return effects + self.mending.doubt(shard, wrong.aggregator, now)

    def damaged(self, shard: int, base: Version, now: float) -> list[Effect]:
        """Handle the report that a shard's tensors no longer match their version: fetch the shard again."""
        if not damage.found(self.logs[shard], base, now):
            return []
        text = f"shard {shard}: the state of epoch {base.epoch} was changed in memory; fetching it again"
        return [Note("mismatch", text), *self.mending.mend(now)]

    def _contributed(self, sender: str, contribution: Contribution, now: float) -> list[Effect]:
        """Handle a contribution. If it was made on the shard's present version or an earlier one, pass it to the
        shard's log. Otherwise store it for later; if it was made on another lineage, also tell its author this
        replica's versions."""
        log = self.logs[contribution.shard]
        match log.relation(contribution.base):
            case "equal":
                return log.collect(sender, contribution, now)
            case "ancestor":
                return log.overtaken(sender, contribution, now)
            case "fork":
                log.incoming.stash(sender, contribution)  # needed if this replica joins that lineage later
                return tell_versions(self.logs, sender)
        log.incoming.stash(sender, contribution)
        self.catchup.lag.gap(log.shard, now)
        return []

    def _committed(self, sender: str, commit: Commit, now: float) -> list[Effect]:
        """Handle another peer's commit by how its base relates to the shard's version. The commit is ignored unless it
        comes from its author, or answers a question of this replica's."""
        log = self.logs[commit.shard]
        if sender != commit.aggregator and not self.asked.open(sender, now):
            return [Complaint(sender, f"a commit of {commit.aggregator} is ignored: it was not asked for")]
        if commit.base == log.version:
            effects = log.committed(sender, commit)
            return [*effects, *self.catchup.lag.asks_holder(commit.shard, effects, now)]
        if log.relation(commit.base) != "ahead":
            if log.insists(sender, commit):
                return tell_versions(self.logs, sender)
            return log.repeated(sender, commit)
        log.incoming.keep(sender, commit)
        self.catchup.lag.gap(log.shard, now)
        missed = log.missed(sender, commit, self.logs.versions(), now)
        if self.training.ready or not self.logs.whole or self.catchup.gathering is not None:
            return missed
        # The author of the missing commit may not know this newcomer; then that commit never arrives here.
        return [*missed, *self.catchup.fetch(sender, self.logs.model(), now)]

    def _asked(self, sender: str, request: TakeOver, now: float) -> list[Effect]:
        """Handle another peer's claim to write the commit that follows ``request.base``. If this replica holds a newer
        version of the shard, send the commits or the state that lead to it; before a state, also tell the peer this
        replica's versions, because the state may take long. If the peer is on another lineage, tell it this replica's
        versions. Otherwise pass the claim to the shard's log."""
        log = self.logs[request.shard]
        match log.relation(request.base):
            case "ancestor" if log.state is not None:
                news = log.outgoing.news(log.state, sender, request.base)
                whole = Send(sender, log.state) in news
                return [*tell_versions(self.logs, sender, forked=False), *news] if whole else news
            case "fork":
                return tell_versions(self.logs, sender)
        return log.asked_by(sender, request, now)
