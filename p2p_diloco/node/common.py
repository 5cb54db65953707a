"""The values that all parts of one peer's node share.

Law: all of these values exist before the first part is made.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from functools import partial

from torch import Tensor

from p2p_diloco.config import PeerConfig
from p2p_diloco.core.events import Event
from p2p_diloco.core.lives import SALT_BITS, incarnation
from p2p_diloco.core.replica import Replica
from p2p_diloco.node.describing import Describing
from p2p_diloco.node.events import EventLog, EventQueue
from p2p_diloco.node.fetching import Fetching
from p2p_diloco.node.history import History
from p2p_diloco.node.history import begin as begin_history
from p2p_diloco.node.joining import Joined
from p2p_diloco.node.ledger import OF_EXCHANGE, TRANSFER, Ledger
from p2p_diloco.node.outbox import Outbox
from p2p_diloco.node.records import DeathCount
from p2p_diloco.node.shared import SharedMemory
from p2p_diloco.node.signatures import Signatures
from p2p_diloco.node.slice_work import SliceWork
from p2p_diloco.node.swarm import Swarm
from p2p_diloco.tensors.threads import Threads, usual


class Common:
    """The values that the parts of a node share once the node has found its run: those of a new incarnation of this
    peer. No part replaces one of them."""

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
        self.describing = Describing(run.layout, joined.card)
        """This peer's description of the run's model, with the model's card."""
        self.ledger = Ledger(OF_EXCHANGE, stands_since=lambda: shared.stands_since or math.inf)
        """The seconds of the present exchange, by part."""
        transferring = partial(self.ledger.part, TRANSFER)
        transport.limits = run.timed(transport.limits)
        transport.traffic.receiving = transferring
        self.outbox = Outbox(transport, transferring, gives_way=not run.rules.asynchronous)
        self.fetching = Fetching(transport, run.run_id, local.cache_dir, local.cache_bytes)
        """Fetches slices of data sets from data nodes."""
        self.events, self.event_log, self.history = EventQueue[Event](), EventLog(transport.peer_id), History()
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
        begin_history(self.history, local, run, self.founding, self.replica, self.started_at, now, grant)
