"""Makes this peer's status (`PeerStatus`) from the parts of its node.

Law: only reads other parts' values; changes nothing.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import time
from collections.abc import Iterator, Sequence

import psutil

from p2p_diloco.core import leases, outlook
from p2p_diloco.core.spans import length
from p2p_diloco.node import status as s
from p2p_diloco.node.auditing import Audits
from p2p_diloco.node.common import Common
from p2p_diloco.node.curves import Point
from p2p_diloco.node.saving import Saving
from p2p_diloco.node.trainer import TrainerSide

WAITS_S = 2.0
"""A peer says what it waits for once it has waited for this long: usual exchanges are not worth a line."""
MEMORY_DIGITS = 7
"""Memory is told in steps of 10 MB."""


class Reporter:
    """Makes this peer's status from the parts of its node."""

    def __init__(self, common: Common, trainer: TrainerSide, audits: Audits, saving: Saving) -> None:
        self._common, self._trainer, self._audits, self._saving = common, trainer, audits, saving
        self._processes = [psutil.Process(), psutil.Process(os.getppid())]
        self.last_state = ""
        """The peer's state once it is about to end: leaving, or dead."""

    def status(self) -> s.PeerStatus:
        common, replica, shared = self._common, self._common.replica, self._common.shared
        local, run, traffic = common.local, common.run, common.transport.traffic
        aggregates, round_now, alive = outlook.owned(replica), outlook.round_now(replica), set(replica.roster.alive())
        outer_lr, outer_momentum = run.rates_at(replica.revision, replica.epoch)
        wall = time.time() - asyncio.get_running_loop().time()
        asynchronous, submissions = run.rules.asynchronous, self._trainer.submissions
        cores, memory_bytes = self._usage()
        return s.PeerStatus(
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
            loss=self._told(shared.loss),
            held_out_loss=self._told(shared.held_out_loss),
            samples=shared.samples,
            counted_samples=replica.roster.mine.model.samples // len(run.rules.fragments)
            if replica.has_state
            else None,
            bytes_sent=traffic.bytes_sent,
            bytes_received=traffic.bytes_received,
            revision=replica.revision.number,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            revision_known=replica.roster.mine.revision.number,
            changed=tuple(replica.revision.changed.items()),
            checkpoint=None if local.checkpoint_dir is None else shared.saved,
            unsaved=self._saving.failed[: s.WAITS_LETTERS_MAX],
            waiting_s=round(shared.waiting_s, 3),
            waits_for=self._waits_for()[: s.WAITS_LETTERS_MAX],
            cpu=cores,
            memory_bytes=memory_bytes,
            gpu_memory=self._gpu_memory(),
            node_threads=common.work.threads.count,
            last_round=shared.last_round,
            bandwidth=int(replica.roster.mine.bandwidth) or None,
            ways=s.Ways.counted(way for peer, way in traffic.ways().items() if peer in alive),
            reach=None if common.transport.reach.kind == "unknown" else common.transport.reach.kind,
            aggregates=aggregates[: s.AGGREGATES_MAX],
            aggregates_count=len(aggregates),
            round=None if round_now is None or asynchronous else s.RoundProgress(*round_now),
            sync_every=self._trainer.sync_every,
            submissions=submissions.told if asynchronous else None,
            buffered=self._buffered(aggregates),
            data=tuple(_progress(table) for table in replica.tables),
            addresses=tuple(common.transport.addresses())[: s.ADDRESSES_MAX],
            refused=tuple(self._refused()),
            doubt=common.event_log.named(self._audits.verdicts.doubt)[: s.WAITS_LETTERS_MAX],
            newest_deaths=tuple(common.deaths.newest),
            deaths=common.deaths.total,
            events=tuple(
                s.Event(round(wall + t, 1), s.cut(text)) for t, text in common.event_log.notes[-s.EVENTS_MAX :]
            ),
        )

    def point(self) -> Point | None:
        """The point of this peer's curve at this moment; None before the trainer has reported a loss."""
        shared, epoch = self._common.shared, self._common.replica.epoch
        loss, held_out = self._told(shared.loss), self._told(shared.held_out_loss)
        if loss is None and held_out is None:
            return None
        return Point(time.time(), shared.steps, shared.samples, epoch, loss, held_out)

    def _told(self, loss: float) -> float | None:
        """A loss as the trainer has reported it; None if it has reported none, or one that is not finite."""
        return round(loss, 6) if self._common.shared.steps and math.isfinite(loss) else None

    def _refused(self) -> Iterator[s.RefusedPeer]:
        """The peers whose messages were refused last. In the reasons, ids of peers are replaced by names."""
        named, refusals = self._common.event_log.named, self._common.refusals
        for peer, refused in refusals.newest(s.REFUSED_MAX):
            who = f"{name} (…{peer[-6:]})" if (name := refusals.name_of(peer)) else named(peer)
            who = f"…{peer[-6:]}" if who == peer else who
            why = named(refused.why.replace(peer, who))
            yield s.RefusedPeer(who[: s.NAME_LETTERS_MAX], refused.count, why[: s.WHY_LETTERS_MAX])

    def _waits_for(self) -> str:
        """What the peer waits for, if it is joining or has waited for `WAITS_S`; else empty."""
        since = self._common.shared.stands_since
        if self._state() != "joining" and not (since and time.monotonic() - since > WAITS_S):
            return ""
        return self._common.event_log.named(outlook.waiting(self._common.replica))

    def _usage(self) -> tuple[float | None, int | None]:
        """The cores that node and trainer have kept busy since the last call, and their memory, shared memory counted
        once; None: the trainer has just ended."""
        try:
            cores = sum(process.cpu_percent() for process in self._processes) / 100
            node, trainer = (process.memory_info() for process in self._processes)
        except psutil.Error:
            return None, None
        # rounded, because a record is published again whenever it changes
        return round(cores, 1), round(trainer.rss + node.rss - getattr(node, "shared", 0), -MEMORY_DIGITS)

    def _gpu_memory(self) -> s.GpuMemory | None:
        """The memory of the trainer's GPUs; None: it uses none, or no round is over."""
        shared = self._common.shared
        return s.GpuMemory(round(shared.gpu_reserved, -MEMORY_DIGITS), shared.gpu_total) if shared.gpu_total else None

    def _buffered(self, aggregates: Sequence[int]) -> s.Buffered | None:
        """How full the Delayed Nesterov buffers of these slices' fragments are; None without buffers or slices."""
        if self._common.run.rules.dn_buffer_size < 2 or not aggregates:
            return None
        buffered = [self._common.replica.state(index).buffered for index in aggregates]
        return s.Buffered(min(buffered), max(buffered))

    def _state(self) -> str:
        if self.last_state:
            return self.last_state
        if self._common.replica.finished:
            return "finished"
        if self._trainer.ready_at is None:
            return "joining"
        if self._common.local.role == "aggregator":
            return "aggregating"
        if self._trainer.paused:
            return "paused"
        if self._common.shared.stands:
            return "waiting"
        return "idle" if self._common.replica.roster.mine.idle else "training"


def _progress(table: leases.Table) -> s.DataProgress:
    data = table.data
    return s.DataProgress(
        data.name[: s.NAME_LETTERS_MAX], data.length, data.epochs, length(leases.used(table)), leases.leased(table)
    )
