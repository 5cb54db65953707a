"""How many bytes the kernel collects of a payload before it wakes the process."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import sys

import pytest

from p2p_diloco.net.pipe import Pipe, PipeStalled
from p2p_diloco.net.tcp import RECORD_BYTES, WAKE_BYTES, TcpSocket
from tests.net.members import tls_of
from tests.net.patience import awaited
from tests.net.tls_ends import ALICE, BOB, handshake, sock_of, sockets

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere every packet wakes the process")


def wakes_for(sock: socket.socket) -> int:
    """How many bytes wake the process that waits for this socket."""
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)


def test_few_bytes_of_a_long_payload_do_not_wake_the_process() -> None:
    """The process is woken once `WAKE_BYTES` are there, or at the connection's end."""
    near, far = sockets()
    with near, far:
        TcpSocket(near).wake_for(10**6)
        far.sendall(bytes(1000))
        assert not select.select([near], [], [], 0.2)[0]
        far.sendall(bytes(WAKE_BYTES - 1000))
        assert select.select([near], [], [], 20)[0]
        near.recv(WAKE_BYTES, socket.MSG_WAITALL)
        far.sendall(b"x")
        assert not select.select([near], [], [], 0.2)[0]
        far.close()
        assert select.select([near], [], [], 20)[0]


@pytest.mark.parametrize("size", [0, 1, RECORD_BYTES, RECORD_BYTES + 1, 1_000_000])
@pytest.mark.parametrize("piece", [1_000, 50_000])
@awaited
async def test_a_payload_arrives_whole_though_nothing_follows_it(size: int, piece: int) -> None:
    """Also if it comes in small pieces. Afterwards each byte wakes the process."""
    near, far, sock = await pipes()
    data, target = os.urandom(size), memoryview(bytearray(size))
    reading = asyncio.create_task(far.read_into(target, stall_s=20, total_s=20))
    for at in range(0, size, piece):
        near.write(data[at : at + piece])
        await asyncio.sleep(0)
    await reading
    assert target == data
    assert wakes_for(sock) == 1
    near.abort()
    far.abort()


@awaited
async def test_a_payload_given_up_leaves_no_wait_behind() -> None:
    """After a payload that stalled, the next frame is noticed however short it is."""
    near, far, sock = await pipes()
    near.write(bytes(1000))
    with pytest.raises(PipeStalled):
        await far.read_into(memoryview(bytearray(10**6)), stall_s=0.2, total_s=20)
    assert wakes_for(sock) == 1
    near.write(b"x")
    assert await far.more(20)
    near.abort()
    far.abort()


async def pipes() -> tuple[Pipe, Pipe, socket.socket]:
    """The two ends of an encrypted connection, and the socket of the second one."""
    near, far = await handshake(tls_of(ALICE), tls_of(BOB))
    return near, far, sock_of(far)
