"""What this peer tells others of itself: its `PeerStatus`, put together from the parts of its node.

Law: reads, and changes nothing.
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Sequence

from p2p_diloco.config import PeerConfig
from p2p_diloco.core.replica import Replica
from p2p_diloco.net.interface import Transport
from p2p_diloco.node.events import EventLog
from p2p_diloco.node.run import Run
from p2p_diloco.node.shared import SharedMemory
from p2p_diloco.node.status import Buffered, Event, PeerStatus, RoundProgress, Ways
from p2p_diloco.node.trainer import TrainerSide


class Reporter:
    """Makes this peer's status."""

    def __init__(
        self,
        local: PeerConfig,
        run: Run,
        replica: Replica,
        transport: Transport,
        shared: SharedMemory,
        trainer: TrainerSide,
        event_log: EventLog,
    ) -> None:
        self._local, self._run, self._replica, self._transport = local, run, replica, transport
        self._shared, self._trainer, self._event_log = shared, trainer, event_log
        self._incarnation = replica.roster.mine.incarnation
        self.leaving = False
        """Whether the peer is about to leave."""

    def status(self) -> PeerStatus:
        """As it is now."""
        replica, shared, traffic = self._replica, self._shared, self._transport.traffic
        aggregates, round_now, alive = replica.aggregates(), replica.round(), set(replica.roster.alive())
        outer_lr, outer_momentum = self._run.rates(replica.revision)
        wall = time.time() - asyncio.get_running_loop().time()
        asynchronous, submissions = self._run.rules.asynchronous, self._trainer.submissions
        return PeerStatus(
            name=self._local.name or socket.gethostname()[:64],
            peer_id=self._transport.peer_id,
            host=socket.gethostname()[:64],
            role=self._local.role,
            state=self._state(),
            time=time.time(),
            incarnation=self._incarnation,
            epoch=replica.epoch if replica.has_state else None,
            step=shared.steps,
            steps_per_second=round(1 / shared.step_time_s, 4) if shared.step_time_s > 0 else None,
            loss=round(shared.loss, 6) if shared.steps and math.isfinite(shared.loss) else None,
            samples=shared.samples,
            bytes_sent=traffic.bytes_sent,
            bytes_received=traffic.bytes_received,
            revision=replica.revision.number,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            revision_known=replica.roster.mine.revision.number,
            waiting_s=round(shared.waiting_s, 3),
            last_round=shared.last_round,
            bandwidth=int(replica.roster.mine.bandwidth) or None,
            ways=Ways.counted(way for peer, way in traffic.ways().items() if peer in alive),
            aggregates=aggregates,
            aggregates_count=len(aggregates),
            round=None if round_now is None or asynchronous else RoundProgress(*round_now),
            sync_every=self._trainer.sync_every,
            submissions=submissions.told if asynchronous else None,
            buffered=self._buffered(aggregates),
            addresses=tuple(self._transport.addresses()),
            events=tuple(Event(round(wall + when, 1), text) for when, text in self._event_log.notes),
        )

    def _buffered(self, aggregates: Sequence[int]) -> Buffered | None:
        """How full the Delayed Nesterov buffers of these shards are."""
        if self._run.rules.dn_buffer_size < 2 or not aggregates:
            return None
        buffered = [self._replica.state(shard).buffered for shard in aggregates]
        return Buffered(min(buffered), max(buffered))

    def _state(self) -> str:
        if self.leaving:
            return "leaving"
        if self._replica.finished:
            return "finished"
        if self._trainer.ready_at is None:
            return "joining"
        if self._trainer.paused:
            return "paused"
        if self._trainer.stands:
            return "waiting"
        return "idle" if self._replica.roster.mine.idle else "training"
