"""The queue of events for the replica, and the log of the replica's notes.

Law: only stores. Every part of a node posts its events here; only the loop (`node`) takes them out.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from typing import Generic, TypeVar

from p2p_diloco.errors import printable
from p2p_diloco.net.interface import Refusal
from p2p_diloco.net.signing import PEER_ID

LEAVING = "this peer is leaving"
NOTES_KEPT = 50
LOUD = ("mismatch", "fork", "passed", "missed", "expelled", "samples")
"""Kinds of notes that are logged as warnings: a machine computes wrongly, work is lost, or a peer lies or keeps others
waiting."""

_ID = re.compile(rf"(?<![/\w]){PEER_ID.pattern}")
"""A peer's id that is no part of an address."""

Fed = asyncio.Future[None]
"""A future that is done once an event's effects are carried out."""

log = logging.getLogger(__name__)


E = TypeVar("E")


class EventQueue(Generic[E]):
    """A first-in, first-out queue of events for the replica. An event has a future if a caller waits for the event's
    effects."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[tuple[E, Fed | None]] = asyncio.Queue()
        self._ended = False

    def post(self, event: E) -> None:
        """Queue an event, without waiting for its effects."""
        self._events.put_nowait((event, None))

    async def feed(self, event: E) -> None:
        """Queue an event, and wait until its effects are carried out.

        Raises:
            Refusal: the queue has ended.
        """
        if self._ended:
            raise Refusal(LEAVING)
        fed: Fed = asyncio.get_running_loop().create_future()
        self._events.put_nowait((event, fed))
        await fed

    @property
    def empty(self) -> bool:
        return self._events.empty()

    async def next(self) -> tuple[E, Fed | None]:
        return await self._events.get()

    def end(self, under_way: list[Fed | None]) -> None:
        """End the queue: all callers that wait for the effects of an event get a Refusal, and so do later callers.
        `under_way` holds the futures of events that were taken out, but not carried out completely."""
        self._ended = True
        waiting = list(under_way)
        while not self._events.empty():
            waiting.append(self._events.get_nowait()[1])
        for fed in waiting:
            if fed is not None and not fed.done():
                fed.set_exception(Refusal(LEAVING))


class EventLog:
    """Writes the replica's notes to the process's log, and keeps the newest ones for the peer's status. In the texts,
    the id of each peer is replaced by the peer's name."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._names: dict[str, str] = {me: "this peer"}
        self._notes: deque[tuple[float, str]] = deque(maxlen=NOTES_KEPT)
        self.news = asyncio.Event()
        """Set by each note."""

    def name(self, peer: str, name: str) -> None:
        self._names[peer] = name

    def note(self, kind: str, text: str) -> None:
        """Write a note to the log, and keep it for the status."""
        log.log(logging.WARNING if kind in LOUD else logging.INFO, "%s: %s", kind, printable(self.named(text)))
        self._notes.append((asyncio.get_running_loop().time(), text))
        self.news.set()

    @property
    def notes(self) -> list[tuple[float, str]]:
        """The newest notes, as (time of the event loop, text). Peers' names are inserted only now, because a name may
        have been unknown when the note was made."""
        return [(when, self.named(text)) for when, text in self._notes]

    def named(self, text: str) -> str:
        """Replace the ids of peers in a text by their names. The last letters of the id are kept, because two peers may
        have the same name. Of a peer without a known name only they are kept. An id in an address stays."""
        for peer, name in self._names.items():
            if name:
                text = text.replace(peer, name if peer == self._me else f"{name} (…{peer[-6:]})")
        return _ID.sub(lambda found: f"…{found[0][-6:]}", text)
