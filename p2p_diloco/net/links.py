"""The links that carry small messages, one to each peer. A link is opened on first use, and moves to another path when
answers fail to come.

Law: knows streams and paths, not libp2p. A link moves only once the other path is open, so that a frozen or dead peer
is not mistaken for a peer behind a broken path.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Generic, Protocol, TypeVar

from p2p_diloco.addresses import leads_over_a_relay
from p2p_diloco.net.attempts import within
from p2p_diloco.net.framing import Accepted, FrameError, FrameStream, Message, Refused
from p2p_diloco.net.interface import Limits, Refusal, Unreachable
from p2p_diloco.net.pipe import Pipe, PipeBroken, PipeStalled
from p2p_diloco.net.streams import Streams, start

T = TypeVar("T")


class OnePerPeer(Generic[T]):
    """Keeps one object for each peer. `open` makes the object of a peer, or raises `Unreachable` if it can't."""

    def __init__(self, open: Callable[[str], Coroutine[object, object, T]]) -> None:
        self._open = open
        self._opened: dict[str, T] = {}
        self._opening: dict[str, asyncio.Task[T]] = {}
        self._ended = False

    async def to(self, peer: str) -> T:
        """Return the object of a peer; if there is none, open it first.

        Raises:
            Unreachable: the object can't be opened.
        """
        if peer in self._opened:
            return self._opened[peer]
        if self._ended:
            raise Unreachable("this peer is closing")
        opening = self._opening.get(peer)
        if opening is None:
            opening = self._opening[peer] = asyncio.create_task(self._open_to(peer))
            opening.add_done_callback(lambda task: task.cancelled() or task.exception())  # even if no caller waits
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            if opening.cancelled():
                raise Unreachable("this peer is closing") from None
            raise

    async def _open_to(self, peer: str) -> T:
        try:
            one = self._opened[peer] = await self._open(peer)
            return one
        finally:
            del self._opening[peer]

    def peers(self) -> list[str]:
        return list(self._opened)

    def has(self, peer: str, one: T) -> bool:
        """Whether `one` is the object that is kept for `peer`."""
        return self._opened.get(peer) is one

    def replace(self, peer: str, one: T, other: T) -> bool:
        """Replace the peer's object `one` by `other`; returns False if `one` is no longer the peer's object."""
        if self.has(peer, one):
            self._opened[peer] = other
            return True
        return False

    def forget(self, peer: str, end: Callable[[T], None]) -> None:
        """Remove the peer's object, if there is one, and pass it to `end`, which ends it."""
        if (one := self._opened.pop(peer, None)) is not None:
            end(one)

    def drop(self, peer: str, one: T) -> None:
        """Remove the peer's object `one`, so that the next call of `to` opens another. Nothing is removed if the peer
        has another object already."""
        if self.has(peer, one):
            del self._opened[peer]

    def end(self) -> None:
        """Cancel all attempts to open an object that are under way, and start no new ones."""
        self._ended = True
        for opening in self._opening.values():
            opening.cancel()


log = logging.getLogger(__name__)

DOUBT_PART = 0.4
"""The fraction of `read_timeout_s` after which another path is sought if no answer has come on a link."""
RELAYED_S = 60.0
"""Seconds after which a link through a relay looks for a direct path."""


class Dial(Protocol):
    """A function that opens a stream to a peer; it returns the stream, and the multiaddr at which the peer was found.
    With `around` it uses only relays, because the direct path may be broken. It raises Unreachable if it can't open a
    stream."""

    async def __call__(self, peer: str, *, around: bool = False) -> tuple[Pipe, str]:
        """Open a stream to `peer`."""
        ...


class Link:
    """The link to one peer: sends small messages on one stream. The receiver answers them in the same order."""

    def __init__(self, frames: FrameStream, limits: Limits) -> None:
        self._frames = frames
        self._limits = limits
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.relayed = False
        """Whether the stream goes through a relay."""
        self.heard_at = -math.inf
        """When the last answer came, by the loop's clock."""

    async def send(self, header: bytes) -> None:
        """Send a message and wait for its answer. The link ends if no answer comes in time.

        Raises:
            Refusal: the receiver refused the message, with its reason.
            Unreachable: the link broke, or no answer came in time.
        """
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())  # its send may be cancelled
        self._waiting.append(answer)
        self._frames.write(Message(header))
        try:
            await self._frames.pipe.drain(self._limits.write_timeout_s)
            await within(self._limits.read_timeout_s, answer)
        except (PipeBroken, PipeStalled) as error:
            self.fail(str(error))
            raise Unreachable(f"{self._frames.peer}: {error}") from None
        except asyncio.TimeoutError:
            why = f"no answer within {self._limits.read_timeout_s:g} s"
            self.fail(why)
            raise Unreachable(f"{self._frames.peer}: {why}") from None

    async def read_answers(self) -> str:
        """Read answers until the link ends, and pass each to the `send` that waits for it; returns the reason why the
        link ended."""
        frame_s = self._limits.read_timeout_s
        try:
            while (frame := await self._frames.read(idle_s=None, frame_s=frame_s)) is not None:
                if not isinstance(frame, (Accepted, Refused)) or not self._waiting:
                    raise FrameError(f"a {type(frame).__name__} frame was not asked for")
                self.heard_at = asyncio.get_running_loop().time()
                answer = self._waiting.popleft()
                if answer.done():  # its send was cancelled
                    continue
                if isinstance(frame, Refused):
                    answer.set_exception(Refusal(frame.reason))
                else:
                    answer.set_result(None)
        except (FrameError, PipeStalled) as error:
            return str(error)
        return self._frames.pipe.ended or "the link was closed"

    def fail(self, why: str) -> None:
        """End the link: every send that waits on it raises `Unreachable`."""
        self._frames.pipe.abort()
        while self._waiting:
            if not (answer := self._waiting.popleft()).done():
                answer.set_exception(Unreachable(f"{self._frames.peer}: {why}"))


class Links:
    """Sends small messages over one link to each peer. When a peer's direct path is broken, and its link has moved to a
    relay, `moved` is called with the peer."""

    def __init__(self, streams: Streams, dial: Dial, moved: Callable[[str], None]) -> None:
        self._streams, self._dial, self._moved = streams, dial, moved
        self._links = OnePerPeer(self._open)
        self._moving = set[str]()

    def peers(self) -> list[str]:
        return self._links.peers()

    async def send(self, peer: str, header: bytes) -> None:
        """Implements `Transport.send` for messages without a payload."""
        link, loop = await self._links.to(peer), asyncio.get_running_loop()
        doubt_s = DOUBT_PART * self._streams.limits.read_timeout_s
        doubting = loop.call_later(doubt_s, self._doubt, peer, link, loop.time())
        try:
            await link.send(header)
        except Unreachable:
            self._links.drop(peer, link)  # at once: a caller that tries again must not get the dead link
            raise
        finally:
            doubting.cancel()

    def end(self) -> None:
        self._links.end()

    async def _open(self, peer: str, around: bool = False) -> Link:
        pipe, found_at = await self._dial(peer, around=around)
        if self._streams.closing:
            pipe.abort()
            raise Unreachable("this peer is closing")
        link = Link(self._streams.frames(peer, pipe), self._streams.limits)
        link.relayed = leads_over_a_relay(found_at)
        self._look_for_a_direct_path(peer, link)
        start(self._read(peer, link), self._streams.tasks)
        return link

    async def _read(self, peer: str, link: Link) -> None:
        why = "this peer is closing"
        try:
            why = await link.read_answers()
        finally:
            self._links.drop(peer, link)
            link.fail(why)
            self._streams.lost(peer)

    # -- another path

    def _doubt(self, peer: str, link: Link, since: float) -> None:
        """Look for a path through relays if no answer has come on the link since the time `since`, when a message was
        sent."""
        if link.heard_at < since:
            self._move(peer, link, True)

    def _move(self, peer: str, link: Link, around: bool) -> None:
        if self._links.has(peer, link) and peer not in self._moving and not self._streams.closing:
            self._moving.add(peer)
            start(self._open_another(peer, link, around), self._streams.tasks)

    async def _open_another(self, peer: str, link: Link, around: bool) -> None:
        """Open a second link to a peer over another path, and replace `link` by it. Keep `link` instead if an answer
        came on it meanwhile, or if the second link should be direct but goes through a relay too."""
        began = asyncio.get_running_loop().time()
        try:
            other = await self._open(peer, around)
        except Unreachable:
            self._look_for_a_direct_path(peer, link)
            return
        finally:
            self._moving.discard(peer)
        better = link.heard_at < began if around else not other.relayed
        if not better or not self._links.replace(peer, link, other):
            other.fail("it isn't needed")
            self._look_for_a_direct_path(peer, link)
            return
        link.fail("another path is used")
        if around:
            log.info("the direct path to %s is broken: messages and payloads to it go through a relay", peer)
            self._moved(peer)

    def _look_for_a_direct_path(self, peer: str, link: Link) -> None:
        """If this link goes through a relay, plan an attempt to move it to a direct path in `RELAYED_S` seconds."""
        if link.relayed:
            asyncio.get_running_loop().call_later(RELAYED_S, self._move, peer, link, False)
