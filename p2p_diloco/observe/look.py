"""Reads a run's records from the DHT and makes a `Snapshot` of them.

Law: only reads, in client mode, and stores nothing. An observer refuses every message.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Sequence

from p2p_diloco.net.interface import Refusal, Transport, Unreachable
from p2p_diloco.node import unowned
from p2p_diloco.node.records import read_peers
from p2p_diloco.node.run import RunRecord
from p2p_diloco.observe.snapshot import Snapshot, snapshot


class DeafInbox:
    """The inbox of an observer, which refuses every message."""

    def admit(self, sender: str, header: bytes) -> int:
        """Refuse the message."""
        raise Refusal("an observer takes no messages")

    async def deliver(self, sender: str, header: bytes, payload: memoryview | None) -> None:
        """Never called, because `admit` refuses every message."""

    def moving(self, peer: str) -> None:
        """Ignore progress: an observer transfers no payloads."""

    def closed(self, peer: str) -> None:
        """Ignore the end of a stream: an observer has no links."""


@contextlib.asynccontextmanager
async def observer(run_id: str, initial_peers: Sequence[str]) -> AsyncIterator[Transport]:
    """A transport that reads the DHT and that no peer can dial; it is closed at the block's end.

    Raises:
        NoBootstrapReached: none of the initial peers answered.
    """
    from p2p_diloco.net.hivemind import HivemindTransport

    transport = await HivemindTransport.create(
        DeafInbox(), run_id=run_id, initial_peers=initial_peers, host_maddrs=(), client_mode=True, direct=False
    )
    try:
        yield transport
    finally:
        await transport.close()


async def look(transport: Transport, run_id: str) -> Snapshot:
    """Make a snapshot of a run from its present DHT records. Records that can't be fetched are left out."""
    peers = await read_peers(transport, run_id)
    return snapshot(run_id, await run_record(transport, run_id), peers.values(), time.time())


async def run_record(transport: Transport, run_id: str) -> RunRecord | None:
    """The run's record. If several peers have founded the run, the lowest name wins, as it does for joiners."""
    try:
        found = await unowned.fetch(transport, f"{run_id}/config")
    except Unreachable:
        return None
    for _, value in sorted(found.items()):
        with contextlib.suppress(ValueError):
            return RunRecord.unpack(value)
    return None
