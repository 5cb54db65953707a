"""Sorts what happens to one fragment by the version that it is about and by the phase, and hands it to its module.

Law: a message on the present version goes to the table of phases (docs/decisions/0085); a newer one is kept; an older
one is answered with what is newer. No rule of the protocol lives here.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import applying, claims, closing, holding, leading, owning, waits
from .events import Applied, Averaged, Complaint, Effect, Send
from .exchange import Exchange
from .fragment import FragmentLog
from .messages import Claim, Close, Commit, Held, Lack, Mean, OfRound, Ready, Slice, Vote, Want, What
from .round import Phase

DEAF = frozenset({Phase.EMPTY, Phase.FETCHING})
ANSWERED = (Ready, Close, Claim, Vote)
"""Messages whose sender lacks a newer version, if they are about an older one."""


class Rounds:
    """Hands events to the fragments' logs."""

    def __init__(self, logs: Sequence[FragmentLog], exchange: Exchange) -> None:
        self.logs, self.exchange = logs, exchange

    def received(self, sender: str, message: OfRound, now: float) -> list[Effect]:
        """Handle a message of a round."""
        log = self.logs[message.fragment]
        if log.phase in DEAF:
            log.keep(sender, message)
            return []
        if log.rules.asynchronous and isinstance(message, Ready | Slice):
            return [*holding.submitted(log, sender, message, now), *self.advance(log, now)]
        match log.relation(message.base):
            case "equal":
                return [*self._present(log, sender, message, now), *self.advance(log, now)]
            case "ahead":
                log.keep(sender, message)
                return holding.missed(log, sender, message, now) if log.rules.asynchronous else []
            case "ancestor" if isinstance(message, Want) and message.what in (What.READY, What.SLICES):
                return self.exchange.wanted(log, sender, message)  # of a submission, which may be on an older version
            case "ancestor":
                return self._older(log, sender, message)
        return []

    def _present(self, log: FragmentLog, sender: str, message: OfRound, now: float) -> list[Effect]:
        """Handle a message on the present version."""
        if log.phase is Phase.FINAL:
            return [Complaint(sender, "nothing follows a final state")] if isinstance(message, Commit) else []
        match message:
            case Ready():
                return leading.collect(log, sender, message, now)
            case Slice():
                return [*leading.pass_on(log, message, now), *owning.collect(log, sender, message, now)]
            case Close():
                return owning.closed(log, sender, message, now)
            case Mean():
                return applying.got(log, sender, message, now)
            case Lack():
                return leading.lacks(log, sender, message, now)
            case Commit():
                return applying.committed(log, sender, message, now)
            case Want():
                return self._wanted(log, sender, message, now)
            case Claim():
                return claims.claimed(log, sender, message, now)
            case Vote():
                claims.voted(log, sender, message)
                if message.commit is not None and message.commit.base == log.version:
                    return applying.committed(log, sender, message.commit, now)
                return []

    def _wanted(self, log: FragmentLog, sender: str, want: Want, now: float) -> list[Effect]:
        match want.what:
            case What.MEANS:
                commit = log.round.commit  # one that fetches asks without a key for the means of the commit here
                means = log.means_of(commit.key if commit is not None and not want.key else want.key)
                return [Send(sender, means[number]) for number in want.numbers if number in means]
            case What.LACKS:
                return owning.answer(log, sender, want, now)
            case What.COMMIT:
                commit = log.round.commit
                return [] if commit is None else [Send(sender, commit)]
            case What.NEXT:
                log.followers[sender] = now
                return []
        return self.exchange.wanted(log, sender, want)

    def _older(self, log: FragmentLog, sender: str, message: OfRound) -> list[Effect]:
        """Answer a message on an older version: with the commits since, and the means that are asked for."""
        if isinstance(message, Want) and message.what is What.NEWS:
            return holding.news(log, sender, message.base)
        since = [place for place, (commit, _) in enumerate(log.last) if commit.base == message.base]
        if not since:
            return []
        commit, means = log.last[since[0]]
        if isinstance(message, Want) and message.what is What.MEANS:
            return [Send(sender, mean) for mean in means if mean.number in message.numbers]
        asks = isinstance(message, ANSWERED) or (isinstance(message, Want) and message.what in (What.COMMIT, What.NEXT))
        if log.rules.asynchronous and isinstance(message, Commit) and message.version == commit.version:
            return [Send(sender, Held(log.fragment, commit.version))]  # the first one was lost
        other = isinstance(message, Commit) and message.version < commit.version  # else the two would answer for ever
        return [Send(sender, newer) for newer, _ in log.last[since[0] :]] if asks or other else []

    # -- what else happens

    def averaged(self, done: Averaged, now: float) -> list[Effect]:
        """Handle a computed mean."""
        log = self.logs[done.fragment]
        effects = owning.averaged(log, done, now)
        if log.rules.asynchronous:
            return effects + self.advance(log, now)
        mean = log.round.means.get((done.key, done.number)) if done.base == log.version else None
        return effects if mean is None else effects + applying.got(log, log.me, mean, now)

    def applied(self, done: Applied, now: float) -> list[Effect]:
        """Handle the end of an outer step."""
        log = self.logs[done.fragment]
        effects = applying.applied(log, done, now)
        return [*effects, *self.begun(log, now)] if effects else []

    def begun(self, log: FragmentLog, now: float) -> list[Effect]:
        """Handle what came early for the version that has just been reached."""
        effects: list[Effect] = []
        for sender, message in log.take_early():
            effects += self.received(sender, message, now)
        return effects + self.advance(log, now)

    def advance(self, log: FragmentLog, now: float) -> list[Effect]:
        """Do what is due now: take over, send the own contribution, close, commit."""
        if log.phase in DEAF or log.phase is Phase.FINAL:
            return []
        effects = claims.advance(log, now)
        self.exchange.aggregates(log)
        effects += self.exchange.deliver(log, now)
        if log.rules.asynchronous:
            return effects + holding.advance(log, now)
        effects += [*applying.retake(log, now), *leading.advance(log, now)]
        effects += self.exchange.deliver(log, now) if log.founding else []  # the Close has told who the owners are
        return [*effects, *leading.commit(log)]

    def tick(self, log: FragmentLog, now: float) -> list[Effect]:
        """Do the periodic work of a fragment."""
        if log.phase in DEAF:
            return []
        effects = waits.pass_over(log, now)
        if not log.rules.asynchronous and closing.all_hold(log):  # means are as long as what is sent: free the memory
            log.last = [(commit, ()) for commit, _ in log.last]
        if log.phase is Phase.FINAL:
            return effects
        effects += claims.announce(log)
        if log.rules.asynchronous:
            self.exchange.again(log, now)
            effects += holding.tick(log, now)
        else:
            effects += leading.tick(log, now)
        return [*effects, *applying.tick(log, now), *self.advance(log, now)]

    def lost(self, peer: str, now: float) -> list[Effect]:
        """Handle a peer that is gone or has restarted."""
        self.exchange.lost(peer)
        effects: list[Effect] = []
        for log in self.logs:
            claims.forgotten_by(log, peer)
            log.shown.pop(peer, None)
            log.round.holding.discard(peer)
            log.round.offered.pop(peer, None)
            log.round.asked.pop(peer, None)
            effects += self.advance(log, now)
            effects += leading.tick(log, now) if log.phase is Phase.CLOSING else []
        return effects
