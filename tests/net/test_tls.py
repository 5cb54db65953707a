"""Who is let in by TLS; a pipe over TLS behaves as over any other transport; TCP's accounts and pace."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import ssl
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from hashlib import sha256
from pathlib import Path

import pytest

from p2p_diloco.net.invitation import Invitation
from p2p_diloco.net.pipe import Pipe, PipeBroken, PipeStalled
from p2p_diloco.net.signing import SigningKey
from p2p_diloco.net.tcp import RECORD_BYTES, WAKE_BYTES, Paced, TcpSocket
from p2p_diloco.net.tls import Tls
from tests.net.members import DAY_S, OTHER_KEY, invitation, key_of, membership, revocation, tls_of
from tests.net.patience import awaited
from tests.net.relays import loops as loops

pytestmark = pytest.mark.usefixtures("loops")
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


@contextlib.asynccontextmanager
async def ends() -> AsyncIterator[tuple[Pipe, Pipe]]:
    """The two ends of a connection, TLS's client first."""
    pipes = await handshake(tls_of(ALICE), tls_of(BOB))
    try:
        yield pipes
    finally:
        for pipe in pipes:
            pipe.abort()


MINE, BANNED = invitation(), invitation(name="mallory")
LATE_S = 2 * DAY_S


def knowing(key: SigningKey) -> Tls:
    """A member that knows of a revocation."""
    own = membership(key.peer_id, MINE)
    assert own.revoke(revocation(BANNED))
    return Tls(own, key)


def late(key: SigningKey) -> Tls:
    """A member whose clock is ahead of an expiry that OpenSSL's clock has not reached."""
    return Tls(membership(key.peer_id, MINE), key, lambda: time.time() + LATE_S)


CASES: dict[str, tuple[Callable[[SigningKey], Tls], Callable[[SigningKey], Tls]]] = {
    "another peer": (tls_of, lambda key: tls_of(key_of("eve"))),
    "another run": (lambda key: tls_of(key, MINE), lambda key: tls_of(key, invitation(key=OTHER_KEY))),
    "an open run": (lambda key: tls_of(key, MINE), tls_of),
    "another open run": (tls_of, lambda key: tls_of(key, Invitation.anybody("another"))),
    "revoked": (knowing, lambda key: tls_of(key, BANNED)),
    "expired": (late, lambda key: tls_of(key, MINE)),
}


@pytest.mark.parametrize("checks", ["client", "server"])
@pytest.mark.parametrize("why", CASES)
@awaited
async def test_whoever_is_not_the_expected_member_is_refused(why: str, checks: str) -> None:
    """By either end, before it reads a byte; the other end hears the end."""
    checking, refused = CASES[why]
    client, server = (checking, refused) if checks == "client" else (refused, checking)
    with pytest.raises(HandshakeFailed) as caught:
        await handshake(client(ALICE), server(BOB))
    assert isinstance(caught.value.args[checks == "server"], OSError)


@awaited
async def test_an_older_tls_is_refused() -> None:
    """A client that offers TLS 1.2 at most gets no connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    dialled, accepted = sockets()
    dialled.setblocking(True)
    old = threading.Thread(target=_begin_and_fail, args=(context, dialled))
    old.start()
    with pytest.raises(OSError, match=r"(?i)protocol"):
        await tls_of(BOB).secured(accepted, ALICE.peer_id, server=True)
    await asyncio.get_running_loop().run_in_executor(None, old.join)


def _begin_and_fail(context: ssl.SSLContext, sock: socket.socket) -> None:
    with sock, contextlib.suppress(OSError):
        context.wrap_socket(sock).close()


def test_no_file_with_a_key_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor was the key in it readable."""
    written: list[bytes] = []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("os.unlink", lambda path: (written.append(Path(path).read_bytes()), os.remove(path)))
    tls_of(ALICE)
    assert list(tmp_path.iterdir()) == []
    assert [(pem.count(b"ENCRYPTED PRIVATE KEY"), pem.count(b"BEGIN CERTIFICATE")) for pem in written] == [(2, 2)] * 2


@awaited
async def test_bytes_arrive_both_ways_at_once() -> None:
    """5 MB each way, in pieces of all sizes, straight into the reader's memory."""
    async with ends() as (near, far):
        data = memoryview(os.urandom(5_000_000))

        async def cross(sender: Pipe, receiver: Pipe) -> None:
            target = memoryview(bytearray(len(data)))

            async def write() -> None:
                for size in (1, 0, 16_384, 16_385, 1_000_000):
                    sender.write(bytes(data[:size]))
                await sender.write_view(data)

            writing = asyncio.create_task(write())
            for size in (1, 16_384, 16_385, 1_000_000, len(data)):
                await receiver.read_into(target[:size], stall_s=20, total_s=60)
                assert sha256(target[:size]).digest() == sha256(data[:size]).digest()
            await writing

        await asyncio.gather(cross(near, far), cross(far, near))


@awaited
async def test_an_abort_ends_waiting_readers_and_writers_at_once() -> None:
    """At this end and at the other."""
    async with ends() as (near, far):
        reading = asyncio.create_task(near.read_into(memoryview(bytearray(9)), stall_s=20, total_s=20))
        writing = asyncio.ensure_future(near.write_view(memoryview(bytearray(64 << 20))))
        await asyncio.sleep(0.1)
        near.abort()
        for task in (reading, writing):
            with pytest.raises(PipeBroken):
                await asyncio.wait_for(task, 10)
        with pytest.raises(PipeBroken):
            await far.read_into(memoryview(bytearray(65 << 20)), stall_s=20, total_s=20)
        assert far.ended


@awaited
async def test_closing_does_not_wait_for_a_reader_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that the other end doesn't read, of which it holds few, are dropped after the deadline, and the socket is
    closed."""
    monkeypatch.setattr("p2p_diloco.net.pipe.CLOSE_S", 0.2)
    async with ends() as (near, far):
        sock = sock_of(near)
        near.write(bytes(32 << 20))
        near.close()
        await asyncio.sleep(0.1)
        assert sock.fileno() >= 0
        await asyncio.sleep(0.3)
        assert sock.fileno() < 0
        assert 0 < len(far.unread) < 1 << 20


ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="TCP tells what it carried, and keeps to a pace, there")


@ON_LINUX
@awaited
async def test_a_connection_counts_its_bytes_and_keeps_to_its_pace() -> None:
    """Bytes that have arrived, at most the given rate, and that the pace held it up all the time."""
    async with ends() as (near, far):
        paced, size = paced_end(near), 4 << 20
        paced.pace(2.0 * size)
        paced.took()
        began, count, held_up_s = time.monotonic(), 0, 0.0
        writing = near.write_view(memoryview(bytes(size)))
        await far.read_into(memoryview(bytearray(size)), stall_s=20, total_s=20)
        await writing
        assert time.monotonic() - began > 0.25
        while count < size:
            took = paced.took()
            count, held_up_s = count + took.bytes, held_up_s + took.held_up_s
            await asyncio.sleep(0.01)
        assert count < 1.05 * size
        assert 0.25 < held_up_s < time.monotonic() - began + 0.1  # a coarse clock


@ON_LINUX
@pytest.mark.parametrize(
    ("rate", "told"), [(0.2, {1}), (5e6, {5_000_000}), (1e12, {2**31 - 1}), (None, {-1, 2**32 - 1})]
)
@awaited
async def test_a_pace_is_within_what_the_kernel_accepts(rate: float | None, told: set[int]) -> None:
    """Less than one byte a second is one, not none, which the kernel would take for no limit; too large a number is the
    largest."""
    async with ends() as (near, _):
        for one in (1e6, rate):
            paced_end(near).pace(one)
        assert sock_of(near).getsockopt(socket.SOL_SOCKET, 47) in told


def paced_end(pipe: Pipe) -> Paced:
    """What holds it to a pace."""
    assert pipe.paced is not None
    return pipe.paced


@awaited
async def test_much_that_comes_with_the_handshakes_end_is_kept() -> None:
    """A stream through a relay: bytes may come before the pipe is told its transport. The sender is held up then."""
    ends = [await Pipe.adopt(*await asyncio.open_connection(sock=sock)) for sock in socket.socketpair()]
    late, data = Pipe(below=ends[0]), os.urandom(300_000)
    for at in range(0, len(data), 60_000):
        part = data[at : at + 60_000]
        late.get_buffer(-1)[: len(part)] = part
        late.buffer_updated(len(part))
    late.connection_made(ends[0].transport)
    assert not ends[0].transport.is_reading()
    target = memoryview(bytearray(len(data)))
    await late.read_into(target, stall_s=5.0, total_s=5.0)
    assert target == data
    for end in ends:
        end.abort()


@pytest.mark.parametrize("waits_for", ["bytes", "room"])
@awaited
async def test_a_wait_that_is_cancelled_ends(waits_for: str) -> None:
    """Also when what it waits for comes at the same moment: else the task that was cancelled would go on for ever."""
    async with ends() as (near, _):
        near._writable.clear()
        waiting = asyncio.create_task(near.more(30.0) if waits_for == "bytes" else near.drain(30.0))
        for _ in range(3):
            await asyncio.sleep(0)
        near._end("now")
        if waits_for == "room":
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


# -- how many bytes the kernel collects before it wakes the process


def wakes_for(sock: socket.socket) -> int:
    """How many bytes wake the process that waits for this socket."""
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)


@ON_LINUX
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


@ON_LINUX
@pytest.mark.parametrize("piece", [1_000, 50_000])
@awaited
async def test_a_payload_arrives_whole_though_nothing_follows_it(piece: int) -> None:
    """Also if it comes in small pieces. Afterwards each byte wakes the process."""
    async with ends() as (near, far):
        for size in (0, 1, RECORD_BYTES, RECORD_BYTES + 1, 1_000_000):
            data, target = os.urandom(size), memoryview(bytearray(size))
            reading = asyncio.create_task(far.read_into(target, stall_s=20, total_s=20))
            for at in range(0, size, piece):
                near.write(data[at : at + piece])
                await asyncio.sleep(0)
            await reading
            assert target == data
            assert wakes_for(sock_of(far)) == 1


@ON_LINUX
@awaited
async def test_a_payload_given_up_leaves_no_wait_behind() -> None:
    """After a payload that stalled, the next frame is noticed however short it is."""
    async with ends() as (near, far):
        near.write(bytes(1000))
        with pytest.raises(PipeStalled):
            await far.read_into(memoryview(bytearray(10**6)), stall_s=0.2, total_s=20)
        assert wakes_for(sock_of(far)) == 1
        near.write(b"x")
        assert await far.more(20)
