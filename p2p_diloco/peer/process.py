"""Starts and ends the node's process, from the peer's side.

Law: the node's process always ends when this process ends; if the node hangs or dies, no call here waits for ever.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Sequence

from p2p_diloco.node import shared
from p2p_diloco.node.channel import ChannelClosed, TrainerEnd
from p2p_diloco.node.setup import Setup
from p2p_diloco.peer.node_client import NodeClient

log = logging.getLogger("p2p_diloco")


class NodeProcess:
    """The process of a node, started by this process."""

    def __init__(self, setup: Setup, sharers: Sequence[socket.socket] = ()) -> None:
        """`sharers`: sockets to the other processes of this peer; processes on this machine get the shared memory."""
        numel = setup.numel
        fd = shared.create(numel)
        ours, theirs = socket.socketpair()
        try:
            memory = shared.SharedMemory(fd, numel)
            for sharer in filter(shared.shareable, sharers):
                shared.lend(fd, sharer)
            self._process = subprocess.Popen(
                _command(theirs.fileno(), fd),
                pass_fds=(theirs.fileno(), fd),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # stdout is for the trainer's data; logs go to the common stderr
                env=_environment(),
                start_new_session=True,  # the terminal's ^C is for the trainer, which then tells the node
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(fd)
        self._channel = TrainerEnd(ours)
        self.client = NodeClient(self._channel, memory, self.how_it_ended)
        """The channel for requests and answers."""
        self.client.tell("setup", setup=setup.to_wire())

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def kill(self) -> None:
        """End the process at once. Other peers notice it as they notice a peer that died."""
        self._process.kill()

    def end(self, timeout_s: float) -> None:
        """Let the node leave the run and end. Kill it after `timeout_s`, or at a second ^C."""
        with contextlib.suppress(ChannelClosed):
            self._channel.send({"kind": "depart"}, timeout_s=1.0)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            log.warning("the node took longer than %g s to leave the run, so it is killed", timeout_s)
        finally:
            self._channel.close()
            if self.alive:
                self._process.kill()
                self._process.wait(5.0)

    def how_it_ended(self) -> str:
        """A sentence that says how the process ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        match self._process.returncode:
            case None:
                how = "closed its channel"
            case status if status < 0:
                how = f"was killed by signal {-status}"
            case status:
                how = f"ended with status {status}"
        return f"the node (process {self.pid}) {how}"


def _command(channel_fd: int, memory_fd: int) -> list[str]:
    level = logging.getLogger("p2p_diloco").getEffectiveLevel()
    options = {
        "channel-fd": channel_fd,
        "memory-fd": memory_fd,
        "parent-pid": os.getpid(),
        "log-level": level,
    }
    return [sys.executable, "-m", "p2p_diloco.node", *(f"--{key}={value}" for key, value in options.items())]


def _environment() -> dict[str, str]:
    """This process's environment variables and import path, so that the node imports the same packages. Filters of
    warnings are for the program: one that makes them errors would end the node in a library that warns."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    own = {key: value for key, value in os.environ.items() if key != "PYTHONWARNINGS"}
    return {**own, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
