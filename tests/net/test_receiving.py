"""Several payloads on one direct connection, at the receiver: their order, their answers, their memory."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from p2p_diloco.net.framing import Accepted, Bulk, Refused, encode
from tests.net.clocks import by_hand
from tests.net.direct_peers import Start, let_in, run
from tests.net.gates import LONG, Gate, answers, sent
from tests.net.patience import plays, until


@plays(run)
async def test_the_next_payload_arrives_while_the_inbox_takes_one(start: Start) -> None:
    """One connection carries them all, and the inbox gets them in order, with their own bytes. The second counts as
    under way until the inbox takes it: the third already fills the system's buffers, and if only the time of reading it
    counted, the link would seem faster than it is."""
    a, b = start("a"), start("b")
    gate, down = Gate(b), b.traffic.bandwidth.down
    sends = sent(a, b"1", b"2", b"3", nbytes=LONG)
    await until(lambda: gate.come == [b"1"] and b.traffic.bytes_received > 2 * LONG)  # the second is here
    await asyncio.sleep(0.05)
    assert [payload._bytes for payload in down._under_way] == [LONG]
    assert not any(send.done() for send in sends)
    gate.open.set()
    await asyncio.gather(*sends)
    assert not down._under_way
    assert [(header, payload) for _, header, payload in b.box.got] == [(h, h * LONG) for h in (b"1", b"2", b"3")]
    assert (a.talks, a.libp2p_streams) == (1, 0)


@plays(run)
async def test_only_the_inbox_holds_a_payloads_memory(start: Start) -> None:
    """When the inbox lets go of it, it is freed, though the connection stays open and nothing else comes on it."""
    a, b = start("a"), start("b")
    come: list[weakref.ref[object]] = []

    async def deliver(sender: str, header: bytes, payload: memoryview | None) -> None:
        assert payload is not None
        come.append(weakref.ref(payload.obj))

    b.box.deliver = deliver  # type: ignore[method-assign]
    await a.send("b", bytes(1000))
    gc.collect()
    assert [memory() is None for memory in come] == [True]
    assert not any(pipe.ended for pipe in b.direct.listener._serving)


@plays(run)
async def test_a_payload_refused_unread_is_skipped(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is understood, however the bytes are split, and all bytes are counted. If the rest doesn't come the
    connection ends."""
    monkeypatch.setattr("p2p_diloco.net.receiving.LINGER_S", 0.2)
    with by_hand() as clock:
        a, b = start("a"), start("b")
        b.box.admitted_bytes = 2
        pipe = await let_in(a, "b")
        before = b.traffic.bytes_received
        pieces = [
            encode(Bulk(b"1", 3)) + b"abc" + encode(Bulk(b"2", 4)) + b"d",
            b"efg" + encode(Bulk(b"3", 2)) + b"hi",
        ]
        for piece in pieces:
            pipe.write(piece)
            await clock.passes(0.02)
        verdicts = await answers(pipe, 3)
        assert [type(verdict) for verdict in verdicts] == [Refused, Refused, Accepted]
        assert [payload for _, _, payload in b.box.got] == [b"hi"]
        assert b.traffic.bytes_received - before == sum(map(len, pieces))
        pipe.write(encode(Bulk(b"4", 3)) + b"j")
        await clock.until(lambda: b.traffic.refused == 3)
        await clock.passes(0.1)
        assert b.direct.listener._serving
        await clock.passes(0.2)
        await clock.until(lambda: not b.direct.listener._serving)
    pipe.abort()
