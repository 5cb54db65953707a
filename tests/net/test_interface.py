"""The counters of a transport, and its refusals."""

from __future__ import annotations

import pytest

from p2p_diloco.net.interface import Refusal, Traffic


def test_the_number_of_peers_counted_apart_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The totals count all peers."""
    monkeypatch.setattr("p2p_diloco.net.interface.PEERS_COUNTED_MAX", 2)
    traffic = Traffic()
    for peer in "abcb":
        traffic.sent(peer, 1)
        traffic.received(peer, 10)
        traffic.refuse(peer)
        traffic.went(peer, "direct")
    assert (traffic.bytes_sent, traffic.bytes_received, traffic.refused) == (4, 40, 4)
    assert {name: one.bytes_received for name, one in traffic.peers.items()} == {"a": 10, "b": 20}
    assert traffic.ways() == {"a": "direct", "b": "direct"}


def test_a_refusals_reason_gives_no_commands_to_a_terminal() -> None:
    """It may be another peer's text, and comes into logs."""
    refusal = Refusal("no\x1b[2J\x1b[31m, and\nWARNING forged")
    assert refusal.reason == str(refusal) == "no [2J [31m, and WARNING forged"
