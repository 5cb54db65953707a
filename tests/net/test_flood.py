"""A private run under a flood: strangers on four connections cost memory that stays bounded, and members exchange."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import msgpack
import pytest

from p2p_diloco.net.framing import VERSION, Bulk, Message
from p2p_diloco.net.hello import PENDING_MAX
from p2p_diloco.net.hivemind import DIRECT
from p2p_diloco.net.relay import RELAY, RELAYED
from tests.net.attacker import attacker
from tests.net.members import invitation
from tests.net.patience import awaited
from tests.net.swarm import Box, join

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("no_daemon_is_left")]

STREAMS = f"/p2p-diloco/{VERSION}/real"
FLOODS = [
    (STREAMS, Message(b"?" + bytes(900)), Bulk(b"contribution", 1 << 30)),
    (STREAMS + DIRECT,),
    (RELAY, Message(msgpack.packb({"register": True}))),
    (RELAYED, Message(msgpack.packb({"from": "x"})), Message(b"")),
]
"""The protocol and the frames of each connection's flood: bytes that are no certificate, silence, requests to relay."""
FLOOD_S = 2.0


async def watch(victim: Any, most: dict[str, int]) -> None:
    """Note how many streams are pending at most."""
    while True:
        for name, pending in (
            ("streams", victim._hellos._pending),
            ("requests", victim._relay._pending),
            ("relayed", victim._circuits._pending),
        ):
            most[name] = max(most.get(name, 0), len(pending))
        await asyncio.sleep(0.005)


@awaited
async def test_members_exchange_under_a_flood() -> None:
    """Every message and payload arrives, also those of a member that joins meanwhile; no link or registration goes to a
    stranger, and no more streams are pending than are allowed."""
    boxes = [Box() for _ in range(3)]
    a = await join(boxes[0], invitation=invitation())
    b = await join(boxes[1], invitation=invitation(name="bob"), initial_peers=a.addresses())
    most, exchanged = dict[str, int](), 0
    async with contextlib.AsyncExitStack() as strangers:
        floods = []
        for protocol, *said in FLOODS:
            stranger = await strangers.enter_async_context(attacker(a))
            floods += [asyncio.create_task(stranger.flood(protocol, *said)) for _ in range(4)]
        watching = asyncio.create_task(watch(a, most))
        c = await join(boxes[2], invitation=invitation(name="carol"), initial_peers=a.addresses())
        until = time.monotonic() + FLOOD_S
        while time.monotonic() < until or exchanged < 3:
            for member in (b, c):
                await member.send(a.peer_id, b"bulk", memoryview(bytes(1 << 20)))
                await a.send(member.peer_id, b"hello")
            exchanged += 1
        assert a._relay._registered == {}
        assert set(a._exchange.receiver._links) <= {b.peer_id, c.peer_id}
        for task in (*floods, watching):
            task.cancel()
        opened = [await flood for flood in floods]
    assert min(sum(opened[at : at + 4]) for at in range(0, len(opened), 4)) > 0
    assert max(most.values()) <= PENDING_MAX
    assert [box.headers.qsize() for box in boxes] == [2 * exchanged, exchanged, exchanged]
    for transport in (c, b, a):
        await transport.close()
