"""Starts and ends the node's process, sends the trainer's requests to it and receives the answers. Logs the node's
reports on what the node waits for.

Law: requests have numbers; an answer that comes during the wait for another one is kept. Every wait has a deadline,
unless the answer depends on other peers; even that wait ends when the node ends. Only one thread at a time uses the
node, because an answer to one would be received by another.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from p2p_diloco import errors
from p2p_diloco.config import RunConfig
from p2p_diloco.errors import GaveUpWaiting, NodeDied, P2PDilocoError, UsageError
from p2p_diloco.node import shared
from p2p_diloco.node.channel import ChannelClosed, Message, TrainerEnd
from p2p_diloco.node.shared import Setup, SharedMemory

REPEAT_S = 10.0
"""Seconds after which a wait with the same reason is logged again."""
ANSWER_S = 60.0
"""The usual deadline for an answer of the node that needs no other peer."""

log = logging.getLogger("p2p_diloco")


class Requests:
    """The trainer's end of a channel to a node. `how_it_ended` returns a sentence that says how the node's process
    ended."""

    def __init__(self, channel: TrainerEnd, how_it_ended: Callable[[], str]) -> None:
        self._channel, self._how_it_ended = channel, how_it_ended
        self.answer_s = ANSWER_S
        """Deadline for an answer of the node that needs no other peer."""
        self.say: Callable[[str], None] = partial(log.info, "%s")
        """Called with each report of the node on what the node waits for."""
        self._using = threading.RLock()
        self._n = 0
        self.told, self.told_at = "", 0.0
        """The last report that was logged, and when."""
        self._error: P2PDilocoError | None = None  # the node's own: a later call must report the same
        self._kept: dict[int, Message] = {}  # answers that came before a call waited for them, by request

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """A block in which only this thread uses the node. It may be nested. Another thread's block waits for the end
        of this one, as long as for an answer.

        Raises:
            UsageError: another thread's block did not end in time.
        """
        if not self._using.acquire(timeout=self.answer_s):
            wrong = f"another thread has been in a step or another call of this peer for {self.answer_s:g} s"
            mend = "call it in the thread that trains; epoch, global_step and metrics can be read in any thread"
            raise UsageError(wrong, mend=mend)
        try:
            yield
        finally:
            self._using.release()

    def tell(self, kind: str, **values: object) -> None:
        """Send the node a message that needs no answer.

        Raises:
            P2PDilocoError: the node has ended; the error says why.
        """
        with self.turn():
            try:
                self._channel.send({"kind": kind, **values})
            except ChannelClosed:
                raise self.why_it_ended() from None

    def request(self, kind: str, **values: object) -> int:
        """Send the node a request. Returns the request's number, which the node's answer repeats.

        Raises:
            P2PDilocoError: the node has ended; the error says why.
        """
        with self.turn():
            self._n += 1
            self.tell(kind, n=self._n, **values)
            return self._n

    def ask(self, kind: str, answer: str, *, within_s: float | None = None, **values: Any) -> Message:
        """Send the node a request, and wait for the answer. `within_s`: deadline for the answer; None: the usual one,
        because the node needs no other peer.

        Raises:
            P2PDilocoError: the node has ended, or doesn't answer.
        """
        with self.turn():
            within_s = self.answer_s if within_s is None else within_s
            message = self.wait_for(answer, n=self.request(kind, **values), timeout_s=within_s)
        if message is None:
            raise NodeDied(f"the node did not answer {kind!r} within {within_s:g} s", mend="see its log above")
        return message

    def wait_for(self, kind: str, *, n: int | None = None, timeout_s: float) -> Message | None:
        """Wait for the next message of this kind (and with the number `n`, if given). None if no such message comes in
        time.

        The node's reports of what it waits for are logged.

        Raises:
            P2PDilocoError: the node has ended; the error says why.
        """
        with self.turn():
            if n is not None and n in self._kept:
                return self._kept.pop(n)
            give_up_at = time.monotonic() + timeout_s
            while (left_s := give_up_at - time.monotonic()) > 0:
                try:
                    message = self._channel.receive(min(left_s, 1.0))
                except ChannelClosed:
                    raise self.why_it_ended() from None
                match message:
                    case None:
                        continue
                    case {"kind": "error", "error": wire}:
                        self._error = errors.from_wire(wire)
                        raise self._error
                    case {"kind": "waiting", "text": text}:
                        self.report(text)
                    case {"kind": found} if found == kind and (n is None or message.get("n") == n):
                        return message
                    case {"kind": "release", "n": other}:
                        self._kept[other] = message
            return None

    def report(self, text: str) -> None:
        """Log what this peer waits for, unless the same was logged less than REPEAT_S ago."""
        now = time.monotonic()
        if text and (text != self.told or now - self.told_at >= REPEAT_S):
            self.say(text)
            self.told, self.told_at = text, now

    def why_it_ended(self) -> P2PDilocoError:
        """The error that the node sent before its end, or an error that says how its process ended."""
        with contextlib.suppress(ChannelClosed):
            while self._error is None and (message := self._channel.receive(1.0)) is not None:
                if message["kind"] == "error":
                    self._error = errors.from_wire(message["error"])
        return self._error or NodeDied(self._how_it_ended(), mend="see its log above, and start this peer again")


class NodeClient(Requests):
    """The trainer's end of the channel to its node, and the memory that both share."""

    def __init__(self, channel: TrainerEnd, memory: SharedMemory, how_it_ended: Callable[[], str]) -> None:
        super().__init__(channel, how_it_ended)
        self.memory = memory


class Patience:
    """How long one trainer waits for its exchanges. An exchange of a run that goes on is waited for without a limit.
    There is a deadline only while a new run waits for its `start_peers`, and while this peer leaves."""

    def __init__(self, node: NodeClient, config: RunConfig, wait_timeout_s: float) -> None:
        """`wait_timeout_s`: the longest time to wait until a run has its `start_peers`."""
        self._node, self._start_peers, self._wait_timeout_s = node, config.start_peers, wait_timeout_s
        self._leave_s, self._leave_by = math.inf, math.inf

    def leave_within(self, seconds: float) -> None:
        """Record that this peer leaves: give up any wait once this many seconds have passed from now, and log as a
        warning what the wait is for."""
        self._leave_s, self._leave_by = seconds, time.monotonic() + seconds
        self._node.say = lambda text: log.warning("leaving: %s; for %g s at most, ^C skips this", text, seconds)

    def hurry(self, seconds: float) -> None:
        """From now on, wait at most this many seconds for an answer of the node, because the program is to end soon."""
        self._node.answer_s = seconds

    def until_over(self, request: int) -> Message:
        """Wait until the exchange with this request's number is over. Returns the node's answer.

        Raises:
            GaveUpWaiting: it is not over in time.
        """
        starting = self._start_peers > 1 and self._node.memory.epoch == 0
        for_start_s, for_leave_s = self._wait_timeout_s if starting else math.inf, self._leave_by - time.monotonic()
        release = self._node.wait_for("release", n=request, timeout_s=min(for_start_s, for_leave_s))
        if release is not None:
            return release
        few = f"fewer than start_peers={self._start_peers} peers take part"
        if for_leave_s < for_start_s:
            why = few if starting else "the last exchange is not over"
            mend = "raise it, or call force_sync() earlier"
            raise GaveUpWaiting(f"has passed, and {why}", key="exit_timeout", value=f"{self._leave_s:g}", mend=mend)
        mend = "start the others, or lower start_peers"
        raise GaveUpWaiting(f"has passed, and {few}", key="wait_timeout", value=self._wait_timeout_s, mend=mend)


# -- the node's process


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
