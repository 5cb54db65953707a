"""The loop around a replica that a script plays: what goes out, what comes back, and how it ends."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import uvloop

from p2p_diloco.config import RunConfig
from p2p_diloco.core import events as e
from p2p_diloco.core.messages import Leave, Mean, Slice, Want, What
from p2p_diloco.core.version import ContributionId, Version
from p2p_diloco.net.interface import Refusal, Unreachable
from p2p_diloco.node.common import EventQueue
from p2p_diloco.node.history import History
from p2p_diloco.node.inbox import Inbox
from p2p_diloco.node.ledger import OF_EXCHANGE, Ledger
from p2p_diloco.node.node import Node
from p2p_diloco.node.outbox import Outbox
from p2p_diloco.node.run import Run
from p2p_diloco.node.slice_work import SliceWork
from p2p_diloco.tensors.layout import Layout, ParamSpec
from tests.net.patience import plays, until
from tests.node.test_outbox import Slow

BASE = Version(0, 0, 0, "0" * 32)


class Script:
    """In the replica's place: answers each event that was scripted, and remembers all."""

    me = "me"

    def __init__(self) -> None:
        self.effects: list[list[e.Effect]] = []
        self.events: list[e.Event] = []
        self.due = math.inf
        self.logs: list[Any] = []
        self.fetching = SimpleNamespace(fetches={})

    def handle(self, event: e.Event, now: float) -> list[e.Effect]:
        self.events.append(event)
        return self.effects.pop(0) if self.effects and isinstance(event, e.Pause) else []

    def next_wakeup(self) -> float:
        return self.due

    def answers(self, kind: type[e.Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


class Reader:
    """In the trainer's place: one that may be reading."""

    def __init__(self) -> None:
        self.reading = asyncio.Event()
        self.on_load: Callable[[], None] = lambda: None

    async def not_reading(self) -> None:
        await self.reading.wait()

    def load(self, effect: e.Load) -> None:
        self.on_load()


def common_of(run: Run, replica: Any, work: SliceWork, outbox: Outbox) -> Any:
    """In the place of a node's `Common`: what its loop uses."""
    inbox = Inbox()
    of = {"run": run, "replica": replica, "work": work, "outbox": outbox, "transport": outbox._transport}
    return SimpleNamespace(
        **of,
        signatures=SimpleNamespace(signed=lambda message: message),
        inbox=inbox,
        refusals=inbox.refusals,
        events=EventQueue(),
        history=History(),
        ledger=Ledger(OF_EXCHANGE),
        event_log=SimpleNamespace(named=lambda text: text, note=lambda kind, text: None),
        shared=SimpleNamespace(reconnections=0),
        deaths=SimpleNamespace(notice=lambda death: None),
    )


class Table:
    """A node with all of these, and its loop running."""

    def __init__(self) -> None:
        run = Run("r", RunConfig(codec="fp32", audit_rate=0.0), Layout.build((ParamSpec("p", (2,), "float32"),), 1))
        self.replica, self.wires, self.trainer = Script(), Slow(), Reader()
        self.wires.let_go.set()
        work = SliceWork(run, torch.zeros(2), lambda *of: b"")
        outbox = Outbox(self.wires)  # type: ignore[arg-type]
        common = common_of(run, self.replica, work, outbox)
        audits: Any = SimpleNamespace(made=lambda *_: None, applied=lambda effect: None)
        self.node = Node(common, self.trainer, audits, lambda: None)  # type: ignore[arg-type]
        self.events = self.node.events
        self.loop = asyncio.create_task(self.node.consume())

    async def carry_out(self, *effects: e.Effect) -> None:
        self.replica.effects.append([*effects])
        await self.events.feed(e.Pause(True))

    async def answered(self, kind: type[e.Event], count: int = 1) -> list[Any]:
        while len(found := self.replica.answers(kind)) < count:
            await asyncio.sleep(0.001)
        return found


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
@plays(at_table)
async def test_every_message_is_answered(
    table: Table, failure: Exception, gone: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever becomes of a message the replica is told once; that the peer is gone only after a refused dial."""
    table.wires.failure = failure
    await table.carry_out(e.Send("b", Leave(1)), e.Send("b", Leave(2)))
    assert [f.gone for f in await table.answered(e.SendFailed, 2)] == [gone, gone]
    table.wires.failure = None
    await table.carry_out(e.Send("b", Leave(1)))
    assert await table.answered(e.Delivered) == [e.Delivered("b", Leave(1))]
    assert ("could not be sent" in caplog.text) == isinstance(failure, RuntimeError)


@pytest.mark.parametrize("sign", ["message", "transfer"])
@plays(at_table)
async def test_a_refused_dial_that_began_before_a_sign_of_life_is_no_proof_of_death(table: Table, sign: str) -> None:
    """A peer that has come up meanwhile is alive. A later dial that is refused proves that it is gone."""
    table.wires.failure = Unreachable("refused", refused=True)
    table.wires.let_go.clear()
    await table.carry_out(e.Send("b", Leave(1)), e.Send("c", Leave(1)))
    await until(lambda: len(table.wires.under_way) == 2)
    if sign == "message":
        await table.node.receive("b", Leave(1))
    else:
        table.node.moving("b")
    table.wires.let_go.set()
    assert {f.to: f.gone for f in await table.answered(e.SendFailed, 2)} == {"b": False, "c": True}
    await table.carry_out(e.Send("b", Leave(1)))
    assert (await table.answered(e.SendFailed, 3))[-1] == e.SendFailed("b", Leave(1), gone=True)


@plays(at_table)
async def test_tensors_on_their_way_to_a_peer_are_not_sent_to_it_again(table: Table) -> None:
    """On a slow link a peer asks again for what is coming. Afterwards it may have it once more: its answer got lost."""
    mean = Mean(0, BASE, "0" * 32, 0, "0" * 64, "me", memoryview(bytes(8)), bytes(64))
    table.wires.let_go.clear()
    await table.carry_out(e.Send("b", mean), e.Send("b", mean), e.Send("c", mean))
    await until(lambda: len(table.wires.under_way) == 2)
    table.wires.let_go.set()
    await table.answered(e.Delivered, 2)
    assert [to for to, _ in table.wires.sent] == ["b", "c"]
    await table.carry_out(e.Send("b", mean))
    await table.answered(e.Delivered, 3)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("ahead_s", [0.02, 0.0])
def test_it_wakes_as_soon_as_the_replica_asks(run: Callable[..., Any], ahead_s: float) -> None:
    """Also if that was later before, and if it is due already; on the node's loop as on asyncio's."""

    async def test(table: Table) -> None:
        now = asyncio.get_running_loop().time()
        for table.replica.due in (now + 1000.0, now + ahead_s):
            for _ in range(3):
                table.events.post(e.Pause(True))
            await table.carry_out()
        await table.answered(e.Wakeup)
        table.replica.due = math.inf

    at_table(test, run)


@plays(at_table)
async def test_what_cant_be_written_is_a_failed_send(table: Table, caplog: pytest.LogCaptureFixture) -> None:
    message = Want(0, Version(0, 2**70, 0, "0" * 32), What.MEANS)
    await table.carry_out(e.Send("b", message))
    assert await table.answered(e.SendFailed) == [e.SendFailed("b", message, gone=False)]
    assert table.wires.sent == []
    assert "can't be encoded" in caplog.text


@plays(at_table)
async def test_a_wakeup_that_waits_for_its_turn_is_not_doubled(table: Table) -> None:
    """However many events come before it; once it is fed, the next one may come."""
    replica = table.replica
    replica.next_wakeup = lambda: math.inf if len(replica.answers(e.Wakeup)) == 2 else 0.0  # type: ignore[method-assign]
    for _ in range(20):
        table.events.post(e.Stepped(0.1))
    await table.events.feed(e.Stepped(0.1))
    for _ in range(60):
        await asyncio.sleep(0.0)
    assert len(replica.answers(e.Stepped)) == 21
    assert len(replica.answers(e.Wakeup)) == 2


@plays(at_table)
async def test_a_slice_is_not_on_its_way_when_the_next_round_of_its_fragment_begins(table: Table) -> None:
    """Whoever takes it so late can't count it. Another fragment's goes on."""
    table.wires.let_go.clear()
    late, other = (Slice(f, BASE, "me", ContributionId(1, 1), 0, "h", memoryview(bytes(8))) for f in (0, 1))
    await table.carry_out(e.Send("a", late), e.Send("b", late), e.Send("a", other))
    await asyncio.sleep(0.01)
    assert len(table.wires.under_way) == 3
    seen: list[int] = []
    table.trainer.on_load = lambda: seen.append(len(table.wires.under_way))
    await table.carry_out(e.Load((e.Loaded(0, BASE, None, True),), 0))
    assert seen == [1]
    assert [failed.to for failed in await table.answered(e.SendFailed, 2)] == ["a", "b"]
    table.wires.let_go.set()
    assert [done.message.fragment for done in await table.answered(e.Delivered)] == [1]


def test_who_waits_at_the_end_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Messages that the replica won't handle any more are refused at once, and nothing is left for asyncio to
    complain of.
    """

    async def test(table: Table) -> None:
        waiting = [asyncio.create_task(table.carry_out(e.Accept(()))) for _ in range(3)]
        await asyncio.sleep(0.01)
        table.loop.cancel()
        for task in waiting:
            with pytest.raises(Refusal, match="leaving"):
                await asyncio.wait_for(task, 30.0)
        with pytest.raises(Refusal, match="leaving"):
            await asyncio.wait_for(table.node.receive("b", Leave(1)), 30.0)

    at_table(test)
    assert caplog.records == []
