"""The node's loop: it feeds the replica one event, carries out the effects in order, and takes the next event.

Law: the replica's state changes only here, by one event at a time. An effect on the network becomes a task, which posts
an event when it is done. Effects on tensors are carried out one by one. The event that results from one is fed before
the next one is carried out, so the messages of one result are sent while the next one is computed.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable
from functools import partial

from p2p_diloco.core.events import (
    Accept,
    Apply,
    Average,
    Averaged,
    Changed,
    Closed,
    Complaint,
    Died,
    Effect,
    Event,
    Fill,
    Finished,
    Load,
    Moving,
    Note,
    Ready,
    Received,
    Release,
    Send,
    Wakeup,
)
from p2p_diloco.core.messages import Contribution, Message
from p2p_diloco.node.alike import Alike
from p2p_diloco.node.auditing import Audits
from p2p_diloco.node.backpressure import Backpressure
from p2p_diloco.node.common import Common
from p2p_diloco.node.events import Fed, gathered
from p2p_diloco.node.ledger import OUTER_STEP
from p2p_diloco.node.posting import Posting
from p2p_diloco.node.trainer import TrainerSide

log = logging.getLogger(__name__)


class Node:
    """Connects a replica with its tensors, its messages and its trainer."""

    def __init__(
        self, common: Common, trainer: TrainerSide, audits: Audits, settled: Callable[[], None] = lambda: None
    ) -> None:
        """`settled` is called after each event, at a moment when versions and tensors agree."""
        self._replica, self._work, self._history = common.replica, common.work, common.history
        self._events, self._event_log = common.events, common.event_log
        self._refusals, self._deaths = common.refusals, common.deaths
        self._alike = Alike(common.event_log.named, common.run)
        self._stepping = partial(common.ledger.part, OUTER_STEP)
        self._outbox, self._trainer, self._audits, self._settled = common.outbox, trainer, audits, settled
        self._loop = asyncio.get_running_loop()
        self._due: deque[tuple[Average | Apply | Fill, Fed | None]] = deque()  # tensor work with its waiters
        self._at_rest = asyncio.Event()  # set while versions and tensors agree
        self._at_rest.set()
        self._posting = Posting(common, self._at_rest)
        self._backpressure = Backpressure(common.replica, common.run.rules.room_within)
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at = math.inf
        self._waking = False  # whether a Wakeup is queued

    # -- events in

    async def receive(self, sender: str, message: Message) -> None:
        """Feed a message from another peer to the replica; return when its effects are carried out. A contribution may
        have to wait first (`Backpressure`)."""
        self._posting.heard(sender)
        if isinstance(message, Contribution):
            await self._backpressure.wait(message.shard)
        await self._events.feed(Received(sender, message))

    def closed(self, peer: str) -> None:
        self._trainer.link_broke()
        self._events.post(Closed(peer))

    def moving(self, peer: str) -> None:
        self._posting.heard(peer)
        self._events.post(Moving(peer))

    async def consume(self) -> None:
        """Feed queued events to the replica, and carry out their effects, until cancelled."""
        current: Fed | None = None
        try:
            self._arm()
            while True:
                if not self._due or not self._events.empty:
                    event, current = await self._events.next()
                    before = len(self._due)
                    await self._feed(event)
                    if len(self._due) > before:  # answered once all tensor work of this event is computed
                        self._due[-1] = self._due[-1][0], current
                    else:
                        _answer(current)
                    current = None
                    await asyncio.sleep(0)  # a full queue must not keep the loop from its sockets
                if self._due:
                    effect, current = self._due.popleft()
                    await self._feed(self._computed(effect))
                    _answer(current)
                    current = None
                    await asyncio.sleep(0)
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._events.end([current, *(fed for _, fed in self._due)])

    async def _feed(self, event: Event) -> None:
        self._at_rest.clear()
        self._waking &= not isinstance(event, Wakeup)
        effects = self._replica.handle(event, self._loop.time())
        log.debug("%s leads to %s", event, effects)
        for effect in gathered(effects):
            await self._carry_out(effect)
        self._at_rest.set()
        self._backpressure.look()
        self._settled()
        self._arm()

    def _arm(self) -> None:
        """Set the timer for the replica's next Wakeup. Nothing is done if a Wakeup is queued already, or if the timer
        is set for that time already, which is so after most events."""
        due = self._replica.next_wakeup()
        if self._waking or (self._timer is not None and self._wakes_at == due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._wakes_at = due
        self._timer = self._loop.call_at(due, self._wake) if math.isfinite(due) else None

    def _wake(self) -> None:
        self._timer, self._waking = None, True
        self._events.post(Wakeup())

    # -- effects out

    async def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Send(to, message):
                self._posting.send(to, message)
            case Average() | Apply() | Fill():
                self._due.append((effect, None))
            case Accept(proposals):
                await self._trainer.not_reading()
                with self._stepping():
                    self._work.accept(proposals)
                self._audits.accepted(proposals)
            case Load(due=due):
                while due and self._due:  # the trainer may soon write memory that this work reads
                    early, fed = self._due.popleft()
                    self._events.post(self._computed(early))
                    _answer(fed)
                for shard in due:
                    await self._outbox.withdraw(shard)
                self._trainer.load(effect)
            case Release():
                self._trainer.release(effect)
            case Ready():
                self._trainer.ready()
            case Changed():
                self._trainer.changed()
            case Finished():
                self._trainer.finished()
            case Note(kind, text):
                self._event_log.note(kind, text)
            case Died():
                self._deaths.notice(effect)
            case Complaint(peer, why):
                self._refusals.count(peer, why)

    def _computed(self, effect: Average | Apply | Fill) -> Event:
        """Carry out an effect on tensors; returns the resulting event."""
        match effect:
            case Average():
                self._alike.look(effect.shard, ((peer, c.weight, c.payload) for peer, c in effect.contributions))
                with self._stepping():
                    averaged = self._work.average(effect)
                    return self._audits.made(effect, averaged) if isinstance(averaged, Averaged) else averaged
            case Apply(commit):
                with self._stepping():
                    applied = self._work.apply(effect)
                self._audits.applied(commit)
                return applied
            case Fill():
                return self._work.fill(effect)


def _answer(fed: Fed | None) -> None:
    if fed is not None and not fed.done():
        fed.set_result(None)
