"""One entry of a history: an event that a peer's replica was told, and the effects that the replica answered.

Law: plain data and its text. Histories of real peers and of simulated ones are lists of entries, so both are told by
the same code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from p2p_diloco.core.events import Effect, Event
from p2p_diloco.history.words import tell


@dataclass(frozen=True, slots=True)
class Entry:
    """An event with its effects. `what`: the event, or a text for what is no event of a replica, such as a death.
    `time`: in seconds since a moment that all entries of a list share."""

    time: float
    peer: str
    what: Event | str
    effects: tuple[Effect, ...] = ()

    def lines(self) -> Iterator[str]:
        """The entry as text: one line for the event, and one for each effect."""
        said = self.what if isinstance(self.what, str) else tell(self.what)
        yield f"{self.time:9.3f} {self.peer} {said}"
        for effect in self.effects:
            yield f"{self.time:9.3f} {self.peer}     {tell(effect)}"


def lines(entries: Iterable[Entry]) -> list[str]:
    """All entries as text."""
    return [line for entry in entries for line in entry.lines()]
