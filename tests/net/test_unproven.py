"""Records that name another host have it dialled a few times, and peers behind one router are dialled as ever."""

from __future__ import annotations

import asyncio

import pytest

from p2p_diloco.net import daemon
from p2p_diloco.net.daemon import DIALS_MAX, DIALS_S, HOSTS_MAX, PROVEN_MAX, Unproven
from p2p_diloco.net.interface import Unreachable
from p2p_diloco.net.signing import SigningKey
from tests.net.patience import awaited
from tests.net.swarm import join

THIRD = "/ip4/192.0.2.9/tcp/{}"


def test_a_host_is_dialled_so_often_in_a_minute_whoever_names_it() -> None:
    """However many peers, ports, and spellings of the address."""
    now = 100.0
    dials = Unproven(lambda: now)
    spelled = [THIRD, "/ip4/192.0.2.9/udp/{}/quic-v1", "/ip6/::ffff:192.0.2.9/tcp/{}", "/ip6/::ffff:c000:209/tcp/{}"]
    named = [spelled[n % 4].format(n) for n in range(16)]
    assert sum(len(dials.admit(f"p{n}", named)) for n in range(30)) == DIALS_MAX
    assert dials.admit("p0", ["/ip4/192.0.2.8/tcp/1"]) == ["/ip4/192.0.2.8/tcp/1"]
    assert sum(len(dials.admit(f"p{n}", [f"/dns4/{n}.example/tcp/1"])) for n in range(99)) == DIALS_MAX
    now += DIALS_S
    assert dials.admit("p0", named) == named


def test_peers_that_were_found_at_a_host_are_dialled_there_without_limit() -> None:
    """Many peers behind one router, each at a port of its own."""
    dials = Unproven()
    for n in range(10 * DIALS_MAX):
        assert dials.admit(f"p{n}", [THIRD.format(n)])
        dials.prove(f"p{n}", THIRD.format(n))
    assert dials.proven("p7", [THIRD.format(7), THIRD.format(8)])
    assert not dials.proven("p7", [THIRD.format(7), "/ip4/192.0.2.8/tcp/1"])
    assert sum(len(dials.admit("x", [THIRD.format(n)])) for n in range(99)) == DIALS_MAX
    assert dials.admit("p7", [THIRD.format(7)])


def test_who_was_found_through_a_relay_proves_nothing_of_the_relay_s_host() -> None:
    dials = Unproven()
    dials.prove("p", f"{THIRD.format(1)}/p2p/relay/p2p-circuit")
    assert not dials.proven("p", [THIRD.format(1)])


def test_what_is_counted_is_bounded() -> None:
    dials = Unproven()
    for n in range(2 * HOSTS_MAX):
        dials.admit("p", [f"/ip4/10.{n // 250 % 250}.{n % 250}.1/tcp/1"])
        dials.prove(f"p{n}", THIRD.format(1))
    assert len(dials._dials) <= HOSTS_MAX
    assert len(dials._proven) <= PROVEN_MAX


@pytest.mark.real
@awaited
async def test_invented_records_have_a_third_host_dialled_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over libp2p. A real peer that names that host too is reached at its own address."""
    monkeypatch.setattr(daemon, "DIALS_MAX", 8)
    came = 0

    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal came
        came += 1
        writer.close()

    third = await asyncio.start_server(count, "127.0.0.2", 0)
    port = third.sockets[0].getsockname()[1]
    a, b = await join(), await join()
    try:
        for number in range(30):
            invented = SigningKey(bytes([number]) * 32).peer_id
            await a.introduce(invented, [f"/ip4/127.0.0.2/tcp/{port}/p2p/{invented}"])
            with pytest.raises(Unreachable):
                await a.send(invented, b"hello")
        assert 0 < came <= 8
        await a.introduce(b.peer_id, [f"/ip4/127.0.0.2/tcp/{port}/p2p/{b.peer_id}", *b.addresses()])
        await a.send(b.peer_id, b"hello")
    finally:
        third.close()
        await b.close()
        await a.close()
