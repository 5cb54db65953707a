"""One peer's life in a run: from the first address to the last word.

Law: puts the parts together and takes them apart again, whatever happens in between; each part's work is
its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import socket
import time
from collections.abc import Sequence
from functools import partial

import torch

from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.core.events import Closed, Depart, Discovered, Found, Measured, Moving, Restore, Revised
from p2p_diloco.core.replica import Replica, founding_meta
from p2p_diloco.core.version import SALT_BITS, incarnation, model_version
from p2p_diloco.errors import ConfigError, NoBootstrapReached, NodeDied, Refused
from p2p_diloco.net.addresses import listen_for
from p2p_diloco.net.bandwidth import steady
from p2p_diloco.net.hivemind import HivemindTransport
from p2p_diloco.net.interface import Limits, Transport
from p2p_diloco.node import records, revising, wire
from p2p_diloco.node.bases import Bases
from p2p_diloco.node.channel import Message, NodeEnd
from p2p_diloco.node.ending import Ending, until_the_others_have_it
from p2p_diloco.node.inbox import Inbox
from p2p_diloco.node.joining import Describing, Joined, find_run, found_if_nobody_has, holders_of, keep_record
from p2p_diloco.node.ledger import CODEC, OUTER_STEP, TRANSFER
from p2p_diloco.node.node import Node
from p2p_diloco.node.outbox import Outbox
from p2p_diloco.node.restart import GoesOn, until_the_others_are_back
from p2p_diloco.node.run import Run, RunRecord
from p2p_diloco.node.saving import Checkpoint, Saving, read_checkpoint
from p2p_diloco.node.setup import Setup
from p2p_diloco.node.shared import SharedMemory
from p2p_diloco.node.status import Buffered, Event, PeerStatus, RoundProgress, Ways
from p2p_diloco.node.tensor_work import TensorWork
from p2p_diloco.node.trainer import TrainerSide, until_one_ends
from p2p_diloco.remembered import remember, remembered

LEAVE_S = 1.0
"""How long the last words may take."""
TELL_S = 5.0
"""How long a peer that knows of the run's end may take to tell it, before it is seen."""
CLOSE_S = 2.0
"""How long the transport may take to end."""
MEASURE_EVERY_S = 1.0
"""How often what is measured of the link is looked at."""
LIVES_ON_S = 6.0
"""A record that an earlier process with this identity has written so long after this one's start was not left behind:
clocks in a DHT agree within half of that."""
LIMITS = Limits(header_bytes_max=2**20)
"""Longer headers than usual: a fetch lists every shard."""

log = logging.getLogger(__name__)


async def live(channel: NodeEnd, messages: asyncio.Queue[Message], memory_fd: int) -> None:
    """Take part in a run until cancelled.

    Raises:
        P2PDilocoError: this peer can't take part, or can't go on.
    """
    setup = Setup.from_wire((await messages.get())["setup"])
    numel = sum(spec.numel for spec in setup.specs or ())
    shared = SharedMemory(memory_fd, numel)
    local, inbox = setup.local, Inbox()
    dead: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def daemon_died(why: str) -> None:
        if not dead.done():
            dead.set_exception(NodeDied(why, mend="start this peer again"))

    async def transport_through(initial_peers: Sequence[str]) -> HivemindTransport:
        return await HivemindTransport.create(
            inbox,
            run_id=local.run_id,
            initial_peers=initial_peers,
            host_maddrs=local.host_maddrs or listen_for(initial_peers),
            announce_maddrs=local.announce_maddrs,
            identity_path=None if local.identity_path is None else str(local.identity_path),
            client_mode=local.client_mode,
            direct=local.direct,
            direct_port=local.direct_port,
            limits=LIMITS,
            on_daemon_death=daemon_died,
        )

    channel.send("progress", text="reaching for the swarm" if local.initial_peers else "starting a swarm of its own")
    try:
        transport = await transport_through(local.initial_peers)
    except NoBootstrapReached as error:
        if not (known := remembered(local.run_id, local.initial_peers)):
            raise
        log.warning("none of the initial peers answers; trying %d addresses met in this run before", len(known))
        try:
            transport = await transport_through(known)
        except NoBootstrapReached:
            raise error from None  # what the user named is what the user can mend
    try:
        channel.send("transport", peer_id=transport.peer_id, addresses=transport.addresses())
        part = asyncio.create_task(take_part(setup, channel, messages, shared, transport, inbox))
        try:
            await asyncio.wait({part, dead}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            part.cancel()
            outcome = (await asyncio.gather(part, return_exceptions=True))[0]
        if dead.done():
            dead.result()
        if isinstance(outcome, BaseException):
            raise outcome
    finally:
        if dead.done():
            dead.exception()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(transport.close(), CLOSE_S)


async def take_part(
    setup: Setup,
    channel: NodeEnd,
    messages: asyncio.Queue[Message],
    shared: SharedMemory,
    transport: Transport,
    inbox: Inbox,
) -> None:
    """Find the run or found it, and be one of its peers until cancelled."""
    saved = await _read_checkpoint(setup.local)
    founding, founded = setup.asked, None
    if saved is not None:
        founding = RunConfig(**{**saved.config_for(setup.local.run_id), **setup.asked.given})
        founded = saved.founded if saved.run_id == setup.local.run_id else None
    joined = await find_run(
        setup, founding, transport, inbox, lambda text: channel.send("progress", text=text), founded
    )
    run = joined.run
    checkpoint = None if saved is None else str(saved.path)
    channel.send("run", config=run.config.to_wire(), layout=run.layout.to_wire(), checkpoint=checkpoint)
    if setup.specs is not None:
        answer = await messages.get()
        assert answer["kind"] == "theta", "the trainer writes its parameters before anything else"
        work = TensorWork(run, shared.theta, Bases(run.layout, shared.theta, shared.base))
    else:
        work = TensorWork(run, torch.zeros(run.layout.numel))
    await Participation(setup, joined, saved, channel, shared, transport, inbox, work).live(messages)


class Participation:
    """What exists while a peer takes part in a run."""

    def __init__(
        self,
        setup: Setup,
        joined: Joined,
        saved: Checkpoint | None,
        channel: NodeEnd,
        shared: SharedMemory,
        transport: Transport,
        inbox: Inbox,
        work: TensorWork,
    ) -> None:
        self.local, self.joined, self.saved = setup.local, joined, saved
        self.run: Run = joined.run
        self.shared, self.transport, self.work = shared, transport, work
        transport.limits = self.run.timed(transport.limits)
        self.last_group: set[str] = set()
        self.started_at = time.time()
        self.incarnation = incarnation(int(self.started_at * 1000), secrets.randbits(SALT_BITS))
        self.reconnections = 0
        self.leaving = False
        self.trainer = TrainerSide(channel, shared, self.run.config, self._nudge_others)
        transferring = partial(self.trainer.ledger.part, TRANSFER)
        transport.traffic.receiving = transferring
        self.outbox = Outbox(transport, transferring, gives_way=not self.run.rules.asynchronous)
        clock = asyncio.get_running_loop().time
        self.replica = Replica(
            transport.peer_id,
            self.run.rules,
            role=setup.local.role,
            eligible=not setup.local.client_mode,
            incarnation=self.incarnation,
            now=clock(),
        )
        self.node = Node(self.run, self.replica, work, self.outbox, self.trainer)
        self.trainer.node = self.node
        self.founding_of = revising.Founding.of(self.run.run_id, RunRecord.unpack(joined.record))
        founded = self.founding_of.founder, self.founding_of.time
        self.saving = Saving(self.run, setup.local, self.replica, work, self.node.post, founded)
        self.goes_on = GoesOn(self.replica, partial(records.who_takes_part, transport, self.run.run_id))
        self.ending = Ending(transport, self.founding_of, self.replica, self.goes_on, setup.local.checkpoint_dir)
        self.came_with_the_end = False
        self.node.settled = self._settled
        Describing(transport, inbox, self.run.token).serve(self.run.layout)
        inbox.on_nudge, inbox.on_closed, inbox.on_moving = self._nudged, self._closed, self._moving
        inbox.proven = partial(self.founding_of.proven, transport)
        inbox.judging = partial(self.trainer.ledger.part, CODEC)
        self.node.stepping = partial(self.trainer.ledger.part, OUTER_STEP)
        inbox.open(work, len(self.run.layout.fragments), self.node.receive)

    async def live(self, messages: asyncio.Queue[Message]) -> None:
        """Until cancelled; then leave."""
        await self.ending.begin(TELL_S)
        self._start()
        run_id, transport = self.run.run_id, self.transport
        consuming = asyncio.create_task(self.node.consume())
        beside = (
            self.trainer.serve(messages),
            self.trainer.watch_header(lambda: self.reconnections, self._traffic),
            self.trainer.tell_waiting(),
            self._measure(),
            self._find_state(),
            self._wait_to_train(),
            self.ending.keep(),
            keep_record(transport, self.joined),
            revising.watch(
                transport,
                self.founding_of,
                lambda: self.replica.roster.mine.revision,
                lambda revision: self.node.post(Revised(revision)),
            ),
            records.publish(transport, run_id, self.describe),
            records.look_around(
                transport,
                run_id,
                self._discovered,
                lambda: len(self.replica.roster.alive()),
                lambda addresses: remember(run_id, addresses),
                self._check_identity,
            ),
        )
        try:
            await until_one_ends([asyncio.create_task(task) for task in beside], consuming)
        finally:
            await self._leave(consuming)

    # -- beginning

    def _start(self) -> None:
        """Bring in the state that this peer starts with: a checkpoint's, its model's if it founds the run,
        or none. Training waits for `_wait_to_train`.
        """
        self.trainer.hold()
        if self.saved is not None and not self.local.new_generation:
            states = self.saved.restore(self.run, self.work)
            self.last_group = {peer for s in states for peer in (*s.plan.group, *s.plan.succession)}
            self.came_with_the_end = self.run.rules.ended(model_version([s.version for s in states]))
            self.node.post(Restore(states))
        elif self.saved is not None:
            self.saved.restore(self.run, self.work)
            self.node.post(self.founding(self.saved.generation + 1))
            if self.saved.run_id == self.run.run_id:
                self.node.post(Revised(self.saved.revision))
        elif self.joined.founder:
            self.node.post(self.founding(0))

    def founding(self, generation: int) -> Found:
        """The tensors at hand as epoch 0 of a generation."""
        meta = founding_meta(generation, self.transport.peer_id, self.local.role)
        return Found(generation, tuple(self.work.store.digest(s.index, meta) for s in self.run.layout.shards))

    async def _find_state(self) -> None:
        patience_s = 2 * self.run.config.heartbeat_timeout
        replica, give_up_s = self.replica, self.local.wait_timeout
        await found_if_nobody_has(
            replica,
            patience_s,
            give_up_s,
            lambda: self.node.post(self.founding(0)),
            lambda: holders_of(self.transport, self.run.run_id),
            self.ending.look,
        )
        await asyncio.Event().wait()  # nothing more to do, and no reason to end

    async def _wait_to_train(self) -> None:
        """For the others after a start from a checkpoint (`restart`), and for the last state where the run has ended
        (`ending`). Whoever sets the run back waits for nobody.
        """
        local = self.local
        if self.came_with_the_end:
            await until_the_others_have_it(self.replica, self.last_group, local.restart_wait, self._wait_for)
        elif not local.new_generation:
            ended = True
            while ended:
                await self.ending.until_it_may_train(local.wait_timeout, self._wait_for)
                ended = bool(self.last_group) and await self._others_are_back()
        self.trainer.let_go()
        await asyncio.Event().wait()

    async def _others_are_back(self) -> bool:
        """Wait for the others; whether the run is found to have ended meanwhile."""
        wait_s = self.local.restart_wait
        await until_the_others_are_back(self.replica, self.last_group, wait_s, self.goes_on, self._wait_for)
        return await self.ending.look()

    def _wait_for(self, text: str) -> None:
        """What is to be told while training is held."""
        self.trainer.held_for = text

    # -- going on

    def _discovered(self, peer: str, name: str) -> None:
        self.node.names[peer] = name
        self.node.post(Discovered(peer))

    def _check_identity(self, record: PeerStatus) -> None:
        """Look at the record under this peer's id.

        Raises:
            Refused: an earlier process with this identity goes on.
        """
        earlier = record.incarnation is not None and record.incarnation < self.incarnation
        if earlier and record.time > self.started_at + LIVES_ON_S:
            raise Refused(
                f"is the identity of a peer that is in the run already, on the machine {record.host[:64]}",
                key="identity_path",
                value=self.local.identity_path,
                mend="give each peer an identity of its own: a copied file is none",
            )

    def _settled(self) -> None:
        """Save the outer state if it is time, and have the trainer save its own beside it; look whether the run has
        ended.
        """
        self.ending.settled()
        self.saving.settled()
        self.shared.saved = self.saving.epoch

    def _closed(self, peer: str) -> None:
        self.reconnections += 1
        self.node.post(Closed(peer))

    def _moving(self, peer: str) -> None:
        self.node.post(Moving(peer))

    async def _measure(self) -> None:
        """Tell the others what this peer's link carries, for their elections."""
        while True:
            told = self.replica.roster.mine.bandwidth
            if (found := steady(told, self.transport.traffic.bandwidth.rate)) != told:
                log.info("this peer's link carries %.3g MB/s", found / 1e6)
                self.node.post(Measured(found))
            await asyncio.sleep(MEASURE_EVERY_S)

    def _nudged(self, goal: int) -> None:
        """A peer asks for an exchange of the whole model: once, and not of what lies far ahead."""
        if goal <= self.trainer.commits + 2 * len(self.run.layout.fragments):
            self.shared.goal = max(goal, self.shared.goal)

    def _nudge_others(self, goal: int) -> None:
        header = wire.pack(wire.Nudge(goal), self.run.token)
        for peer in self.replica.roster.alive():
            self.outbox.put(peer, header, None, lambda outcome: None)

    def _traffic(self) -> tuple[int, int]:
        return self.transport.traffic.bytes_sent, self.transport.traffic.bytes_received

    def describe(self) -> PeerStatus:
        """What this peer says of itself in the DHT."""
        replica, shared, traffic = self.replica, self.shared, self.transport.traffic
        aggregates, round_now, alive = replica.aggregates(), replica.round(), set(replica.roster.alive())
        outer_lr, outer_momentum = self.run.rates(replica.revision)
        wall = time.time() - asyncio.get_running_loop().time()
        asynchronous, submissions = self.run.rules.asynchronous, self.trainer.submissions
        return PeerStatus(
            name=self.local.name or socket.gethostname()[:64],
            peer_id=self.transport.peer_id,
            host=socket.gethostname()[:64],
            role=self.local.role,
            state=self._state(),
            time=time.time(),
            incarnation=self.incarnation,
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
            sync_every=self.trainer.sync_every,
            submissions=submissions.told if asynchronous else None,
            buffered=self._buffered(aggregates),
            addresses=tuple(self.transport.addresses()),
            events=tuple(Event(round(wall + when, 1), text) for when, text in self.node.notes),
        )

    def _buffered(self, aggregates: Sequence[int]) -> Buffered | None:
        """How full the Delayed Nesterov buffers of these shards are."""
        if self.run.rules.dn_buffer_size < 2 or not aggregates:
            return None
        buffered = [self.replica.logs[shard].buffered for shard in aggregates]
        return Buffered(min(buffered), max(buffered))

    def _state(self) -> str:
        if self.leaving:
            return "leaving"
        if self.replica.finished:
            return "finished"
        if self.trainer.ready_at is None:
            return "joining"
        if self.trainer.paused:
            return "paused"
        if self.trainer.stands:
            return "waiting"
        return "idle" if self.replica.roster.mine.idle else "training"

    # -- ending

    async def _leave(self, consuming: asyncio.Task[None]) -> None:
        """Hand over what is under way, say so, and stop; in bounded time."""
        self.leaving = True
        self.trainer.departs()
        if not consuming.done():
            await self._linger()
            self.node.post(Depart())
            await asyncio.gather(self._announce_leaving(), self._say_leave(), self.ending.leave(LEAVE_S))
        consuming.cancel()
        await asyncio.gather(consuming, return_exceptions=True)
        self.outbox.close()
        await self.saving.finish()

    async def _linger(self) -> None:
        """Let payloads go out. A peer that is through stays until all others have the last state, too."""
        clock = asyncio.get_running_loop().time
        until = clock() + (self.run.config.heartbeat_timeout if self.replica.finished else LEAVE_S)
        await self.outbox.drained(until - clock())
        while self.replica.finished and clock() < until and self._somebody_lacks_the_end():
            await asyncio.sleep(0.1)

    def _somebody_lacks_the_end(self) -> bool:
        mine = self.replica.roster.mine.model
        return any(s.model < mine for s in self.replica.roster.summaries().values())

    async def _say_leave(self) -> None:
        await asyncio.sleep(0.05)  # the replica's turn
        await self.outbox.emptied(LEAVE_S)

    async def _announce_leaving(self) -> None:
        key, value = records.key_of(self.run.run_id, self.transport.peer_id), self.describe().pack()
        storing = self.transport.store(key, self.transport.peer_id, value, records.PEER_TTL_S)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(storing, LEAVE_S)


async def _read_checkpoint(local: PeerConfig) -> Checkpoint | None:
    """The checkpoint to start from, if there is one."""
    saved = await asyncio.get_running_loop().run_in_executor(None, read_checkpoint, local)
    if saved is None:
        return None
    if local.from_checkpoint is None and saved.run_id != local.run_id:
        mend = f"name another folder, or run_id={saved.run_id}"
        raise ConfigError(
            f"holds checkpoints of the run {saved.run_id}",
            key="checkpoint_dir",
            value=local.checkpoint_dir,
            mend=mend,
        )
    log.info("starting from %s", saved.path)
    return saved
