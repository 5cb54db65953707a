"""Addresses: dialable ones are accepted, all others are refused with one sentence."""

from __future__ import annotations

import pytest

from p2p_diloco.addresses import (
    by_reach,
    canonical,
    check_listen_address,
    check_peer_address,
    is_loopback,
    listen_for,
    peer_of,
    split_addresses,
)
from p2p_diloco.errors import AddressError

ID = "12D3KooWGrk7pQsQ8dDR8yu8vUuL1tCiBGHBvCVbx8fyR3zdYpuv"
GOOD = f"/ip4/203.0.113.5/tcp/31337/p2p/{ID}"
RSA_ID = "QmUy4j1x9sGoKmeZjvVHbyuSrPHb3pYH72S1XUGTc9WrzK"


@pytest.mark.parametrize(
    "address",
    [
        f"/ip4/127.0.0.1/tcp/31337/p2p/{ID}",
        f"/ip4/127.0.0.1/tcp/31337/p2p/{RSA_ID}",
        f"/ip6/::1/tcp/1/p2p/{ID}",
        f"/dns4/seed.example.org/tcp/443/wss/p2p/{ID}",
        f"/dns/localhost/tcp/443/ipfs/{RSA_ID}",
        f"/ip4/10.0.0.1/tcp/4001/p2p/{ID}/p2p-circuit/p2p/{RSA_ID}",
        f"/dnsaddr/bootstrap.example.org/p2p/{ID}",
        f"/dns4/my_host/tcp/31337/p2p/{ID}",
        f"/dns/_a.b_/tcp/31337/p2p/{ID}",
    ],
)
def test_dialable_addresses_are_accepted(address: str) -> None:
    """Every form that a bootstrap prints, and the common ones of libp2p, pass unchanged."""
    assert check_peer_address(address) == address


@pytest.mark.parametrize(
    ("address", "wrong"),
    [
        ("127.0.0.1:31337", "is host:port, no multiaddr; write it as a multiaddr: /ip4/127.0.0.1/tcp/31337/p2p/"),
        ("localhost:31337", "/dns4/localhost/tcp/31337/p2p/"),
        ("[::1]:31337", "/ip6/::1/tcp/31337/p2p/"),
        ("--run-id", "is a flag, not an address"),
        ("/", "names no host"),
        ("/ip4", "ends after /ip4"),
        (f"/ip4/127.0.0.1/p2p/{ID}", "names no port"),
        ("/ip4/127.0.0.1/tcp/31337", "names no peer"),
        (f"/ip4/300.0.0.1/tcp/31337/p2p/{ID}", "unreadable /ip4/300.0.0.1"),
        (f"/ip4/127.0.0.1/tcp/65536/p2p/{ID}", "unreadable /tcp/65536"),
        (f"/ip4/127.0.0.1/tcp/0/p2p/{ID}", "has port 0"),
        (f"/ip4/127.0.0.1/tcp/1/p2p/{ID[:-1]}", "unreadable /p2p"),
        (f"/tcp/1/p2p/{ID}", "names no host"),
        (f"/ip4/127.0.0.1/tpc/1/p2p/{ID}", "unknown part 'tpc'"),
        (f"/ip6zone/eth0/ip6/fe80::1/tcp/1/p2p/{ID}", "has a zone, which means another link on each machine; give an"),
        (f"/ip6/fe80::1%eth0/tcp/1/p2p/{ID}", "has a zone, which means another link on each machine; give an"),
    ],
)
def test_other_addresses_are_refused(address: str, wrong: str) -> None:
    """The sentence names the key, the address and what is wrong with it."""
    with pytest.raises(AddressError) as caught:
        check_peer_address(address)
    assert str(caught.value).startswith(f"initial_peers={address} ")
    assert wrong in str(caught.value)
    assert caught.value.mend


@pytest.mark.parametrize(
    ("address", "wrong"),
    [
        (f"/ip4/0.0.0.0/tcp/1/p2p/{ID}", "names a peer"),
        ("/dns4/example.org/tcp/1", "names no IP address"),
        ("/ip4/0.0.0.0", "names no port"),
        ("0.0.0.0:1", "is host:port"),
    ],
)
def test_a_place_to_listen_is_a_host_and_a_port(address: str, wrong: str) -> None:
    """Listening needs an address of this machine, without a name or a peer id."""
    assert check_listen_address("/ip4/0.0.0.0/tcp/0") == "/ip4/0.0.0.0/tcp/0"
    with pytest.raises(AddressError, match=wrong):
        check_listen_address(address)


def test_lists_take_spaces_commas_and_repetition() -> None:
    """However several addresses are given, the result has each once and in order."""
    assert split_addresses("a b,c\n d,,b") == ("a", "b", "c", "d")
    assert split_addresses(["a,b", "c", "a"]) == ("a", "b", "c")


def test_addresses_are_ordered_by_reach() -> None:
    """A public address comes before a private one, and loopback last."""
    public, named = f"/ip4/8.8.8.8/tcp/1/p2p/{ID}", f"/dns4/example.org/tcp/1/p2p/{ID}"
    private, loopback = f"/ip4/192.168.0.2/tcp/1/p2p/{ID}", f"/ip6/::1/tcp/1/p2p/{ID}"
    assert by_reach([loopback, private, named, public]) == [named, public, private, loopback]
    assert [is_loopback(address) for address in (loopback, "/dns/localhost/tcp/1", private, named)] == [
        True, True, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "form"),
    [
        (GOOD, GOOD),
        (f"  {GOOD}\n", GOOD),
        (GOOD.replace("/p2p/", "/ipfs/"), GOOD),
        (f"/ip6/2001:0db8:0::1/tcp/1/p2p/{ID}", f"/ip6/2001:db8::1/tcp/1/p2p/{ID}"),
        (f"/dns4/seed.example.org/tcp/31337/p2p/{ID}", f"/dns4/seed.example.org/tcp/31337/p2p/{ID}"),
    ],
)
def test_an_address_has_one_form(text: str, form: str) -> None:
    """The same address, however written, is the same text."""
    assert canonical(text) == form
    assert peer_of(canonical(text)) == ID


def test_a_peer_listens_where_its_initial_peers_are() -> None:
    """Loopback for loopback, and for a swarm of one's own; all interfaces as soon as one peer is elsewhere, by IPv6 too
    if the machine has it."""
    loopback, loopback6 = f"/ip4/127.0.0.1/tcp/1/p2p/{ID}", f"/ip6/::1/tcp/1/p2p/{ID}"
    for ip6 in (False, True):
        assert listen_for([], ip6=ip6) == listen_for([loopback], ip6=ip6) == ["/ip4/127.0.0.1/tcp/0"]
        assert listen_for([loopback, loopback6], ip6=ip6) == ["/ip4/127.0.0.1/tcp/0", "/ip6/::1/tcp/0"]
    assert listen_for([loopback, GOOD], ip6=False) == ["/ip4/0.0.0.0/tcp/0"]
    assert listen_for([GOOD], ip6=True) == ["/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0"]
