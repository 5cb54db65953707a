"""Direct connections that break, stand still or are closed while payloads are under way."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from dataclasses import replace

from p2p_diloco.net.interface import Unreachable
from tests.net.direct_peers import AT_ONCE_S, Start, changed_offers, run
from tests.net.patience import plays, until


@plays(run)
async def test_a_payload_on_a_broken_connection_goes_over_libp2p(start: Start) -> None:
    """The receiver's end is cut within a payload: it arrives over libp2p, the inbox is told of the break, and no direct
    connection is tried for a while."""
    a, b = start("a"), start("b")
    await a.send("b", b"first")
    sending = asyncio.create_task(a.send("b", bytes(48 << 20)))
    await until(lambda: any(p.filled_bytes > 1 << 20 for p in b.direct.listener._serving))
    for pipe in list(b.direct.listener._serving):
        pipe.transport.abort()
    await sending
    assert [len(payload) for _, _, payload in b.box.got] == [5, 48 << 20]
    assert (a.box.closed_peers, a.libp2p_streams) == (["b"], 1)
    assert 48 << 20 < a.traffic.bytes_sent < 49 << 20  # what broke was not a message
    await a.send("b", b"over libp2p")
    assert (a.libp2p_streams, a.talks) == (1, 1)
    assert a.traffic.ways() == {"b": "libp2p"}


@plays(run)
async def test_flipped_bits_are_never_delivered(start: Start) -> None:
    """They break the connection; the payload arrives whole over libp2p."""
    a, b = start("a"), start("b")
    passed = 0

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal passed
        with contextlib.suppress(OSError):
            while piece := bytearray(await reader.read(1 << 16)):
                passed += len(piece)
                if passed > 1 << 20:
                    piece[random.randrange(len(piece))] ^= 1
                writer.write(piece)
                await writer.drain()
        writer.close()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", b.port)
        await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))

    server = await asyncio.start_server(forward, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    a.told = lambda offer: replace(offer, ports=((4, port),))
    payload = os.urandom(8 << 20)
    with changed_offers(a):
        await a.send("b", payload)
    assert passed > 1 << 20
    assert b.box.got == [("a", b"h", payload)]
    assert a.libp2p_streams == 1
    server.close()
    await until(lambda: len(asyncio.all_tasks()) < 50)
    await asyncio.sleep(0.1)


@plays(run)
async def test_closing_ends_everything_in_bounded_time(start: Start) -> None:
    """Payloads under way and a connection that shows no ticket end with the peer; `run` checks that nothing is left."""
    a, b = start("a"), start("b")
    gate = asyncio.Event()
    b.box.on_deliver = gate.wait  # type: ignore[assignment]
    sends = [asyncio.create_task(a.send("b", bytes(1000))) for _ in range(3)]
    await until(lambda: any(stream.awaited for stream in a.direct._way("b").connections))
    _, writer = await asyncio.open_connection("127.0.0.1", b.port)
    began = time.monotonic()
    await asyncio.gather(a.close(), b.close())
    results = await asyncio.gather(*sends, return_exceptions=True)
    assert [type(result) for result in results] == [Unreachable] * 3
    assert time.monotonic() - began < AT_ONCE_S
    assert a.box.closed_peers == b.box.closed_peers == []
    assert await a.direct.take("b") is None
    writer.close()
