"""Measures what moves payloads over TLS at least cost, the event loop or threads: `python -m tests.net.link_cost`.

Two processes on this machine, each with an event loop (uvloop). Over each link one of them sends a payload, and the
other receives it into memory: either the loops encrypt and decrypt, or at either end a thread for each link does, on a
blocking socket. Beside this a loop computes for the part of its time that `--busy` names, 2 ms at a time. With
`--hashed 1` BLAKE3 is computed as well, in the threads piece by piece, on the loop at once. The ways take turns. The
medians of all turns, as JSON: MB a second, processor seconds a GB of both processes without the busy part, and by how
many ms the loops' timers are late at most.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import socket
import statistics
import sys
import time
from multiprocessing.connection import Connection

import uvloop
from blake3 import blake3

from p2p_diloco.net import tcp
from p2p_diloco.net.pipe import Pipe
from tests.net.members import key_of, tls_of

PAYLOAD_BYTES, SLICE_BYTES, BUSY_S, LINKS_MAX = 64 << 20, 64 << 10, 0.002, 8
MEMORY = [memoryview(bytearray(b"m" * PAYLOAD_BYTES)) for _ in range(LINKS_MAX)]
TLS = tls_of(key_of("both"))
SERVER, CLIENT = TLS._server, TLS._client

Told = tuple[float, float, float]


async def by_loop(sock: socket.socket, memory: memoryview, sends: bool, hashed: bool) -> None:
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    if sends:
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, sock, ssl=SERVER)
    else:
        transport, _ = await loop.create_connection(lambda: protocol, sock=sock, ssl=CLIENT, server_hostname="")
    pipe = await Pipe.adopt(reader, asyncio.StreamWriter(transport, protocol, reader, loop))
    if hashed and sends:
        blake3(memory).digest()
    if sends:
        await pipe.write_view(memory)
    else:
        await pipe.read_into(memory, stall_s=60, total_s=600)
        if hashed:
            blake3(memory).digest()
        pipe.write(b"k")
    await pipe.more(60)
    pipe.abort()


async def by_thread(sock: socket.socket, memory: memoryview, sends: bool, hashed: bool) -> None:
    await asyncio.to_thread(_blocking, sock, memory, sends, hashed)


def _blocking(sock: socket.socket, memory: memoryview, sends: bool, hashed: bool) -> None:
    sock.settimeout(60)
    hasher, done, at = blake3(), 0, 0
    with (SERVER if sends else CLIENT).wrap_socket(sock, server_side=sends) as tls:
        while at < PAYLOAD_BYTES:
            at += tls.send(memory[at : at + SLICE_BYTES]) if sends else tls.recv_into(memory[at:])
            if hashed and (at - done >= SLICE_BYTES or at == PAYLOAD_BYTES):
                hasher.update(memory[done:at])
                done = at
        tls.recv(1) if sends else tls.send(b"k")


WAYS = {"loop": by_loop, "threads": by_thread}


async def move(way: str, socks: list[socket.socket], sends: bool, busy: float, hashed: bool) -> Told:
    """Seconds, processor seconds without the busy part, and how late a timer was at most."""
    late, spent = list[float](), 0.0

    async def compute() -> None:
        nonlocal spent
        while True:
            due = time.perf_counter() + BUSY_S * (1 - busy) / max(busy, 0.1)
            await asyncio.sleep(due - time.perf_counter())
            began, used = time.perf_counter(), time.thread_time()
            late.append(began - due)
            while busy and time.perf_counter() - began < BUSY_S:
                pass
            spent += time.thread_time() - used

    beside = asyncio.create_task(compute())
    began, used = time.perf_counter(), time.process_time()
    await asyncio.gather(*(WAYS[way](sock, MEMORY[place], sends, hashed) for place, sock in enumerate(socks)))
    took, used = time.perf_counter() - began, time.process_time() - used - spent
    beside.cancel()
    return took, used, max(late, default=0.0)


def receive(orders: Connection) -> None:
    """The other process: for each order, accept the links and receive on them."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        orders.send(listening.getsockname()[1])
        while order := orders.recv():
            way, links, busy, switch_s, hashed = order
            sys.setswitchinterval(switch_s)
            socks = [listening.accept()[0] for _ in range(links)]
            orders.send(uvloop.run(move(way, socks, False, busy, hashed)))


def main() -> None:
    options = argparse.ArgumentParser()
    for name, default in (("links", "1,4"), ("busy", "0,0.5"), ("switch-ms", "5"), ("turns", "9"), ("hashed", "0")):
        options.add_argument(f"--{name}", default=default)
    chosen = options.parse_args()
    context = multiprocessing.get_context("spawn")
    orders, there = context.Pipe()
    context.Process(target=receive, args=(there,), daemon=True).start()
    port, hashed = orders.recv(), chosen.hashed == "1"
    lists = [[float(one) for one in text.split(",")] for text in (chosen.links, chosen.busy, chosen.switch_ms)]
    for links, busy, switch_ms in itertools.product(*lists):
        found: dict[str, list[Told]] = {way: [] for way in WAYS}
        sys.setswitchinterval(switch_ms / 1e3)
        for _ in range(int(chosen.turns)):
            for way, told in found.items():
                orders.send((way, int(links), busy, switch_ms / 1e3, hashed))
                socks = [socket.create_connection(("127.0.0.1", port)) for _ in range(int(links))]
                for sock in socks:
                    tcp.set_up(sock)
                mine, theirs = uvloop.run(move(way, socks, True, busy, hashed)), orders.recv()
                gb = links * PAYLOAD_BYTES / 1e9
                told.append((gb * 1e3 / mine[0], (mine[1] + theirs[1]) / gb, 1e3 * max(mine[2], theirs[2])))
        for way, told in found.items():
            rate, cost, late = (round(statistics.median(one), 2) for one in zip(*told, strict=True))
            figures = {"MB/s": rate, "processor s/GB": cost, "late ms": late}
            case = {"links": int(links), "busy": busy, "switch ms": switch_ms, "way": way}
            print(json.dumps(case | figures), flush=True)
    orders.send(None)


if __name__ == "__main__":
    main()
