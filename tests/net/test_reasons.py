"""Dials are judged by what the daemon says."""

from __future__ import annotations

import pytest

from p2p_diloco.net.reasons import dial_refused, likely_reason


@pytest.mark.parametrize(
    ("daemon_says", "nobody"),
    [
        ("dial: * [/ip4/10.0.0.1/tcp/1] connect: connection refused", True),
        ("* [/ip4/127.0.0.1/tcp/1] failed to negotiate security protocol: read: connection reset by peer", True),
        ("* [/ip4/127.0.0.1/tcp/1] connect: connection refused\n  * [/ip4/10.0.0.1/tcp/1] i/o timeout", False),
        ("stream reset", False),
        ("dial backoff", False),
    ],
)
def test_a_dial_to_the_dead_and_to_the_dying_is_refused(daemon_says: str, nobody: bool) -> None:
    """A process that is just being killed still accepts and then resets; a silent address may be anything."""
    assert dial_refused(Exception(daemon_says)) is nobody


NEGOTIATING = "failed to dial: all dials failed\n  * [/ip4/127.0.0.1/tcp/1] failed to negotiate security protocol: "


@pytest.mark.parametrize(
    ("daemon_says", "meaning"),
    [
        (f"{NEGOTIATING}message did not have trailing newline", "something else answers there, no p2p-diloco"),
        (f"{NEGOTIATING}read tcp4 127.0.0.1:2->127.0.0.1:1: read: connection reset by peer", "closed at once"),
        (f"{NEGOTIATING}EOF", "closed at once"),
        (f"{NEGOTIATING}context deadline exceeded", "timed out"),
        (f"{NEGOTIATING}peer id mismatch: expected 12D3KooWA, but remote key matches 12D3KooWB", "its id is 12D3KooWB"),
        (f"{NEGOTIATING}EOF\n  * [/ip4/10.0.0.1/tcp/1] connect: connection refused", "nothing listens there"),
        ("failed to dial: something new", "failed to dial: something new"),
    ],
)
def test_a_failed_dial_is_explained_in_plain_words(daemon_says: str, meaning: str) -> None:
    """The reason is named, the rarest last; a message that is not known is passed on."""
    assert meaning in likely_reason(Exception(daemon_says))
