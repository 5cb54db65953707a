"""What other peers' answers mean for a peer's reachability, when it asks them, and where they dial it back."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import time
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import ANY

import msgpack
import pytest

from p2p_diloco.config import PeerConfig
from p2p_diloco.net import dial_back as dialling
from p2p_diloco.net import reach
from p2p_diloco.net.dht import DhtPeer
from p2p_diloco.net.dial_back import ADDRESSES_MAX, PORTS_MAX, Place, PortBudget, dial_back, place_of
from p2p_diloco.net.framing import Accepted, Frame, Message, Refused, encode
from p2p_diloco.net.interface import Reach, Unreachable
from p2p_diloco.net.reach import LOOK_EVERY_S, DialBack, ReachFinder, ask, ask_all, together
from p2p_diloco.net.reasons import GREETING, no_answer
from tests.net.clocks import ByHand, timed
from tests.net.direct_peers import pair
from tests.net.patience import awaited, plays
from tests.net.swarm import STRANGER

ME = "QmMe"
OWN = [f"/ip4/192.168.1.2/tcp/40/p2p/{ME}", f"/ip4/127.0.0.1/tcp/40/p2p/{ME}"]
PUBLIC = [f"/ip4/20.0.0.5/tcp/40/p2p/{ME}"]
MAPPED = f"/ip4/20.0.0.9/tcp/40/p2p/{ME}"


def nat(why: str | None = "timed out") -> DialBack:
    """The answer of a peer outside, for a peer behind a router."""
    elsewhere = dict.fromkeys(OWN, "it isn't at 20.0.0.9, where this peer is seen")
    return DialBack("/ip4/20.0.0.9/tcp/51234", {**elsewhere, MAPPED: why})


def seen_at_its_own(why: str | None) -> DialBack:
    return DialBack("/ip4/20.0.0.5/tcp/999", {PUBLIC[0]: why})


def seen_at(place: str) -> DialBack:
    return DialBack(place, {OWN[0]: "timed out"})


SILENT, OVER_IP6 = (
    DialBack("/ip4/20.0.0.9/tcp/1", {}),
    DialBack("/ip6/fd00:3::2/tcp/999", {PUBLIC[0]: "it isn't there"}),
)
BEHIND_NAT = Reach("private", "it is seen at 20.0.0.9, which is a router's address (NAT); port 40: timed out")
NOT_OVER_IP6 = "it is seen at fd00:3::2, and listens at no IPv6 address; no address of it lies there"


@pytest.mark.parametrize(
    ("own", "answers", "means"),
    [
        (PUBLIC, [OVER_IP6], Reach("private", NOT_OVER_IP6)),
        (PUBLIC, [seen_at_its_own(None)], Reach("public", f"other peers dial this peer at {PUBLIC[0]}")),
        (PUBLIC, [seen_at_its_own("timed out")], Reach("private", "it is seen at 20.0.0.5; port 40: timed out")),
        # one peer that fails makes private, whatever the others say, and in whichever order
        (OWN, [nat()], BEHIND_NAT),
        (OWN, [SILENT, nat(None), nat()], BEHIND_NAT),
        (OWN, [nat(), nat(None)], BEHIND_NAT),
        # an answer without a place or a dial tells nothing
        (OWN, [], Reach()),
        (OWN, [SILENT], Reach()),
        (OWN, [seen_at("nonsense")], Reach()),
        (OWN, [seen_at("/ip4/20.0.0.9/tcp/²")], Reach()),
        (OWN, [seen_at("/ip4/not an address/tcp/1")], Reach()),
        (OWN, [seen_at("/ip4/20.0.0.1/tcp/1/p2p/Qm/p2p-circuit")], Reach()),
    ],
)
def test_what_answers_mean(own: list[str], answers: list[DialBack], means: Reach) -> None:
    """The reason names the address at which it is seen, the port that was dialled, and what became of the dial."""
    assert together(own, answers) == means
    assert together(OWN, [SILENT, nat(None)]).kind == "mapped"


# -- asking


class Asker:
    """A daemon whose only peer gives the answers of a test."""

    def __init__(self, *frames: Frame | None, addresses: list[str] | None = None) -> None:
        self.peer_id, self.addresses = ME, OWN if addresses is None else addresses
        self.chain: bytes | None = None
        self.frames, self.far, self.near = frames, list[Any](), list[Any]()

    async def open_stream(self, peer: str, protocol: str, *, timeout_s: float) -> Any:
        near, far = await pair()
        self.near.append(near)
        self.far.append(far)
        for frame in self.frames:
            if frame is None:
                far.close()
            else:
                far.write(encode(frame))
        return near, "/ip4/20.0.0.1/tcp/1"


@contextlib.asynccontextmanager
async def asked(asker: Asker) -> AsyncIterator[Any]:
    try:
        yield asker
    finally:
        assert all(pipe.ended for pipe in asker.near)
        for pipe in asker.far:
            pipe.abort()


def answer(**content: Any) -> Message:
    return Message(msgpack.packb(content))


@awaited
async def test_a_stranger_s_answer_is_cleaned() -> None:
    """Only addresses of this peer count, of a bounded length; a reason is one line of bounded length."""
    reached = {
        OWN[0]: "line\nline\x1b[31m" + "x" * 1000,
        "/ip4/20.0.0.9/tcp/1/p2p/QmAnother": None,
        "/ip4/20.0.0.9/tcp/1/" + "x" * reach.ADDRESS_LETTERS_MAX + f"/p2p/{ME}": None,
        b"bytes": None,
        OWN[1]: functools.reduce(lambda inner, _: [inner], range(500), [1]),
        MAPPED: None,
    }
    async with asked(Asker(answer(seen="/ip4/20.0.0.9/tcp/1", reached=reached))) as asker:
        told = await ask(asker, "other", asker.addresses)
    assert list(told.reached) == [OWN[0], MAPPED]
    assert told.reached[MAPPED] is None
    why = told.reached[OWN[0]]
    assert why is not None
    assert why.isprintable()
    assert why.startswith("line line [31mx")
    assert len(why) < 500


@pytest.mark.parametrize(
    "frame",
    [Refused("no"), Accepted(), None, Message(b"\xc1"), answer(seen=1, reached={}), answer(seen="x"), Message(b"\xa1")],
    ids=str,
)
@awaited
async def test_an_answer_that_cannot_be_read_is_unreachable(frame: Frame | None) -> None:
    """The stream is closed, and others' answers count all the same."""
    async with asked(Asker(frame)) as asker:
        with pytest.raises(Unreachable, match="other"):
            await ask(asker, "other", asker.addresses)
        assert await ask_all(asker, ["other"]) == {}


@awaited
async def test_a_peer_that_listens_nowhere_is_private_and_asks_none() -> None:
    """There is nothing to dial."""
    asker: Any = Asker(addresses=[])
    assert await ask_all(asker, ["other"]) == {}
    assert asker.far == []
    assert together([], []).private


# -- finding out


@plays(timed)
async def test_peers_are_asked_when_they_come_and_again_after_changes_and_after_a_while(
    clock: ByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each newly linked one once, and not those that have answered at the start; all after a change of addresses, when
    the answers before it don't count any more, and now and then, because a router or a firewall may change: without any
    answer the last ones stay. `changed` is called once for a change."""
    daemon: Any = Asker()
    answers: dict[str, DialBack] = {"a": nat(), "b": nat()}
    linked, asked, told = ["seed"], list[str](), list[Reach]()

    async def ask_all(daemon: Any, peers: list[str]) -> dict[str, DialBack]:
        asked.extend(peers)
        return {peer: answers[peer] for peer in peers if peer in answers}

    async def asks(seconds: float = LOOK_EVERY_S) -> str:
        """Whom it asks within this time."""
        asked.clear()
        for _ in range(round(seconds / LOOK_EVERY_S)):
            await clock.passes(LOOK_EVERY_S)
        return "".join(peer[0] for peer in asked)

    monkeypatch.setattr(reach, "ask_all", ask_all)
    finder = ReachFinder(daemon, {"seed": nat(None)}, lambda: linked, told.append)
    assert (finder.now.kind, finder.mapped) == ("mapped", [MAPPED])
    assert await asks() == ""
    linked.append("a")
    assert await asks() == "a"
    assert finder.now.private
    linked.append("b")
    assert await asks(3 * LOOK_EVERY_S) == "b"
    assert [reach.kind for reach in told] == ["private"]

    daemon.addresses, answers = PUBLIC, {"seed": seen_at_its_own(None)}
    assert await asks() == "sab"
    assert (finder.now.kind, finder.mapped) == ("public", [])
    assert await asks() == ""
    answers = {}
    assert await asks(reach.ASK_EVERY_S - 2 * LOOK_EVERY_S) == ""
    assert await asks(2 * LOOK_EVERY_S) == "sab"
    assert [reach.kind for reach in told] == ["private", "public"]
    answers = {"seed": seen_at_its_own("timed out")}
    assert await asks(reach.ASK_EVERY_S + LOOK_EVERY_S) == "sab"
    assert [reach.kind for reach in told] == ["private", "public", "private"]
    await finder.close()


# -- dialling back


SEEN = "/ip4/20.0.0.9/tcp/51234"
HERE = "/ip4/127.0.0.1/tcp/51234"
TCP = "/ip4/10.0.0.5/tcp"
NO_PLACES = f"{TCP}/65536 {TCP}/99999999999999999999 {TCP}/0 {TCP}/² {TCP}/1/p2p/Qm/p2p-circuit".split()
NO_PLACES += ["/ip4/10.0.0.5/udp/1", "/ip4/evil.example/tcp/80", "/dns4/box/tcp/1", ""]


def test_a_place_is_an_ip_address_and_a_port() -> None:
    """Whatever a stranger writes gives a place or None."""
    assert place_of("/ip4/10.0.0.5/tcp/4001/p2p/Qm") == ("10.0.0.5", 4001)
    assert place_of("/ip6/0:0::1/tcp/65535") == ("::1", 65535)
    assert {*map(place_of, NO_PLACES)} == {None}


class Dials:
    """Answers dials in the place of the network."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dialled: list[Place] = []
        self.proved: list[Place] = []
        self.looked_up: list[str] = []
        self.now = 0.0
        self.budget = PortBudget(lambda: self.now)
        self.names: dict[str, list[str]] = {}
        self.fails: dict[Place, str] = {}
        monkeypatch.setattr(dialling, "no_answer", self.no_answer)
        monkeypatch.setattr(dialling, "_proved", self.prove)

    async def no_answer(self, host: str, port: int, within_s: float) -> str | None:
        self.dialled.append((host, port))
        return self.fails.get((host, port))

    async def prove(self, peer: str, place: Place) -> str | None:
        self.proved.append(place)
        return "another peer" if peer == "impostor" else None

    async def back(self, addresses: list[str], peer: str = "QmA", seen_at: str = SEEN) -> dict[str, str | None]:
        asyncio.get_running_loop().getaddrinfo = self.look_up  # type: ignore[method-assign, assignment]
        reached = await dial_back(peer, seen_at, addresses, self.budget)
        assert reached is not None
        return reached

    async def look_up(self, name: str, port: int, **_: Any) -> Any:
        self.looked_up.append(name)
        if name == "hangs":
            await asyncio.sleep(1000.0)
        if name not in self.names:
            raise socket.gaierror
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in self.names[name]]


@pytest.fixture
def dials(monkeypatch: pytest.MonkeyPatch) -> Dials:
    return Dials(monkeypatch)


ELSEWHERE = "/ip4/10.0.0.1/tcp/22", "/ip6/::1/tcp/25", "/ip4/127.0.0.1/tcp/80"
NOT_THERE = dict.fromkeys(ELSEWHERE, "it isn't at 20.0.0.9, where this peer is seen")
OVER_6 = "/ip6/2001:db8::5/tcp/9"


@pytest.mark.parametrize(
    ("addresses", "seen_at", "reached", "dialled", "proved"),
    [
        # others are answered with a reason; a plain dial is enough for an address that the peer has itself
        ([*ELSEWHERE, "/ip4/20.0.0.9/tcp/40"], SEEN, {**NOT_THERE, "/ip4/20.0.0.9/tcp/40": None}, [40], []),
        (["/ip6/2001:db8:0::5/tcp/40"], OVER_6, {"/ip6/2001:db8:0::5/tcp/40": None}, [40], []),
        # a router may forward the same port; whether the peer itself answers there has to be proved
        (["/ip4/192.168.1.2/tcp/40"], SEEN, {"/ip4/20.0.0.9/tcp/40/p2p/QmA": None}, [40], [40]),
        (["/ip4/127.0.0.1/tcp/41"], SEEN, {"/ip4/20.0.0.9/tcp/41/p2p/QmA": "timed out"}, [41], []),
        (["/ip6/fe80::1/tcp/40"], OVER_6, {"/ip6/2001:db8::5/tcp/40/p2p/QmA": None}, [40], [40]),
        # a name must lead to the seen host, which is dialled at the address that was found: one of several is enough
        (["/dns4/box/tcp/40"], SEEN, {"/dns4/box/tcp/40": None}, [40], [40]),
        (["/dns/inside/tcp/22"], SEEN, {"/dns/inside/tcp/22": ANY}, [], []),
        (["/dns/unknown/tcp/23", "/dns4//tcp/1", "/dns4/x/tcp/²", "/ip4/20.0.0.9/tcp/99999"], SEEN, {}, [], []),
        # over a relay the address isn't the peer's
        (["/ip4/20.0.0.9/tcp/4"], f"{SEEN}/p2p/Qm/p2p-circuit", {}, [], []),
    ],
)
def test_only_the_seen_host_is_dialled(
    dials: Dials, addresses: list[str], seen_at: str, reached: dict[str, Any], dialled: list[int], proved: list[int]
) -> None:
    """At the ports that the peer names."""
    dials.names = {"box": ["20.0.0.8", "20.0.0.9"], "inside": ["10.0.0.1"]}
    dials.fails = {("20.0.0.9", 41): "timed out"}
    told = asyncio.run(dials.back(addresses, seen_at=seen_at))
    assert reached.items() <= told.items()
    assert bool(told) == bool(reached)
    host = "2001:db8::5" if seen_at == OVER_6 else "20.0.0.9"
    assert (dials.dialled, dials.proved) == ([(host, port) for port in dialled], [(host, port) for port in proved])


def test_of_many_addresses_few_are_looked_at(dials: Dials, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger can't have hundreds of ports dialled. Of names even fewer are looked up, all at once, with one
    deadline: each look-up holds a thread."""
    asyncio.run(dials.back([f"/ip4/20.0.0.9/tcp/{port}/p2p/QmA" for port in range(1, 1000)]))
    assert len(dials.dialled) == ADDRESSES_MAX
    monkeypatch.setattr(dialling, "DIAL_S", 0.2)
    assert asyncio.run(dials.back([f"/dns4/hangs/tcp/{port}" for port in range(1, 9)])) == {}
    assert len(dials.looked_up) == dialling.NAMES_MAX


# -- the greeting


@pytest.mark.parametrize(
    ("greeting", "why"),
    [
        (GREETING, None),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "something else answers there"),
        (b"", "something else answers there"),
        (None, "sends nothing"),
    ],
)
@awaited
async def test_only_libp2p_s_greeting_counts(greeting: bytes | None, why: str | None) -> None:
    """Another server, one that closes at once, one that hangs and none are each told apart, in bounded time."""
    leave = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if greeting is None:
            await leave.wait()
        else:
            writer.write(greeting)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        answer = await no_answer("127.0.0.1", port, 1.0)
        leave.set()
    assert answer is None if why is None else why in str(answer)
    assert "refused" in str(await no_answer("127.0.0.1", port, 1.0))


@awaited
async def test_no_peer_has_the_ports_of_an_address_scanned(dials: Dials) -> None:
    """So many different ports of one IP address are dialled in so many seconds, for all peers together; the same port
    again costs nothing, and another address has a budget of its own."""

    def asked(first: int, count: int, host: str = "20.0.0.9") -> bool:
        return dials.budget.spend([(host, port) for port in range(first, first + count)])

    for first in range(1, PORTS_MAX, ADDRESSES_MAX):
        await dials.back([f"/ip4/20.0.0.9/tcp/{first + more}" for more in range(ADDRESSES_MAX)])
    assert len(dials.dialled) == PORTS_MAX
    more = ["/ip4/20.0.0.9/tcp/5000"]
    assert await dial_back("QmB", SEEN, more, dials.budget) is None
    assert len(dials.dialled) == PORTS_MAX
    assert asked(1, PORTS_MAX)
    assert asked(5000, 1, "20.0.0.8")
    dials.now = dialling.PORTS_S
    assert await dials.back(more) == {more[0]: None}


def test_the_budget_of_ports_takes_bounded_memory(dials: Dials) -> None:
    """The addresses that were dialled longest ago are forgotten."""
    for host in range(dialling.HOSTS_MAX + 10):
        assert dials.budget.spend([(f"10.0.{host // 256}.{host % 256}", 80)])
    assert len(dials.budget._dialled) == dialling.HOSTS_MAX


@pytest.mark.real
@pytest.mark.usefixtures("no_daemon_is_left")
@awaited
async def test_the_identity_of_who_answers_is_checked() -> None:
    """Where the address is translated, the peer itself is reached and a neighbour isn't; no daemon is left over, also
    when the check is cancelled."""
    peer = await DhtPeer.create(PeerConfig())
    (port,) = {place[1] for place in map(place_of, peer.daemon.addresses) if place is not None}
    inside = [f"/ip4/192.168.1.2/tcp/{port}/p2p/{peer.peer_id}"]
    at, budget = f"/ip4/127.0.0.1/tcp/{port}", PortBudget(time.monotonic)
    reached = await dial_back(peer.peer_id, HERE, inside, budget)
    assert reached is not None
    assert reached[f"{at}/p2p/{peer.peer_id}"] is None
    neighbour = (await dial_back(STRANGER, HERE, inside, budget) or {})[f"{at}/p2p/{STRANGER}"]
    assert neighbour is not None
    assert neighbour.startswith("another peer answers there")
    for after_s in (0.0, 0.05, 0.3):
        checking = asyncio.create_task(dial_back(peer.peer_id, HERE, inside, budget))
        await asyncio.sleep(after_s)
        checking.cancel()
        await asyncio.wait_for(asyncio.wait({checking}), 20.0)
    await peer.close()
