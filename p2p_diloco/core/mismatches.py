"""Counts the versions from which a commit's outer step gives another digest here than the commit names. After many such
versions in a row, this replica asks for states instead of commits."""

from __future__ import annotations

from .events import Effect, Note
from .roster import Roster
from .rules import Rules
from .version import Version


class Mismatches:
    """Counts and logs the commits whose outer step leads to another digest here than the commit names."""

    def __init__(self, rules: Rules, roster: Roster, now: float) -> None:
        self.rules, self.roster = rules, roster
        # (shard, version) on which such a commit was made, since a commit last led to the digest that it names. Each
        # version counts once, because damaged tensors give every commit on them another digest until they are repaired
        self.bases = set[tuple[int, Version]]()
        self.senders = set[str]()  # of these commits; each may name another peer as its author
        self.silent_until, self.unsaid = now, 0

    def agreed(self) -> None:
        """Record that a commit led to the digest that it names."""
        self.bases, self.senders = set(), set()

    def found(self, shard: int, base: Version, sender: str, now: float) -> list[Effect]:
        """Record that a commit on ``base`` from this sender led to another digest than it names. Log it, unless such a
        line was logged lately. After ``astray_max`` such versions in a row, ask for states instead of commits. The
        commits must come from a live peer, and from two if several other peers are live, because a single peer may
        compute wrongly, or lie. Senders that have died or left don't count: otherwise a commit of a liar that has left
        would be proof enough."""
        if len(self.bases) < self.rules.astray_max:
            self.bases.add((shard, base))
        self.senders.add(sender)
        text, live = astray(shard, base), set(self.roster.alive())
        proven = len(self.bases) >= self.rules.astray_max and len(self.senders & live) >= max(1, min(2, len(live)))
        if proven and not self.roster.mine.unlike:
            self.roster.says(unlike=True)
            why = (
                f"{text}, as did the commits on each of the last {len(self.bases)} versions: this machine computes the "
                "outer step unlike the peers that make the commits. From now on they send it whole states, which take "
                "several times the bytes of commits, and it aggregates only if all peers are such machines. "
                "outer_optimizer=sgd gives the same result on every machine; if it is set already, test this machine's "
                "memory"
            )
            return [Note("mismatch", why)]
        if now < self.silent_until:
            self.unsaid += 1
            return []
        if self.unsaid:
            text = f"{text}, as did {self.unsaid} more since the last such line"
        self.silent_until, self.unsaid = now + self.rules.say_again, 0
        return [Note("mismatch", text)]


def astray(shard: int, base: Version) -> str:
    """Return the text that says that a commit on ``base`` led to another digest than it names."""
    return f"shard {shard}: a commit on epoch {base.epoch} led to another digest than it names"
