"""What other peers' answers mean for a peer's reachability, and when it asks them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgpack
import pytest

from p2p_diloco.net import reach as module
from p2p_diloco.net.framing import Accepted, Frame, Message, Refused, encode
from p2p_diloco.net.interface import Reach, Unreachable
from p2p_diloco.net.reach import (
    ADDRESS_LETTERS_MAX,
    ASK_EVERY_S,
    ASK_S,
    LOOK_EVERY_S,
    DialBack,
    ReachFinder,
    ask,
    ask_all,
    judged,
    together,
)
from tests.net.clocks import ByHand, by_hand
from tests.net.direct_peers import pair
from tests.net.patience import awaited, plays

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
async def test_a_peer_that_hangs_is_waited_for_only_until_the_deadline() -> None:
    """Opening the stream and the answer together, even if a first byte comes late."""
    with by_hand() as clock:
        async with asked(Asker()) as asker:
            asking = asyncio.create_task(ask(asker, "other", asker.addresses))
            await clock.until(lambda: asker.far)
            await clock.passes(0.9 * ASK_S)
            asker.far[0].write(encode(Message(b"abc"))[:5])
            await clock.until(lambda: asker.near[0].unread)
            assert not asking.done()
            await clock.passes(0.2 * ASK_S)
            await clock.until(asking.done)
            with pytest.raises(Unreachable, match="no answer within"):
                await asking


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
        monkeypatch.setattr(module, "ask_all", self.ask_all)

    async def ask_all(self, daemon: Any, peers: list[str]) -> dict[str, DialBack]:
        self.asked += peers
        return {peer: self.answers[peer] for peer in peers if peer in self.answers}

    def start(self, answers: dict[str, DialBack]) -> ReachFinder:
        self.finder = ReachFinder(self, answers, lambda: self.linked, self.told.append)  # type: ignore[arg-type]
        return self.finder


def run(test: Callable[[Swarm, ByHand], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with by_hand() as clock, pytest.MonkeyPatch.context() as patch:
            swarm = Swarm(patch)
            await test(swarm, clock)
            await swarm.finder.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(bounded())


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
