"""How the TCP connections that payloads go over are set up, read and paced.

Law: sockets and numbers; neither TLS nor peers. Reading and pacing work on Linux alone: elsewhere nothing is counted
and nothing is held back.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys

from p2p_diloco.net.pacing import Took

UNSENT_BYTES = 256 * 1024
"""How much the kernel takes before the network does. It would take megabytes; then payloads written one after the other
would share a slow link, and the first would arrive as late as the last."""

_KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPALIVE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))
"""Seconds, and a count. Routers forget a connection that carries nothing between two rounds."""
_UNPACED, _PACE_MAX = -1, 2**31 - 1
"""What Linux takes for no pace, and the fastest pace in bytes a second."""
_SO_MAX_PACING_RATE = 47
"""Python has no name for it."""
_TCP_INFO = struct.Struct("120xQ40xQQ")
"""Three fields of Linux's `tcp_info`: bytes acknowledged, microseconds in which something was to be sent or
acknowledged, and the part of these in which the other end's window was full."""


def set_up(sock: socket.socket) -> None:
    """Set the options of a connection that payloads go over: no delay, little unsent, probes while it is idle."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


class TcpSocket:
    """A connection as `pacing.Paced`."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._took = Took(0, 0.0)

    def took(self) -> Took:
        """What TCP has counted; the last known counts if the kernel gives none, or the connection has ended."""
        with contextlib.suppress(OSError, ValueError):
            if sys.platform == "linux":
                counts = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
                if len(counts) == _TCP_INFO.size:
                    acknowledged, busy_us, awaited_us = _TCP_INFO.unpack(counts)
                    self._took = Took(acknowledged, (busy_us - awaited_us) / 1e6)
        return self._took

    def pace(self, rate: float | None) -> None:
        """Have TCP send at most so many bytes a second, None: as it can. Does nothing where the kernel can't."""
        pace = _UNPACED if rate is None else max(1, min(round(rate), _PACE_MAX))
        with contextlib.suppress(OSError, ValueError):
            if sys.platform == "linux":
                self._sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, pace)
