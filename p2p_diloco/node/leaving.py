"""A peer's last moments in a run.

Law: hands over what is under way, says that it leaves, and stops; each wait is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib

from p2p_diloco.core.events import Depart
from p2p_diloco.core.replica import Replica
from p2p_diloco.net.interface import Transport
from p2p_diloco.node import records
from p2p_diloco.node.ending import Ending
from p2p_diloco.node.events import EventQueue
from p2p_diloco.node.outbox import Outbox
from p2p_diloco.node.run import Run
from p2p_diloco.node.status import PeerStatus

LEAVE_S = 1.0
"""How long the last messages may take."""
LOOK_EVERY_S = 0.1
TURN_S = 0.05
"""How long the replica takes to write its last messages."""


async def say_goodbye(
    run: Run,
    transport: Transport,
    replica: Replica,
    events: EventQueue,
    outbox: Outbox,
    ending: Ending,
    last_status: PeerStatus,
) -> None:
    """Let payloads go out, and tell the others; a peer that has the run's end stays until all others have it too."""
    await _linger(replica, outbox, run.config.heartbeat_timeout if replica.finished else LEAVE_S)
    events.post(Depart())
    await asyncio.gather(_announce(run, transport, last_status), _empty(outbox), ending.leave(LEAVE_S))


async def _linger(replica: Replica, outbox: Outbox, within_s: float) -> None:
    clock = asyncio.get_running_loop().time
    until = clock() + within_s
    await outbox.drained(within_s)
    while replica.finished and clock() < until and _some_lack_the_end(replica):
        await asyncio.sleep(LOOK_EVERY_S)


def _some_lack_the_end(replica: Replica) -> bool:
    mine = replica.roster.mine.model
    return any(summary.model < mine for summary in replica.roster.summaries().values())


async def _empty(outbox: Outbox) -> None:
    await asyncio.sleep(TURN_S)
    await outbox.emptied(LEAVE_S)


async def _announce(run: Run, transport: Transport, status: PeerStatus) -> None:
    key = records.key_of(run.run_id, transport.peer_id)
    storing = transport.store(key, transport.peer_id, status.pack(), records.PEER_TTL_S)
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(storing, LEAVE_S)
