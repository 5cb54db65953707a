"""A member of a private run with a client of its own: a transport with a valid invitation, and hand-made messages.

Law: it knows what a member can know: the run's token, and what other peers tell it. It answers probes if it is told to
take part, and contributes like an honest peer if it is told to work; all else a row sends by hand.
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
from nodes import NUMEL, RUN_ID, SHARDS, Field

from p2p_diloco.core.events import Apply, Fill
from p2p_diloco.core.lives import incarnation
from p2p_diloco.core.messages import (
    Commit,
    Contribution,
    Counted,
    Fetch,
    Plan,
    Probe,
    ProbeAck,
    Promise,
    State,
    Summary,
    TakeOver,
)
from p2p_diloco.core.state import append, meta_of
from p2p_diloco.core.version import ContributionId, Version, model_version
from p2p_diloco.net.interface import Refusal, Unreachable
from p2p_diloco.net.membership import Invitation
from p2p_diloco.node import wire
from p2p_diloco.node.entry import LIMITS
from p2p_diloco.node.seals import SEAL_BYTES, Seals
from p2p_diloco.node.tensor_work import TensorWork
from p2p_diloco.tensors.step_limit import LENGTHS_MAX
from tests.net.members import invitation
from tests.net.swarm import join

PART = NUMEL // SHARDS
ANSWER_S = 20.0


class Liar:
    """The hostile member. Its inbox accepts everything."""

    def __init__(self, field: Field, name: str, invited: Invitation | None) -> None:
        self.field, self.name, self.invited = field, name, invited
        self.came: list[tuple[str, wire.AnyMessage]] = []
        self.known: dict[int, tuple[Version, int, Plan]] = {}
        """By shard: the newest version that it was told, with its term and its plan."""
        self.states: dict[int, State] = {}
        """By shard: the newest state that came, with its tensors."""
        self.present = False
        """Whether it answers probes, and says that it trains."""
        self.works = False
        """Whether it contributes to every round."""
        self.eligible = True
        """Whether it says that others can dial it, so that it is elected."""
        self.delta, self.weight, self.samples = 1.0, 1.0, 1
        self.speed = 1.0
        """The inner steps a second that it tells."""
        self.incarnation = incarnation(int(time.time() * 1000), 7)
        self.commits: Callable[[int], Coroutine[Any, Any, None]] = self._nothing
        """Awaited once: when a plan lets it aggregate a shard for the first time."""
        self.elected: int | None = None
        """The first shard that a plan let it aggregate."""
        self._sequence, self._tasks = 0, set[asyncio.Task[None]]()

    async def begin(self) -> None:
        """Open the transport. It waits for answers as long as a newcomer does, because the machine may stand still for
        longer than the run's timeouts."""
        self.transport: Any = await join(
            self, run_id=RUN_ID, initial_peers=self.field.addresses, limits=LIMITS, invitation=self.invited
        )
        self.token = self.field.run(self.field.nodes[0].access.member.token_salt).token
        self.seals = Seals(self.transport, self.token)
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

    # -- its inbox

    def admit(self, sender: str, header: bytes) -> int:
        return 1 << 20

    async def deliver(self, sender: str, header: bytes, payload: memoryview | None) -> None:
        message = wire.unpack(header, self.token)
        self.came.append((sender, message))
        match message:
            case Probe() if self.present and len(self.known) == SHARDS:
                self._soon(sender, ProbeAck(self.summary()))
            case TakeOver(shard, base, term) if self.present:
                self._soon(sender, Promise(shard, base, term))
            case Commit(shard, version=version) | State(shard, version):
                if isinstance(message, State):
                    self.states[shard] = replace(message, payload=payload)
                if shard not in self.known or version.epoch > self.known[shard][0].epoch:
                    self.known[shard] = version, message.term, message.plan
                    if self.works:
                        self._work(shard, message.plan.succession[0])

    def _work(self, shard: int, aggregator: str) -> None:
        if aggregator != self.id:
            self._soon(aggregator, self.contribution(shard), self.gradient())
        elif self.elected is None:
            self.elected = shard
            self._keep(self.commits(shard))

    async def _nothing(self, shard: int) -> None:
        """Commit nothing."""

    def closed(self, peer: str) -> None:
        pass

    def moving(self, peer: str) -> None:
        pass

    # -- what it says

    async def tell(self, to: str, message: wire.AnyMessage, payload: memoryview | None = None) -> str:
        """Send a message; returns an empty text if it was accepted, or the reason why not."""
        try:
            await self.transport.send(to, wire.pack(self._sealed(message, payload), self.token), payload)
        except Refusal as refusal:
            return refusal.reason
        except Unreachable as error:
            return f"unreachable: {error}"
        return ""

    def _sealed(self, message: wire.AnyMessage, payload: memoryview | None) -> wire.AnyMessage:
        """The message with this member's seal, if it needs one; whatever it counts, this member has made."""
        match message:
            case Contribution():
                return replace(message, seal=self.seals.of_contribution(replace(message, payload=payload)))
            case Commit(shard, base, version, contributions=counted) if payload is not None:
                listed = [(c, bytes(SEAL_BYTES)) for c in counted]
                return replace(message, seal=self.seals.of_commit(shard, base, version.digest, listed, payload).pack())
        return message

    async def tell_all(self, message: wire.AnyMessage, payload: memoryview | None = None) -> list[str]:
        """Send a message to every honest node."""
        return list(await asyncio.gather(*(self.tell(node.id, message, payload) for node in self.field.nodes)))

    def _soon(self, to: str, message: wire.AnyMessage, payload: memoryview | None = None) -> None:
        async def tell() -> None:
            await self.tell(to, message, payload)

        self._keep(tell())

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- what it knows, and makes of it

    async def look(self, shard: int = 0) -> tuple[Version, int, Plan]:
        """The present version, term and plan of a shard, which any member may ask for."""
        have = tuple(None for _ in range(SHARDS))
        self.states.pop(shard, None)
        await self.tell(self.field.nodes[0].id, Fetch(have, True, (shard,)))
        await self.until(lambda: shard in self.states, "a state")
        state = self.states[shard]
        self.known[shard] = state.version, state.term, state.plan
        return self.known[shard]

    async def take_part(self, *, works: bool = False) -> None:
        """Be a peer that holds the state and says that it trains: fetch all shards, and present itself. `works`:
        contribute to every round from now on."""
        self.works = works
        for shard in range(SHARDS):
            await self.look(shard)
        self.present = True
        await self.tell_all(Probe(self.summary()))

    async def counted(self) -> None:
        """Wait until the newest commit of each shard has counted its contribution."""
        await self.until(lambda: all(self.id in plan.group for _, _, plan in self.known.values()), "counted", 60.0)

    def summary(self, **changes: Any) -> Summary:
        """What it says of itself: as far as the honest peers, and at work."""
        versions = [self.known[shard][0] for shard in range(SHARDS)]
        epochs = (min(version.epoch for version in versions),)
        summary = Summary(
            self.incarnation, "worker", self.eligible, model_version(versions), epochs, False, speed=self.speed
        )
        return replace(summary, **changes)

    def new_id(self) -> ContributionId:
        """The id of its next contribution."""
        self._sequence += 1
        return ContributionId(self.incarnation, self._sequence)

    def contribution(self, shard: int, **changes: Any) -> Contribution:
        """A contribution on the newest version that it knows."""
        id = self.new_id()
        made = Contribution(shard, self.known[shard][0], id, id, self.weight, self.samples)
        return replace(made, **changes)

    def gradient(self) -> memoryview:
        """A shard's pseudo-gradient."""
        return memoryview(np.full(PART, self.delta, dtype=np.float32)).cast("B")

    def commit(self, shard: int, author: str, **changes: Any) -> Commit:
        """A commit on the newest version that it knows, with a digest that it made up."""
        base, _, plan = self.known[shard]
        version = replace(base, epoch=base.epoch + 1, digest="0" * 32)
        return replace(Commit(shard, base, version, 0, author, (), plan), **changes)

    async def sound_commit(self, shard: int, listed: tuple[Counted, ...], plan: Plan) -> Commit:
        """A commit on the present version with a mean of zeros, which lists what it likes and has the right digest."""
        await self.look(shard)
        state, run = self.states[shard], self.field.run(self.transport.membership.token_salt)
        work = TensorWork(run, torch.zeros(NUMEL))
        filled = work.fill(Fill(state, meta_of(state)))
        work.accept([(shard, filled.digest)])
        base = state.version
        version = Version(base.generation, base.samples + sum(c.samples for c in listed), base.epoch + 1, "")
        commit = Commit(shard, base, version, 0, self.id, listed, plan, ZEROS)
        applied = work.apply(Apply(commit, meta_of(append(state, commit, run.rules)), 0))
        return replace(commit, version=replace(version, digest=applied.digest))

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
"""The payload of a commit or a contribution, all zeros."""
STATE_ZEROS = memoryview(bytes(8 * PART + 4 * LENGTHS_MAX))
"""The payload of a state: θ, the outer momentum, and the lengths of the last means."""
