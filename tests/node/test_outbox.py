"""Messages on their way out: what goes at once, what waits for its turn, and what gives way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from p2p_diloco.net.interface import Limits, Refusal, Traffic, Unreachable, Written, unnoticed
from p2p_diloco.node import outbox as outboxes
from p2p_diloco.node.outbox import BULK_AT_ONCE, Outbox
from tests.net.clocks import ByHand, by_hand
from tests.net.patience import plays


class Slow:
    """A transport on which everything takes until it is let go, and then fails if `failure` is set."""

    peer_id, limits, traffic = "me", Limits(), Traffic()

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes]] = []
        self.under_way: list[tuple[str, bytes]] = []
        self.failure: Exception | None = None
        self.writes = False
        self.let_go = asyncio.Event()
        self.clock: ByHand

    async def send(
        self, peer: str, header: bytes, payload: memoryview | None = None, *, written: Written = unnoticed
    ) -> None:
        self.sent.append((peer, header))
        self.under_way.append((peer, header))
        if self.writes:
            written()
        try:
            await self.let_go.wait()
        finally:
            self.under_way.remove((peer, header))
        if self.failure is not None:
            raise self.failure


PAYLOAD, STATE = memoryview(b"payload"), memoryview(b"state")


def state(header: bytes) -> Callable[[], Awaitable[tuple[bytes, memoryview]]]:
    async def make() -> tuple[bytes, memoryview]:
        return header, STATE

    return make


class Desk:
    """An outbox, its wires, and how each message that was put into it has ended."""

    def __init__(self, *, gives_way: bool) -> None:
        self.wires, self.answers = Slow(), list[Any]()
        self.box = Outbox(self.wires, gives_way=gives_way)  # type: ignore[arg-type]

    def put(self, to: str, header: bytes, payload: memoryview | None = PAYLOAD, key: Any = None, **more: Any) -> None:
        self.box.put(to, header, payload, self.answers.append, key, **more)

    def put_late(self, to: str, header: bytes) -> None:
        """Put a state into it."""
        self.box.put_late(to, state(header), self.answers.append)

    async def goes_on(self) -> None:
        """Let what is under way be answered, and what follows leave."""
        self.wires.let_go.set()
        await asyncio.sleep(0)
        self.wires.let_go.clear()
        await self.passes(0.01)

    async def passes(self, seconds: float) -> None:
        await self.wires.clock.passes(seconds)

    async def is_not_drained(self) -> bool:
        draining = asyncio.ensure_future(self.box.drained(0.01))
        await self.wires.clock.over(draining, step_s=0.01)
        return not draining.result()


def played(test: Callable[[Desk], Awaitable[None]], gives_way: bool = True) -> None:
    async def life() -> None:
        with by_hand() as clock:
            desk = Desk(gives_way=gives_way)
            desk.wires.clock = clock
            await test(desk)
        desk.box.close()
        await desk.box.emptied(1.0)

    asyncio.run(life())


@plays(played)
async def test_who_wants_to_know_is_told_while_a_rounds_payload_goes(desk: Desk) -> None:
    """From when it is put here until it is taken; not of words, nor of what is for somebody who catches up."""
    going = 0

    @contextmanager
    def sending() -> Iterator[None]:
        nonlocal going
        going += 1
        yield
        going -= 1

    desk.box._sending = sending
    desk.put("a", b"words", None)
    desk.put_late("a", b"state")
    await desk.passes(0.01)
    assert (len(desk.wires.under_way), going) == (2, 0)
    for n in range(BULK_AT_ONCE + 1):
        desk.put("b", b"%d" % n)
    await desk.passes(0.01)
    assert going == BULK_AT_ONCE + 1
    desk.wires.let_go.set()
    await desk.box.emptied(1.0)
    assert going == 0


@plays(played)
async def test_so_many_payloads_go_to_a_peer_at_once(desk: Desk) -> None:
    """The rest waits for its turn; words without a payload pass it, and so do payloads to others."""
    for n in range(BULK_AT_ONCE + 1):
        desk.put("a", b"%d" % n)
    desk.put("a", b"word", None)
    desk.put("b", b"other")
    await desk.passes(0.01)
    bulk = [("a", b"%d" % n) for n in range(BULK_AT_ONCE)]
    assert sorted(desk.wires.under_way) == [*bulk, ("a", b"word"), ("b", b"other")]
    assert await desk.is_not_drained()
    desk.wires.let_go.set()
    assert await desk.box.drained(1.0)
    await desk.box.emptied(1.0)
    assert desk.answers == [None] * (BULK_AT_ONCE + 3)


@plays(played)
async def test_written_payloads_keep_no_others_waiting(desk: Desk) -> None:
    """Once the transport has written a payload the next one may leave, though none is answered yet."""
    desk.wires.writes = True
    for n in range(3 * BULK_AT_ONCE):
        desk.put("a", b"%d" % n)
    await desk.passes(0.01)
    assert desk.wires.under_way == [("a", b"%d" % n) for n in range(3 * BULK_AT_ONCE)]
    assert desk.answers == []


@plays(played)
async def test_a_state_gives_way_to_rounds(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves once no round's payload is under way; to each peer one at a time if they are long, and none waits for
    another's.
    """
    monkeypatch.setattr(outboxes, "LATE_BYTES", len(STATE))
    desk.put("a", b"round")
    desk.put_late("b", b"one")
    desk.put_late("b", b"two")
    desk.put_late("c", b"other")
    await desk.passes(0.01)
    assert desk.wires.under_way == [("a", b"round")]
    await desk.goes_on()
    assert desk.wires.under_way == [("b", b"one"), ("c", b"other")]
    assert await desk.is_not_drained()
    desk.wires.let_go.set()
    assert await desk.box.drained(1.0)
    assert desk.answers == [None] * 4


@plays(played)
async def test_short_states_leave_together(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as make LATE_BYTES are under way to a peer at a time; the next ones leave when all of them are answered.
    One that can't be made is answered with the reason, and the others leave.
    """
    monkeypatch.setattr(outboxes, "LATE_BYTES", 2 * len(STATE))

    async def cannot() -> tuple[bytes, memoryview]:
        raise Refusal("damaged")

    desk.box.put_late("a", cannot, desk.answers.append)
    for n in range(5):
        desk.put_late("a", b"%d" % n)
    await desk.passes(0.01)
    assert [type(answer) for answer in desk.answers] == [Refusal]
    assert desk.wires.under_way == [("a", b"0"), ("a", b"1")]
    await desk.goes_on()
    assert desk.wires.under_way == [("a", b"2"), ("a", b"3")]
    desk.wires.let_go.set()
    assert await desk.box.drained(1.0)
    assert desk.answers[1:] == [None] * 5


@plays(played)
async def test_a_state_that_cannot_be_made_holds_up_no_later_one(desk: Desk) -> None:
    """Whatever the reason, and also if it is alone in the queue: its sender is told."""

    async def broken() -> tuple[bytes, memoryview]:
        raise ValueError("broken")

    desk.box.put_late("a", broken, desk.answers.append)
    await desk.passes(0.01)
    assert [type(answer) for answer in desk.answers] == [Unreachable]
    desk.put_late("a", b"next")
    await desk.passes(0.01)
    assert desk.wires.under_way == [("a", b"next")]


@plays(played)
async def test_a_newer_queued_message_replaces_an_older_one(desk: Desk) -> None:
    """Under one key one waits, the newest, behind what came before it; who put the older is told."""
    for n in range(9):
        desk.box.put_late("a", state(b"%d" % n), lambda outcome, n=n: desk.answers.append((n, outcome)), key=n % 2)
        await desk.passes(0.01)  # the first is under way
    desk.box.put_late("a", state(b"last"), lambda outcome: desk.answers.append(("last", outcome)))
    assert [n for n, outcome in desk.answers if isinstance(outcome, Refusal)] == [1, 2, 3, 4, 5, 6]
    desk.answers.clear()
    desk.wires.let_go.set()
    assert await desk.box.drained(1.0)
    assert desk.answers == [(0, None), (7, None), (8, None), ("last", None)]
    assert not desk.box._lines


@plays(played)
async def test_a_state_does_not_give_way_for_ever(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds without a gap don't shut a newcomer out."""
    monkeypatch.setattr(outboxes, "GIVE_WAY_S", 0.05)
    desk.put("a", b"round")
    desk.put_late("b", b"state")
    await desk.passes(0.2)
    assert sorted(desk.wires.under_way) == [("a", b"round"), ("b", b"state")]


@plays(played)
async def test_a_state_gives_way_by_its_share(desk: Desk) -> None:
    """What went fast waits for a short time only, so that a newcomer has a share of any link."""
    desk.put_late("b", b"first")
    await desk.passes(0.05)
    desk.wires.let_go.set()
    await desk.box.emptied(1.0)
    desk.wires.let_go.clear()
    desk.put("a", b"round")
    desk.put_late("b", b"second")
    await desk.passes(0.01)
    assert desk.wires.under_way == [("a", b"round")]
    await desk.passes(0.5)
    assert sorted(desk.wires.under_way) == [("a", b"round"), ("b", b"second")]


@plays(played)
async def test_what_is_withdrawn_is_on_its_way_no_more(desk: Desk) -> None:
    """Nor waits for its turn; each is answered for once. What goes under another key goes on, and so does what comes
    later."""
    others: list[Any] = []
    for n in range(BULK_AT_ONCE + 1):
        desk.put("a", b"%d" % n, key=7)
    desk.box.put("b", b"other", PAYLOAD, others.append, 8)
    await desk.passes(0.01)
    assert len(desk.wires.under_way) == BULK_AT_ONCE + 1
    await desk.box.withdraw(7)
    assert desk.wires.under_way == [("b", b"other")]
    assert [type(answer) for answer in desk.answers] == [Refusal] * (BULK_AT_ONCE + 1)
    desk.box.put("a", b"later", PAYLOAD, others.append, 7)
    await desk.passes(0.01)
    assert ("a", b"later") in desk.wires.under_way
    desk.wires.let_go.set()
    await desk.box.emptied(1.0)
    assert others == [None, None]
    assert len(desk.answers) == BULK_AT_ONCE + 1


@plays(partial(played, gives_way=False))
async def test_without_rounds_a_state_does_not_wait_for_payloads(desk: Desk) -> None:
    """In asynchronous mode it is an answer that somebody's training waits for."""
    desk.put("b", b"payload")
    desk.put_late("c", b"state")
    await desk.passes(0.05)
    assert sorted(desk.wires.under_way) == [("b", b"payload"), ("c", b"state")]
