"""Messages on their way out: what goes at once, what waits for its turn, and what gives way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from p2p_diloco.net.interface import Limits, Refusal, Traffic, Written, unnoticed
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


def played(test: Callable[[Outbox, Slow, list[Any]], Awaitable[None]], gives_way: bool = True) -> None:
    async def life() -> None:
        wires, answers = Slow(), list[Any]()
        with by_hand() as wires.clock:
            box = Outbox(wires, gives_way=gives_way)  # type: ignore[arg-type]
            await test(box, wires, answers)
        box.close()
        await box.emptied(1.0)

    asyncio.run(life())


def state(header: bytes) -> Callable[[], Awaitable[tuple[bytes, memoryview]]]:
    async def make() -> tuple[bytes, memoryview]:
        return header, STATE

    return make


PAYLOAD, STATE = memoryview(b"payload"), memoryview(b"state")


@plays(played, 3)
async def test_who_wants_to_know_is_told_while_a_rounds_payload_goes(
    box: Outbox, wires: Slow, answers: list[Any]
) -> None:
    """From when it is put here until it is taken; not of words, nor of what is for somebody who catches up."""
    going = 0

    @contextmanager
    def sending() -> Iterator[None]:
        nonlocal going
        going += 1
        yield
        going -= 1

    box._sending = sending
    box.put("a", b"words", None, answers.append)
    box.put_late("a", state(b"state"), answers.append)
    await wires.clock.passes(0.01)
    assert (len(wires.under_way), going) == (2, 0)
    for n in range(BULK_AT_ONCE + 1):
        box.put("b", b"%d" % n, PAYLOAD, answers.append)
    await wires.clock.passes(0.01)
    assert going == BULK_AT_ONCE + 1
    wires.let_go.set()
    await box.emptied(1.0)
    assert going == 0


@plays(played, 3)
async def test_so_many_payloads_go_to_a_peer_at_once(box: Outbox, wires: Slow, answers: list[Any]) -> None:
    """The rest waits for its turn; words without a payload pass it, and so do payloads to others, and what has to be
    held."""
    for n in range(BULK_AT_ONCE + 1):
        box.put("a", b"%d" % n, PAYLOAD, answers.append)
    box.put("a", b"word", None, answers.append)
    box.put("b", b"other", PAYLOAD, answers.append)
    box.put("a", b"urgent", PAYLOAD, answers.append, urgent=True)
    await wires.clock.passes(0.01)
    bulk = [("a", b"%d" % n) for n in range(BULK_AT_ONCE)]
    assert sorted(wires.under_way) == [*bulk, ("a", b"urgent"), ("a", b"word"), ("b", b"other")]
    draining = asyncio.ensure_future(box.drained(0.01))
    await wires.clock.over(draining, step_s=0.01)
    assert not draining.result()
    wires.let_go.set()
    assert await box.drained(1.0)
    await box.emptied(1.0)
    assert answers == [None] * (BULK_AT_ONCE + 4)


@plays(played, 3)
async def test_written_payloads_keep_no_others_waiting(box: Outbox, wires: Slow, answers: list[Any]) -> None:
    """Once the transport has written a payload the next one may leave, though none is answered yet."""
    wires.writes = True
    for n in range(3 * BULK_AT_ONCE):
        box.put("a", b"%d" % n, PAYLOAD, answers.append)
    await wires.clock.passes(0.01)
    assert wires.under_way == [("a", b"%d" % n) for n in range(3 * BULK_AT_ONCE)]
    assert answers == []


@plays(played, 3)
async def test_a_state_gives_way_to_rounds(
    box: Outbox, wires: Slow, answers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves once no round's payload is under way; to each peer one at a time if they are long, and none waits for
    another's.
    """
    monkeypatch.setattr(outboxes, "LATE_BYTES", len(STATE))
    box.put("a", b"round", PAYLOAD, answers.append)
    box.put_late("b", state(b"one"), answers.append)
    box.put_late("b", state(b"two"), answers.append)
    box.put_late("c", state(b"other"), answers.append)
    await wires.clock.passes(0.01)
    assert wires.under_way == [("a", b"round")]
    wires.let_go.set()
    await asyncio.sleep(0)
    wires.let_go.clear()
    await wires.clock.passes(0.01)
    assert wires.under_way == [("b", b"one"), ("c", b"other")]
    draining = asyncio.ensure_future(box.drained(0.01))
    await wires.clock.over(draining, step_s=0.01)
    assert not draining.result()
    wires.let_go.set()
    assert await box.drained(1.0)
    assert answers == [None] * 4


def test_short_states_leave_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as make LATE_BYTES are under way to a peer at a time; the next ones leave when all of them are answered.
    One that can't be made is answered with the reason, and the others leave.
    """
    monkeypatch.setattr(outboxes, "LATE_BYTES", 2 * len(STATE))

    async def cannot() -> tuple[bytes, memoryview]:
        raise Refusal("damaged")

    async def test(box: Outbox, wires: Slow, answers: list[Any]) -> None:
        box.put_late("a", cannot, answers.append)
        for n in range(5):
            box.put_late("a", state(b"%d" % n), answers.append)
        await wires.clock.passes(0.01)
        assert [type(answer) for answer in answers] == [Refusal]
        assert wires.under_way == [("a", b"0"), ("a", b"1")]
        wires.let_go.set()
        await asyncio.sleep(0)
        wires.let_go.clear()
        await wires.clock.passes(0.01)
        assert wires.under_way == [("a", b"2"), ("a", b"3")]
        wires.let_go.set()
        assert await box.drained(1.0)
        assert answers[1:] == [None] * 5

    played(test)


@plays(played, 3)
async def test_a_newer_queued_message_replaces_an_older_one(box: Outbox, wires: Slow, answers: list[Any]) -> None:
    """Under one key one waits, the newest, behind what came before it; who put the older is told."""
    for n in range(9):
        box.put_late("a", state(b"%d" % n), lambda outcome, n=n: answers.append((n, outcome)), key=n % 2)
        await wires.clock.passes(0.01)  # the first is under way
    box.put_late("a", state(b"last"), lambda outcome: answers.append(("last", outcome)))
    assert [n for n, outcome in answers if isinstance(outcome, Refusal)] == [1, 2, 3, 4, 5, 6]
    answers.clear()
    wires.let_go.set()
    assert await box.drained(1.0)
    assert answers == [(0, None), (7, None), (8, None), ("last", None)]
    assert not box._lines


@plays(played, 3)
async def test_a_state_does_not_give_way_for_ever(
    box: Outbox, wires: Slow, answers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds without a gap don't shut a newcomer out."""
    monkeypatch.setattr(outboxes, "GIVE_WAY_S", 0.05)
    box.put("a", b"round", PAYLOAD, answers.append)
    box.put_late("b", state(b"state"), answers.append)
    await wires.clock.passes(0.2)
    assert sorted(wires.under_way) == [("a", b"round"), ("b", b"state")]


@plays(played, 3)
async def test_a_state_gives_way_by_its_share(box: Outbox, wires: Slow, answers: list[Any]) -> None:
    """What went fast waits for a short time only, so that a newcomer has a share of any link."""
    box.put_late("b", state(b"first"), answers.append)
    await wires.clock.passes(0.05)
    wires.let_go.set()
    await box.emptied(1.0)
    wires.let_go.clear()
    box.put("a", b"round", PAYLOAD, answers.append)
    box.put_late("b", state(b"second"), answers.append)
    await wires.clock.passes(0.01)
    assert wires.under_way == [("a", b"round")]
    await wires.clock.passes(0.5)
    assert sorted(wires.under_way) == [("a", b"round"), ("b", b"second")]


@plays(played, 3)
async def test_what_is_withdrawn_is_on_its_way_no_more(box: Outbox, wires: Slow, answers: list[Any]) -> None:
    """Nor waits for its turn; each is answered for once. What goes under another key goes on, and so does what comes
    later."""
    others: list[Any] = []
    for n in range(BULK_AT_ONCE + 1):
        box.put("a", b"%d" % n, PAYLOAD, answers.append, 7)
    box.put("b", b"other", PAYLOAD, others.append, 8)
    await wires.clock.passes(0.01)
    assert len(wires.under_way) == BULK_AT_ONCE + 1
    await box.withdraw(7)
    assert wires.under_way == [("b", b"other")]
    assert [type(answer) for answer in answers] == [Refusal] * (BULK_AT_ONCE + 1)
    box.put("a", b"later", PAYLOAD, others.append, 7)
    await wires.clock.passes(0.01)
    assert ("a", b"later") in wires.under_way
    wires.let_go.set()
    await box.emptied(1.0)
    assert others == [None, None]
    assert len(answers) == BULK_AT_ONCE + 1


def test_without_rounds_a_state_does_not_wait_for_payloads() -> None:
    """In asynchronous mode it is an answer that somebody's training waits for."""

    async def test(box: Outbox, wires: Slow, answers: list[Any]) -> None:
        box.put("b", b"payload", PAYLOAD, answers.append)
        box.put_late("c", state(b"state"), answers.append)
        await wires.clock.passes(0.05)
        assert sorted(wires.under_way) == [("b", b"payload"), ("c", b"state")]

    played(test, gives_way=False)
