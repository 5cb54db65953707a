"""An inbox for tests."""

from __future__ import annotations


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
