"""A member of a private run with a client of its own: a transport with a valid invitation, and hand-made messages.

Law: it knows what a member can know: the run's token, and what other peers tell it. It answers probes if it is told to
take part, and contributes and computes means like an honest peer if it is told to work; all else a row sends by hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from nodes import NUMEL, RUN_ID, SLICES, Field

from p2p_diloco.core import messages as m
from p2p_diloco.core.state import State, append, key_of, rooted
from p2p_diloco.core.version import ContributionId, Version, incarnation, model_version
from p2p_diloco.net.interface import Refusal, Unreachable
from p2p_diloco.net.invitation import Invitation
from p2p_diloco.node import wire
from p2p_diloco.node.headers import opened, pack, packed, unpack
from p2p_diloco.node.signatures import Signatures, hash_of
from p2p_diloco.node.slice_work import SliceWork
from p2p_diloco.node.swarm import LIMITS
from p2p_diloco.tensors.limits import LENGTHS_MAX
from tests.net.members import invitation
from tests.net.swarm import join

PART = NUMEL // SLICES
ANSWER_S = 20.0
Said = m.Message | wire.NodeMessage


class Liar:
    """The hostile member. Its inbox accepts everything."""

    def __init__(self, field: Field, name: str, invited: Invitation | None) -> None:
        self.field, self.name, self.invited = field, name, invited
        self.came: list[tuple[str, Said]] = []
        self.state: State | None = None
        """The newest state that it was told, or that follows from the commits that came."""
        self.present = False
        """Whether it answers probes, and says that it trains."""
        self.works = False
        """Whether it contributes to every round, and computes the means that it owns."""
        self.delta, self.weight, self.samples = 1.0, 1.0, 1
        self.ahead = 0
        """How many epochs further than the others it says that it is."""
        self.incarnation = incarnation(int(time.time() * 1000), 7)
        self.elected = False
        """Whether it has led."""
        self._sequence, self._tasks = 0, set[asyncio.Task[None]]()
        self._ready: m.Ready | None = None
        self._close: m.Close | None = None
        self._slices: dict[tuple[int, str], m.Slice] = {}

    async def begin(self) -> None:
        """Open the transport. It waits for answers as long as a newcomer does, because the machine may stand still for
        longer than the run's timeouts."""
        self.transport: Any = await join(
            self, run_id=RUN_ID, initial_peers=self.field.addresses, limits=LIMITS, invitation=self.invited
        )
        self.run = self.field.run(self.field.nodes[0].access.member.token_salt)
        self.token = self.run.token
        self.signatures = Signatures(self.id, self.transport, self.token)
        self.work = SliceWork(self.run, torch.zeros(NUMEL), self.signatures.of_mean)
        for node in self.field.nodes:
            await self.transport.introduce(node.id, node.transport.addresses())

    async def end(self) -> None:
        """Close the transport."""
        for task in self._tasks:
            task.cancel()
        await self.transport.close()

    @property
    def id(self) -> str:
        return str(self.transport.peer_id)

    @property
    def held(self) -> State:
        assert self.state is not None, "it has not looked yet"
        return self.state

    @property
    def leader(self) -> str:
        """Who leads the present round."""
        return self.held.plan.succession[0]

    # -- its inbox

    def admit(self, sender: str, header: bytes) -> int:
        return 1 << 20

    async def deliver(self, sender: str, header: bytes, payload: memoryview | None) -> None:
        message = opened(header, self.token, self.run.rules)
        if isinstance(message, int):
            assert payload is not None
            message = unpack(payload, self.run.rules)
        if isinstance(message, m.Slice):
            message = replace(message, payload=payload, hash=hash_of(payload or b""))
        self.came.append((sender, message))
        self._hear(sender, message)

    def _hear(self, sender: str, message: Said) -> None:
        match message:
            case m.Probe() if self.present:
                self._soon(sender, m.ProbeAck(self.summary()))
            case m.Ask(numbers=()) if self.ahead:
                versions, links = (self.version(),), ((*self.held.links, self.heads()[0]),)
                self._soon(sender, m.Told(versions, links, fresh=False))
            case m.Claim(fragment, base, term) if self.present:
                self._soon(sender, m.Vote(fragment, base, term, sender))
            case m.Head(state=state):
                self._reaches(state)
            case m.Commit(base=base) if self.state is not None and base == self.state.version:
                self._reaches(append(self.state, message.choice, message.key, message.hashes, self.run.rules))
            case m.Want(what=m.What.READY) if self._ready is not None:
                self._soon(sender, self._ready)
            case m.Want(what=m.What.SLICES, numbers=numbers) if self._ready is not None:
                for number in numbers:
                    self._soon(sender, self.part(self._ready, number), self.gradient())
            case m.Slice(number=number, author=author):
                self._slices[number, author] = message
                self._average()
            case m.Close(choice=None, owners=owners) if self._ready is not None:
                self._give(self._ready, owners)
            case m.Close():
                self._close = message
                self._average()

    def _reaches(self, state: State) -> None:
        if self.state is not None and state.version.epoch <= self.state.version.epoch:
            return
        self.state, self._ready, self._close = state, None, None
        self._slices = {place: part for place, part in self._slices.items() if part.base.epoch >= state.version.epoch}
        if self.present:
            self._keep(self._tell_all(m.Probe(self.summary())))
        if self.works:
            self._work()

    def _work(self) -> None:
        ready = self.ready()
        self._give(ready, self.held.plan.owners)
        if self.leader != self.id:
            self._soon(self.leader, ready)
        else:
            self.elected = True

    def _give(self, ready: m.Ready, owners: tuple[str, ...]) -> None:
        """Send each slice of its contribution to the slice's owner."""
        for number, owner in enumerate(owners):
            if owner != self.id:
                self._soon(owner, self.part(ready, number), self.gradient())
            else:
                part = replace(self.part(ready, number), payload=self.gradient())
                self._slices[number, self.id] = part

    def _average(self) -> None:
        """Compute the means that it owns, as an honest owner does."""
        close = self._close
        if not self.works or close is None or close.choice is None or close.base != self.held.version:
            return
        weighted = [(peer, ready) for peer, ready in close.choice.entries if ready.weight]
        for number in (number for number, owner in enumerate(close.owners) if owner == self.id):
            if all((number, peer) in self._slices for peer, _ in weighted):
                given = [(peer, ready.weight, self._slices[number, peer].payload) for peer, ready in weighted]
                payload = self.work.mean_of(number, given)
                of = 0, close.base, close.key, number, hash_of(payload)
                self._keep(self._tell_all(m.Mean(*of, self.id, seal=self.signatures.of_mean(*of)), payload))

    def closed(self, peer: str) -> None:
        pass

    def moving(self, peer: str) -> None:
        pass

    # -- what it says

    async def tell(self, to: str, message: Said, payload: memoryview | None = None) -> str:
        """Send a message, signed if it needs that; returns an empty text if it was accepted, or the reason why not."""
        if isinstance(message, wire.NodeMessage):
            header = packed(message, self.token)
        else:
            header, body = pack(self.signatures.signed(message), self.token)
            payload = payload if body is None else memoryview(body)
        try:
            await self.transport.send(to, header, payload)
        except Refusal as refusal:
            return refusal.reason
        except Unreachable as error:
            return f"unreachable: {error}"
        return ""

    async def tell_all(self, message: Said, payload: memoryview | None = None) -> list[str]:
        """Send a message to every honest node."""
        return list(await asyncio.gather(*(self.tell(node.id, message, payload) for node in self.field.nodes)))

    async def _tell_all(self, message: Said, payload: memoryview | None = None) -> None:
        await self.tell_all(message, payload)

    def _soon(self, to: str, message: Said, payload: memoryview | None = None) -> None:
        async def tell() -> None:
            await self.tell(to, message, payload)

        self._keep(tell())

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- what it knows, and makes of it

    async def look(self) -> State:
        """The present state without its tensors, which any member may ask for."""
        told = len(self.got(m.Head))
        await self.tell(self.field.nodes[0].id, m.Ask(0))
        await self.until(lambda: len(self.got(m.Head)) > told, "a state")
        return self.held

    async def take_part(self, *, works: bool = False) -> None:
        """Be a peer that holds the state and says that it trains. `works`: contribute to every round from now on."""
        self.works = works
        await self.look()
        self.present = True
        await self.tell_all(m.Probe(self.summary()))
        if works:
            self._work()

    def summary(self, **changes: Any) -> m.Summary:
        """What it says of itself: as far as the honest peers, and at work."""
        model, heads = model_version([self.version()]), self.heads()
        told = m.Summary(self.incarnation, "worker", True, model, heads, speed=1.0)
        return replace(told, **changes)

    def version(self) -> Version:
        """The version that it says it holds."""
        held, more = self.held.version, self.ahead
        lie = replace(held, samples=held.samples + 100 * more, epoch=held.epoch + more, chain="1e" * 16)
        return lie if more else held

    def heads(self) -> tuple[tuple[int, str]]:
        """The same, as Summaries and links have it."""
        return ((self.version().epoch, self.version().chain),)

    def new_id(self) -> ContributionId:
        """The id of its next contribution."""
        self._sequence += 1
        return ContributionId(self.incarnation, self._sequence)

    def contribution(self, **changes: Any) -> m.Ready:
        """A contribution on the newest version that it knows."""
        id, hashes = self.new_id(), (hash_of(self.gradient()),) * SLICES
        grant = "" if self.invited is None else self.transport.membership.own.id.hex()
        size = self.weight, self.samples, hashes, 0.0, True, grant
        return rooted(replace(m.Ready(0, self.held.version, id, id, *size), **changes))

    def ready(self) -> m.Ready:
        """Its one contribution to the newest version that it knows: two choices of one attempt would expel it."""
        if self._ready is None:
            self._ready = self.contribution()
        return self._ready

    def part(self, ready: m.Ready, number: int) -> m.Slice:
        """One slice of its contribution."""
        return m.Slice(0, ready.base, self.id, ready.id, number, ready.hashes[number])

    def gradient(self) -> memoryview:
        """A slice's pseudo-gradient."""
        return memoryview(np.full(PART, self.delta, dtype=np.float32)).cast("B")

    def choice(self, *entries: tuple[str, m.Ready], by: str = "") -> m.Choice:
        """A choice of these contributions, of its own if it names no other leader."""
        return m.Choice(by or self.id, 0, tuple(sorted(entries)))

    def close(self, choice: m.Choice) -> m.Close:
        """The Close of a choice, on the newest version that it knows."""
        base, owners = self.held.version, self.held.plan.owners
        return m.Close(0, base, 0, self.id, 0, key_of(0, base, choice), choice, owners)

    def commit(self, choice: m.Choice, leader: str = "", **changes: Any) -> m.Commit:
        """The commit of a choice, which follows from the newest version that it knows, with means that nobody has."""
        state, choice = self.held, choice.bare()
        key, hashes = key_of(0, state.version, choice), ("00" * 32,) * SLICES
        version = append(state, choice, key, hashes, self.run.rules).version
        made = m.Commit(0, state.version, version, 0, leader or self.id, key, choice, hashes, state.plan.owners)
        return replace(made, **changes)

    async def until(self, condition: Callable[[], Any], what: str, within_s: float = ANSWER_S) -> None:
        """Wait for a condition, in bounded time."""
        await self.field.until(lambda: bool(condition()), within_s, f"{self.name}: {what}")

    def got(self, kind: type) -> list[Any]:
        """The messages of a kind that came."""
        return [message for _, message in self.came if isinstance(message, kind)]


@contextlib.asynccontextmanager
async def liar(field: Field, name: str = "mallory", invited: Invitation | None = None) -> AsyncIterator[Liar]:
    """A hostile member for one row, with an invitation of its own or the given one."""
    async with stranger(field, name, invited or invitation(name=name)) as made:
        yield made


@contextlib.asynccontextmanager
async def stranger(field: Field, name: str = "stranger", invited: Invitation | None = None) -> AsyncIterator[Liar]:
    """The same without an invitation, though it knows the run's token."""
    made = Liar(field, name, invited)
    await made.begin()
    try:
        yield made
    finally:
        await made.end()


ZEROS = memoryview(bytes(4 * PART))
"""The payload of a mean or a contribution, all zeros."""
STATE_ZEROS = memoryview(bytes(8 * PART + 4 * LENGTHS_MAX))
"""The payload of a slice's state: θ, the outer momentum, and the lengths of the last means."""
