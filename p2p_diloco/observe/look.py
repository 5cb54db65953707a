"""Reads a run's records from the DHT and makes a `Snapshot` of them.

Law: only reads, in client mode, and stores nothing. An observer takes no messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence

from p2p_diloco.config import PeerConfig
from p2p_diloco.net.interface import Records, Unreachable
from p2p_diloco.net.invitation import Invitation
from p2p_diloco.net.membership import Membership, SealedRecords
from p2p_diloco.node.privacy import Access
from p2p_diloco.node.records import read_peers
from p2p_diloco.node.run_record import BOARD, RunRecord
from p2p_diloco.observe.snapshot import Snapshot, snapshot


@contextlib.asynccontextmanager
async def observer(initial_peers: Sequence[str], invitation: Invitation | None = None) -> AsyncIterator[Records]:
    """A member of the DHT that no peer can dial; it leaves at the end of the `with` block. `invitation`: one to the
    private run whose records are read; None: they belong to an open run.

    Raises:
        NoBootstrapReached: none of the initial peers answered. ConfigError: the invitation can't be used.
    """
    from p2p_diloco.net.dht import DhtPeer

    dht = await DhtPeer.create(PeerConfig(initial_peers=tuple(initial_peers), client_mode=True))
    try:
        if invitation is None:
            yield dht
        else:
            yield SealedRecords(dht, Membership(invitation, dht.peer_id, time.time()))
    finally:
        await dht.close()


async def look(dht: Records, run_id: str) -> Snapshot:
    """Make a snapshot of a run from its present DHT records. Records that can't be fetched are left out."""
    # at once: a member of the DHT that has frozen holds up each question for seconds
    peers, record = await asyncio.gather(read_peers(dht, run_id), run_record(dht, run_id))
    return snapshot(run_id, record, peers.values(), time.time())


async def run_record(dht: Records, run_id: str) -> RunRecord | None:
    """Read the run's record; None if none can be read. If several peers have founded the run, the record with the
    lowest hash wins, as it does for joiners; in a private run only records that the run key signed count."""
    try:
        found = await BOARD.fetch(dht, run_id)
    except Unreachable:
        return None
    access = Access(dht.membership) if isinstance(dht, SealedRecords) else None
    for _, value in sorted(found.items()):
        if access is None or access.founded_by_the_key(run_id, value):
            with contextlib.suppress(ValueError):
                return RunRecord.unpack(value)
    return None
