"""One entry of a history: an event that a peer's replica was told, and the effects that it answered; and both as text.

Law: plain data and its text. Histories of real peers and of simulated ones are lists of entries, so both are told by
the same code. The text has the names in `core.events` and `core.messages`, as Python writes them, but shorter: a
version is `3/b6e5f6`, its epoch and the first letters of its chain; a contribution is `#0042.3`, the third of an
incarnation whose last four digits are 0042. Fields that are empty, or hashes and other details, are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum

from p2p_diloco.core.events import Effect, Event
from p2p_diloco.core.messages import Choice, Summary
from p2p_diloco.core.state import State
from p2p_diloco.core.version import Version

UNNAMED = {"to", "sender", "peer", "message", "summary", "commit", "kind", "text"}
"""Fields that are told without their names."""
LEFT_OUT = {
    "hash", "hashes", "root", "key", "seal", "payload", "payloads", "digest", "digests", "slices", "means", "mean",
    "owners", "owner", "links", "link", "reachable", "grant", "uses", "samples", "oldest", "incarnation", "buffered",
    "peers", "attempt", "outcome", "turn",
}  # fmt: skip
"""Fields that are not told."""


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
        yield f"{self.time:9.3f} {self.peer} {tell(self.what)}"
        for effect in self.effects:
            yield f"{self.time:9.3f} {self.peer}     {tell(effect)}"


def tell(value: object) -> str:
    """An event, an effect, a message or a part of one as text."""
    match value:
        case Version(epoch=epoch, chain=chain) | State(version=Version(epoch=epoch, chain=chain)):
            return f"{epoch}/{chain[:6]}"
        case Choice(entries=entries):
            return "[" + ", ".join(f"{peer} {ready.id}" for peer, ready in entries) + "]"
        case Summary(epochs=epochs, idle=idle):
            return f"epochs={tell(epochs)}" + ", idle" * idle
        case tuple():
            return "[" + ", ".join(map(tell, value)) + "]"
        case float():
            return f"{value:.4g}"
        case Enum():
            return str(value.value)
    if not is_dataclass(value) or type(value).__str__ is not object.__str__:
        return str(value)
    told = [(field.name, getattr(value, field.name)) for field in fields(value) if field.name not in LEFT_OUT]
    shown = [(name, it) for name, it in told if it is not False and it not in (None, "", ())]
    return f"{type(value).__name__}({', '.join((name + '=') * (name not in UNNAMED) + tell(it) for name, it in shown)})"
