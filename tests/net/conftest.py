"""What all tests of this folder share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A payload waits for its direct connection, and that for its handshake, however busy this machine is."""
    monkeypatch.setattr("p2p_diloco.net.direct.PATIENCE_PART", 6.0)
    monkeypatch.setattr("p2p_diloco.net.direct.DIAL_S", 30.0)
    monkeypatch.setattr("p2p_diloco.net.listener.HANDSHAKE_S", 30.0)
