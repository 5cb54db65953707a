"""Both ends of an encrypted TCP connection in one process."""

from __future__ import annotations

import asyncio
import socket

from p2p_diloco.net.pipe import Pipe
from p2p_diloco.net.tls import Tls
from tests.net.members import key_of

ALICE, BOB = key_of("alice"), key_of("bob")


class HandshakeFailed(Exception):
    """What became of each end."""


async def handshake(client: Tls, server: Tls) -> tuple[Pipe, Pipe]:
    """Both ends of a connection between alice, who dials, and bob; an error of each end that fails."""
    dialled, accepted = sockets()
    near, far = await asyncio.gather(
        client.secured(dialled, BOB.peer_id, server=False),
        server.secured(accepted, ALICE.peer_id, server=True),
        return_exceptions=True,
    )
    if isinstance(near, BaseException) or isinstance(far, BaseException):
        for end in (near, far):
            if isinstance(end, Pipe):
                assert not await end.more(20)
        raise HandshakeFailed(near, far)
    return near, far


def sockets() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        dialled = socket.create_connection(listening.getsockname())
        accepted, _ = listening.accept()
    for sock in (dialled, accepted):
        sock.setblocking(False)
    return dialled, accepted


def sock_of(pipe: Pipe) -> socket.socket:
    sock: socket.socket = pipe.transport.get_extra_info("socket")
    return sock
