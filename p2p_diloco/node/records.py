"""The records in which peers publish their own status in the DHT, for newcomers and observers.

Law: a record is a `PeerStatus` under the subkey of its peer's id. Records of other peers are untrusted: one that can't
be read is left out, and no decision is based on a record alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

from p2p_diloco.core.events import Died
from p2p_diloco.core.version import life_of
from p2p_diloco.net.attempts import within
from p2p_diloco.net.interface import Records, Transport
from p2p_diloco.net.streams import stop
from p2p_diloco.node.board import Board
from p2p_diloco.node.status import DEATHS_MAX, NAME_LETTERS_MAX, Death, Deaths, PeerStatus, highest

BOARD = Board("peers", ttl_s=30.0, owned=True, buckets=4)
PUBLISH_EVERY_S = 2.0
NEWS_AFTER_S = 0.3
"""Seconds from an event, such as a death, to the record that tells of it. Events come in groups."""
PUBLISH_AT_LEAST_EVERY_S = 10.0
LOOK_EVERY_S, LOOK_EVERY_LATER_S = 1.5, 10.0
"""Seconds between two looks for other peers: LOOK_EVERY_S for a peer that is young or knows fewer than FEW live ones,
else LOOK_EVERY_LATER_S."""
LOOK_EACH_S, LOOK_EACH_LATER_S = 0.1, 0.5
"""The same, in seconds for each live peer that is known. The longer of the two times is used, so the number of records
that are read in a second does not grow with the run."""
YOUNG_S = 60.0
"""A peer is young for this many seconds after its start."""
FEW = 8

TAKE_PART = ("training", "waiting", "paused", "idle", "aggregating")
"""The states of a peer that takes part in rounds."""

log = logging.getLogger(__name__)


async def read_peers(dht: Records, run_id: str) -> dict[str, PeerStatus]:
    """Read the statuses of a run's peers from the DHT; returns them by peer id. Records that don't come, or can't be
    read, are left out."""
    peers: dict[str, PeerStatus] = {}
    try:
        found = await BOARD.fetch(dht, run_id)
    except Exception as error:  # the DHT gives no answer
        log.debug("no records of peers can be read: %r", error)
        return peers
    for peer_id, value in found.items():
        with contextlib.suppress(ValueError):
            if (status := PeerStatus.unpack(value)).peer_id == peer_id:
                peers[peer_id] = status
    return peers


async def who_takes_part(dht: Records, run_id: str) -> dict[str, float]:
    """Find in the DHT the peers that take part in rounds, according to their records. Returns the time of each peer's
    record, in seconds since 1970."""
    peers = await read_peers(dht, run_id)
    return {peer: status.time for peer, status in peers.items() if status.state in TAKE_PART}


async def publish(dht: Records, run_id: str, describe: Callable[[], PeerStatus], news: asyncio.Event) -> None:
    """Keep this peer's record in the DHT up to date, until cancelled. `news`: is set when there is something that
    observers should see soon. News doesn't wait until an earlier record is stored, because a member of the DHT that has
    frozen holds that up for seconds, and the news may be its death."""
    published: PeerStatus | None = None
    storing, is_news = set[asyncio.Task[None]](), False
    try:
        while True:
            storing = {task for task in storing if not task.done()}
            record = describe()
            if (is_news or not storing) and (published is None or _is_due(record, published)):
                storing.add(asyncio.create_task(_store(dht, run_id, record)))
                published = record
            is_news = False
            with contextlib.suppress(asyncio.TimeoutError):
                await within(PUBLISH_EVERY_S, news.wait())
                await asyncio.sleep(NEWS_AFTER_S)
                news.clear()
                is_news = True
    finally:
        await stop(*storing)


async def _store(dht: Records, run_id: str, record: PeerStatus) -> None:
    try:
        taken = await BOARD.store(dht, run_id, record.pack())
    except Exception:  # a failed record must not end the run
        log.warning("this peer's record can't be stored in the DHT; trying again", exc_info=True)
    else:
        log.debug("this peer's DHT record was %s", "stored" if taken else "not stored")


def _is_due(record: PeerStatus, published: PeerStatus) -> bool:
    """Whether a record differs from the published one in any field other than their time, or is much newer."""
    changed = dataclasses.replace(record, time=published.time) != published
    return changed or record.time - published.time >= PUBLISH_AT_LEAST_EVERY_S


async def look_around(
    transport: Transport, run_id: str, known: Callable[[], int]
) -> AsyncIterator[tuple[PeerStatus, bool]]:
    """Read the peers' records at regular times. Each time, yield every record, because the replica may have forgotten
    the peer meanwhile, and whether it has new addresses of another peer; the transport was introduced to these. Records
    of other peers that say that they are gone are left out. `known` returns the number of live peers that this peer
    knows."""
    clock = asyncio.get_running_loop().time
    young_until = clock() + YOUNG_S
    addresses_of: dict[str, tuple[str, ...]] = {}
    while True:
        for peer_id, record in (await read_peers(transport, run_id)).items():
            if peer_id == transport.peer_id:
                yield record, False
            elif not record.gone:
                is_new = addresses_of.get(peer_id) != record.addresses
                addresses_of[peer_id] = record.addresses
                if is_new:
                    try:
                        await transport.introduce(peer_id, record.addresses)
                    except Exception:  # one peer's invalid record must not hide the others
                        log.warning("the addresses of %s can't be used", peer_id, exc_info=True)
                yield record, is_new
        await asyncio.sleep(looks_again_in(known(), young=clock() < young_until))


def looks_again_in(known: int, *, young: bool) -> float:
    """Return how many seconds a peer waits until it looks for others again. `known`: how many live ones it knows."""
    if young or known < FEW:
        return max(LOOK_EVERY_S, known * LOOK_EACH_S)
    return max(LOOK_EVERY_LATER_S, known * LOOK_EACH_LATER_S)


# -- deaths

LOOK_S = 1.0


class DeathCount:
    """The deaths of a run's peers, as far as this peer knows: those that it notices, and those before its start that
    other peers tell. A peer is never called dead if its record says that it left on purpose: its farewell may have been
    lost. So each death waits for one look at the dead peer's record, for `LOOK_S` at most. Nor is one that was put out
    of a private run: its role is empty. `named` replaces the ids of peers in a text by names. `told` is called after
    each new death."""

    def __init__(
        self,
        dht: Records,
        run_id: str,
        named: Callable[[str], str],
        role_of: Callable[[str], str | None],
        told: Callable[[], None],
    ) -> None:
        self._dht, self._run_id, self._named, self._role_of, self._told = dht, run_id, named, role_of, told
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
            if self._role_of(death.peer) == "" or (record is not None and record.state == "leaving"):
                log.info("%s has not died: it left on purpose, or was put out", self._named(death.peer))
                continue
            cause = "trainer" if record is not None and record.state == "dead" else death.cause
            self.total = total = total.one_more(cause)
            self.newest.append(Death(round(when, 1), self._named(death.peer)[:NAME_LETTERS_MAX], cause))
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
