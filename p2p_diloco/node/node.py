"""The loop of a node: an event in, its effects out, one after another.

Law: the replica's state changes only here, by one event at a time. A message is sent by a task, which posts an event
when it is done. Work on tensors is done one by one, while no event waits; the result of one is fed before the next
begins. Digests are computed by threads, beside all else.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Hashable
from functools import partial

from p2p_diloco.core import events as e
from p2p_diloco.core.messages import Close, Commit, Mean, Message, Part, Slice
from p2p_diloco.core.round import Phase
from p2p_diloco.net.interface import Refusal, Unreachable
from p2p_diloco.node.alike import Alike
from p2p_diloco.node.auditing import Audits
from p2p_diloco.node.common import Common, Fed
from p2p_diloco.node.headers import pack
from p2p_diloco.node.ledger import OUTER_STEP
from p2p_diloco.node.outbox import Outcome
from p2p_diloco.node.trainer import TrainerSide

PROMPT_ROUNDS = 2
"""While the means of so many rounds are on their way to a peer, further ones wait for the payloads of rounds."""

Work = e.Average | e.Apply | e.Fill | e.Roll

log = logging.getLogger(__name__)


class Node:
    """Connects a replica with its tensors, its messages and its trainer."""

    def __init__(self, common: Common, trainer: TrainerSide, audits: Audits, settled: Callable[[], None]) -> None:
        """`settled` is called after each event, at a moment when versions and tensors agree."""
        self._common, self._trainer, self._audits = common, trainer, audits
        self.replica, self.work, self.events = common.replica, common.work, common.events
        self._settled = settled
        self._run, self._outbox, self._signatures = common.run, common.outbox, common.signatures
        self._alike, self._loop = Alike(common.event_log.named, common.run), asyncio.get_running_loop()
        self._due: deque[Work] = deque()
        self._at_rest = asyncio.Event()  # set while versions and tensors agree
        self._at_rest.set()
        self._encoded: tuple[Message, tuple[bytes, bytes | None]] | None = None  # the last Close or Commit
        self._means = Counter[str]()  # to each peer, queued or being sent
        self._going = set[Hashable]()  # tensors that are queued or being sent, and to whom
        self._heard = Counter[str]()  # signs of life of each peer
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at = math.inf
        self._waking = False  # whether a Wakeup is queued

    # -- events in

    async def receive(self, sender: str, message: Message) -> None:
        """Feed a message from another peer to the replica; return when its effects are carried out."""
        self._heard[sender] += 1
        await self.events.feed(e.Received(sender, message))

    def closed(self, peer: str) -> None:
        self._common.shared.reconnections += 1
        self.events.post(e.Broke(peer))

    def moving(self, peer: str) -> None:
        self._heard[peer] += 1
        self.events.post(e.Moving(peer))

    async def consume(self) -> None:
        """Feed queued events to the replica, and carry out their effects, until cancelled."""
        current: Fed | None = None
        try:
            self._arm()
            while True:
                event: e.Event | None
                if self._due and self.events.empty:
                    event = await self._computed(self._due.popleft())
                else:
                    event, current = await self.events.next()
                if event is not None:
                    await self._feed(event)
                if current is not None and not current.done():
                    current.set_result(None)
                current = None
                await asyncio.sleep(0)  # a full queue must not keep the loop from its sockets
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self.events.end([current])

    async def _feed(self, event: e.Event) -> None:
        self._at_rest.clear()
        self._waking &= not isinstance(event, e.Wakeup)
        effects = self.replica.handle(event, now := self._loop.time())
        self._common.history.write(now, event, effects)
        if isinstance(event, e.Found | e.Restore):
            for begun in self.replica.logs:
                self.work.hold(begun.fragment, begun.held.version)
                self.look(begun.fragment)
        log.debug("%s leads to %s", event, effects)
        for effect in effects:
            await self._carry_out(effect)
        self._at_rest.set()
        self._settled()
        self._arm()

    def _arm(self) -> None:
        """Set the timer for the replica's next Wakeup. Nothing is done if a Wakeup is queued already, or if the timer
        is set for that time already, which is so after most events."""
        due = self.replica.next_wakeup()
        if self._waking or (self._timer is not None and self._wakes_at == due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._wakes_at = due
        self._timer = self._loop.call_at(due, self._wake) if math.isfinite(due) else None

    def _wake(self) -> None:
        self._timer, self._waking = None, True
        self.events.post(e.Wakeup())

    # -- effects out

    async def _carry_out(self, effect: e.Effect) -> None:
        match effect:
            case e.Send(to, message):
                self._send(to, message)
            case e.Average() | e.Apply() | e.Fill() | e.Roll():
                self._due.append(effect)
            case e.Accept(versions):
                await self._trainer.not_reading()
                self.work.accept(effect)
                for fragment, _ in versions:
                    self.look(fragment)
            case e.Keep(fragment):
                self.work.keep(effect)
                self.look(fragment)
            case e.Load(fragments):
                for loaded in fragments:
                    await self._outbox.withdraw(loaded.fragment)  # slices for a round that is over
                self._trainer.load(effect)
            case e.Release():
                self._trainer.release(effect)
            case e.Start():
                self._trainer.ready()
            case e.Changed():
                self._trainer.changed()
            case e.Finished():
                self._trainer.finished()
            case e.Note(kind, text):
                self._common.event_log.note(kind, text)
            case e.Died():
                self._common.deaths.notice(effect)
            case e.Complaint(peer, why):
                self._common.refusals.count(peer, why)

    async def _computed(self, effect: Work) -> e.Event | None:
        """Carry out an effect on tensors; returns the resulting event."""
        if isinstance(effect, e.Apply):
            return await self._applied(effect)
        with self._common.ledger.part(OUTER_STEP):
            match effect:
                case e.Average():
                    index = self._run.rules.fragments[effect.fragment][effect.number]
                    self._alike.look(index, ((s.author, weight, s.hash, s.payload) for weight, s in effect.slices))
                    averaged = self.work.average(effect)
                    self._audits.made(effect, averaged)
                    return averaged
                case e.Fill():
                    return self.work.fill(effect)
                case e.Roll():
                    return self.work.roll(effect)

    async def _applied(self, effect: e.Apply) -> e.Event | None:
        """Make the outer step, unless the replica has gone over to another state meanwhile. Damage of the base is told,
        and is repaired after the step: other peers have made theirs, and keep no base."""
        fragment = effect.commit.fragment
        replicated = self.replica.logs[fragment]
        if replicated.phase is not Phase.APPLYING or replicated.round.working is not effect:
            return None
        if (damaged := self.work.damaged(fragment, self.work.unseen(fragment))) is not None:
            self.events.post(damaged)
        await self._trainer.not_reading()
        self._at_rest.clear()
        with self._common.ledger.part(OUTER_STEP):
            applied = self.work.apply(effect, () if damaged is None else damaged.numbers)
        self._audits.applied(effect)
        return applied

    def look(self, fragment: int) -> None:
        """Let a thread compute the digests of a fragment's present tensors, and tell the replica."""

        def tell(done: asyncio.Future[e.Digested | None]) -> None:
            if not done.cancelled() and (digested := done.result()) is not None:
                self.events.post(digested)

        self._loop.run_in_executor(None, self.work.digest, fragment).add_done_callback(tell)

    # -- messages out

    def _send(self, to: str, message: Message) -> None:
        """Send a message. An event tells the replica whether it was delivered."""
        heard, tensors = self._heard[to], _tensors(to, message)
        if tensors in self._going:
            return  # on a slow link, what is asked for again while it is on its way would come again and again
        self._going |= {tensors} - {None}

        def answer(outcome: Outcome) -> None:
            self._going.discard(tensors)
            self._means[to] -= isinstance(message, Mean)
            if outcome is None:
                self.events.post(e.Delivered(to, message))
                return
            log.debug("sending a %s message to %s failed: %s", type(message).__name__, to, outcome)
            # A passed deadline doesn't prove that the peer is gone, and the transport itself reports a broken link. Nor
            # does a dial prove it that began before the peer's last sign of life: the peer or its relay was not ready.
            gone = isinstance(outcome, Unreachable) and outcome.refused and self._heard[to] == heard
            self.events.post(e.SendFailed(to, message, gone))

        if isinstance(message, Part):
            self._outbox.put_late(to, partial(self._part, message.fragment, message.number), answer)
            return
        try:
            header, body = self._packed(message)
        except Exception:  # a fault of our own, which must not end this peer
            log.exception("a %s message to %s can't be encoded", type(message).__name__, to)
            self._going.discard(tensors)
            self.events.post(e.SendFailed(to, message, gone=False))
            return
        payload = getattr(message, "payload", None) if body is None else memoryview(body)
        if not isinstance(message, Mean):
            self._outbox.put(to, header, payload, answer, message.fragment if isinstance(message, Slice) else None)
            return
        slices = len(self._run.rules.fragments[message.fragment])
        self._means[to] += 1
        if self._means[to] <= PROMPT_ROUNDS * slices:
            self._outbox.put(to, header, payload, answer)
            return

        async def made() -> tuple[bytes, memoryview]:
            return header, message.payload

        kept = message.fragment, message.number, message.base.epoch % self._run.rules.commits_kept
        self._outbox.put_late(to, made, answer, kept)

    def _packed(self, message: Message) -> tuple[bytes, bytes | None]:
        if not isinstance(message, Close | Commit):
            return pack(self._signatures.signed(message), self._run.token)
        if self._encoded is None or self._encoded[0] is not message:  # the same one goes to many peers
            self._encoded = message, pack(self._signatures.signed(message), self._run.token)
        return self._encoded[1]

    async def _part(self, fragment: int, number: int) -> tuple[bytes, memoryview]:
        """Encode a slice's present tensors, when they can be sent: they may be newer than when they were asked for.

        Raises:
            Refusal: the tensors don't have their digest.
        """
        while not self._at_rest.is_set():
            await self._at_rest.wait()
        if (damaged := self.work.damaged(fragment, (number,))) is not None:
            self.events.post(damaged)
            raise Refusal(f"slice {number} of fragment {fragment} is corrupted in the sender's memory")
        part = self.work.part(fragment, number)
        return self._packed(part)[0], part.payload


def _tensors(to: str, message: Message) -> Hashable:
    """What is sent to whom, of a message that carries tensors; None of another one. A slice of the state is encoded
    when its turn comes, so it has the newest tensors."""
    match message:
        case Part(fragment, _, number):
            return to, fragment, number
        case Slice() | Mean():
            return to, message
    return None
