"""Deadlines that no busy machine misses."""

from __future__ import annotations

import pytest


def be_patient(monkeypatch: pytest.MonkeyPatch, *, real: bool) -> None:
    """A payload waits for its direct connection, that for its handshake, and a joiner for its initial peers' answers,
    however busy this machine is."""
    monkeypatch.setattr("p2p_diloco.net.direct.PATIENCE_PART", 6.0)
    monkeypatch.setattr("p2p_diloco.net.direct.DIAL_S", 30.0)
    monkeypatch.setattr("p2p_diloco.net.listener.HANDSHAKE_S", 30.0)
    if real:
        monkeypatch.setattr("p2p_diloco.net.daemon.DIAL_S", 20.0)
        monkeypatch.setattr("p2p_diloco.net.dht.RPC_S", 14.0)
