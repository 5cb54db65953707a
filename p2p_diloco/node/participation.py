"""A node from the trainer's first message until its end: the one way in which it founds a run, joins one, starts again
from a checkpoint, or finds that its run has ended; then its parts, which run concurrently until the peer leaves.

Law: each step is complete before the next one begins, and every part is complete when it is made. A part that has news
for a part made later posts an event to the `EventQueue`.

    1  the trainer's settings and model come over the channel                 `run_node`
    2  the transport is opened, to an open run or as a private run's member   `swarm.entered`
    3  a checkpoint is read, if there is one                                  `take_part`
    4  the run is found, or founded                                           `Joining.find_run`
    5  the trainer learns the run's settings, and writes its parameters       `take_part`
    6  the parts are made, and exchange messages with other peers             `Participation`
    7  the first state: the checkpoint's, the founder's or another peer's;
       the trainer may start, unless the run has ended                        `beginning`

An observer takes steps 1, 2 and 4, and then only reads (`observing`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Coroutine, Iterator
from typing import Any

import torch

from p2p_diloco.config import RunConfig
from p2p_diloco.core.events import Depart, Discovered, Measured, Reachable, Revised
from p2p_diloco.errors import Refused
from p2p_diloco.net.bandwidth import steady
from p2p_diloco.net.invitation_used import on_this_machine
from p2p_diloco.node import curves, records, run_record
from p2p_diloco.node.auditing import Audits
from p2p_diloco.node.beginning import Beginning
from p2p_diloco.node.channel import Message, NodeEnd
from p2p_diloco.node.common import Common
from p2p_diloco.node.joining import RECORD_EVERY_S, Joining
from p2p_diloco.node.node import Node
from p2p_diloco.node.observing import follow
from p2p_diloco.node.privacy import OPEN, keep_notice, watch_revocations
from p2p_diloco.node.reporting import Reporter
from p2p_diloco.node.run_end import Ending
from p2p_diloco.node.run_inbox import RunInbox
from p2p_diloco.node.saving import Checkpoint, Saving, read_checkpoint
from p2p_diloco.node.shared import Setup, SharedMemory
from p2p_diloco.node.status import PeerStatus
from p2p_diloco.node.swarm import Swarm, entered, until_one_ends
from p2p_diloco.node.trainer import TrainerSide
from p2p_diloco.remembered import met_through, remember

TELL_S = 5.0
"""Deadline for publishing a known end of the run, before other peers see this peer."""
LEAVE_S = 1.0
"""Deadline for the last messages."""
TURN_S = 0.05
"""Seconds that the replica gets to write its last messages."""
LOOK_EVERY_S = 0.1
"""Seconds between two checks whether all others have the end."""
MEASURE_EVERY_S = 1.0
"""Seconds between two looks at the link's measured bandwidth."""
LIVES_ON_S = 6.0
"""An earlier process with this identity is alive if its record is from more than this many seconds after this process's
start. The clocks of two peers in a DHT differ by at most half as much."""

log = logging.getLogger(__name__)


async def run_node(channel: NodeEnd, messages: asyncio.Queue[Message], memory_fd: int) -> None:
    """Take part in a run, or observe it, until cancelled.

    Raises:
        P2PDilocoError: this peer can't take part in the run, or can't go on.
    """
    setup = Setup.from_wire((await messages.get())["setup"])
    run_id, observes = setup.local.run_id, setup.local.role == "observer"
    shared = SharedMemory(memory_fd, setup.numel)
    async with entered(setup, channel.progress) as swarm:
        transport = swarm.transport
        tasks = [(follow if observes else take_part)(setup, channel, messages, shared, swarm)]
        if swarm.access is not None:
            member = swarm.access.member
            tasks.append(watch_revocations(transport, run_id, member))
            if not observes:
                tasks.append(keep_notice(transport.plain, run_id, member.run))
        await until_one_ends(tasks, swarm.dead)


async def take_part(
    setup: Setup, channel: NodeEnd, messages: asyncio.Queue[Message], shared: SharedMemory, swarm: Swarm
) -> None:
    """Find or found the run, and take part in it until cancelled."""
    local = setup.local
    saved = await asyncio.get_running_loop().run_in_executor(None, read_checkpoint, local)
    founding, founded = setup.asked, None
    if saved is not None:
        log.info("starting from the checkpoint %s", saved.path)
        founding = RunConfig(**{**saved.config_for(local.run_id), **setup.asked.given})
        founded = saved.founded if saved.run_id == local.run_id else None
    joined = await Joining(setup, swarm, channel.progress).find_run(founding, founded)
    run = joined.run
    if swarm.access is None and not on_this_machine(local):
        log.warning("the run %s is OPEN: %s", run.run_id, OPEN)
    elif swarm.access is None and joined.founder:
        log.info("the run %s is open, as any on loopback: its peers join without an invitation", run.run_id)
    checkpoint = None if saved is None else str(saved.path)
    me = {"peer_id": swarm.transport.peer_id, "addresses": swarm.transport.addresses()}
    channel.send("run", **me, config=run.config.to_wire(), layout=run.layout.to_wire(), checkpoint=checkpoint)
    theta, base = torch.zeros(run.layout.numel, device="cpu"), None
    if setup.specs is not None:
        answer = await messages.get()
        assert answer["kind"] == "theta", "the trainer writes its parameters before anything else"
        numel = run.layout.numel  # the memory is longer if the run keeps buffers local
        theta, base = shared.theta[:numel], shared.base[:numel]
    common = Common(local, joined, swarm, shared, theta, base)
    await Participation(common, saved, channel).live(messages)


class Participation:
    """The parts of a node while its peer takes part in a run."""

    def __init__(self, common: Common, saved: Checkpoint | None, channel: NodeEnd) -> None:
        self._common, self._run, self._replica, self._events = common, common.run, common.replica, common.events
        self._transport, self._outbox, self._channel = common.transport, common.outbox, channel
        self._beginning = Beginning(common, saved)
        self._ending = Ending(common, self._beginning.last_group, b"" if saved is None else saved.end)
        self._saving = Saving(common, self._ending.record)
        self._trainer, self._audits = TrainerSide(common, channel), Audits(common)
        self._node = Node(common, self._trainer, self._audits, self._settled)
        self._reporter = Reporter(common, self._trainer, self._audits, self._saving)
        self._twin_at = math.inf
        """The time of the last record that another process with this peer's identity seems to have made."""

    async def live(self, messages: asyncio.Queue[Message]) -> None:
        """Take part until cancelled; then leave."""
        for event in self._beginning.events:  # before any message: who is back from a checkpoint is no newcomer
            self._events.post(event)
        self._common.inbox.handler = RunInbox(self._common, self._node, self._trainer, self._audits)
        await self._ending.begin(TELL_S)
        run_id, transport, roster = self._run.run_id, self._transport, self._replica.roster
        consuming = asyncio.create_task(self._node.consume())
        beside = (
            self._trainer.serve(messages),
            self._trainer.watch_progress(),
            self._trainer.tell_waiting(),
            self._measure(),
            self._start_training(),
            self._audits.serve(),
            self._ending.keep(),
            run_record.BOARD.keep(transport, run_id, lambda: self._common.joined.record, RECORD_EVERY_S),
            run_record.watch_revisions(
                transport,
                self._common.founding,
                lambda: roster.mine.revision,
                lambda revision: self._events.post(Revised(revision)),
            ),
            self._common.deaths.count(),
            records.publish(transport, run_id, self._reporter.status, self._common.event_log.news),
            curves.keep(transport, run_id, self._reporter.point),
            *self._metrics(),
            self._look_around(),
        )
        try:
            await until_one_ends(beside, consuming)
        finally:
            await self._leave(consuming)

    async def _start_training(self) -> None:
        """Hold the trainer back until training may start, then let it start. After that, this call stays open until it
        is cancelled."""
        await self._beginning.until_it_may_train(self._ending, self._trainer.hold_for)
        await self._trainer.start()
        await asyncio.Event().wait()

    async def _leave(self, consuming: asyncio.Task[None]) -> None:
        """Stop all parts, in bounded time. If the replica still takes events, tell the other peers first that this peer
        leaves, or that its trainer has died."""
        died = self._channel.left_alone
        if died:
            log.warning("the trainer has ended without leaving the run: it was killed, or has crashed")
        self._reporter.last_state = "dead" if died else "leaving"
        self._trainer.departs()
        if not consuming.done():
            await self._linger()
            self._events.post(Depart(died))
            await asyncio.gather(self._announce_leaving(), self._empty_outbox())
        consuming.cancel()
        await asyncio.gather(consuming, return_exceptions=True)
        self._outbox.close()
        self._common.history.end(asyncio.get_running_loop().time(), left=not died)
        await self._saving.finish()

    async def _linger(self) -> None:
        """Wait until the last payloads have left, in bounded time. If the run has ended, wait also until all other
        peers have its last state."""
        clock, replica = asyncio.get_running_loop().time, self._replica
        within_s = self._run.config.heartbeat_timeout if replica.finished else LEAVE_S
        until = clock() + within_s
        await self._outbox.drained(within_s)
        while replica.finished and clock() < until and self._some_lack_the_end():
            await asyncio.sleep(LOOK_EVERY_S)

    def _some_lack_the_end(self) -> bool:
        mine = self._replica.roster.mine.model
        return any(summary.model < mine for summary in self._replica.roster.summaries().values())

    async def _empty_outbox(self) -> None:
        await asyncio.sleep(TURN_S)
        await self._outbox.emptied(LEAVE_S)

    async def _announce_leaving(self) -> None:
        """Store this peer's last record in the DHT; before it the run's end, because a newcomer that finds neither a
        holder of the state nor an end takes the state for lost."""
        await self._ending.leave(LEAVE_S)
        storing = records.BOARD.store(self._transport, self._run.run_id, self._reporter.status().pack())
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(storing, LEAVE_S)

    def _metrics(self) -> Iterator[Coroutine[Any, Any, None]]:
        """The task that gives metrics to Prometheus and OpenTelemetry; none if the peer's settings ask for neither."""
        local = self._common.local
        if local.metrics_port is not None or local.otlp_endpoint is not None:
            from p2p_diloco.node.metrics import tell  # here, because few peers need it

            address = None if local.metrics_port is None else (local.metrics_host, local.metrics_port)
            yield tell(self._run.run_id, address, local.otlp_endpoint, self._reporter.status)

    # -- what the parts tell

    def _settled(self) -> None:
        """Called after each event. Check whether the run has ended, save the outer state if a checkpoint is due, and
        tell the trainer, which then saves its own state beside the checkpoint."""
        self._ending.settled()
        self._saving.settled()
        shared, traffic = self._common.shared, self._transport.traffic
        shared.saved = self._saving.epoch
        shared.leave_s = self._run.config.heartbeat_timeout if self._replica.finished else 0.0
        shared.bytes_sent, shared.bytes_received = traffic.bytes_sent, traffic.bytes_received
        shared.retries = self._outbox.failed

    async def _look_around(self) -> None:
        """Until cancelled, tell the replica of the peers that have records in the DHT, and remember their addresses."""
        common, me, roster = self._common, self._transport.peer_id, self._replica.roster
        swarm = met_through(common.local.initial_peers, me)
        around = records.look_around(self._transport, self._run.run_id, lambda: len(roster.alive()))
        async for record, has_new_addresses in around:
            if record.peer_id == me:
                self._check_identity(record)
                continue
            if has_new_addresses:
                remember(self._run.run_id, swarm, record.addresses)
            name = record.name[:64]
            common.event_log.name(record.peer_id, name)
            common.history.name(asyncio.get_running_loop().time(), record.peer_id, name)
            self._events.post(Discovered(record.peer_id))

    def _check_identity(self, record: PeerStatus) -> None:
        """Check, by the DHT record under this peer's id, that no other process uses the same identity.

        Raises:
            Refused: an earlier process with this identity is still alive.
        """
        earlier = record.incarnation is not None and record.incarnation < self._common.incarnation
        if not earlier or record.time <= self._common.started_at + LIVES_ON_S:
            return
        before, self._twin_at = self._twin_at, record.time
        if record.time > before:  # a second one: a clock that has been set back since leaves one of its future
            raise Refused(
                f"is the identity of a peer that is in the run already, on the machine {record.host[:64]}",
                key="identity_path",
                value=self._common.local.identity_path,
                mend="give each peer an identity file of its own, not a copy of another peer's",
            )

    async def _measure(self) -> None:
        """Until cancelled, tell the replica each change of this peer's bandwidth, and of whether other peers can dial
        it. All peers use these two values to choose leaders and owners."""
        while True:
            if (reachable := not self._transport.reach.private) != self._replica.roster.mine.eligible:
                self._events.post(Reachable(reachable))
            told = self._replica.roster.mine.bandwidth
            if (found := steady(told, self._transport.traffic.bandwidth.rate)) != told:
                log.info("this peer's link carries %.3g MB/s", found / 1e6)
                self._events.post(Measured(found))
            await asyncio.sleep(MEASURE_EVERY_S)
