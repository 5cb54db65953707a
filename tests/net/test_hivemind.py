"""The transport over Hivemind: its streams and direct connections between real daemons."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from p2p_diloco.net.interface import Unreachable
from tests.net.patience import awaited, until
from tests.net.swarm import AT_ONCE_S, Box, child_path, join

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("no_daemon_is_left")]


@awaited
async def test_a_client_uses_direct_connections() -> None:
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
    for transport in (plain, client, seed):
        await transport.close()


@awaited
async def test_direct_connections_end_with_the_daemon() -> None:
    """A peer without its daemon is dead to others: payloads to it and from it end."""
    box = Box()
    a, b = await join(), await join(box)
    await a.introduce(b.peer_id, b.addresses())
    await a.send(b.peer_id, b"first", memoryview(bytes(1000)))
    assert a.traffic.ways() == {b.peer_id: "direct"}
    listener = b._exchange.direct.listener
    os.kill(b._dht.daemon.p2p._child.pid, signal.SIGKILL)
    await until(lambda: not listener.ports and not listener._serving, AT_ONCE_S)
    with pytest.raises(Unreachable) as caught:
        await asyncio.wait_for(a.send(b.peer_id, b"second", memoryview(bytes(1000))), AT_ONCE_S)
    assert caught.value.refused
    await a.close()
    await b.close()


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
