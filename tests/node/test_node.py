"""The loop around a replica that a script plays: what goes out, what comes back, and how it ends."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import uvloop

from p2p_diloco.config import RunConfig
from p2p_diloco.core.events import (
    Accept,
    Damaged,
    Delivered,
    Effect,
    Event,
    Load,
    Pause,
    Received,
    Send,
    SendFailed,
    Stepped,
    Wakeup,
)
from p2p_diloco.core.messages import Commit, Contribution, Leave, Plan, State, Want
from p2p_diloco.core.replica import meta_of
from p2p_diloco.core.version import ContributionId, Version
from p2p_diloco.net.interface import Limits, Refusal, Traffic, Unreachable
from p2p_diloco.node import wire
from p2p_diloco.node.deaths import DeathCount
from p2p_diloco.node.events import EventLog, EventQueue
from p2p_diloco.node.history import History
from p2p_diloco.node.ledger import OF_EXCHANGE, Ledger
from p2p_diloco.node.node import Node
from p2p_diloco.node.outbox import Outbox
from p2p_diloco.node.refusals import Refusals
from p2p_diloco.node.run import Run
from p2p_diloco.node.tensor_work import TensorWork
from p2p_diloco.tensors.layout import Layout, ParamSpec
from tests.net.memory import MemoryNetwork
from tests.net.patience import plays

PLAN = Plan(("a",), ("a",))


def state(epoch: int) -> State:
    return State(0, Version(0, 0, epoch, f"d{epoch}"), 0, PLAN, {}, {epoch: f"d{epoch}"})


class Script:
    """In the replica's place: answers each event that was scripted, and remembers all."""

    me = "me"

    def __init__(self) -> None:
        self.collected, self.room = 0, 1
        self.effects: list[list[Effect]] = []
        self.events: list[Event] = []
        self.epoch = 0
        self.work: TensorWork
        self.digest = ""
        self.due = math.inf
        self.roster = SimpleNamespace(workers=lambda: ["worker"])

    def handle(self, event: Event, now: float) -> list[Effect]:
        self.events.append(event)
        return self.effects.pop(0) if self.effects and isinstance(event, Pause) else []

    def next_wakeup(self) -> float:
        return self.due

    def crowded(self, shard: int) -> bool:
        return self.collected >= self.room

    def state(self, shard: int) -> State:
        """One whose digest is that of the tensors, as long as the test does not say otherwise."""
        held = state(self.epoch)
        digest = self.digest or self.work.store.digest(shard, meta_of(held))
        return replace(held, version=replace(held.version, digest=digest))

    def answers(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


class Wires:
    """In the transport's place: what is sent waits for `gate`, then fails if `failure` is set."""

    peer_id, limits, traffic = "me", Limits(), Traffic()

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any, bytes | None]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.failure: Exception | None = None
        self.under_way = 0

    async def send(self, peer: str, header: bytes, payload: memoryview | None = None, **_: Any) -> None:
        self.sent.append((peer, header, None if payload is None else bytes(payload)))
        self.under_way += 1
        try:
            await self.gate.wait()
        finally:
            self.under_way -= 1
        if self.failure is not None:
            raise self.failure


class Reader:
    """In the trainer's place: one that may be reading."""

    def __init__(self) -> None:
        self.reading = asyncio.Event()
        self.on_load: Callable[[], None] = lambda: None

    async def not_reading(self) -> None:
        await self.reading.wait()

    def load(self, effect: Load) -> None:
        self.on_load()


class Unaudited:
    """In the audits' place: nothing is sealed or audited."""

    def made(self, effect: Effect, averaged: Event) -> Event:
        return averaged

    def applied(self, commit: Commit) -> None:
        """Nothing is remembered."""

    def accepted(self, proposals: object) -> None:
        """No lot falls on them."""


class Table:
    """A node with all of these, and its loop running."""

    def __init__(self) -> None:
        run = Run("r", RunConfig(codec="fp32", audit_rate=0.0), Layout.build((ParamSpec("p", (2,), "float32"),), 1))
        self.theta = torch.zeros(2)
        self.replica, self.wires, self.trainer = Script(), Wires(), Reader()
        self.work = self.replica.work = TensorWork(run, self.theta)
        self.run, self.events, self.outbox = run, EventQueue(), Outbox(self.wires)  # type: ignore[arg-type]
        common: Any = SimpleNamespace(
            run=run,
            replica=self.replica,
            work=self.work,
            events=self.events,
            event_log=EventLog("me"),
            refusals=Refusals(),
            outbox=self.outbox,
            ledger=Ledger(OF_EXCHANGE),
            history=History(),
            deaths=DeathCount(self.wires, "r", str, int),  # type: ignore[arg-type]
        )
        self.node = Node(common, self.trainer, Unaudited())  # type: ignore[arg-type]
        self.loop = asyncio.create_task(self.node.consume())

    async def carry_out(self, *effects: Effect) -> None:
        self.replica.effects.append([*effects])
        await self.events.feed(Pause(True))

    async def answered(self, kind: type[Event], count: int = 1) -> list[Any]:
        while len(found := self.replica.answers(kind)) < count:
            await asyncio.sleep(0.001)
        return found

    def states(self) -> list[tuple[int, list[float]]]:
        """Epoch and θ of the states that have left."""
        return [
            (wire.unpack(header, self.run.token).version.epoch, [*memoryview(payload).cast("f")][:2])
            for _, header, payload in self.wires.sent
            if payload is not None
        ]  # fmt: skip


def at_table(test: Callable[[Table], Awaitable[None]], run: Callable[..., Any] = asyncio.run) -> None:
    async def life() -> None:
        table = Table()
        try:
            await asyncio.wait_for(test(table), 60.0)
        finally:
            table.loop.cancel()
            await asyncio.gather(table.loop, return_exceptions=True)

    run(life())


@pytest.mark.parametrize(
    ("failure", "gone"),
    [
        (Unreachable("refused", refused=True), True),
        (Unreachable("the link broke"), False),
        (Refusal("no"), False),
        (RuntimeError("what nobody thought of"), False),
    ],
)
def test_every_message_is_answered(failure: Exception, gone: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever becomes of a message the replica is told once; that the peer is gone only after a refused dial."""

    async def test(table: Table) -> None:
        table.wires.failure = failure
        await table.carry_out(Send("b", Leave(1)), Send("b", state(0)))
        assert [f.gone for f in await table.answered(SendFailed, 2)] == [gone, gone]
        table.wires.failure = None
        await table.carry_out(Send("b", Leave(1)))
        assert await table.answered(Delivered) == [Delivered("b", Leave(1))]

    at_table(test)
    assert ("could not be sent" in caplog.text) == isinstance(failure, RuntimeError)


@pytest.mark.parametrize("sign", ["message", "transfer"])
def test_a_refused_dial_that_began_before_a_sign_of_life_is_no_proof_of_death(sign: str) -> None:
    """A peer that has come up meanwhile is alive. A later dial that is refused proves that it is gone."""

    async def test(table: Table) -> None:
        table.wires.failure = Unreachable("refused", refused=True)
        table.wires.gate.clear()
        await table.carry_out(Send("b", Leave(1)), Send("c", Leave(1)))
        while table.wires.under_way < 2:
            await asyncio.sleep(0.001)
        if sign == "message":
            await table.node.receive("b", Leave(1))
        else:
            table.node.moving("b")
        table.wires.gate.set()
        assert {f.to: f.gone for f in await table.answered(SendFailed, 2)} == {"b": False, "c": True}
        await table.carry_out(Send("b", Leave(1)))
        assert (await table.answered(SendFailed, 3))[-1] == SendFailed("b", Leave(1), gone=True)

    at_table(test)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("ahead_s", [0.02, 0.0])
def test_it_wakes_as_soon_as_the_replica_asks(run: Callable[..., Any], ahead_s: float) -> None:
    """Also if that was later before, and if it is due already; on the node's loop as on asyncio's."""

    async def test(table: Table) -> None:
        now = asyncio.get_running_loop().time()
        for table.replica.due in (now + 1000.0, now + ahead_s):
            for _ in range(3):
                table.events.post(Pause(True))
            await table.carry_out()
        await table.answered(Wakeup)
        table.replica.due = math.inf

    at_table(test, run)


def test_what_cant_be_written_is_a_failed_send(caplog: pytest.LogCaptureFixture) -> None:
    async def test(table: Table) -> None:
        message = Want(0, Version(0, 2**70, 0, "d"))
        await table.carry_out(Send("b", message))
        assert await table.answered(SendFailed) == [SendFailed("b", message, gone=False)]
        assert table.wires.sent == []

    at_table(test)
    assert "can't be encoded" in caplog.text


@plays(at_table)
async def test_a_wakeup_that_waits_for_its_turn_is_not_doubled(table: Table) -> None:
    """However many events come before it; once it is fed, the next one may come."""
    replica = table.replica
    replica.next_wakeup = lambda: math.inf if len(replica.answers(Wakeup)) == 2 else 0.0  # type: ignore[method-assign]
    for _ in range(20):
        table.events.post(Stepped(0.1))
    await table.events.feed(Stepped(0.1))
    for _ in range(60):
        await asyncio.sleep(0.0)
    assert len(replica.answers(Stepped)) == 21
    assert len(replica.answers(Wakeup)) == 2


@plays(at_table)
async def test_a_state_leaves_as_it_is_then(table: Table) -> None:
    """States wait for their turn without memory of their own; asked for twice they go once, with the version and the
    tensors of the moment, and never while the two disagree.
    """
    table.wires.gate.clear()
    await table.carry_out(*(Send("b", Leave(1)) for _ in range(9)))  # no payloads: they hold nothing up
    table.outbox._rounds.__enter__()  # a payload of a round is under way
    await table.carry_out(Send("b", state(0)), Send("b", state(0)))
    assert await table.answered(SendFailed) == [SendFailed("b", state(0), gone=False)]
    proposal = table.work.store.propose(0, torch.ones(2).numpy().tobytes(), "fp32", b"")
    table.work._proposals[0, "new"] = proposal
    table.replica.epoch = 1
    accepting = asyncio.create_task(table.carry_out(Accept(((0, "new"),))))
    await asyncio.sleep(0.01)
    table.outbox._rounds.__exit__()
    await asyncio.sleep(0.01)
    assert table.states() == []
    table.trainer.reading.set()
    await accepting
    table.wires.gate.set()
    await table.answered(Delivered, 10)
    assert table.states() == [(1, proposal.theta.tolist())]
    table.wires.gate.clear()
    await table.carry_out(Send("b", state(1)))
    await asyncio.sleep(0.01)
    await table.carry_out(Send("b", state(1)))  # the first is on its way
    assert await table.answered(SendFailed, 2) == [SendFailed("b", state(s), gone=False) for s in (0, 1)]
    table.wires.gate.set()
    await table.answered(Delivered, 11)
    await table.carry_out(Send("b", state(1)))
    await table.answered(Delivered, 12)
    assert len(table.states()) == 3


@plays(at_table)
async def test_a_commit_leaves_first_for_those_that_take_part(table: Table) -> None:
    """A peer that the plan does not name, and that holds no state, still catches up: what it is sent gives way to the
    payloads of rounds. One that works is about to take part, and its commit does not."""
    table.wires.gate.clear()
    base, version = state(0).version, state(1).version
    commit = Commit(0, base, version, 0, "me", (), Plan(("a", "b"), ("c",)), memoryview(b"p"))
    await table.carry_out(*(Send(peer, commit) for peer in ("newcomer", "a", "worker", "c")))
    await asyncio.sleep(0.01)
    assert [peer for peer, _, _ in table.wires.sent] == ["a", "worker", "c"]
    table.wires.gate.set()
    await table.answered(Delivered, 4)
    assert [(peer, payload) for peer, _, payload in table.wires.sent][3:] == [("newcomer", b"p")]


@plays(at_table)
async def test_no_more_commits_wait_for_a_slow_peer_than_it_would_keep(table: Table) -> None:
    """The oldest is given up for the newest, shard by shard, and the replica told; so is a commit put in twice."""
    kept = table.run.rules.commits_kept
    table.wires.gate.clear()
    commits = [
        Commit(0, state(n).version, state(n + 1).version, 0, "me", (), PLAN, memoryview(b"%d" % n))
        for n in range(kept + 5)
    ]
    for commit in commits:
        await table.carry_out(Send("slow", commit))
        await asyncio.sleep(0.005)  # the first is under way
    failed = [(f.message.base.epoch, f.gone) for f in await table.answered(SendFailed, 4)]
    assert failed == [(n, False) for n in range(1, 5)]
    await table.carry_out(Send("slow", commits[-1]))
    assert (await table.answered(SendFailed, 5))[4].message == commits[-1]
    table.wires.gate.set()
    delivered = [d.message.base.epoch for d in await table.answered(Delivered, kept + 1)]
    assert delivered == [0, *range(5, kept + 5)]


@plays(at_table)
async def test_a_contribution_is_not_on_its_way_when_the_trainer_writes_the_next_one(table: Table) -> None:
    """It goes out from the trainer's memory; whoever takes it so late can't count it. Another shard's goes on."""
    table.wires.gate.clear()
    id = ContributionId(1, 1)
    late, other = (Contribution(s, state(0).version, id, id, 1.0, 1, memoryview(bytes(8))) for s in (0, 1))
    await table.carry_out(Send("a", late), Send("b", late), Send("a", other))
    await asyncio.sleep(0.01)
    assert table.wires.under_way == 3
    seen: list[int] = []
    table.trainer.on_load = lambda: seen.append(table.wires.under_way)
    await table.carry_out(Load((), (0,)))
    assert seen == [1]
    assert [failed.to for failed in await table.answered(SendFailed, 2)] == ["a", "b"]
    table.wires.gate.set()
    assert [done.message.shard for done in await table.answered(Delivered)] == [1]


@plays(at_table)
async def test_a_damaged_state_does_not_leave(table: Table) -> None:
    """Nobody could use it; the replica is told, so that it mends its state."""
    table.replica.digest = "another"
    await table.carry_out(Send("b", state(0)))
    assert [failed.gone for failed in await table.answered(SendFailed)] == [False]
    assert await table.answered(Damaged) == [Damaged(0, table.replica.state(0).version)]
    assert table.states() == []


@plays(at_table)
async def test_a_contribution_is_handed_on_once_there_is_room(table: Table) -> None:
    """Its sender's answer waits meanwhile; whatever else comes does not."""
    id = ContributionId(1, 1)
    contribution = Contribution(0, state(0).version, id, id, 1.0, 1, memoryview(bytes(8)))
    table.node._backpressure._patience_s = 60.0
    table.replica.collected = table.replica.room = 3
    waiting = asyncio.create_task(table.node.receive("b", contribution))
    await table.node.receive("b", Leave(1))
    await asyncio.sleep(0.01)
    assert [r.message for r in table.replica.answers(Received)] == [Leave(1)]
    assert not waiting.done()
    table.replica.collected = 2
    await table.events.feed(Stepped(0.1))
    await waiting
    assert [r.message for r in table.replica.answers(Received)] == [Leave(1), contribution]


def test_who_waits_at_the_end_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Messages that the replica won't handle any more are refused at once, and nothing is left for asyncio to
    complain of.
    """

    async def test(table: Table) -> None:
        table.work._proposals[0, "new"] = table.work.store.propose(0, bytes(8), "fp32", b"")
        waiting = [asyncio.create_task(table.carry_out(Accept(((0, "new"),)))) for _ in range(3)]
        await asyncio.sleep(0.01)
        table.loop.cancel()
        for task in waiting:
            with pytest.raises(Refusal, match="leaving"):
                await asyncio.wait_for(task, 30.0)
        with pytest.raises(Refusal, match="leaving"):
            await asyncio.wait_for(table.node.receive("b", Leave(1)), 30.0)

    at_table(test)
    assert caplog.records == []


def test_a_link_that_is_reset_is_no_death(
    memory_peer: Any, quick: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Several messages lost at once with one link leave a living peer alive; a killed one is gone in no time."""

    async def life() -> None:
        network = MemoryNetwork()
        a, b = memory_peer(network, "a", {**quick, "heartbeat_timeout": 30.0}), memory_peer(network, "b")
        await a.enter()
        await b.enter()
        send, resets = a.transport.send, [5]

        async def unsteady(peer: str, header: bytes, payload: memoryview | None = None) -> None:
            if resets[0]:
                resets[0] -= 1
                a.inbox.closed(peer)
                raise Unreachable("b: the link broke")
            await send(peer, header, payload)

        a.transport.send = unsteady
        while resets[0]:
            await asyncio.sleep(0.01)
        assert (await a.ask("ask", "told"))["peers"] == ["a", "b"]
        assert "died" not in caplog.text
        network.kill("b")
        for _ in range(100):
            if (await a.ask("ask", "told"))["peers"] == ["a"]:
                break
            await asyncio.sleep(0.01)
        assert "died" in caplog.text
        await b.stop()
        await a.stop()
        await a.stop()

    with caplog.at_level("INFO"):
        asyncio.run(life())
