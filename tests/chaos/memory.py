"""The memory of another process's node, read and written from outside, as a failing chip would: Linux alone.

Law: a node's memory is touched only while the node is stopped, so that what was found is still there when it is
written; it always goes on afterwards. θ and the epoch lie in the mapping that trainer and node share; the outer
momentum lies somewhere on the node's own heap, and is found by its value.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from swarm import Member

from p2p_diloco.node.shared import _HEADER_BYTES, SLOT_BYTES, Header

CHUNK = 1 << 24
WORD = 4
STOP_S = 5.0


class Unreachable(Exception):
    """Nobody may write to another process's memory here; the text says why."""


class NodeMemory:
    """What lies in the node of a peer. `numel`: elements of its model."""

    def __init__(self, member: Member, numel: int) -> None:
        """Raises Unreachable where the system doesn't allow it."""
        if sys.platform != "linux":
            raise Unreachable("/proc/PID/mem is Linux's")
        (node,) = [process for process in member.family() if "p2p_diloco.node" in process.cmdline()]
        self.pid, self.numel = node.pid, numel
        self._shared = next(start for start, _, name in self._maps() if "p2p-diloco" in name)
        try:
            self._memory = os.open(f"/proc/{self.pid}/mem", os.O_RDWR)
            os.pwrite(self._memory, self._read(self._shared, 1), self._shared)
        except OSError as error:
            raise Unreachable(f"the memory of another process can't be written ({error}); try as root") from None

    def close(self) -> None:
        os.close(self._memory)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """No line of the node runs meanwhile."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            give_up_at = time.monotonic() + STOP_S
            while not self._all_threads_stopped():
                assert time.monotonic() < give_up_at, "the node doesn't stop"
                time.sleep(0.001)
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def epoch(self) -> int:
        """The epoch that the node has told its trainer."""
        at = self._shared + SLOT_BYTES * vars(Header)["epoch"].index
        return int.from_bytes(self._read(at, SLOT_BYTES), "little", signed=True)

    def theta(self) -> np.ndarray:
        """θ [numel] fp32, as it lies there."""
        return np.frombuffer(self._read(self.theta_at(0), WORD * self.numel), np.float32)

    def theta_at(self, element: int) -> int:
        """Where an element of θ lies."""
        return self._shared + _HEADER_BYTES + WORD * element

    def runs_of(self, value: np.float32) -> list[int]:
        """Where on its heap `numel` elements of one value stand in a row: each momentum of that value, and what was
        one before it was freed."""
        needle, found = np.full(self.numel, value, np.float32).tobytes(), []
        for start, stop, name in self._maps():
            if name not in ("", "[heap]"):
                continue
            place = start
            while place < stop:  # chunks overlap by the needle, less one byte
                data = self._read(place, min(CHUNK + len(needle) - 1, stop - place))
                at = data.find(needle)
                while at >= 0:
                    found.append(place + at)
                    at = data.find(needle, at + len(needle))
                place += CHUNK
        return sorted(set(found))

    def flip(self, address: int, bit: int) -> None:
        """One bit of the fp32 element there."""
        word = int.from_bytes(self._read(address, WORD), "little") ^ 1 << bit
        assert os.pwrite(self._memory, word.to_bytes(WORD, "little"), address) == WORD

    def _read(self, address: int, length: int) -> bytes:
        return os.pread(self._memory, length, address)

    def _maps(self) -> Iterator[tuple[int, int, str]]:
        """Mappings that may be read and written: (start, stop, name)."""
        with open(f"/proc/{self.pid}/maps") as lines:
            for line in lines:
                place, rights, _, _, _, *name = line.split(maxsplit=5)
                if rights.startswith("rw"):
                    start, _, stop = place.partition("-")
                    yield int(start, 16), int(stop, 16), "".join(name).strip()

    def _all_threads_stopped(self) -> bool:
        for thread in os.listdir(f"/proc/{self.pid}/task"):
            with open(f"/proc/{self.pid}/task/{thread}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] != "T":
                    return False
        return True
