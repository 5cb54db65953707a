"""Makes this peer's status (`PeerStatus`) from the parts of its node.

Law: only reads.
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Sequence

from p2p_diloco.node.common import Common
from p2p_diloco.node.status import Buffered, Event, PeerStatus, RoundProgress, Ways
from p2p_diloco.node.trainer import TrainerSide


class Reporter:
    """Makes this peer's status from the parts of its node."""

    def __init__(self, common: Common, trainer: TrainerSide) -> None:
        self._common, self._trainer = common, trainer
        self.leaving = False
        """Whether the peer is about to leave."""

    def status(self) -> PeerStatus:
        """Make the peer's present status."""
        common, replica, shared = self._common, self._common.replica, self._common.shared
        local, run, traffic = common.local, common.run, common.transport.traffic
        aggregates, round_now, alive = replica.aggregates(), replica.round(), set(replica.roster.alive())
        outer_lr, outer_momentum = run.rates(replica.revision)
        wall = time.time() - asyncio.get_running_loop().time()
        asynchronous, submissions = run.rules.asynchronous, self._trainer.submissions
        return PeerStatus(
            name=local.name or socket.gethostname()[:64],
            peer_id=common.transport.peer_id,
            host=socket.gethostname()[:64],
            role=local.role,
            state=self._state(),
            time=time.time(),
            incarnation=common.incarnation,
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
            reach=None if common.transport.reach.kind == "unknown" else common.transport.reach.kind,
            aggregates=aggregates,
            aggregates_count=len(aggregates),
            round=None if round_now is None or asynchronous else RoundProgress(*round_now),
            sync_every=self._trainer.sync_every,
            submissions=submissions.told if asynchronous else None,
            buffered=self._buffered(aggregates),
            addresses=tuple(common.transport.addresses()),
            events=tuple(Event(round(wall + when, 1), text) for when, text in common.event_log.notes),
        )

    def _buffered(self, aggregates: Sequence[int]) -> Buffered | None:
        """How full the Delayed Nesterov buffers of these shards are; None without buffers or without shards."""
        if self._common.run.rules.dn_buffer_size < 2 or not aggregates:
            return None
        buffered = [self._common.replica.state(shard).buffered for shard in aggregates]
        return Buffered(min(buffered), max(buffered))

    def _state(self) -> str:
        if self.leaving:
            return "leaving"
        if self._common.replica.finished:
            return "finished"
        if self._trainer.ready_at is None:
            return "joining"
        if self._trainer.paused:
            return "paused"
        if self._trainer.stands:
            return "waiting"
        return "idle" if self._common.replica.roster.mine.idle else "training"
