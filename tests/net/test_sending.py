"""Several payloads on one direct connection: each gets its own answer, even if other sends fail."""

from __future__ import annotations

import asyncio
import random

import pytest

from p2p_diloco.net import direct as direct_module
from p2p_diloco.net.interface import Refusal, Unreachable
from tests.net.direct_peers import LIMITS, Start, run
from tests.net.gates import Gate, sent, serving
from tests.net.patience import plays, until


@plays(run)
async def test_a_half_sent_payload_ends_the_connection_after_the_earlier_answers(start: Start) -> None:
    """A send that is cancelled midway is the last on its connection. Earlier ones are answered, later ones use another
    connection."""
    a, b = start("a"), start("b")
    gate = Gate(b)
    before = sent(a, b"1")
    await until(lambda: gate.come)
    (pipe,) = b.direct.listener._serving
    half = sent(a, b"2", nbytes=48 << 20)
    await until(lambda: serving(b) > 1 << 20)
    half[0].cancel()
    await asyncio.wait(half)
    after = sent(a, b"3")
    await until(lambda: gate.come == [b"1", b"3"])
    assert pipe.ended is None
    gate.open.set()
    await asyncio.gather(*before, *after)
    await until(lambda: pipe.ended)
    assert (a.talks, a.libp2p_streams, a.connected("b")) == (2, 0, True)


# -- anything at any moment

NUMBER_OF_SENDS, NUMBER_OF_BREAKS = 40, 4
FATES = (b"taken", b"taken", b"refused", b"unread")
SIZES = (0, 1, 1000, 100_000, 1 << 20, 3 << 20)


@pytest.mark.parametrize("way", ["direct", "libp2p"])
@pytest.mark.parametrize("seed", range(4))
def test_random_faults_never_mix_up_answers(monkeypatch: pytest.MonkeyPatch, seed: int, way: str) -> None:
    """Payloads both ways, of any length, to slow inboxes; refused before or after they are read, cancelled at any
    moment, on connections that break at any moment. A send that returns was delivered with its own bytes, a refused one
    gets its own reason, none hangs, and nothing is left. Only where streams over libp2p break may a payload be lost."""
    monkeypatch.setattr(direct_module, "RETRY_S", 0.05)
    monkeypatch.setattr(direct_module, "RETRY_S_MAX", 0.05)
    draw = random.Random(seed)

    async def some_time() -> None:
        if draw.random() < 0.5:
            for _ in range(draw.randrange(30)):
                await asyncio.sleep(0)
        else:
            await asyncio.sleep(draw.uniform(0.0, 0.05))

    def body(header: bytes, nbytes: int) -> bytes:
        return (header * (nbytes // len(header) + 1))[:nbytes]

    async def test(start: Start) -> None:
        peers = {name: start(name) for name in "ab"}
        for peer in peers.values():
            peer.exchange.direct = peer.direct if way == "direct" else None
        may_lose = way == "libp2p" and seed % 2
        taken: set[bytes] = set()

        def admit(sender: str, header: bytes) -> int:
            if b"unread" in header:
                raise Refusal(f"no {header.decode()}")
            return 64 << 20

        async def deliver(sender: str, header: bytes, payload: memoryview | None) -> None:
            assert payload is not None
            if draw.random() < 0.3:
                await some_time()
            if b"refused" in header:
                raise Refusal(f"no {header.decode()}")
            assert bytes(payload) == body(header, len(payload))
            taken.add(header)

        async def send(number: int) -> None:
            sender, to = draw.sample("ab", 2)
            header = f"{number}{sender}{to} ".encode() + draw.choice(FATES)
            await some_time()
            sending = asyncio.create_task(peers[sender].send(to, body(header, draw.choice(SIZES)), header))
            if draw.random() < 0.3:
                await some_time()
                sending.cancel()
            await asyncio.wait({sending})
            if sending.cancelled():
                return
            match sending.exception():
                case None:
                    assert header in taken
                case Refusal(reason=reason):
                    assert reason == f"no {header.decode()}"
                    assert b"taken" not in header
                case Unreachable() if may_lose:
                    pass
                case error:
                    raise AssertionError(header) from error

        async def cut() -> None:
            await some_time()
            streams = [pipe for peer in peers.values() for pipe in peer.exchange.streams.pipes if pipe.ended is None]
            pipes = [pipe for peer in peers.values() for pipe in peer.direct.listener._serving]
            if carrying := pipes if way == "direct" else streams:
                draw.choice(carrying).transport.abort()

        for peer in peers.values():
            peer.box.admit, peer.box.deliver = admit, deliver  # type: ignore[method-assign]
        breaks = [cut() for _ in range(NUMBER_OF_BREAKS if seed % 2 else 0)]
        await asyncio.wait_for(asyncio.gather(*map(send, range(NUMBER_OF_SENDS)), *breaks), 60.0)
        for peer in peers.values():
            exchange, both = peer.exchange, peer.traffic.bandwidth
            await until(lambda exchange=exchange: exchange.receiver._receiving._value == LIMITS.streams_max)
            await until(lambda both=both: not both.up._under_way + both.down._under_way)
            assert exchange._sending._value == LIMITS.streams_max
            assert not any(turns.locked() for turns in exchange._writing.values())
            kept = [one for way in peer.direct._ways.values() for one in way.connections]
            assert not any(stream.awaited for stream in kept)
            assert len(kept) <= 1
        await peers["a"].send("b", body(b"last", 1000), b"last")
        assert b"last" in taken

    run(test)
