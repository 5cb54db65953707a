"""Messages on their way in: a header is judged before its payload is let through, a payload before the replica sees it.

Law: nothing reaches the replica that is not of this run, well-formed, of the right size and finite. A refusal is
answered with its reason, counted by the transport, and logged once for each peer.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Protocol

from p2p_diloco.core.messages import Commit, Contribution, Message, Probe, ProbeAck, State
from p2p_diloco.core.revision import FOUNDED, Revision
from p2p_diloco.net.interface import Refusal
from p2p_diloco.node import wire
from p2p_diloco.node.misfit import misfit
from p2p_diloco.node.run import Run
from p2p_diloco.node.tensor_work import TensorWork
from p2p_diloco.node.wire import Describe, Description, Nudge

REMEMBERED_BYTES_MAX = 16 * 2**10
"""A longer header is read twice, when it comes and with its payload: headers of strangers must not fill the cache."""

log = logging.getLogger(__name__)


class Handler:
    """What is done with messages at one stage of a peer's way into the run. This one is the first: all are refused."""

    def read(self, header: bytes) -> tuple[wire.AnyMessage, int]:
        """The message, and how many bytes of payload belong to it.

        Raises:
            Refusal: the message isn't taken.
        """
        raise Refusal("this peer is not in a run yet")

    def check(self, sender: str, message: wire.AnyMessage, payload: memoryview | None) -> wire.AnyMessage:
        """The message with its payload.

        Raises:
            Refusal: the payload can't be used.
        """
        return message

    async def take(self, sender: str, message: wire.AnyMessage) -> None:
        """Returns once the message is handled. May raise Refusal."""

    def closed(self, peer: str) -> None:
        """A link broke."""

    def moving(self, peer: str) -> None:
        """A transfer with a peer goes on."""


class Inbox:
    """What the transport calls, as `net.interface.Inbox`. `handler` is replaced as the peer comes into the run."""

    def __init__(self) -> None:
        self.handler = Handler()
        self._complained: set[str] = set()

    def admit(self, sender: str, header: bytes) -> int:
        """As `net.interface.Inbox.admit`."""
        with self._complaining(sender):
            return self.handler.read(header)[1]

    async def deliver(self, sender: str, header: bytes, payload: memoryview | None) -> None:
        """As `net.interface.Inbox.deliver`."""
        handler = self.handler
        with self._complaining(sender):
            message, expected = handler.read(header)
            found = 0 if payload is None else payload.nbytes
            if found != expected:
                raise Refusal(f"a {type(message).__name__} carries {expected} bytes, {found} came")
            message = handler.check(sender, message, payload)
        await handler.take(sender, message)

    def closed(self, peer: str) -> None:
        """As `net.interface.Inbox.closed`."""
        self.handler.closed(peer)

    def moving(self, peer: str) -> None:
        """As `net.interface.Inbox.moving`."""
        self.handler.moving(peer)

    @contextmanager
    def _complaining(self, sender: str) -> Iterator[None]:
        """Log the first refusal of each peer."""
        try:
            yield
        except Refusal as refusal:
            if sender not in self._complained:
                self._complained.add(sender)
                log.warning("refused a message of %s: %s (said once for each peer)", sender, refusal.reason)
            raise


class Receiver(Protocol):
    """What a run's messages lead to. `receive` returns once the replica has handled one."""

    async def receive(self, sender: str, message: Message) -> None: ...

    def describe_to(self, peer: str) -> None: ...

    def nudged(self, goal: int) -> None: ...

    def closed(self, peer: str) -> None: ...

    def moving(self, peer: str) -> None: ...

    def proven(self, revision: Revision) -> bool: ...


class RunInbox(Handler):
    """The handler of a peer that is in the run. `judging` is entered while a payload is looked at."""

    def __init__(
        self, run: Run, work: TensorWork, receiver: Receiver, judging: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._token, self._work, self._receiver, self._judging = run.token, work, receiver, judging
        self._shape = len(run.layout.shards), len(run.layout.fragments)
        self._unsigned: set[str] = set()  # peers whose unsigned revisions were logged

    def read(self, header: bytes) -> tuple[wire.AnyMessage, int]:
        """As `Handler.read`."""
        read = _read_once if len(header) <= REMEMBERED_BYTES_MAX else _read
        message = read(header, self._token, self._shape)
        match message:
            case Describe() | Nudge():
                return message, 0
            case Description():
                raise Refusal("no description was asked for")
        return message, self._work.nbytes(message)

    def check(self, sender: str, message: wire.AnyMessage, payload: memoryview | None) -> wire.AnyMessage:
        """As `Handler.check`."""
        if isinstance(message, (Contribution, Commit, State)) and payload is not None:
            with self._judging():
                objection = self._work.objection(message, payload)
            if objection:
                raise Refusal(f"the {type(message).__name__} is refused: {objection}")
            return dataclasses.replace(message, payload=payload)
        return message

    async def take(self, sender: str, message: wire.AnyMessage) -> None:
        """As `Handler.take`."""
        match message:
            case Describe():
                self._receiver.describe_to(sender)
            case Nudge(goal):
                self._receiver.nudged(goal)
            case Description():
                raise AssertionError("refused when it was read")
            case _:
                await self._receiver.receive(sender, self._believed(sender, message))

    def closed(self, peer: str) -> None:
        """As `Handler.closed`."""
        self._receiver.closed(peer)

    def moving(self, peer: str) -> None:
        """As `Handler.moving`."""
        self._receiver.moving(peer)

    def _believed(self, sender: str, message: Message) -> Message:
        """Without a revision that the founder has not signed: all else in a probe may be true. The digests of commits
        and states cover their revisions, which are believed as the rest of these is.
        """
        match message:
            case Probe(summary) | ProbeAck(summary) if summary.revision.number:
                if self._receiver.proven(summary.revision):
                    return message
                if sender not in self._unsigned:
                    self._unsigned.add(sender)
                    log.warning("ignored %s of %s: not signed by the run's founder", summary.revision, sender)
                return dataclasses.replace(message, summary=dataclasses.replace(summary, revision=FOUNDED))
        return message


def _read(header: bytes, token: bytes, shape: tuple[int, int]) -> wire.AnyMessage:
    """The message of a header. `shape`: how many shards and fragments the run has.

    Raises:
        Refusal: it is none, or none of this run.
    """
    message = wire.unpack(header, token)
    if isinstance(message, (Describe, Description, Nudge)):
        return message
    if reason := misfit(message, *shape):
        raise Refusal(f"the {type(message).__name__} is refused: {reason}")
    return message


_read_once = lru_cache(maxsize=64)(_read)
"""A header is read when it comes, and again with its payload; few are under way at a time."""
