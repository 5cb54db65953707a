"""`python -m examples.benchmarks.delay SECONDS LOSS`: a network switch that delivers each frame SECONDS later, and
loses the fraction LOSS of all packets. Needs Linux and root.

Law: standard library only. Interfaces are named one a line on stdin; once one is connected, its name is written to
stdout. The process ends when its stdin ends. The kernel's own `netem` would do the same, but not every kernel has it.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import select
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from time import monotonic

from examples.benchmarks.frames import addresses, survivors

FRAME_BYTES_MAX = 70_000
"""More than the longest frame: 64 KiB, with headers."""
AT_ONCE = 64
"""The most frames that are read from one interface before the frames that are due are sent."""
BUFFER_BYTES = 64 << 20
"""Length of each interface's receive buffer and send buffer: enough for all frames that arrive while this process waits
for a processor."""
PRIORITY = -10
"""This process's niceness. It is low because frames are late if the process has to wait for a processor."""
_ALL_FRAMES = 0x0003  # ETH_P_ALL
_OFFLOAD_HEADERS, _NOT_OUR_OWN = 15, 23  # PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING
_RECEIVE_BUFFER, _SEND_BUFFER = 33, 32  # SO_RCVBUFFORCE, SO_SNDBUFFORCE
_SOL_PACKET = 263


class Switch:
    """Delivers each frame `delay_s` seconds later to the interface that leads to its receiver, or to all interfaces
    while that one is unknown. `gap` draws how many packets arrive until the next one that is lost."""

    def __init__(self, delay_s: float, gap: Callable[[], int]) -> None:
        self._delay_s, self._gap, self._until_loss = delay_s, gap, gap()
        self._ports: list[socket.socket] = []
        self._behind: dict[bytes, socket.socket] = {}
        self._due: deque[tuple[float, socket.socket, bytes]] = deque()

    def connect(self, interface: str) -> None:
        """Start to receive frames from an interface, and to deliver frames through it."""
        port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK, 0)
        for option in (_OFFLOAD_HEADERS, _NOT_OUR_OWN):
            port.setsockopt(_SOL_PACKET, option, 1)
        for option in (_RECEIVE_BUFFER, _SEND_BUFFER):
            port.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        port.bind((interface, _ALL_FRAMES))
        self._ports.append(port)

    def run(self) -> None:
        """Deliver frames until stdin ends. Meanwhile connect each interface that stdin names."""
        while True:
            left_s = max(0.0, self._due[0][0] - monotonic()) if self._due else None
            ready = select.select([*self._ports, sys.stdin], [], [], left_s)[0]
            if sys.stdin in ready:
                if not (name := sys.stdin.readline().strip()):
                    return
                self.connect(name)
                sys.stdout.write(f"{name}\n")
                sys.stdout.flush()
            for port in self._ports:
                if port in ready:
                    self._receive(port)
            self._deliver()

    def _receive(self, port: socket.socket) -> None:
        due = monotonic() + self._delay_s
        with contextlib.suppress(BlockingIOError):
            for _ in range(AT_ONCE):
                kept, self._until_loss = survivors(port.recv(FRAME_BYTES_MAX), self._gap, self._until_loss)
                for frame in kept:
                    self._due.append((due, port, frame))

    def _deliver(self) -> None:
        now = monotonic()
        while self._due and self._due[0][0] <= now:
            _, port, frame = self._due.popleft()
            receiver, sender = addresses(frame)
            self._behind[sender] = port
            known = self._behind.get(receiver)
            for to in self._ports if known is None else [known]:
                if to is not port:
                    with contextlib.suppress(OSError):  # the link's queue is full: the frame is lost, as on any switch
                        to.send(frame)


def gap_between_losses(loss: float) -> int:
    """Draw how many packets arrive between two lost packets. Each packet is lost with the probability `loss`."""
    return int(math.log(1.0 - random.random()) / math.log1p(-loss)) if loss else sys.maxsize


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C is for the command that started this process and closes its stdin
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    Switch(float(sys.argv[1]), partial(gap_between_losses, float(sys.argv[2]))).run()
