"""The loop: one event into the replica, its effects out in order, then the next event.

Law: the replica's state changes here and nowhere else, by one event at a time. An effect that takes the
network's time becomes a task that answers with an event; an effect on tensors is carried out in its turn, and its event
is fed at once: there is one proposal at a time, and what it leads to is sent while the next one is computed.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from p2p_diloco.core.events import (
    Accept,
    Apply,
    Average,
    Changed,
    Damaged,
    Delivered,
    Effect,
    Event,
    Fill,
    Finished,
    Load,
    Note,
    Ready,
    Received,
    Release,
    Send,
    SendFailed,
    Wakeup,
)
from p2p_diloco.core.messages import Commit, Contribution, Message, Plan, State
from p2p_diloco.core.replica import Replica
from p2p_diloco.net.interface import Refusal, Unreachable
from p2p_diloco.node import wire
from p2p_diloco.node.backpressure import Backpressure
from p2p_diloco.node.outbox import Made, Outbox, Outcome
from p2p_diloco.node.run import Run
from p2p_diloco.node.tensor_work import TensorWork

NOTES_KEPT = 50
PROMPT_MAX = 4
"""Of each shard, commits that may be on their way to a peer that works and that no plan names; more give way."""
LOUD = ("mismatch", "fork")
"""Kinds of notes that are warnings: something is wrong with a machine, or work is lost."""

log = logging.getLogger(__name__)


class Trainer(Protocol):
    """What the loop tells the trainer's side."""

    async def not_reading(self) -> None:
        """Return once the trainer reads θ no more."""

    def load(self, effect: Load) -> None:
        """The answer to a merge."""

    def release(self, effect: Release) -> None:
        """An exchange is over."""

    def ready(self) -> None:
        """Training may start."""

    def changed(self) -> None:
        """Some shard's state has changed."""

    def finished(self) -> None:
        """The run has ended."""


class Node:
    """A replica with its tensors, its messages and its trainer."""

    def __init__(self, run: Run, replica: Replica, work: TensorWork, outbox: Outbox, trainer: Trainer) -> None:
        self.run = run
        self.replica = replica
        self.work = work
        self.retries = 0
        self.settled: Callable[[], None] = lambda: None
        """Called after each event, when versions and tensors agree."""
        self.stepping: Callable[[], AbstractContextManager[None]] = nullcontext
        """Entered while an outer step is made, or made the state."""
        self.notes: deque[tuple[float, str]] = deque(maxlen=NOTES_KEPT)
        """The newest events of the log: (loop's time, text)."""
        self.names: dict[str, str] = {replica.me: "this peer"}
        """What peers are called, by id, as far as their records have told."""
        self._outbox = outbox
        self._trainer = trainer
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[Event, asyncio.Future[None] | None]] = asyncio.Queue()
        self._due: deque[Average | Apply | Fill] = deque()
        self._awaited: dict[int, asyncio.Future[None]] = {}  # by the effect that an event is fed once it is computed
        self._at_rest = asyncio.Event()  # set while versions and tensors agree
        self._at_rest.set()
        self._states: set[tuple[str, int]] = set()  # (peer, shard) of states that wait or are on their way
        self._under_way = Counter[str]()  # commits to each peer that wait or are on their way
        self._room = Backpressure(replica, run.rules.room_within)
        self._ended = False
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at = math.inf
        self._waking = False  # a Wakeup waits for its turn

    # -- events in

    def post(self, event: Event) -> None:
        """Feed an event once its turn comes."""
        self._events.put_nowait((event, None))

    async def feed(self, event: Event) -> None:
        """Feed an event, and return once its effects are carried out.

        Raises:
            Refusal: no more events are fed.
        """
        if self._ended:
            raise _leaving()
        done: asyncio.Future[None] = self._loop.create_future()
        self._events.put_nowait((event, done))
        await done

    async def receive(self, sender: str, message: Message) -> None:
        """A message of another replica; returns once it is handled, and there was room for it."""
        if isinstance(message, Contribution):
            await self._room.wait(message.shard)
        await self.feed(Received(sender, message))

    async def consume(self) -> None:
        """Feed events until cancelled."""
        done: asyncio.Future[None] | None = None
        try:
            self._arm()
            while True:
                if not self._due or not self._events.empty():
                    event, done = await self._events.get()
                    before = len(self._due)
                    await self._feed(event)
                    if done is not None and len(self._due) > before:
                        self._awaited[id(self._due[-1])] = done  # whoever sends much waits until it is computed
                    else:
                        _answer(done)
                    done = None
                    await asyncio.sleep(0)  # a full queue must not keep the loop from its sockets
                if self._due:
                    effect = self._due.popleft()
                    done = self._awaited.pop(id(effect), None)
                    await self._feed(self._worked(effect))
                    _answer(done)
                    done = None
                    await asyncio.sleep(0)
        finally:
            self._end(done)

    async def _feed(self, event: Event) -> None:
        self._at_rest.clear()
        if isinstance(event, Wakeup):
            self._waking = False
        effects = self.replica.handle(event, self._loop.time())
        log.debug("%s leads to %s", event, effects)
        for effect in effects:
            await self._carry_out(effect)
        self._at_rest.set()
        self._room.look()
        self.settled()
        self._arm()

    def _end(self, current: asyncio.Future[None] | None) -> None:
        """Tell those that wait for their events that these won't be fed."""
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        waiting = [current, *self._awaited.values()]
        while not self._events.empty():
            waiting.append(self._events.get_nowait()[1])
        for done in waiting:
            if done is not None and not done.done():
                done.set_exception(_leaving())

    def _arm(self) -> None:
        """Wake up when the replica asks for it. Most events leave that as it was; one Wakeup in line is enough."""
        due = self.replica.next_wakeup()
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
        self.post(Wakeup())

    # -- effects out

    async def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Send(to, message):
                self._send(to, message)
            case Average() | Apply() | Fill():
                self._due.append(effect)
            case Accept(proposals):
                await self._trainer.not_reading()
                with self.stepping():
                    self.work.accept(proposals)
            case Load(due=due):
                while due and self._due:  # the trainer is about to write what these may be made of
                    early = self._due.popleft()
                    self.post(self._worked(early))
                    _answer(self._awaited.pop(id(early), None))
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
                self.note(kind, text)

    def note(self, kind: str, text: str) -> None:
        """A line of the event log."""
        log.log(logging.WARNING if kind in LOUD else logging.INFO, "%s: %s", kind, self.named(text))
        self.notes.append((self._loop.time(), self.named(text)))

    def _worked(self, effect: Average | Apply | Fill) -> Event:
        """What comes of an effect on tensors."""
        match effect:
            case Average():
                with self.stepping():
                    return self.work.average(effect)
            case Apply():
                with self.stepping():
                    return self.work.apply(effect)
            case Fill():
                return self.work.fill(effect)

    def named(self, text: str) -> str:
        """The text with peers called by their names; the end of the id stays, for names may be used twice."""
        for peer, name in self.names.items():
            if name:
                text = text.replace(peer, name if peer == self.replica.me else f"{name} (…{peer[-6:]})")
        return text

    def _send(self, to: str, message: Message) -> None:
        def answer(outcome: Outcome) -> None:
            if isinstance(message, Commit):
                self._under_way[to] -= 1
            if isinstance(message, State):
                self._states.discard((to, message.shard))
            if outcome is None:
                self.post(Delivered(to, message))
                return
            self.retries += 1
            log.debug("%s to %s failed: %s", type(message).__name__, to, outcome)
            # A broken link is a suspicion that the transport reports by itself, a deadline proves nothing.
            gone = isinstance(outcome, Unreachable) and outcome.refused
            self.post(SendFailed(to, message, gone))

        match message:
            case State(shard=shard) if (to, shard) in self._states:
                self.post(SendFailed(to, message, gone=False))  # what waits will be as new when it leaves
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
            header = wire.pack(message, self.run.token)
        except (ValueError, TypeError, OverflowError) as error:
            log.error("a %s to %s can't be written: %s", type(message).__name__, to, error)
            self.post(SendFailed(to, message, gone=False))
        else:
            self._under_way[to] += isinstance(message, Commit)
            match message:
                case Commit(shard=shard, plan=plan) if self.run.rules.asynchronous:
                    # several make one answer; and who has to hold one is waited for by its submitter
                    self._outbox.put(to, header, payload, answer, line=shard, urgent=to in plan.succession)
                case Commit(shard=shard, plan=plan) if payload is not None and not self._soon(to, plan):
                    kept = shard, message.base.epoch % self.run.rules.commits_kept
                    self._outbox.put_late(to, _made(header, payload), answer, kept)
                case Contribution(shard=shard):
                    self._outbox.put(to, header, payload, answer, shard)
                case _:
                    self._outbox.put(to, header, payload, answer)

    def _soon(self, to: str, plan: Plan) -> bool:
        """Whether rounds wait for what a peer has: those that take part, and those that are about to; but for one that
        takes commits more slowly than they are made."""
        room = PROMPT_MAX * self.run.rules.shards
        return plan.names(to) or (self._under_way[to] < room and to in self.replica.roster.workers())

    async def _present(self, to: str, shard: int) -> tuple[bytes, memoryview]:
        """A shard's present state, to go out now: by its turn it may have moved on since it was asked for.

        Raises:
            Refusal: its tensors are not what its version says.
        """
        while not self._at_rest.is_set():
            await self._at_rest.wait()
        state = self.replica.state(shard)
        if self.work.damaged(state):
            self.post(Damaged(shard, state.version))
            raise Refusal(f"shard {shard} is damaged here")
        return wire.pack(state, self.run.token), self.work.export(shard)


def _answer(done: asyncio.Future[None] | None) -> None:
    """Tell whoever waits for an event that it is fed."""
    if done is not None and not done.done():
        done.set_result(None)


def _made(header: bytes, payload: memoryview) -> Made:
    async def make() -> tuple[bytes, memoryview]:
        return header, payload

    return make


def _leaving() -> Refusal:
    return Refusal("this peer is leaving")
