"""`status`: how it ends, and whom it tells."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from p2p_diloco.cli import carry_out
from p2p_diloco.cli import status as module
from p2p_diloco.cli.status import Watch
from p2p_diloco.config import PeerConfig
from p2p_diloco.observe.snapshot import Snapshot, snapshot


async def look(*_: object) -> Snapshot:
    return snapshot("main", None, [], 1.0)


def test_whoever_stops_reading_ends_it_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `status --json | head`: the DHT is left before the loop ends, and the broken pipe is no other error."""
    left: list[str] = []

    @asynccontextmanager
    async def observer(*_: object) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.sleep(0)  # as the DHT's end does
            left.append("the DHT")

    async def no_warning(*_: object) -> None:
        return

    def gone(_: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("p2p_diloco.observe.snapshot.observer", observer)
    monkeypatch.setattr("p2p_diloco.observe.snapshot.look", look)
    monkeypatch.setattr(module, "_warn", no_warning)
    monkeypatch.setattr(module.typer, "echo", gone)
    with pytest.raises(BrokenPipeError):
        asyncio.run(module._print(Watch(PeerConfig()), 1.0, as_json=True))
    assert left == ["the DHT"]


def test_only_a_check_exports_no_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exit code and its lines are for a monitor; the endpoint may be that of a peer on this machine."""
    endpoints: list[str | None] = []

    @contextmanager
    def told(_: object, endpoint: str | None, *collectors: object) -> Iterator[None]:
        endpoints.append(endpoint)
        yield

    async def follow(_: Watch, saw: Callable[[Snapshot], None], *__: object) -> None:
        saw(await look())

    monkeypatch.setattr("p2p_diloco.node.metrics.told", told)
    monkeypatch.setattr(Watch, "follow", follow)
    monkeypatch.setattr(module, "watched", lambda *_: Watch(PeerConfig(otlp_endpoint="http://127.0.0.1:9")))
    assert carry_out(["status", "--check"]) == 1
    assert endpoints == []
    assert carry_out(["status", "--once"]) == 0
    assert endpoints == ["http://127.0.0.1:9"]
