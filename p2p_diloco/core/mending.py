"""Repair of shards whose tensors are wrong: they are fetched again, or used as they are if no peer has better ones.

A shard is damaged if its tensors failed their checksum before use. A shard is doubted if a commit led to another digest
here than the commit names.
"""

from __future__ import annotations

from . import damage
from .catchup import CatchUp
from .events import Effect, Note
from .logs import Logs
from .roster import Roster
from .rules import Rules


class Mending:
    """Fetches damaged and doubted shards again."""

    def __init__(self, rules: Rules, logs: Logs, roster: Roster, catchup: CatchUp) -> None:
        self.rules, self.logs, self.roster, self.catchup = rules, logs, roster, catchup
        self.repairs = 0  # number of fetches for repair so far; each asks the next donor

    def doubt(self, shard: int, author: str, now: float) -> list[Effect]:
        """Handle a commit whose outer step led to another digest here than the commit names. Fetch the shard's whole
        state from the commit's author or, if the author is gone, from any peer whose model version is higher. If there
        is none, the next fetch asks for the state."""
        self.catchup.doubt([shard])
        if author == self.roster.me or not self.roster.live(author):
            ahead = [p for p, s in self.roster.summaries().items() if s.model > self.logs.model()]
            if not ahead:
                return []
            author = ahead[0]
        return self.catchup.fetch(author, self.logs.model(), now)

    def mend(self, now: float) -> list[Effect]:
        """Fetch the damaged shards again. If no peer can send them, or none has done so in time, go on with the damaged
        tensors."""
        damaged = [log for log in self.logs if log.round.damaged is not None]
        shards = [log.shard for log in damaged]
        if not damaged or self.catchup.is_loading(shards):
            return []
        donors = damaged[0].donors()
        since = min(log.round.damaged for log in damaged if log.round.damaged is not None)
        patience = min(max(since, self.catchup.lag.moving) + self.rules.fetch_again, since + self.rules.mended_within)
        if donors and now < patience:
            if self.catchup.donor is not None:
                return []
            self.catchup.doubted.update(shards)
            self.repairs += 1
            turn = self.repairs % len(donors)
            others = [p for p in self.roster.alive() if p not in donors and self.roster.holds_state(p)]
            turns = [*donors[turn:], *donors[:turn], *others]
            return self.catchup.fetch(min(turns, key=self.catchup.failures.times), self.logs.model(), now)
        ended, effects = all(log.final for log in self.logs), list[Effect]()
        for log in damaged:
            then = "the run ended with this damage" if ended else "continuing with the changed copy"
            text = f"shard {log.shard} was changed in memory and no live peer has an intact copy: {then}"
            effects.append(Note("mismatch", text))
            if ended:
                damage.give_up(log)
            else:
                effects += damage.mended(log, now, trusted=True)
        return effects
