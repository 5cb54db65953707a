"""Shards whose tensors are not their version's: fetched anew, or taken as they are where no peer has them.

A damaged shard fails its checksum before it is used. A doubted one led a commit to another digest than its author's.
"""

from __future__ import annotations

from .catchup import CatchUp
from .events import Effect, Note
from .logs import Logs
from .roster import Roster
from .rules import Rules


class Mending:
    def __init__(self, rules: Rules, logs: Logs, roster: Roster, catchup: CatchUp) -> None:
        self.rules, self.logs, self.roster, self.catchup = rules, logs, roster, catchup
        self.repairs = 0  # so far; each asks another peer

    def doubt(self, shard: int, author: str, now: float) -> list[Effect]:
        """A commit led this replica to another digest than its author: its state of the shard is not to be trusted.
        What the author holds is asked for, or, if it is gone, what any peer holds that is ahead."""
        self.catchup.doubt([shard])
        if author == self.roster.me or not self.roster.live(author):
            ahead = [p for p, s in self.roster.summaries().items() if s.model > self.logs.model()]
            if not ahead:
                return []
            author = ahead[0]
        return self.catchup.fetch(author, self.logs.model(), now)

    def mend(self, now: float) -> list[Effect]:
        """Where tensors have changed in memory, fetch them anew; where no peer has them, go on with what is there."""
        damaged = [log for log in self.logs if log.round.damaged is not None]
        shards = [log.shard for log in damaged]
        if not damaged or self.catchup.is_fetching(shards):
            return []
        donors = damaged[0].donors()
        since = min(log.round.damaged for log in damaged if log.round.damaged is not None)
        if donors and now - since < self.rules.dead_after:
            self.catchup.doubted.update(shards)
            self.repairs += 1
            return self.catchup.fetch(donors[self.repairs % len(donors)], self.logs.model(), now)
        ended, effects = all(log.final for log in self.logs), list[Effect]()
        for log in damaged:
            then = "the run has ended with it damaged" if ended else "going on with what is there"
            text = f"shard {log.shard} was changed in memory and no peer has it as it was: {then}"
            effects.append(Note("mismatch", text))
            if ended:
                log.give_up()
            else:
                effects += log.mended(now, trusted=True)
        return effects
