"""The memory of another process's node, read and written from outside, as a failing chip would change it; Linux only.

Law: a node's memory is accessed only while the node is stopped, so that a found value is still there when it is
written; the node always goes on afterwards. θ and the epoch are in the mapping that trainer and node share; the outer
momentum is on the node's own heap, and is found by its value.
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
    """This system does not allow writing to another process's memory; the text has the reason."""


class NodeMemory:
    """The memory of a peer's node. `numel`: elements of its model."""

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
        """The node is stopped meanwhile."""
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
        """θ [numel] fp32 in the shared mapping."""
        return np.frombuffer(self._read(self.theta_at(0), WORD * self.numel), np.float32)

    def theta_at(self, element: int) -> int:
        """The address of an element of θ."""
        return self._shared + _HEADER_BYTES + WORD * element

    def runs_of(self, value: np.float32, numel: int) -> list[int]:
        """The addresses on its heap at which `numel` elements of this value stand in a row: the momentum of a slice, or
        freed memory of an earlier one."""
        needle, found = np.full(numel, value, np.float32).tobytes(), []
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
        """Flip one bit of the fp32 element at this address."""
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
