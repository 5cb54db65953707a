"""The log of the replica's notes."""

from __future__ import annotations

import asyncio

import pytest

from p2p_diloco.net.signing import SigningKey
from p2p_diloco.node.common import EventLog


def test_peers_of_one_name_are_told_apart() -> None:
    """All peer ids begin alike, so a note shows the last letters of an id beside the peer's name. Of a peer
    without a name only they are shown, and this peer as such. An address keeps its id."""
    me, a, b, unnamed = (SigningKey(bytes([number]) * 32).peer_id for number in range(4))
    log = EventLog(me)
    for peer in (a, b):
        log.name(peer, "box")
    texts = {peer: log.named(f"{peer} joined") for peer in (me, a, b, unnamed)}
    assert texts[me] == "this peer joined"
    assert texts[a].startswith("box (")
    assert len(set(texts.values())) == 4
    assert texts[unnamed] == f"…{unnamed[-6:]} joined"
    assert log.named(f"dial /ip4/1.2.3.4/tcp/1/p2p/{unnamed}") == f"dial /ip4/1.2.3.4/tcp/1/p2p/{unnamed}"


def test_a_note_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """It may quote what another peer has said."""

    async def noted() -> None:
        EventLog("12D3").note("expelled", "b refuses: x\n2026 ERROR invented\x1b[2J")

    asyncio.run(noted())
    assert caplog.messages[0] == "expelled: b refuses: x 2026 ERROR invented [2J"
