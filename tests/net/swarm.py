"""Transports over real daemons, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from p2p_diloco.config import PeerConfig
from p2p_diloco.net.interface import Limits
from tests.net.inboxes import Box
from tests.net.patience import plays

LISTEN = ["/ip4/127.0.0.1/tcp/0"]
PATIENT = Limits(connect_timeout_s=30.0, read_timeout_s=30.0, write_timeout_s=30.0, payload_bytes_max=1 << 30)
AT_ONCE_S = 8.0
"""What waits for no deadline takes far less, unless the machine, or one of its processes, stands still meanwhile."""
STRANGER = "12D3KooWGrk7pQsQ8dDR8yu8vUuL1tCiBGHBvCVbx8fyR3zdYpuv"
CHILD = """
import asyncio
from p2p_diloco.config import PeerConfig
from p2p_diloco.net.hivemind import HivemindTransport
from tests.net.inboxes import Quiet

async def main():
    transport = await HivemindTransport.create(
        Quiet(), PeerConfig(run_id="real", host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    )
    print(transport.peer_id, transport.addresses()[0], transport._dht.daemon.p2p._child.pid, flush=True)
    await asyncio.sleep(110)

asyncio.run(main())
"""


async def join(box: Box | None = None, **options: Any) -> Any:
    from p2p_diloco.net.hivemind import HivemindTransport

    own = {key: options.pop(key) for key in ("limits", "invitation", "on_daemon_death") if key in options}
    local = PeerConfig(**({"run_id": "real", "host_maddrs": LISTEN} | options))
    return await HivemindTransport.create(box or Box(), local, **({"limits": PATIENT} | own))


Join = Callable[..., Awaitable[Any]]


def real(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A decorator for a test with daemons. Its first argument is `join`, whose transports are closed afterwards, the
    latest first."""
    return pytest.mark.real(pytest.mark.usefixtures("no_daemon_is_left")(plays(_run)(test)))


def _run(test: Callable[[Join], Awaitable[None]]) -> None:
    async def closing() -> None:
        async with contextlib.AsyncExitStack() as opened:

            async def joined(box: Box | None = None, **options: Any) -> Any:
                transport = await join(box, **options)
                opened.push_async_callback(transport.close)
                return transport

            await test(joined)

    asyncio.run(closing())


@contextlib.contextmanager
def peer_process() -> Iterator[tuple[subprocess.Popen[str], str, str, int]]:
    """A peer in a process of its own: the process, its peer id, its address, and its daemon's process id."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True, env=os.environ | child_path()
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
