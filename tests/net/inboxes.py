"""Inboxes for tests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable


class Quiet:
    """Takes everything, and remembers nothing."""

    def admit(self, sender: str, header: bytes) -> int:
        return 1 << 30

    async def deliver(self, sender: str, header: bytes, payload: memoryview | None) -> None:
        pass

    def closed(self, peer: str) -> None:
        pass

    def moving(self, peer: str) -> None:
        pass


class Box(Quiet):
    """Remembers what comes."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.admitted_bytes = 1 << 30
        self.got: list[tuple[str, bytes, bytes | None]] = []
        self.closed_peers: list[str] = []
        self.moving_peers: list[str] = []
        self.on_deliver: Callable[[bytes], Awaitable[object]] | None = None
        """Awaited with each header before the message counts as taken; may raise."""

    def admit(self, sender: str, header: bytes) -> int:
        return self.admitted_bytes

    async def deliver(self, sender: str, header: bytes, payload: memoryview | None) -> None:
        if self.on_deliver is not None:
            await self.on_deliver(header)
        self.got.append((sender, header, None if payload is None else bytes(payload)))

    def closed(self, peer: str) -> None:
        self.closed_peers.append(peer)

    def moving(self, peer: str) -> None:
        self.moving_peers.append(peer)

    @property
    def headers(self) -> list[bytes]:
        return [header for _, header, _ in self.got]
