"""Hand-made messages to a private run over real libp2p: of a member with a client of its own, and of a stranger who
knows an address, the run's name and its token. The honest members go on with equal digests."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from nodes import NUMEL, RUN_ID, SHARDS, Field

from p2p_diloco.core import messages as m
from p2p_diloco.core.lives import incarnation
from p2p_diloco.core.state import State, append, key_of, rooted
from p2p_diloco.core.version import ContributionId
from p2p_diloco.net.interface import Refusal, Unreachable
from p2p_diloco.net.invitation import Invitation
from p2p_diloco.node import wire
from p2p_diloco.node.forms import About
from p2p_diloco.node.headers import Rolls, opened, pack, packed, unpack
from p2p_diloco.node.signatures import Signatures, hash_of
from p2p_diloco.node.swarm import LIMITS
from p2p_diloco.tensors.step_limit import LENGTHS_MAX
from tests.net.members import invitation
from tests.net.swarm import join

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(300)]

GRADIENT = memoryview(np.ones(NUMEL // SHARDS, dtype=np.float32)).cast("B")
STATE_ZEROS = memoryview(bytes(8 * (NUMEL // SHARDS) + 4 * LENGTHS_MAX))
"""The payload of a slice's state: θ, the outer momentum, and the lengths of the last means."""
ENORMOUS = ContributionId(2**62, 1)
TRIES = 6


@pytest.fixture(scope="module")
def field() -> Iterator[Field]:
    """A private run of three honest nodes that train in this process."""
    made = Field()
    try:
        yield made
    finally:
        made.end()


class Client:
    """A transport without a node: it takes in everything, and says what a test makes it say."""

    def __init__(self, field: Field, invited: Invitation | None) -> None:
        self.field, self.invited = field, invited
        self.came: list[m.Message | wire.NodeMessage] = []
        self.state: State | None = None

    async def begin(self) -> None:
        self.transport: Any = await join(
            self, run_id=RUN_ID, initial_peers=self.field.addresses, limits=LIMITS, invitation=self.invited
        )
        self.run = self.field.run(self.field.nodes[0].access.member.token_salt)
        self.rolls, self.id = Rolls(), self.transport.peer_id
        self.signatures = Signatures(self.id, self.transport, self.run.token)
        for node in self.field.nodes:
            await self.transport.introduce(node.id, node.transport.addresses())

    # -- its inbox

    def admit(self, sender: str, header: bytes) -> int:
        return 1 << 20

    async def deliver(self, sender: str, header: bytes, payload: memoryview | None) -> None:
        body = opened(header, self.run.token)
        message = unpack(payload if isinstance(body, int) else body, About(sender, self.run.rules), self.rolls)
        self.came.append(message)
        if isinstance(message, m.Head):
            self.state = message.state
            self.rolls.know(message.state)

    def closed(self, peer: str) -> None:
        pass

    def moving(self, peer: str) -> None:
        pass

    # -- what it says

    async def tell(self, to: str, message: m.Message | wire.NodeMessage, payload: memoryview | None = None) -> str:
        """Send a message; returns an empty text if it was accepted, or the reason why not."""
        if isinstance(message, wire.NodeMessage):
            header = packed(message, self.run.token)
        else:
            about = About(self.id, self.run.rules)
            header, body = pack(self.signatures.signed(message), about, self.run.token)
            payload = payload if body is None else memoryview(body)
        try:
            await self.transport.send(to, header, payload)
        except Refusal as refusal:
            return refusal.reason
        except Unreachable as error:
            return f"unreachable: {error}"
        return ""

    async def tell_all(self, message: m.Message | wire.NodeMessage, payload: memoryview | None = None) -> list[str]:
        return list(await asyncio.gather(*(self.tell(node.id, message, payload) for node in self.field.nodes)))

    async def look(self) -> State:
        """The present state without its tensors, which any member may ask for."""
        told = len(self.got(m.Head))
        await self.tell(self.field.nodes[told % len(self.field.nodes)].id, m.Ask(0))  # each answers only so often
        await self.until(lambda: len(self.got(m.Head)) > told, "a state")
        return self.held

    @property
    def held(self) -> State:
        assert self.state is not None
        return self.state

    def contribution(self, **changes: Any) -> m.Ready:
        """A contribution on the newest version that it knows."""
        id = ContributionId(incarnation(int(time.time() * 1000), 7), 1)
        grant = "" if self.invited is None else self.transport.membership.own.id.hex()
        ready = m.Ready(0, self.held.version, id, id, 1.0, 1, (hash_of(GRADIENT),) * SHARDS, 0.0, True, grant)
        return rooted(replace(ready, **changes))

    def choice(self, *entries: tuple[str, m.Ready], by: str = "") -> m.Choice:
        return m.Choice(by or self.id, 0, entries)

    def commit(self, choice: m.Choice, leader: str = "", **changes: Any) -> m.Commit:
        """The commit of a choice, which follows from the newest version that it knows, with means that nobody has."""
        state, choice = self.held, choice.bare()
        key, hashes = key_of(0, state.version, choice), ("00" * 32,) * SHARDS
        version = append(state, choice, key, hashes, self.run.rules).version
        made = m.Commit(0, state.version, version, 0, leader or self.id, key, choice, hashes, state.plan.owners)
        return replace(made, **changes)

    def messages(self) -> list[tuple[Any, memoryview | None]]:
        """What neither a member nor a stranger may say, on the newest version that it knows."""
        state, ready = self.held, self.contribution()
        raised = replace(state.version, generation=state.version.generation + 1)
        more = replace(state.version, samples=state.version.samples + 1000, epoch=state.version.epoch + 1)
        leader, seal = state.plan.succession[0], b"s" * 72
        of_another = self.field.nodes[1].id, replace(ready, id=ENORMOUS, oldest=ENORMOUS)
        in_its_name = self.choice(of_another, by=leader)
        links = (*state.links, (more.epoch, more.digest))
        return [
            (m.Head(0, replace(state, version=more, links=links)), None),
            *[(m.Part(0, more, number), STATE_ZEROS) for number in range(SHARDS)],
            (self.commit(self.choice((self.id, ready))), None),
            (self.commit(replace(in_its_name, seal=seal[:64]), leader, seal=seal), None),
            (replace(ready, weight=1e9), None),
            (replace(ready, samples=2**40), None),
            (m.Slice(0, ready.base, self.id, ready.id, 0, ready.hashes[0]), GRADIENT),
            (m.Claim(0, state.version, 2**40), None),
            (m.Told((raised,), (((raised.epoch, raised.digest),),)), None),
            (wire.Nudge(state.version.epoch + 2), None),
        ]

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        await self.field.until(condition, 20.0, what)

    def got(self, kind: type) -> list[Any]:
        """The messages of a kind that came."""
        return [message for message in self.came if isinstance(message, kind)]


@contextlib.asynccontextmanager
async def client(field: Field, invited: Invitation | None = None) -> AsyncIterator[Client]:
    """A member's client, or a stranger's: without an invitation."""
    made = Client(field, invited)
    await made.begin()
    try:
        yield made
    finally:
        await made.transport.close()


def test_what_a_member_may_not_say_changes_nothing(field: Field) -> None:
    """States and versions that nobody asked for, commits from outside the plan and in a leader's name, contributions
    with enormous numbers, claims of enormous terms."""

    async def row() -> None:
        async with client(field, invitation(name="mallory")) as member:
            for _ in range(TRIES):
                await member.look()
                for message, payload in member.messages():
                    await member.tell_all(message, payload)
            for why, kind in (("has not signed its commit", m.Commit), ("a number is out of range", m.Ready)):
                telling = asyncio.create_task(field.tells("mallory", why))
                while not telling.done():  # bases change, and a node that computes ignores commits without a reason
                    await member.look()
                    for message, payload in member.messages():
                        if isinstance(message, kind):
                            await member.tell_all(message, payload)
                    await asyncio.wait({telling}, timeout=0.5)
                await telling
            while not (votes := member.got(m.Vote)):  # a row has its own deadline
                await member.tell_all(m.Claim(0, (await member.look()).version, 2**40))
            assert all(vote.holder != member.id and vote.term < 2**20 for vote in votes)
            await field.goes_on()
            state = await member.look()
            assert member.id not in state.roll
            assert state.version.generation == 0
            assert state.version.samples <= len(field.nodes) * state.version.epoch
        assert not member.got(m.Ask)
        assert all(node.memory.theta.abs().min() > 0 for node in field.nodes)

    field.do(row())


def test_a_stranger_reads_and_says_nothing(field: Field) -> None:
    """It is told no version, state or description, and its copies of the run's records show nothing, though it knows
    the keys under which they lie. What it says is refused with one text before it is read, and no status names it."""

    def refused(answers: list[str]) -> None:
        assert all("not a member of this run" in answer or "the stream was closed" in answer for answer in answers)

    async def row() -> None:
        async with client(field) as outside:
            for question in (wire.Describe(), m.Ask(), m.Ask(0), m.Ask(0, tuple(range(SHARDS)))):
                refused(await outside.tell_all(question))
            assert outside.came == []
            member = field.nodes[0].access.member
            for key in (f"{RUN_ID}/config", *(f"{RUN_ID}/peers/{bucket}" for bucket in range(4))):
                assert await outside.transport.fetch(key) == {}
                for value, _ in (await outside.transport.fetch(member.hidden(key))).values():
                    assert not any(word in value for word in (b"sync_every", b"training", b"/ip4/", b"peer_id"))
            assert any([await outside.transport.fetch(member.hidden(f"{RUN_ID}/peers/{b}")) for b in range(4)])
            async with client(field, invitation(name="informant")) as known:
                outside.state = await known.look()
            for message, payload in outside.messages():
                refused(await outside.tell_all(message, payload))
            await field.goes_on()
            told = [refused.peer for status in (await field.statuses()).values() for refused in status.refused]
            assert not any(outside.id[-6:] in peer for peer in told)

    field.do(row())
