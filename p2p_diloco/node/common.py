"""The values that all parts of one peer's node share.

Law: this is one frozen value, complete before the first part is made.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from dataclasses import dataclass
from functools import partial

from p2p_diloco.config import PeerConfig
from p2p_diloco.core.lives import SALT_BITS, incarnation
from p2p_diloco.core.replica import Replica
from p2p_diloco.net.interface import Transport
from p2p_diloco.node.describing import Describing
from p2p_diloco.node.events import EventLog, EventQueue
from p2p_diloco.node.history import History
from p2p_diloco.node.history import begin as begin_history
from p2p_diloco.node.joining import Joined
from p2p_diloco.node.ledger import OF_EXCHANGE, TRANSFER, Ledger
from p2p_diloco.node.outbox import Outbox
from p2p_diloco.node.refusals import Refusals
from p2p_diloco.node.revising import Founding
from p2p_diloco.node.run import Run, RunRecord
from p2p_diloco.node.seals import Seals
from p2p_diloco.node.shared import SharedMemory
from p2p_diloco.node.tensor_work import TensorWork


@dataclass(frozen=True)
class Common:
    """The values that the parts of a node share once the node has found its run. `incarnation` is made from
    `started_at` (in seconds since 1970); the replica's own incarnation may rise later. `ledger` tells what the present
    exchange spent its time on. `describing`: this peer's description of the run's model, with the model's card."""

    local: PeerConfig
    run: Run
    founding: Founding
    transport: Transport
    shared: SharedMemory
    work: TensorWork
    replica: Replica
    events: EventQueue
    event_log: EventLog
    history: History
    refusals: Refusals
    ledger: Ledger
    outbox: Outbox
    seals: Seals
    started_at: float
    incarnation: int
    describing: Describing

    @classmethod
    def of(
        cls,
        local: PeerConfig,
        joined: Joined,
        transport: Transport,
        shared: SharedMemory,
        work: TensorWork,
        refusals: Refusals,
    ) -> Common:
        """Make the shared values for a new incarnation of this peer, in the run `joined`."""
        run, started_at, now = joined.run, time.time(), asyncio.get_running_loop().time()
        ledger = Ledger(OF_EXCHANGE, stands_since=lambda: shared.stands_since or math.inf)
        transferring = partial(ledger.part, TRANSFER)
        transport.limits = run.timed(transport.limits)
        transport.traffic.receiving = transferring
        born = incarnation(int(started_at * 1000), secrets.randbits(SALT_BITS))
        replica = Replica(
            transport.peer_id,
            run.rules,
            role=local.role,
            eligible=not transport.reach.private,
            incarnation=born,
            now=now,
        )
        founding, history = Founding.of(run.run_id, RunRecord.unpack(joined.record)), History()
        begin_history(history, local, run, founding, replica, started_at, now)
        return cls(
            local,
            run,
            founding,
            transport,
            shared,
            work,
            replica,
            EventQueue(),
            EventLog(transport.peer_id),
            history,
            refusals,
            ledger,
            Outbox(transport, transferring, gives_way=not run.rules.asynchronous),
            Seals(transport, run.token),
            started_at,
            born,
            Describing(run.layout, joined.card),
        )
