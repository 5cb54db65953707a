"""Fixtures of all tests in this folder."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest


@pytest.fixture(autouse=True)
def patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A payload waits for its direct connection, that for its handshake, and a joiner for its initial peers' answers,
    however busy this machine is."""
    monkeypatch.setattr("p2p_diloco.net.direct.PATIENCE_PART", 6.0)
    monkeypatch.setattr("p2p_diloco.net.direct.DIAL_S", 30.0)
    monkeypatch.setattr("p2p_diloco.net.listener.HANDSHAKE_S", 30.0)
    if request.node.get_closest_marker("real"):
        monkeypatch.setattr("p2p_diloco.net.daemon.DIAL_S", 20.0)
        monkeypatch.setattr("p2p_diloco.net.dht.RPC_S", 14.0)


@pytest.fixture
def no_daemon_is_left() -> Iterator[None]:
    """Every test ends the daemons that it started."""
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child.name() == "p2pd"]
    for child in left:
        child.kill()
    assert left == []
