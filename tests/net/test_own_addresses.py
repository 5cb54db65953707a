"""A peer listens on IPv6 where its machine can be dialled by it, and nowhere else."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_diloco.config import PeerConfig
from p2p_diloco.net import reach
from p2p_diloco.net.reach import has_ip6, listens_at, own_hosts

FAR = "/ip6/2001:db8::5/tcp/1/p2p/12D3KooWGrk7pQsQ8dDR8yu8vUuL1tCiBGHBvCVbx8fyR3zdYpuv"
LOCAL = ["127.0.0.1", "::1", "fe80::1%eth0", "192.168.1.2"]


def give(monkeypatch: pytest.MonkeyPatch, *hosts: str) -> None:
    """Give this machine these addresses."""
    each: list[Any] = [
        SimpleNamespace(family=socket.AF_INET6 if ":" in host else socket.AF_INET, address=host) for host in hosts
    ]
    packet = SimpleNamespace(family=socket.AF_PACKET, address="00:00:00:00:00:00")
    monkeypatch.setattr(reach.psutil, "net_if_addrs", lambda: {"lo": each[:2], "eth0": [*each[2:], packet]})


@pytest.mark.parametrize("more", [[], ["fd00:3::1"], ["2001:db8::1"]])
def test_a_machine_listens_on_ip6_if_it_has_it(monkeypatch: pytest.MonkeyPatch, more: list[str]) -> None:
    """Also if the address is valid within one site alone; loopback's address and those for one link alone don't count.
    What the user says counts more."""
    give(monkeypatch, *LOCAL, *more)
    assert has_ip6() == bool(more)
    both = ["/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0"]
    assert listens_at(PeerConfig(initial_peers=[FAR])) == both[: 1 + bool(more)]
    assert "fe80::1" in own_hosts()
    chosen = ("/ip4/0.0.0.0/tcp/5",)
    assert listens_at(PeerConfig(initial_peers=[FAR], host_maddrs=chosen)) == chosen
