"""`status`: how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

import pytest

from p2p_diloco.cli import carry_out
from p2p_diloco.cli import status as module
from p2p_diloco.config import PeerConfig
from p2p_diloco.observe.snapshot import Snapshot, snapshot


def test_whoever_stops_reading_ends_it_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `status --json | head`: the DHT is left before the loop ends, and the broken pipe is no other error."""
    left: list[str] = []

    async def looks() -> AsyncGenerator[Snapshot, None]:
        try:
            while True:
                yield snapshot("main", None, [], 1.0)
        finally:
            await asyncio.sleep(0)  # as the DHT's end does, which the end of a loop would not wait for
            left.append("the DHT")

    def gone(_: str) -> None:
        raise BrokenPipeError

    async def printed() -> None:
        try:
            await module._print(looks(), as_json=True)
        finally:
            left.append("the loop")

    monkeypatch.setattr(module.typer, "echo", gone)
    with pytest.raises(BrokenPipeError):
        asyncio.run(printed())
    assert left == ["the DHT", "the loop"]


def test_only_a_check_exports_no_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exit code and its lines are for a monitor; the endpoint may be that of a peer on this machine."""
    endpoints: list[str | None] = []

    @contextmanager
    def told(_: object, endpoint: str | None, *collectors: object) -> Iterator[None]:
        endpoints.append(endpoint)
        yield

    async def looks(*_: object) -> AsyncGenerator[Snapshot, None]:
        yield snapshot("main", None, [], 1.0)

    monkeypatch.setattr("p2p_diloco.node.metrics.told", told)
    monkeypatch.setattr(module, "looks", looks)
    monkeypatch.setattr(module, "watched", lambda *_: PeerConfig(otlp_endpoint="http://127.0.0.1:9"))
    assert carry_out(["status", "--check"]) == 1
    assert endpoints == []
    assert carry_out(["status", "--once"]) == 0
    assert endpoints == ["http://127.0.0.1:9"]
