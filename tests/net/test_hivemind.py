"""The transport over Hivemind: its streams, direct connections and relays between real daemons."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Any

import pytest

from p2p_diloco.net.interface import Unreachable
from tests.net.inboxes import Box
from tests.net.patience import until
from tests.net.swarm import AT_ONCE_S, PATIENT, Join, child_path, real


@real
async def test_a_client_uses_direct_connections(join: Join) -> None:
    """The client dials, whichever of the two sends. Where direct connections are switched off none is made."""
    seed = await join()
    client = await join(initial_peers=seed.addresses(), client_mode=True)
    plain = await join(initial_peers=seed.addresses(), direct=False)
    for sender, receiver in ((client, seed), (seed, client)):
        await sender.introduce(plain.peer_id, plain.addresses())
        for other in (receiver, plain):
            await sender.send(other.peer_id, b"bulk", memoryview(bytes(1000)))
            await other.send(sender.peer_id, b"hello")
        assert sender.traffic.ways() == {receiver.peer_id: "direct", plain.peer_id: "libp2p"}


async def private(join: Join, seed: Any, box: Box) -> Any:
    """A peer that listens nowhere, registered at the seed."""
    peer = await join(box, initial_peers=seed.addresses(), client_mode=True)
    await until(lambda: peer._circuits.registered, PATIENT.connect_timeout_s)
    assert peer.reach.private
    assert all("/p2p-circuit/" in address for address in peer.addresses())
    return peer


@real
async def test_two_private_peers_exchange_through_a_relay(join: Join) -> None:
    """Messages and payloads, in both directions; when the relay ends so do their links, in bounded time."""
    seed, boxes = await join(), (Box(), Box())
    a, b = [await private(join, seed, box) for box in boxes]
    for one, other, box in ((a, b, boxes[1]), (b, a, boxes[0])):
        await one.introduce(other.peer_id, other.addresses())
        await one.send(other.peer_id, b"hello")
        await one.send(other.peer_id, b"bulk", memoryview(bytes(1 << 20)))
        assert box.headers == [b"hello", b"bulk"]
        assert one.traffic.ways() == {other.peer_id: "relayed"}
    await seed.close()
    for box, other in ((boxes[0], b), (boxes[1], a)):
        await until(lambda box=box, other=other: other.peer_id in box.closed_peers, AT_ONCE_S)
    with pytest.raises(Unreachable) as caught:
        await a.send(b.peer_id, b"anyone?")
    assert not caught.value.refused
    await asyncio.wait_for(asyncio.gather(a.close(), b.close()), AT_ONCE_S)


IMPORTS = """
import _multiprocessing, errno, logging, multiprocessing

class Refused(_multiprocessing.SemLock):
    def __new__(*_): raise OSError(errno.EROFS, "Read-only file system")

known, _multiprocessing.SemLock = multiprocessing.Lock, Refused
import p2p_diloco.net.hivemind
assert multiprocessing.Lock == known
assert logging.getLogger().handlers == [], logging.getLogger().handlers
assert logging.getLevelName(logging.WARNING) == "WARNING"
logging.basicConfig(format="%(name)s|%(message)s", level=logging.DEBUG)
logging.getLogger("hivemind.dht.node").warning("careful")
logging.getLogger("hivemind.dht.node").info("chatter")
logging.getLogger("p2p_diloco").setLevel(logging.INFO)
logging.getLogger("hivemind.p2p").error("accept unix x.sock: use of closed network connection")
"""


@pytest.mark.real
def test_importing_hivemind_leaves_the_process_as_it_was() -> None:
    """No handler on the root logger, level names unchanged; Hivemind's warnings come, through our logger. No lock of
    processes is needed, which can't be made in a container without /dev/shm; other code still finds the function that
    it knows."""
    result = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=60, env=os.environ | child_path()
    )
    assert result.returncode == 0, result.stderr
    assert "p2p_diloco.net.hivemind_library|hivemind: careful" in result.stderr
    assert "chatter" not in result.stderr
    assert "x.sock" not in result.stderr
