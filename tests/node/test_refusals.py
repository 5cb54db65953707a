"""Refused messages: counted by their sender, with the last reason, in a bounded table."""

from __future__ import annotations

import logging

import pytest

from p2p_diloco.node.inbox import PEERS_MAX, Refusals, Tally


def test_each_peer_has_a_count_and_the_last_reason() -> None:
    """The peer that was refused last comes last."""
    refusals = Refusals()
    for peer, why in (("a", "too long"), ("b", "too short"), ("a", "too late")):
        refusals.count(peer, why)
    assert refusals.newest(2) == [("b", Tally(1, "too short")), ("a", Tally(2, "too late"))]
    assert refusals.newest(1) == [("a", Tally(2, "too late"))]


def test_only_the_first_refusal_of_a_peer_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """As a warning, with the name in the peer's invitation; a flood of messages doesn't fill the log."""
    refusals = Refusals()
    refusals.name_of = {"a": "alice"}.get  # type: ignore[assignment]
    for peer in "aaab":
        refusals.count(peer, "too long")
    logged = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [text.split(" (logged")[0] for text in logged] == [
        "refused a message of alice (a): too long",
        "refused a message of b: too long",
    ]


def test_what_a_message_says_begins_no_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """A reason may quote the message, for example the name of an invented peer."""
    Refusals().count("a", "it counts x\n2026 ERROR invented\x1b[2J" + "!" * 5000)
    assert "it counts x 2026 ERROR invented [2J!!!" in caplog.messages[0]
    assert len(caplog.messages[0]) < 500


def test_the_table_is_bounded() -> None:
    """Identities are free: the peer that was refused longest ago is forgotten."""
    refusals = Refusals()
    for n in range(PEERS_MAX + 1):
        refusals.count(f"peer {n}", "too long")
    known = [peer for peer, _ in refusals.newest(PEERS_MAX + 1)]
    assert known == [f"peer {n}" for n in range(1, PEERS_MAX + 1)]
