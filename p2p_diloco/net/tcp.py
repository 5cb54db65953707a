"""The TCP sockets of direct connections: their options, their counters and their pacing.

Law: works on sockets only, and knows nothing of TLS or peers. Counters, pacing and `wake_for` work only on Linux:
elsewhere nothing is counted, no connection is limited, and every packet wakes the process.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys

from p2p_diloco.net.pacing import Took

UNSENT_BYTES = 256 * 1024
"""The most unsent bytes in the kernel's buffer. By default it holds megabytes: payloads written one after the other
would then share a slow link, and the first would arrive as late as the last."""

WAKE_BYTES = 32 * 1024
"""While a payload is received, the kernel wakes this process once this many bytes are there. Otherwise each packet on a
slow link would wake it, and a wake-up takes much longer than decrypting a packet. This is half of the window with which
a connection begins on Linux. With as many bytes as the window has, the kernel did not enlarge the window, and long
paths became very slow."""
RECORD_BYTES = 16 * 1024
"""The longest TLS record. Up to this many of a payload's missing bytes may have come already, in an incomplete
record."""

_KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPALIVE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))
"""Keep-alive options, in seconds; the last is a count. Without probes, routers would forget a connection that is idle
between two rounds."""
_UNPACED, _PACE_MAX = -1, 2**31 - 1
"""The value that means no limit to Linux, and the highest rate in bytes a second."""
_SO_MAX_PACING_RATE = 47
"""The number of the socket option, for which Python has no name."""
_TCP_INFO = struct.Struct("16xI4xI40xI48xQ20xI16xQQ")
"""Fields of Linux's `tcp_info`: bytes of a packet; packets not acknowledged; round trip time, in microseconds; bytes
acknowledged; the shortest round trip time; microseconds in which bytes were unsent or unacknowledged; and the part of
these in which the receiver's window was full."""


def set_up(sock: socket.socket) -> None:
    """Set the options of a direct connection's socket: send small packets at once, keep few unsent bytes in the kernel,
    and send probes while the connection is idle."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


class TcpSocket:
    """A TCP connection whose progress can be read and whose rate can be limited (a `pacing.Paced`)."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._total = Took(0, 0.0)
        self._wake_bytes = 1

    def took(self) -> Took:
        """The connection's progress since the last call, by TCP's counters; none if the kernel doesn't tell them."""
        before = self._total
        if (info := self._info()) is not None:
            _, _, _, acknowledged, _, busy_us, awaited_us = info
            self._total = Took(acknowledged, (busy_us - awaited_us) / 1e6)
        return Took(self._total.bytes - before.bytes, self._total.held_up_s - before.held_up_s)

    def path_bytes(self) -> float:
        """Estimate how many of the connection's bytes are on their way now, without those that wait in queues: the
        unacknowledged bytes, multiplied by the shortest round trip time and divided by the present one. 0 if the kernel
        tells nothing, or the connection has ended."""
        if (info := self._info()) is None:
            return 0.0
        packet_bytes, unacknowledged, rtt_us, _, shortest_us, _, _ = info
        return packet_bytes * unacknowledged * min(1.0, shortest_us / max(1, rtt_us))

    def _info(self) -> tuple[int, ...] | None:
        with contextlib.suppress(OSError, ValueError):
            if sys.platform == "linux":
                fields = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
                if len(fields) == _TCP_INFO.size:
                    return _TCP_INFO.unpack(fields)
        return None

    def wake_for(self, missing_bytes: int) -> None:
        """Let the kernel wake this process once `WAKE_BYTES` have come, or fewer near a payload's end, where no more
        may follow. `missing_bytes`: the payload's bytes that are not decrypted yet. Does nothing where the kernel
        can't."""
        wake_bytes = max(1, min(WAKE_BYTES, missing_bytes - RECORD_BYTES))
        if wake_bytes != self._wake_bytes:
            self._wake_bytes = wake_bytes
            with contextlib.suppress(OSError, ValueError):
                if sys.platform == "linux":
                    self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wake_bytes)

    def pace(self, rate: float | None) -> None:
        """Limit TCP to `rate` bytes a second; None: no limit. Does nothing if the kernel can't limit it."""
        pace = _UNPACED if rate is None else max(1, min(round(rate), _PACE_MAX))
        with contextlib.suppress(OSError, ValueError):
            if sys.platform == "linux":
                self._sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, pace)
