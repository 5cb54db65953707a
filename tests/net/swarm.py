"""Transports over real daemons, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from p2p_diloco.config import PeerConfig
from p2p_diloco.net.interface import Limits
from tests.net.inboxes import Quiet

LISTEN = ["/ip4/127.0.0.1/tcp/0"]
PATIENT = Limits(connect_timeout_s=30.0, read_timeout_s=30.0, write_timeout_s=30.0, payload_bytes_max=1 << 30)
AT_ONCE_S = 8.0
"""What waits for no deadline takes far less, unless the machine, or one of its processes, stands still meanwhile."""
STRANGER = "12D3KooWGrk7pQsQ8dDR8yu8vUuL1tCiBGHBvCVbx8fyR3zdYpuv"
CHILD = """
import asyncio
import sys
from p2p_diloco.config import PeerConfig
from p2p_diloco.net.hivemind import HivemindTransport
from tests.net.inboxes import Quiet

async def main():
    transport = await HivemindTransport.create(
        Quiet(), PeerConfig(run_id="real", initial_peers=sys.argv[1:], host_maddrs=["/ip4/127.0.0.1/tcp/0"],
        client_mode=len(sys.argv) > 1))
    print(transport.peer_id, (transport.addresses() or ["-"])[0], transport._dht.daemon.p2p._child.pid, flush=True)
    await asyncio.sleep(110)

asyncio.run(main())
"""


class Box(Quiet):
    def __init__(self) -> None:
        self.headers: asyncio.Queue[bytes] = asyncio.Queue()
        self.closed_peers: asyncio.Queue[str] = asyncio.Queue()

    async def deliver(self, sender: str, header: bytes, payload: memoryview | None) -> None:
        self.headers.put_nowait(header)

    def closed(self, peer: str) -> None:
        self.closed_peers.put_nowait(peer)


async def join(box: Box | None = None, **options: Any) -> Any:
    from p2p_diloco.net.hivemind import HivemindTransport

    own = {key: options.pop(key) for key in ("limits", "invitation", "on_daemon_death") if key in options}
    local = PeerConfig(**({"run_id": "real", "host_maddrs": LISTEN} | options))
    return await HivemindTransport.create(box or Box(), local, **({"limits": PATIENT} | own))


@contextlib.contextmanager
def peer_process(*initial_peers: str) -> Iterator[tuple[subprocess.Popen[str], str, str, int]]:
    """A peer in a process of its own: the process, its peer id, its address, and its daemon's process id. With initial
    peers it is one that listens nowhere."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, *initial_peers], stdout=subprocess.PIPE, text=True, env=os.environ | child_path()
    )
    try:
        assert process.stdout is not None
        peer_id, address, daemon = process.stdout.readline().split()
        yield process, peer_id, address, int(daemon)
    finally:
        process.kill()
        process.wait(10)


def child_path() -> dict[str, str]:
    return {"PYTHONPATH": str(Path(__file__).parents[2])}


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
