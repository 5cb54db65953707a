"""Commits that lead this replica to another digest than they name: said once in a while, until it gives up commits."""

from __future__ import annotations

from .events import Effect, Note
from .roster import Roster
from .rules import Rules


class Mismatches:
    def __init__(self, rules: Rules, roster: Roster, now: float) -> None:
        self.rules, self.roster = rules, roster
        self.in_a_row = 0  # commits of any shard
        self.silent_until, self.unsaid = now, 0

    def agreed(self) -> None:
        """A commit led to the digest that it names."""
        self.in_a_row = 0

    def found(self, text: str, now: float) -> list[Effect]:
        """A commit led elsewhere. Say so, but not at every commit of a fault that lasts. After many in a row ask for
        states in place of commits."""
        self.in_a_row += 1
        if self.in_a_row >= self.rules.astray_max and not self.roster.mine.unlike:
            self.roster.says(unlike=True)
            why = (
                f"{text}, as did all of the last {self.in_a_row}: this machine computes the outer step unlike those "
                "that make the commits. It is sent whole states from now on, several times the bytes, and aggregates "
                "only where all are unlike. outer_optimizer=sgd computes alike everywhere; if it is set, test the "
                "memory"
            )
            return [Note("mismatch", why)]
        if now < self.silent_until:
            self.unsaid += 1
            return []
        if self.unsaid:
            text = f"{text}, as did {self.unsaid} others since it was last said"
        self.silent_until, self.unsaid = now + self.rules.say_again, 0
        return [Note("mismatch", text)]
