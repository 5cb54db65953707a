"""The state that all streams of this peer share: limits, counts, the inbox, the open pipes, and the tasks.

Law: neither opens nor reads a stream; `exchange` and `receiving` do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from weakref import WeakKeyDictionary

from p2p_diloco.net.framing import FrameStream
from p2p_diloco.net.interface import Inbox, Limits, Traffic, Unreachable
from p2p_diloco.net.outgoing import Outgoing
from p2p_diloco.net.pipe import Pipe
from p2p_diloco.net.shares import Groups, no_groups

CLOSE_S = 1.0
"""Seconds that streams have to end before their tasks are cancelled."""


def start(coroutine: Coroutine[object, object, None], tasks: set[asyncio.Task[None]]) -> asyncio.Task[None]:
    """Run a coroutine as a task. The task stays in the set `tasks` until it ends."""
    task = asyncio.create_task(coroutine)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def stop(*tasks: asyncio.Task[None]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Streams:
    """The open streams of a peer and the tasks that serve them."""

    def __init__(self, inbox: Inbox, limits: Limits, traffic: Traffic) -> None:
        self.inbox, self.limits, self.traffic = inbox, limits, traffic
        self.pipes = WeakKeyDictionary[Pipe, str]()  # with their peers; weak: the code that uses a pipe keeps it alive
        self.tasks: set[asyncio.Task[None]] = set()
        self.closing = False
        self.admits: Callable[[str], bool] = lambda peer: True
        """Whether streams with this peer are allowed. A private run allows streams with its members only."""
        self.groups: Groups = no_groups

    def frames(self, peer: str, pipe: Pipe) -> FrameStream:
        """Make a frame stream over a pipe, which `Streams.close` will end. If the peer isn't admitted, the pipe ends at
        once."""
        self.pipes[pipe] = peer
        if not self.admits(peer):
            _cut(pipe)
        return FrameStream(pipe, peer, self.limits, self.traffic)

    def outgoing(
        self, peer: str, pipe: Pipe, way: str, ended: Callable[[Outgoing], None] = lambda stream: None
    ) -> Outgoing:
        """Make a stream on which this peer sends, over a pipe. `ended` is called when the stream has ended.

        Raises:
            Unreachable: this peer is closing.
        """
        if self.closing:
            pipe.abort()
            raise Unreachable("this peer is closing")
        stream = Outgoing(self.frames(peer, pipe), way)
        start(self._read(stream, ended), self.tasks)
        return stream

    async def _read(self, stream: Outgoing, ended: Callable[[Outgoing], None]) -> None:
        try:
            await stream.read(self.limits.read_timeout_s)
        finally:
            ended(stream)

    def cut(self, peer: str) -> None:
        """End every stream and connection with a peer at once."""
        for pipe in [pipe for pipe, other in self.pipes.items() if other == peer]:
            _cut(pipe)

    def lost(self, peer: str) -> None:
        """Tell the inbox that a stream of `peer` broke, unless this peer is closing."""
        if not self.closing:
            self.inbox.closed(peer)

    def abort(self) -> None:
        """End every stream and connection."""
        for pipe in list(self.pipes):
            pipe.abort()

    async def close(self) -> None:
        self.closing = True
        self.abort()
        if tasks := self.tasks - {asyncio.current_task()}:
            _, unfinished = await asyncio.wait(tasks, timeout=CLOSE_S)
            for task in unfinished:
                task.cancel()


def _cut(pipe: Pipe) -> None:
    """End a pipe at once; bytes that have come already are not read."""
    pipe.abort()
    pipe.unread.clear()
