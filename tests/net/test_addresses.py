"""Addresses are read, and dials are judged by what the daemon says."""

from __future__ import annotations

import subprocess
import sys

import pytest

from p2p_diloco.errors import AddressError
from p2p_diloco.net.addresses import listen_for, parse, peer_of
from p2p_diloco.net.reasons import dial_refused, likely_reason

PEER = "12D3KooWGrk7pQsQ8dDR8yu8vUuL1tCiBGHBvCVbx8fyR3zdYpuv"
GOOD = f"/ip4/203.0.113.5/tcp/31337/p2p/{PEER}"


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        (GOOD, GOOD),
        (f"  {GOOD}\n", GOOD),
        (GOOD.replace("/p2p/", "/ipfs/"), GOOD),
        (f"/ip6/2001:0db8:0::1/tcp/1/p2p/{PEER}", f"/ip6/2001:db8::1/tcp/1/p2p/{PEER}"),
        (f"/dns4/seed.example.org/tcp/31337/p2p/{PEER}", f"/dns4/seed.example.org/tcp/31337/p2p/{PEER}"),
    ],
)
def test_an_address_has_one_form(text: str, canonical: str) -> None:
    """The same address, however written, is the same text."""
    assert parse(text) == canonical
    assert peer_of(parse(text)) == PEER


@pytest.mark.parametrize("text", ["203.0.113.5:31337", "--run-id", GOOD[:-10], "hello", ""])
def test_an_invalid_address_is_refused(text: str) -> None:
    """Before anything is dialled; the error shows the text that the user wrote."""
    with pytest.raises(AddressError) as error:
        parse(text)
    assert (error.value.key, error.value.value) == ("initial_peers", text)
    assert error.value.mend


def test_a_peer_listens_where_its_initial_peers_are() -> None:
    """Loopback for loopback, and for a swarm of one's own; all interfaces as soon as one peer is
    elsewhere."""
    loopback = f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}"
    assert listen_for([]) == listen_for([loopback]) == ["/ip4/127.0.0.1/tcp/0"]
    assert listen_for([loopback, GOOD]) == ["/ip4/0.0.0.0/tcp/0"]


def test_reading_addresses_loads_nothing_heavy() -> None:
    """A command that is about to say that an address is wrong need not load torch first."""
    code = (
        "import sys; from p2p_diloco.net.addresses import parse; "
        "bad = {'torch', 'hivemind', 'multiaddr'} & set(sys.modules); sys.exit(repr(bad) if bad else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


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
