"""Measures the cost of payloads on each path: `python tests/net/bulk_cost.py`.

Two peers in processes of their own on this machine, on uvloop, as nodes are. Turn by turn the same payload goes over a
bare stream of libp2p, over our exchange on such a stream, and over our exchange on a direct connection, in one piece
and in many. MB a second, and processor seconds a GB of both peers and both daemons together; the medians of all turns,
with the least and the greatest, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import uvloop

PAYLOAD_BYTES, TURNS = 64 * 1024 * 1024, 9
PART_BYTES, AT_ONCE = 2 * 1024 * 1024, 4
RAW = "/p2p-diloco-raw"


class Box:
    """Takes everything."""

    def admit(self, sender: str, header: bytes) -> int:
        return PAYLOAD_BYTES

    async def deliver(self, sender: str, header: bytes, payload: memoryview | None) -> None:
        pass

    def closed(self, peer: str) -> None:
        pass

    def moving(self, peer: str) -> None:
        pass


async def join(initial_peers: list[str]):  # type: ignore[no-untyped-def]
    from p2p_diloco.config import PeerConfig
    from p2p_diloco.net.hivemind import HivemindTransport

    listen = ["/ip4/127.0.0.1/tcp/0"]
    return await HivemindTransport.create(
        Box(), PeerConfig(run_id="cost", initial_peers=initial_peers, host_maddrs=listen)
    )


async def receive() -> None:
    """The other peer: take whatever comes until killed."""
    from p2p_diloco.net.pipe import Pipe

    async def take(peer: str, pipe: Pipe, seen_at: str) -> None:
        await pipe.read_into(memoryview(bytearray(PAYLOAD_BYTES)), stall_s=20, total_s=60)
        pipe.write(b"k")
        await pipe.more(20)
        pipe.close()

    transport = await join([])
    await transport._dht.daemon.serve_streams(RAW, take)
    print(transport.addresses()[0], flush=True)
    await asyncio.sleep(600)


def processor_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


async def measure(other: subprocess.Popen[str], address: str) -> dict[str, dict[str, list[float]]]:
    transport = await join([address])
    peer, payload = address.rpartition("/")[2], memoryview(bytearray(os.urandom(1 << 20) * (PAYLOAD_BYTES >> 20)))
    await transport.introduce(peer, [address])
    exchange, direct = transport._exchange, transport._exchange.direct

    async def raw() -> None:
        pipe, _ = await transport._dht.daemon.open_stream(peer, RAW, timeout_s=5)
        await pipe.write_view(payload)
        if not pipe.unread:
            await pipe.more(20)
        pipe.abort()

    async def over_libp2p() -> None:
        exchange.direct = None
        await transport.send(peer, b"h", payload)
        assert transport.traffic.ways()[peer] == "libp2p"

    async def over_direct() -> None:
        exchange.direct = direct
        await transport.send(peer, b"h", payload)
        assert transport.traffic.ways()[peer] == "direct"

    async def in_parts() -> None:
        async def every_few(first: int) -> None:
            for start in range(first * PART_BYTES, PAYLOAD_BYTES, AT_ONCE * PART_BYTES):
                await transport.send(peer, b"h", payload[start : start + PART_BYTES])

        await asyncio.gather(*(every_few(first) for first in range(AT_ONCE)))

    async def in_parts_over_libp2p() -> None:
        exchange.direct = None
        await in_parts()
        assert transport.traffic.ways()[peer] == "libp2p"

    async def in_parts_over_direct() -> None:
        exchange.direct = direct
        await in_parts()
        assert transport.traffic.ways()[peer] == "direct"

    ways: dict[str, Callable[[], Awaitable[None]]] = {
        "bare libp2p stream": raw, "exchange over libp2p": over_libp2p, "exchange over direct": over_direct,
        "exchange over libp2p, 32 parts": in_parts_over_libp2p, "exchange over direct, 32 parts": in_parts_over_direct,
    }  # fmt: skip
    family = [psutil.Process(), psutil.Process(other.pid)]
    family += [child for process in list(family) for child in process.children() if child.name() == "p2pd"]
    found: dict[str, dict[str, list[float]]] = {name: {"MB/s": [], "processor s/GB": []} for name in ways}
    exchange.direct = direct
    for _ in range(3):
        await in_parts_over_direct()  # the connections are there
    for _ in range(TURNS):
        for name, send in ways.items():
            began, used = time.perf_counter(), processor_s(family)
            await send()
            took = time.perf_counter() - began
            await asyncio.sleep(0.1)  # what the daemons still do is theirs
            found[name]["MB/s"].append(PAYLOAD_BYTES / took / 1e6)
            found[name]["processor s/GB"].append((processor_s(family) - used) / (PAYLOAD_BYTES / 1e9))
    exchange.direct = direct
    await transport.close()
    return found


def main() -> None:
    command = [sys.executable, __file__, "receive"]
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": root}) as other:
        try:
            assert other.stdout is not None
            found = uvloop.run(measure(other, other.stdout.readline().strip()))
        finally:
            other.kill()
    for name, figures in found.items():
        told = {
            unit: {"median": round(statistics.median(v), 2), "least": round(min(v), 2), "most": round(max(v), 2)}
            for unit, v in figures.items()
        }
        print(json.dumps({name: told}))


if __name__ == "__main__":
    uvloop.run(receive()) if sys.argv[1:] == ["receive"] else main()
