"""The node's loop: it feeds the replica one event, carries out the effects in order, and takes the next event.

Law: the replica's state changes only here, by one event at a time. An effect on the network becomes a task, which posts
an event when it is done. Effects on tensors are carried out one by one, and the resulting event is fed at once: there
is one proposal at a time, and its messages are sent while the next one is computed.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, deque
from collections.abc import Callable
from functools import partial

from p2p_diloco.core.events import (
    Accept,
    Apply,
    Average,
    Changed,
    Closed,
    Damaged,
    Delivered,
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
    SendFailed,
    Wakeup,
)
from p2p_diloco.core.messages import Commit, Contribution, Message, Plan, State
from p2p_diloco.net.interface import Refusal, Unreachable
from p2p_diloco.node import wire
from p2p_diloco.node.backpressure import Backpressure
from p2p_diloco.node.common import Common
from p2p_diloco.node.events import Fed
from p2p_diloco.node.ledger import OUTER_STEP
from p2p_diloco.node.outbox import Made, Outcome
from p2p_diloco.node.trainer import TrainerSide

PROMPT_MAX = 4
"""Commits for a training peer that no plan names are sent at once while fewer than this many, times the number of
shards, are under way to it; further ones wait for the payloads of rounds."""

log = logging.getLogger(__name__)


class Node:
    """Connects a replica with its tensors, its messages and its trainer."""

    def __init__(self, common: Common, trainer: TrainerSide, settled: Callable[[], None] = lambda: None) -> None:
        """`settled` is called after each event, at a moment when versions and tensors agree."""
        self._run, self._replica, self._work = common.run, common.replica, common.work
        self._events, self._event_log = common.events, common.event_log
        self._stepping = partial(common.ledger.part, OUTER_STEP)
        self._outbox, self._trainer, self._settled = common.outbox, trainer, settled
        self._loop = asyncio.get_running_loop()
        self._due: deque[tuple[Average | Apply | Fill, Fed | None]] = deque()  # tensor work with its waiters
        self._at_rest = asyncio.Event()  # set while versions and tensors agree
        self._at_rest.set()
        self._states: set[tuple[str, int]] = set()  # (peer, shard) of states that are queued or being sent
        self._under_way = Counter[str]()  # commits to each peer that are queued or being sent
        self._backpressure = Backpressure(common.replica, common.run.rules.room_within)
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at = math.inf
        self._waking = False  # whether a Wakeup is queued

    # -- events in

    async def receive(self, sender: str, message: Message) -> None:
        """Feed a message from another peer to the replica; return when its effects are carried out. A contribution may
        have to wait first (`Backpressure`)."""
        if isinstance(message, Contribution):
            await self._backpressure.wait(message.shard)
        await self._events.feed(Received(sender, message))

    def closed(self, peer: str) -> None:
        """Tell the replica that a link to or from a peer broke."""
        self._trainer.link_broke()
        self._events.post(Closed(peer))

    def moving(self, peer: str) -> None:
        """Tell the replica that a payload to or from a peer makes progress."""
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
                    if len(self._due) > before:  # its waiter waits until all of its tensor work is computed
                        effect, _ = self._due.pop()
                        self._due.append((effect, current))
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
        if isinstance(event, Wakeup):
            self._waking = False
        effects = self._replica.handle(event, self._loop.time())
        log.debug("%s leads to %s", event, effects)
        for effect in effects:
            await self._carry_out(effect)
        self._at_rest.set()
        self._backpressure.look()
        self._settled()
        self._arm()

    def _arm(self) -> None:
        """Set the timer for the replica's next Wakeup. Nothing is done if a Wakeup is queued already, or if the timer
        is set for that time already, which is so after most events."""
        due = self._replica.next_wakeup()
        if self._waking:
            return
        if self._timer is not None:
            if self._wakes_at == due:
                return
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
                self._send(to, message)
            case Average() | Apply() | Fill():
                self._due.append((effect, None))
            case Accept(proposals):
                await self._trainer.not_reading()
                with self._stepping():
                    self._work.accept(proposals)
            case Load(due=due):
                while due and self._due:  # the trainer may be about to write memory that these read
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

    def _computed(self, effect: Average | Apply | Fill) -> Event:
        """Carry out an effect on tensors; returns the resulting event."""
        match effect:
            case Average():
                with self._stepping():
                    return self._work.average(effect)
            case Apply():
                with self._stepping():
                    return self._work.apply(effect)
            case Fill():
                return self._work.fill(effect)

    def _send(self, to: str, message: Message) -> None:
        def answer(outcome: Outcome) -> None:
            if isinstance(message, Commit):
                self._under_way[to] -= 1
            if isinstance(message, State):
                self._states.discard((to, message.shard))
            if outcome is None:
                self._events.post(Delivered(to, message))
                return
            log.debug("sending a %s message to %s failed: %s", type(message).__name__, to, outcome)
            # The transport itself reports a broken link, and a passed deadline proves nothing.
            gone = isinstance(outcome, Unreachable) and outcome.refused
            self._events.post(SendFailed(to, message, gone))

        match message:
            case State(shard=shard) if (to, shard) in self._states:
                self._events.post(SendFailed(to, message, gone=False))  # the queued message will have the newest state
                return
            case State(shard=shard):
                self._states.add((to, shard))
                self._outbox.put_late(to, lambda: self._present(to, shard), answer)
                return
            case Contribution(payload=encoded) | Commit(payload=encoded):
                payload: memoryview | None = encoded
            case _:
                payload = None
        try:
            header = wire.pack(message, self._run.token)
        except (ValueError, TypeError, OverflowError) as error:
            log.error("a %s message to %s can't be encoded: %s", type(message).__name__, to, error)
            self._events.post(SendFailed(to, message, gone=False))
        else:
            self._under_way[to] += isinstance(message, Commit)
            match message:
                case Commit(shard=shard, plan=plan) if self._run.rules.asynchronous:
                    # urgent, because a submitter is answered only once every successor holds the commit
                    self._outbox.put(to, header, payload, answer, line=shard, urgent=to in plan.succession)
                case Commit(shard=shard, plan=plan) if payload is not None and not self._soon(to, plan):
                    kept = shard, message.base.epoch % self._run.rules.commits_kept
                    self._outbox.put_late(to, _made(header, payload), answer, kept)
                case Contribution(shard=shard):
                    self._outbox.put(to, header, payload, answer, shard)
                case _:
                    self._outbox.put(to, header, payload, answer)

    def _soon(self, to: str, plan: Plan) -> bool:
        """Whether a commit for the peer `to` is sent at once, because rounds may wait for that peer. They may if the
        plan names the peer, or if the peer trains and receives commits as fast as they are made."""
        room = PROMPT_MAX * self._run.rules.shards
        return plan.names(to) or (self._under_way[to] < room and to in self._replica.roster.workers())

    async def _present(self, to: str, shard: int) -> tuple[bytes, memoryview]:
        """Encode a shard's present state. This is called when the state can be sent, so the state may be newer than the
        one that was asked for.

        Raises:
            Refusal: the tensors don't have the digest of their version.
        """
        while not self._at_rest.is_set():
            await self._at_rest.wait()
        state = self._replica.state(shard)
        if self._work.damaged(state):
            self._events.post(Damaged(shard, state.version))
            raise Refusal(f"shard {shard} is corrupted in the sender's memory")
        return wire.pack(state, self._run.token), self._work.export(shard)


def _answer(fed: Fed | None) -> None:
    if fed is not None and not fed.done():
        fed.set_result(None)


def _made(header: bytes, payload: memoryview) -> Made:
    async def make() -> tuple[bytes, memoryview]:
        return header, payload

    return make
