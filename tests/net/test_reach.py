"""What other peers' answers mean for a peer's reachability, when it asks them, and where they dial it back."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgpack
import pytest

from p2p_diloco.config import PeerConfig
from p2p_diloco.net import dial_back as dialling
from p2p_diloco.net import reach
from p2p_diloco.net.dht import DhtPeer
from p2p_diloco.net.dial_back import (
    ADDRESSES_MAX,
    HOSTS_MAX,
    NAMES_MAX,
    PORTS_MAX,
    PORTS_S,
    Place,
    PortBudget,
    dial_back,
    place_of,
)
from p2p_diloco.net.framing import Accepted, Frame, Message, Refused, encode
from p2p_diloco.net.interface import Reach, Unreachable
from p2p_diloco.net.reach import (
    ADDRESS_LETTERS_MAX,
    ASK_EVERY_S,
    LOOK_EVERY_S,
    DialBack,
    ReachFinder,
    ask,
    ask_all,
    judged,
    together,
)
from p2p_diloco.net.reasons import GREETING, no_answer
from tests.net.clocks import ByHand, timed
from tests.net.direct_peers import pair
from tests.net.patience import awaited, plays
from tests.net.swarm import STRANGER

ME = "QmMe"
OWN = [f"/ip4/192.168.1.2/tcp/40/p2p/{ME}", f"/ip4/127.0.0.1/tcp/40/p2p/{ME}"]
PUBLIC = [f"/ip4/20.0.0.5/tcp/40/p2p/{ME}"]
MAPPED = f"/ip4/20.0.0.9/tcp/40/p2p/{ME}"
SEEN_AT_A_ROUTER = "/ip4/20.0.0.9/tcp/51234"


def nat(why: str | None = "timed out") -> DialBack:
    """The answer of a peer outside, for a peer behind a router."""
    elsewhere = dict.fromkeys(OWN, "it isn't at 20.0.0.9, where this peer is seen")
    return DialBack(SEEN_AT_A_ROUTER, {**elsewhere, MAPPED: why})


def seen_at_its_own(why: str | None) -> DialBack:
    return DialBack("/ip4/20.0.0.5/tcp/999", {PUBLIC[0]: why})


@pytest.mark.parametrize(
    ("own", "answer", "kind", "why"),
    [
        (OWN, nat(), "private", "it is seen at 20.0.0.9, which is a router's address (NAT); port 40: timed out"),
        (
            PUBLIC,
            DialBack("/ip6/fd00:3::2/tcp/999", dict.fromkeys(PUBLIC, "it isn't at fd00:3::2")),
            "private",
            "it is seen at fd00:3::2, and listens at no IPv6 address; no address of it lies there",
        ),
        (PUBLIC, seen_at_its_own(None), "public", f"other peers dial this peer at {PUBLIC[0]}"),
        (PUBLIC, seen_at_its_own("timed out"), "private", "it is seen at 20.0.0.5; port 40: timed out"),
    ],
    ids=["a router that lets nothing in", "no address of IPv6", "reached at its own address", "a firewall"],
)
def test_a_peer_is_private_unless_it_was_reached(own: list[str], answer: DialBack, kind: str, why: str) -> None:
    """The reason names the address at which it is seen, the port that was dialled, and what became of the dial."""
    assert judged(own, answer) == Reach(kind, why)


@pytest.mark.parametrize(
    "answer",
    [
        DialBack("/ip4/20.0.0.9/tcp/1", {}),
        DialBack("nonsense", {OWN[0]: "timed out"}),
        DialBack("/ip4/20.0.0.9/tcp/²", {OWN[0]: "timed out"}),
        DialBack("/ip4/not an address/tcp/1", {OWN[0]: "timed out"}),
        DialBack("/ip4/20.0.0.1/tcp/1/p2p/Qm/p2p-circuit", {OWN[0]: "timed out"}),
    ],
    ids=str,
)
def test_an_answer_without_a_place_or_a_dial_tells_nothing(answer: DialBack) -> None:
    """Such an answer neither makes the peer private nor public."""
    assert judged(OWN, answer) == Reach()


def test_one_peer_that_fails_makes_private() -> None:
    """Whatever the others say, and in whichever order; those that tell nothing don't count."""
    silent, failed = DialBack("/ip4/20.0.0.9/tcp/1", {}), nat()
    assert together(OWN, [silent, nat(None), failed]).private
    assert together(OWN, [failed, nat(None)]).private
    assert together(OWN, [silent, nat(None)]).kind == "mapped"
    assert together(OWN, [silent]) == Reach()
    assert together(OWN, []) == Reach()


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
        "/ip4/20.0.0.9/tcp/1/" + "x" * ADDRESS_LETTERS_MAX + f"/p2p/{ME}": None,
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


class Swarm:
    """Peers that answer as the test says, and a finder that asks them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.peer_id, self.addresses = ME, list(OWN)
        self.answers: dict[str, DialBack] = {}
        self.linked: list[str] = []
        self.asked: list[str] = []
        self.told: list[Reach] = []
        monkeypatch.setattr(reach, "ask_all", self.ask_all)

    async def ask_all(self, daemon: Any, peers: list[str]) -> dict[str, DialBack]:
        self.asked += peers
        return {peer: self.answers[peer] for peer in peers if peer in self.answers}

    def start(self, answers: dict[str, DialBack]) -> ReachFinder:
        self.finder = ReachFinder(self, answers, lambda: self.linked, self.told.append)  # type: ignore[arg-type]
        return self.finder


def run(test: Callable[[Swarm, ByHand], Awaitable[None]]) -> None:
    async def finding(clock: ByHand) -> None:
        with pytest.MonkeyPatch.context() as patch:
            swarm = Swarm(patch)
            await test(swarm, clock)
            await swarm.finder.close()

    timed(finding)


@plays(run, 2)
async def test_newly_linked_peers_are_asked(swarm: Swarm, clock: ByHand) -> None:
    """Each one once, and not those that have answered at the start. `changed` is called once for a change."""
    swarm.linked, swarm.answers = ["seed"], {"a": nat(), "b": nat()}
    finder = swarm.start({"seed": nat(None)})
    assert finder.now.kind == "mapped"
    assert finder.mapped == [MAPPED]
    await clock.passes(LOOK_EVERY_S)
    assert swarm.asked == []
    swarm.linked.append("a")
    await clock.passes(LOOK_EVERY_S)
    assert swarm.asked == ["a"]
    assert finder.now.private
    swarm.linked.append("b")
    for _ in range(3):
        await clock.passes(LOOK_EVERY_S)
    assert swarm.asked == ["a", "b"]
    assert [reach.kind for reach in swarm.told] == ["private"]


@plays(run, 2)
async def test_all_are_asked_again_after_a_change_of_addresses(swarm: Swarm, clock: ByHand) -> None:
    """The answers before the change don't count any more; a peer that doesn't answer now is asked again later."""
    swarm.linked = ["seed", "a"]
    finder = swarm.start({"seed": nat(), "a": nat()})
    assert finder.now.private
    await clock.passes(0.0)
    swarm.addresses = PUBLIC
    swarm.answers = {"seed": DialBack("/ip4/20.0.0.5/tcp/9", {PUBLIC[0]: None})}
    await clock.passes(LOOK_EVERY_S)
    assert swarm.asked == ["seed", "a"]
    assert finder.now.kind == "public"
    assert finder.mapped == []
    await clock.passes(LOOK_EVERY_S)
    assert swarm.asked == ["seed", "a"]
    assert [reach.kind for reach in swarm.told] == ["public"]


@plays(run, 2)
async def test_all_are_asked_again_after_a_while(swarm: Swarm, clock: ByHand) -> None:
    """Because a router or a firewall may change; without any answer the last ones stay."""
    swarm.linked = ["seed"]
    finder = swarm.start({"seed": nat()})
    passed_s = 0.0
    while not swarm.asked:
        await clock.passes(LOOK_EVERY_S)
        passed_s += LOOK_EVERY_S
    assert ASK_EVERY_S <= passed_s <= ASK_EVERY_S + LOOK_EVERY_S
    assert finder.now.private
    swarm.answers = {"seed": nat(None)}
    for _ in range(int(ASK_EVERY_S / LOOK_EVERY_S) + 1):
        await clock.passes(LOOK_EVERY_S)
    assert swarm.asked == ["seed", "seed"]
    assert [reach.kind for reach in swarm.told] == ["mapped"]


# -- dialling back


SEEN = "/ip4/20.0.0.9/tcp/51234"
HERE = "/ip4/127.0.0.1/tcp/51234"


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("/ip4/10.0.0.5/tcp/4001/p2p/Qm", ("10.0.0.5", 4001)),
        ("/ip6/0:0::1/tcp/65535", ("::1", 65535)),
        ("/ip4/10.0.0.5/tcp/65536", None),
        ("/ip4/10.0.0.5/tcp/99999999999999999999", None),
        ("/ip4/10.0.0.5/tcp/0", None),
        ("/ip4/10.0.0.5/tcp/²", None),
        ("/ip4/10.0.0.5/udp/1", None),
        ("/ip4/evil.example/tcp/80", None),
        ("/dns4/box/tcp/1", None),
        ("/ip4/10.0.0.5/tcp/1/p2p/Qm/p2p-circuit", None),
        ("", None),
    ],
)
def test_a_place_is_an_ip_address_and_a_port(address: str, place: Place | None) -> None:
    """Whatever a stranger writes gives a place or None."""
    assert place_of(address) == place


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


def test_only_the_seen_host_is_dialled(dials: Dials) -> None:
    """The others are answered with a reason; a plain dial is enough for an address that the peer has itself."""
    elsewhere = ["/ip4/10.0.0.1/tcp/22", "/ip6/::1/tcp/25", "/ip4/127.0.0.1/tcp/80"]
    reached = asyncio.run(dials.back([*elsewhere, "/ip4/20.0.0.9/tcp/40/p2p/QmA"]))
    assert dials.dialled == [("20.0.0.9", 40)]
    assert dials.proved == []
    assert reached.pop("/ip4/20.0.0.9/tcp/40/p2p/QmA") is None
    assert reached == dict.fromkeys(elsewhere, "it isn't at 20.0.0.9, where this peer is seen")
    spelt = "/ip6/2001:db8:0::5/tcp/40/p2p/QmA"
    assert asyncio.run(dials.back([spelt], seen_at="/ip6/2001:db8::5/tcp/9")) == {spelt: None}


def test_behind_a_router_its_ports_are_dialled_there(dials: Dials) -> None:
    """A router may forward the same port; whether the peer itself answers there has to be proved."""
    dials.fails = {("20.0.0.9", 41): "timed out"}
    reached = asyncio.run(dials.back(["/ip4/192.168.1.2/tcp/40/p2p/QmA", "/ip4/127.0.0.1/tcp/41/p2p/QmA"]))
    assert dials.dialled == [("20.0.0.9", 40), ("20.0.0.9", 41)]
    assert dials.proved == [("20.0.0.9", 40)]
    assert reached["/ip4/20.0.0.9/tcp/40/p2p/QmA"] is None
    assert reached["/ip4/20.0.0.9/tcp/41/p2p/QmA"] == "timed out"
    reached = asyncio.run(dials.back(["/ip6/fe80::1/tcp/40/p2p/QmA"], seen_at="/ip6/2001:db8::5/tcp/9"))
    assert reached["/ip6/2001:db8::5/tcp/40/p2p/QmA"] is None


def test_a_name_is_dialled_only_if_it_leads_to_the_seen_host(dials: Dials) -> None:
    """At the address that was found, so that no second look-up can lead elsewhere. One of several is enough."""
    dials.names = {"box": ["20.0.0.8", "20.0.0.9"], "inside": ["10.0.0.1"]}
    reached = asyncio.run(dials.back(["/dns4/box/tcp/40/p2p/QmA"]))
    assert (dials.dialled, reached) == ([("20.0.0.9", 40)], {"/dns4/box/tcp/40/p2p/QmA": None})
    reached = asyncio.run(dials.back(["/dns/inside/tcp/22/p2p/QmA", "/dns/unknown/tcp/23/p2p/QmA"]))
    assert (dials.dialled, list(reached)) == ([("20.0.0.9", 40)], ["/dns/inside/tcp/22/p2p/QmA"])


def test_of_many_addresses_few_are_looked_at(dials: Dials, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger can't have hundreds of ports dialled. Of names even fewer are looked up, all at once, with one
    deadline: each look-up holds a thread."""
    asyncio.run(dials.back([f"/ip4/20.0.0.9/tcp/{port}/p2p/QmA" for port in range(1, 1000)]))
    assert len(dials.dialled) == ADDRESSES_MAX
    monkeypatch.setattr(dialling, "DIAL_S", 0.2)
    assert asyncio.run(dials.back([f"/dns4/hangs/tcp/{port}" for port in range(1, 9)])) == {}
    assert len(dials.looked_up) == NAMES_MAX


def test_what_leads_to_no_place_is_not_dialled(dials: Dials) -> None:
    """An address that can't be read, and any of a peer that asks over a relay, whose address isn't the peer's."""
    for address in ("/ip4/20.0.0.9/tcp/99999", "/ip4/20.0.0.9/tcp/²", "/dns4//tcp/1", "/dns4/x/tcp/²"):
        assert asyncio.run(dials.back([address])) == {}
    assert asyncio.run(dials.back(["/ip4/20.0.0.9/tcp/4"], seen_at=f"{SEEN}/p2p/Qm/p2p-circuit")) == {}
    assert dials.dialled == []


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
    dials.now = PORTS_S
    assert await dials.back(more) == {more[0]: None}


def test_the_budget_of_ports_takes_bounded_memory(dials: Dials) -> None:
    """The addresses that were dialled longest ago are forgotten."""
    for host in range(HOSTS_MAX + 10):
        assert dials.budget.spend([(f"10.0.{host // 256}.{host % 256}", 80)])
    assert len(dials.budget._dialled) == HOSTS_MAX


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
