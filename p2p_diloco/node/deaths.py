"""Counts the deaths of other peers: those that this peer notices, and those before its start that other peers tell.

Law: a peer is never called dead if its record says that it left on purpose: its farewell may have been lost. So each
death waits for one look at the dead peer's record, for `LOOK_S` at most.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from p2p_diloco.core.events import Died
from p2p_diloco.core.lives import life_of
from p2p_diloco.net.attempts import within
from p2p_diloco.net.interface import Records
from p2p_diloco.node.records import BOARD, read_peers
from p2p_diloco.node.status import DEATHS_MAX, Death, Deaths, PeerStatus, highest

LOOK_S = 1.0

log = logging.getLogger(__name__)


class DeathCount:
    """The deaths of a run's peers, as far as this peer knows. `named` replaces the ids of peers in a text by names.
    `told` is called after each new death."""

    def __init__(self, dht: Records, run_id: str, named: Callable[[str], str], told: Callable[[], None]) -> None:
        self._dht, self._run_id, self._named, self._told = dht, run_id, named, told
        self._noticed: asyncio.Queue[tuple[float, Died]] = asyncio.Queue()
        self.total: Deaths | None = None
        """All deaths since the run began; None until the other peers' records are read."""
        self.newest: deque[Death] = deque(maxlen=DEATHS_MAX)
        """Those that this peer noticed last, oldest first."""

    def notice(self, death: Died) -> None:
        """Take a death that the replica noticed."""
        self._noticed.put_nowait((time.time(), death))

    async def count(self) -> None:
        """Until cancelled, count the deaths that were noticed. The count begins with the highest one that another peer
        tells: each peer notices all deaths from its start on."""
        self.total = total = highest((await read_peers(self._dht, self._run_id)).values())
        while True:
            when, death = await self._noticed.get()
            record = await self._record(death)
            if record is not None and record.state == "leaving":
                log.info("%s had left on purpose", self._named(death.peer))
                continue
            cause = "trainer" if record is not None and record.state == "dead" else death.cause
            self.total = total = total.one_more(cause)
            self.newest.append(Death(round(when, 1), self._named(death.peer), cause))
            self._told()

    async def _record(self, death: Died) -> PeerStatus | None:
        """The record of the incarnation that died; None if the DHT has none, or doesn't answer in time."""
        try:
            found = await within(LOOK_S, self._dht.fetch(BOARD.key(self._run_id, death.peer)))
            record = PeerStatus.unpack(found[death.peer][0])
        except Exception as error:  # a timeout, an unreachable DHT, no record, or an unreadable one
            log.debug("the record of %s can't be read: %r", death.peer, error)
            return None
        same = record.incarnation is not None and life_of(record.incarnation) == life_of(death.incarnation)
        return record if same else None
