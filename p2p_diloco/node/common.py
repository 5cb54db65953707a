"""The values that all parts of one peer's node share; among them are the queue of events for the replica, and the log
of the replica's notes.

Law: all of these values exist before the first part is made. Every part posts its events to the queue; only the loop
(`node`) takes them out.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import secrets
import time
from collections import deque
from functools import partial

from torch import Tensor

from p2p_diloco.config import PeerConfig
from p2p_diloco.core.events import Event
from p2p_diloco.core.replica import Replica
from p2p_diloco.core.version import SALT_BITS, incarnation
from p2p_diloco.errors import printable
from p2p_diloco.net.interface import Refusal
from p2p_diloco.net.signing import PEER_ID
from p2p_diloco.node.fetching import Fetching
from p2p_diloco.node.history import begun
from p2p_diloco.node.inbox import LEAVING
from p2p_diloco.node.joining import Described, Joined
from p2p_diloco.node.ledger import OF_EXCHANGE, TRANSFER, Ledger
from p2p_diloco.node.outbox import Outbox
from p2p_diloco.node.records import DeathCount
from p2p_diloco.node.shared import SharedMemory
from p2p_diloco.node.signatures import Signatures
from p2p_diloco.node.slice_work import SliceWork
from p2p_diloco.node.swarm import Swarm
from p2p_diloco.tensors.flat import Threads, usual

NOTES_KEPT = 50
LOUD = ("mismatch", "fork", "passed", "missed", "starved", "expelled", "samples")
"""Kinds of notes that are logged as warnings: a machine computes wrongly, work is lost, a peer lies or keeps others
waiting, or nothing comes to this one."""

_ID = re.compile(rf"(?<![/\w]){PEER_ID.pattern}")
"""A peer's id that is no part of an address."""

Fed = asyncio.Future[None]
"""A future that is done once an event's effects are carried out."""

log = logging.getLogger(__name__)


class EventQueue:
    """A first-in, first-out queue of events for the replica. An event has a future if a caller waits for the event's
    effects."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[tuple[Event, Fed | None]] = asyncio.Queue()
        self._ended = False

    def post(self, event: Event) -> None:
        """Queue an event, without waiting for its effects."""
        self._events.put_nowait((event, None))

    async def feed(self, event: Event) -> None:
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

    async def next(self) -> tuple[Event, Fed | None]:
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


class Common:
    """The values that the parts of a node share once the node has found its run: those of a new incarnation of this
    peer. No part replaces one of them but `described`."""

    def __init__(
        self,
        local: PeerConfig,
        joined: Joined,
        swarm: Swarm,
        shared: SharedMemory,
        theta: Tensor,
        base: Tensor | None = None,
    ) -> None:
        """`theta`, `base`: as of `SliceWork`."""
        run, transport, now = joined.run, swarm.transport, asyncio.get_running_loop().time()
        self.local, self.joined, self.run, self.transport, self.shared = local, joined, run, transport, shared
        self.inbox, self.refusals = swarm.inbox, swarm.inbox.refusals
        self.signatures = Signatures(transport.peer_id, transport, run.token)
        self.work = SliceWork(run, theta, self.signatures.of_mean, base, Threads(local.node_threads or usual()))
        self.started_at = time.time()
        """Seconds since 1970."""
        self.incarnation = incarnation(int(self.started_at * 1000), secrets.randbits(SALT_BITS))
        """The incarnation at the start; the replica's own may rise later."""
        self.founding = joined.founding
        self.described = Described(run.layout, joined.card)
        """This peer's description of the run's model. A trainer whose model has buffers replaces its card now and
        then."""
        self.ledger = Ledger(OF_EXCHANGE, stands_since=lambda: shared.stands_since or math.inf)
        """The seconds of the present exchange, by part."""
        transferring = partial(self.ledger.part, TRANSFER)
        transport.limits = run.timed(transport.limits)
        transport.traffic.receiving = transferring
        self.outbox = Outbox(transport, transferring, gives_way=not run.rules.asynchronous)
        self.fetching = Fetching(transport, swarm.inbox.questions, run.run_id, local.cache_dir, local.cache_bytes)
        """Fetches slices of data sets from data nodes."""
        self.events, self.event_log = EventQueue(), EventLog(transport.peer_id)
        self.deaths = DeathCount(transport, run.run_id, self.event_log.named, self.event_log.news.set)
        grant = "" if swarm.access is None else swarm.access.member.own.id.hex()
        self.replica = Replica(
            transport.peer_id,
            run.rules,
            role=local.role,
            eligible=not transport.reach.private,
            incarnation=self.incarnation,
            now=now,
            grant=grant,
        )
        self.history = begun(self, now, grant)
