"""TLS 1.3 on sockets of our own, driven by the event loop.

Law: knows certificates, sockets and asyncio's way of driving a protocol; neither peers nor frames. The certificate is
pinned: a connection is to whoever holds the key of exactly that one. A payload is decrypted into the memory where it
belongs, and encrypted from where it lies.

asyncio's own TLS keeps what it reads and writes in buffers in between, which costs more processor time; a thread for
each connection costs a little less, and has to be stopped (docs/decisions/0012).
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import socket
import ssl
import struct
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from p2p_diloco.net.pacing import Took

TURN_BYTES = 256 * 1024
"""How much a connection reads before the loop's other business has its turn."""

RECORD_BYTES = 16 * 1024
"""The most that TLS encrypts, and gives back, at once."""

UNSENT_BYTES = 256 * 1024
"""How much may wait in the system until the network takes it. The system would take megabytes: then the payloads that
are written one after the other would share a slow link again, and the first be there as late as the last."""

_UNPACED, _PACE_MAX = -1, 2**31 - 1
"""How Linux is told of no pace; and the fastest one, bytes a second."""
_SO_MAX_PACING_RATE = 47
"""Python has no name for it."""
_TCP_INFO = struct.Struct("120xQ40xQQ")
"""Of Linux's `tcp_info`: bytes acknowledged, microseconds in which something was to be sent or acknowledged, and those
in which the other end took nothing."""

CLOSE_S = 2.0
"""How long what was written may take to go out once the end has begun."""

_NAME = "peer.p2p-diloco.invalid"
_KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPALIVE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))
"""Seconds, and a count: a connection that waits for the next round stays known to the routers between."""


class Certificate:
    """A fresh key and its self-signed certificate, for as long as this process lives."""

    def __init__(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
        made = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(datetime.datetime(2000, 1, 1))  # clocks may be wrong: it dies with the process
            .not_valid_after(datetime.datetime(9999, 12, 31))
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(_NAME)]), critical=False)
            .sign(key, hashes.SHA256())
        )
        self.der = made.public_bytes(serialization.Encoding.DER)
        """What the other end is to pin."""
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_3
        self.context.num_tickets = 0  # nobody resumes
        plain = serialization.NoEncryption()
        secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
        _load(self.context, secret + made.public_bytes(serialization.Encoding.PEM))

    def take(self, sock: socket.socket) -> ssl.SSLSocket:
        """The listener's end of a connection, before the handshake.

        Raises:
            OSError: it has ended already.
        """
        return self.context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    """Give a context its key and certificate, which Python reads from a file alone: its owner's, and gone at once."""
    file, path = tempfile.mkstemp(prefix="p2p-diloco-")
    try:
        with os.fdopen(file, "wb") as opened:
            opened.write(pem)
        context.load_cert_chain(path)
    finally:
        os.unlink(path)


async def connect(host: str, port: int, family: int, certificate: bytes) -> ssl.SSLSocket:
    """A connection to whoever holds the key of this certificate (DER), after the handshake.

    Raises:
        OSError: there is none: nobody listens, somebody else answers, or the certificate can't be read.
    """
    loop = asyncio.get_running_loop()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # verifies chain and name
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=certificate)
    plain = socket.socket(family, socket.SOCK_STREAM)
    try:
        plain.setblocking(False)
        await loop.sock_connect(plain, (host, port))  # looks names up
        sock = context.wrap_socket(plain, server_hostname=_NAME, do_handshake_on_connect=False)
    except BaseException:
        plain.close()
        raise
    try:
        await shake_hands(sock)
        if sock.getpeercert(binary_form=True) != certificate:
            raise OSError("another certificate than the one agreed on")
    except BaseException:
        sock.close()
        raise
    return sock


async def shake_hands(sock: ssl.SSLSocket) -> None:
    """The TLS handshake. Whoever calls this sets the deadline, by cancelling it.

    Raises:
        OSError: the other end left, or is no such peer.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    await _when_ready(sock, sock.do_handshake)


async def read_exactly(sock: ssl.SSLSocket, count: int) -> bytes:
    """So many bytes, before the connection carries a protocol.

    Raises:
        OSError: the other end left.
    """
    data = b""
    while len(data) < count:
        piece = await _when_ready(sock, partial(sock.recv, count - len(data)))
        if not piece:
            raise OSError("the other end left")
        data += piece
    return data


async def write_all(sock: ssl.SSLSocket, data: bytes) -> None:
    """Send a few bytes, before the connection carries a protocol."""
    await _when_ready(sock, partial(sock.send, data))  # TLS takes all or nothing of what fits into a record


async def _when_ready(sock: ssl.SSLSocket, step: Callable[[], Any]) -> Any:
    """Try a step of TLS again whenever the socket has, or takes, more."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return step()
        except ssl.SSLWantReadError:
            add, remove = loop.add_reader, loop.remove_reader
        except ssl.SSLWantWriteError:
            add, remove = loop.add_writer, loop.remove_writer
        ready: asyncio.Future[None] = loop.create_future()
        add(sock, _wake, ready)
        try:
            await ready
        finally:
            remove(sock)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class TlsTransport(asyncio.Transport):
    """Carries an `asyncio.BufferedProtocol` over a connection whose handshake is over.

    What is written stays where it is until it is sent: the caller changes it only after that, or after `abort`.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._outgoing: deque[memoryview] = deque()
        self._took = Took(0, 0.0)
        self._reading = self._closing = self._closed = self._full = self._awaits_room = False

    # -- what a protocol asks for

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Begin to read, for a protocol that says where to."""
        assert isinstance(protocol, asyncio.BufferedProtocol)
        self._protocol = protocol
        self.resume_reading()

    def is_reading(self) -> bool:
        """Whether the protocol is given what comes."""
        return self._reading and not self._closing

    def is_closing(self) -> bool:
        """Whether the end has begun."""
        return self._closing

    def pause_reading(self) -> None:
        """Leave what comes where it is, so that the other end has to wait."""
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._sock)

    def resume_reading(self) -> None:
        """Go on; a part of it may be here already, decrypted, of which the socket knows nothing."""
        if not self._reading and not self._closing:
            self._reading = True
            self._loop.add_reader(self._sock, self._read)
            self._loop.call_soon(self._read)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send, and tell the protocol to pause as long as not all of it could be sent."""
        if self._closing or not data:
            return
        self._outgoing.append(memoryview(data))
        if len(self._outgoing) == 1:
            self._write()
        if self._outgoing and not self._full:
            self._full = True
            self._protocol.pause_writing()

    def forget_unsent(self) -> None:
        """Send no more of what was written; nothing may be written after it."""
        self._outgoing.clear()
        self._await_room(False)

    # -- as `pacing.Paced`, where the system is Linux

    def took(self) -> Took:
        """By TCP's own accounts; where it gives none, or no more, what was known."""
        with contextlib.suppress(OSError):
            if sys.platform == "linux":
                counts = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
                if len(counts) == _TCP_INFO.size:
                    acknowledged, busy_us, awaited_us = _TCP_INFO.unpack(counts)
                    self._took = Took(acknowledged, (busy_us - awaited_us) / 1e6)
        return self._took

    def pace(self, rate: float | None) -> None:
        """By TCP's own timers; as before where it can't be told."""
        told = _UNPACED if rate is None else max(1, min(round(rate), _PACE_MAX))
        with contextlib.suppress(OSError):
            if sys.platform == "linux":
                self._sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, told)

    # -- ending, when all was sent or at once

    def close(self) -> None:
        """End once what was written is sent."""
        if not self._closing:
            self._stop_reading()
            if self._outgoing:
                self._loop.call_later(CLOSE_S, self.abort)
            else:
                self._finish(None)

    def abort(self) -> None:
        """End now."""
        self._stop_reading()
        self._finish(None)

    # -- what the loop calls

    def _read(self) -> None:
        """Fill what the protocol offers, at most a turn's worth, and tell it once.

        A record that isn't full ends what was written at once. What follows may belong elsewhere: the loop calls again.
        """
        if not self.is_reading():
            return
        buffer, filled = memoryview(self._protocol.get_buffer(-1))[:TURN_BYTES], 0
        count = RECORD_BYTES
        try:
            while count == RECORD_BYTES and filled < len(buffer):
                count = self._sock.recv_into(buffer[filled:], RECORD_BYTES)
                filled += count
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            self._retry_write()
        except OSError as error:
            self._came(filled)
            self._fail(error)
            return
        self._came(filled)
        if not count:
            self._protocol.eof_received()
            self.abort()
        elif self.is_reading() and self._sock.pending():
            self._loop.call_soon(self._read)

    def _came(self, count: int) -> None:
        if count:
            self._protocol.buffer_updated(count)

    def _write(self) -> None:
        """Send what the socket takes. What it doesn't take must be offered again as it is: TLS has encrypted a part."""
        try:
            while self._outgoing:
                count = self._sock.send(self._outgoing[0])
                left = self._outgoing.popleft()[count:]
                if left:
                    self._outgoing.appendleft(left)
        except ssl.SSLWantWriteError:
            self._await_room(True)
            return
        except ssl.SSLWantReadError:  # a change of keys: `_read` tries again
            self._await_room(False)
            return
        except OSError as error:
            self._fail(error)
            return
        if self._full and not self._closing:
            self._full = False
            self._protocol.resume_writing()  # which may write on
        if not self._outgoing:
            self._await_room(False)
            if self._closing:
                self._finish(None)

    def _await_room(self, waits: bool) -> None:
        """Have the loop call `_write` when the socket takes more, or no longer."""
        if waits != self._awaits_room:
            self._awaits_room = waits
            if waits:
                self._loop.add_writer(self._sock, self._write)
            else:
                self._loop.remove_writer(self._sock)

    def _retry_write(self) -> None:
        if self._outgoing and not self._closed:
            self._write()

    # -- ending

    def _stop_reading(self) -> None:
        self._closing = True
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._sock)

    def _fail(self, error: OSError) -> None:
        self._stop_reading()
        self._finish(error)

    def _finish(self, error: OSError | None) -> None:
        if self._closed:
            return
        self._closed = True
        self._outgoing.clear()
        self._await_room(False)
        self._sock.close()
        self._loop.call_soon(self._protocol.connection_lost, error)
