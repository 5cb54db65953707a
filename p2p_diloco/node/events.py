"""Events on their way to the replica, and the log of what it notes.

Law: a queue and a list. Each part of a node posts its events here; the loop (`node`) alone takes them out.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from p2p_diloco.core.events import Event
from p2p_diloco.net.interface import Refusal

NOTES_KEPT = 50
LOUD = ("mismatch", "fork")
"""Kinds of notes that are warnings: something is wrong with a machine, or work is lost."""

Fed = asyncio.Future[None]
"""Done once an event's effects are carried out."""

log = logging.getLogger(__name__)


class EventQueue:
    """Events in their order, each with what waits for it, if anything does."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[tuple[Event, Fed | None]] = asyncio.Queue()
        self._ended = False

    def post(self, event: Event) -> None:
        """Feed an event once its turn comes."""
        self._events.put_nowait((event, None))

    async def feed(self, event: Event) -> None:
        """Feed an event, and return once its effects are carried out.

        Raises:
            Refusal: no more events are fed.
        """
        if self._ended:
            raise Refusal("this peer is leaving")
        fed: Fed = asyncio.get_running_loop().create_future()
        self._events.put_nowait((event, fed))
        await fed

    @property
    def empty(self) -> bool:
        """Whether no event waits."""
        return self._events.empty()

    async def next(self) -> tuple[Event, Fed | None]:
        """The next event, once there is one."""
        return await self._events.get()

    def end(self, under_way: list[Fed | None]) -> None:
        """Refuse what waits, and what comes later. `under_way`: of events that were taken out."""
        self._ended = True
        waiting = list(under_way)
        while not self._events.empty():
            waiting.append(self._events.get_nowait()[1])
        for fed in waiting:
            if fed is not None and not fed.done():
                fed.set_exception(Refusal("this peer is leaving"))


class EventLog:
    """What the replica notes, in the log of the process and for the peer's status; peers by their names."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._names: dict[str, str] = {me: "this peer"}
        self._notes: deque[tuple[float, str]] = deque(maxlen=NOTES_KEPT)

    def name(self, peer: str, name: str) -> None:
        """Learn what a peer calls itself."""
        self._names[peer] = name

    def note(self, kind: str, text: str) -> None:
        """Write a line."""
        log.log(logging.WARNING if kind in LOUD else logging.INFO, "%s: %s", kind, self.named(text))
        self._notes.append((asyncio.get_running_loop().time(), text))

    @property
    def notes(self) -> list[tuple[float, str]]:
        """The newest ones: (loop's time, text); a peer that was not known by name then may be by now."""
        return [(when, self.named(text)) for when, text in self._notes]

    def named(self, text: str) -> str:
        """The text with peers called by their names; the end of the id stays, for names may be used twice."""
        for peer, name in self._names.items():
            if name:
                text = text.replace(peer, name if peer == self._me else f"{name} (…{peer[-6:]})")
        return text
