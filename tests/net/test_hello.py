"""HELLO: no byte of a stream reaches its handler before its peer is known as a member, and strangers cost little."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import pytest

from p2p_diloco.net import hello as module
from p2p_diloco.net.certificates import CHAIN_BYTES_MAX, Stranger
from p2p_diloco.net.framing import Bulk, Frame, Message, Refused, encode
from p2p_diloco.net.hello import (
    HELLO_S,
    PENDING_MAX,
    PENDING_PER_PEER_MAX,
    STREAMS_PER_PEER_MAX,
    TURNED_AWAY_MAX,
    Hellos,
)
from p2p_diloco.net.interface import Unreachable
from p2p_diloco.net.invitation import Invitation
from p2p_diloco.net.pipe import Pipe
from tests.net.clocks import by_hand
from tests.net.direct_peers import next_frame, pair
from tests.net.members import OTHER_KEY, id_of, invitation, membership, revocation
from tests.net.patience import plays, until

REFUSED = Refused("not a member of this run")
WITHIN_S = 30.0
A, B, C, S, ME, OTHER = (id_of(name) for name in ("a", "b", "c", "s", "me", "other"))
PEERS = P0, P1, P2, P3 = tuple(id_of(f"p{number}") for number in range(4))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINGER_S", 0.1)


class End:
    """One peer's end: its HELLO, the streams that reached its handler, and the peers that were cut."""

    def __init__(self, name: str, invited: Invitation | None = None) -> None:
        self.name, self.cut, self.clock = name, list[str](), time.time
        self.hellos = Hellos(membership(name, invited), self.cut.append, lambda: self.clock())
        self.served: list[tuple[str, Pipe]] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def serve(self, peer: str, pipe: Pipe, seen_at: str) -> None:
        self.served.append((peer, pipe))
        await until(lambda: pipe.ended is not None, 100.0)

    async def opened_by(self, peer: str) -> Pipe:
        """The other end of a stream that a peer opens to this one."""
        near, far = await pair()
        serving = self.hellos.guarded(self.serve)(peer, far, "/ip4/127.0.0.1/tcp/1")
        self.tasks.append(asyncio.ensure_future(serving))
        return near

    async def greets(self, other: End) -> Pipe:
        """A stream from this peer to another, once both have shown their certificates."""
        pipe = await other.opened_by(self.name)
        return (await self.hellos.greet(other.name, (pipe, "/ip4/127.0.0.1/tcp/2"), WITHIN_S))[0]

    async def close(self) -> None:
        await self.hellos.close()
        for _, pipe in self.served:
            pipe.abort()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


Start = Callable[..., End]


def run(test: Callable[[Start], Awaitable[None]]) -> None:
    async def bounded() -> None:
        started: list[End] = []

        def start(name: str, invited: Invitation | None = None) -> End:
            started.append(End(name, invited))
            return started[-1]

        try:
            await asyncio.wait_for(test(start), 60)
        finally:
            for end in started:
                await end.close()

    asyncio.run(bounded())


@plays(run)
async def test_two_members_get_to_know_each_other(start: Start) -> None:
    """The stream reaches the handler with what was written after the certificate, and each knows the other's role."""
    a, b = start(A), start(B, invitation("observer", "bob"))
    pipe = await a.greets(b)
    pipe.write(b"first")
    await until(lambda: b.served and b.served[0][1].unread)
    assert (b.served[0][0], bytes(b.served[0][1].unread)) == (A, b"first")
    known = a.hellos.member(B), b.hellos.member(A)
    assert [(m.role, m.name) for m in known if m is not None] == [("observer", "bob"), ("worker", "alice")]


@plays(run)
async def test_a_known_member_is_not_waited_for(start: Start) -> None:
    """The second stream's certificate travels with its first bytes, and nothing comes back: no round trip."""
    a, b = start(A), start(B)
    await a.greets(b)
    near, far = await pair()
    opened = a.hellos.greet(B, (near, ""), WITHIN_S)
    with pytest.raises(StopIteration):
        opened.send(None)
    near.write(b"at once")
    serving = asyncio.ensure_future(b.hellos.guarded(b.serve)(A, far, ""))
    await until(lambda: len(b.served) == 2 and b.served[1][1].unread == b"at once")
    assert near.quiet
    near.abort()
    await serving


def strangers(me: End) -> dict[str, bytes]:
    """First messages of peers that are no members, by what is wrong with them."""
    valid = membership(S).chain
    return {
        "another peer's": membership(A).chain,
        "another run's": membership(S, invitation(key=OTHER_KEY)).chain,
        "changed": valid[:-1] + bytes([valid[-1] ^ 1]),
        "nothing": b"",
        "too long": bytes(CHAIN_BYTES_MAX),
    }


@pytest.mark.parametrize("kind", ["another peer's", "another run's", "changed", "nothing", "too long"])
@pytest.mark.parametrize("mark", [b"?", b"!", b"", b"x"])
@plays(run)
async def test_a_stranger_is_told_one_text(start: Start, kind: str, mark: bytes) -> None:
    """Whatever is wrong; what it has written behind it is not read, and the stream ends."""
    me = start(ME)
    pipe = await me.opened_by(S)
    pipe.write(encode(Message(mark + strangers(me)[kind])) + encode(Message(b"payload of an attack")))
    assert await next_frame(pipe) == REFUSED
    assert not await pipe.more(WITHIN_S)
    assert not me.served
    assert me.hellos.turned_away == 1
    assert not me.hellos.admits(S)


@plays(run)
async def test_a_stranger_that_floods_is_closed_out_unheard(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its first streams are read and answered, until the next sweep. Other peers are heard meanwhile."""
    monkeypatch.setattr(module, "SWEEP_EVERY_S", 1000.0)
    me, a = start(ME), start(A)

    async def told() -> Frame | None:
        pipe = await me.opened_by(S)
        pipe.write(encode(Message(b"?" + strangers(me)["changed"])))
        return await next_frame(pipe)

    answers = [await told() for _ in range(TURNED_AWAY_MAX + 4)]
    assert answers == [REFUSED] * TURNED_AWAY_MAX + [None] * 4
    assert me.hellos.turned_away == TURNED_AWAY_MAX
    await a.greets(me)
    me.hellos.sweep()
    assert await told() == REFUSED


@plays(run)
async def test_a_stream_that_shows_nothing_ends_at_the_deadline(start: Start) -> None:
    """Also if its bytes trickle in."""
    with by_hand() as clock:
        me = start(ME)
        pipe = await me.opened_by(S)
        pipe.write(encode(Message(b"?"))[:4])
        await clock.passes(0.9 * HELLO_S)
        assert me.hellos._pending
        pipe.write(encode(Message(b"?"))[4:8])
        await clock.passes(0.2 * HELLO_S)
        await clock.until(lambda: me.hellos.turned_away == 1)


@plays(run)
async def test_pending_streams_are_few_and_members_get_in(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """The oldest pending stream makes room, of the same peer first. One line in the log counts them."""
    caplog.set_level(logging.INFO)
    me, a = start(ME), start(A)
    mine = [await me.opened_by(S) for _ in range(PENDING_PER_PEER_MAX + 1)]
    await until(lambda: mine[0].ended)
    assert [pipe.ended is None for pipe in mine] == [False] + [True] * PENDING_PER_PEER_MAX
    others = [await me.opened_by(id_of(f"s{index}")) for index in range(2 * PENDING_MAX)]
    assert len(me.hellos._pending) == PENDING_MAX
    await a.greets(me)
    assert len(me.hellos._pending) <= PENDING_MAX
    for pipe in (*mine, *others):
        pipe.abort()
    await until(lambda: not me.hellos._pending)
    assert sum("turned away" in record.getMessage() for record in caplog.records) == 1


STRANGERS = Message(membership(S, invitation(key=OTHER_KEY)).chain)


@pytest.mark.parametrize("frame", [None, Bulk(b"", 0), Message(b"no certificate"), STRANGERS])
@plays(run)
async def test_a_listener_that_is_no_member_gets_the_certificate_alone(start: Start, frame: Frame | None) -> None:
    """Whether it closes the stream or says something else. If it shows a stranger's certificate the dialler takes the
    peer for dead: no other process can have its id."""
    a = start(A)
    near, far = await pair()
    far.close() if frame is None else far.write(encode(frame))
    with pytest.raises(Unreachable) as error:
        await a.hellos.greet(S, (near, ""), WITHIN_S)
    if frame is STRANGERS:
        assert ("not a member" in str(error.value), error.value.refused) == (True, True)
    assert near.ended
    if frame is not None:
        await until(lambda: far.ended)
        assert bytes(far.unread) == encode(Message(b"?" + a.hellos.membership.chain))
    far.abort()


@plays(run)
async def test_a_member_that_the_listener_refuses_is_told_so(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """Once in the log, with what may be wrong; the peer doesn't count as dead."""
    given_to_a = invitation()
    a, b = start(A, given_to_a), start(B)
    assert b.hellos.revoke(revocation(given_to_a))
    for _ in range(2):
        with pytest.raises(Unreachable, match="not a member") as error:
            await a.greets(b)
        assert not error.value.refused
    assert sum("doesn't accept this peer as a member" in record.getMessage() for record in caplog.records) == 1


@plays(run)
async def test_a_peer_is_no_member_to_itself(start: Start) -> None:
    """So its own certificates, reflected, open no stream."""
    a = start(A)
    with pytest.raises(Stranger):
        a.hellos.run_of(A, a.hellos.membership.chain)


@plays(run)
async def test_a_revoked_member_is_cut_at_once_and_stays_out(start: Start) -> None:
    """Also where it was known; the others stay."""
    given_to_a, b, c = invitation(), start(B), start(C)
    a = start(A, given_to_a)
    await a.greets(b)
    await c.greets(b)
    assert not b.hellos.revoke(revocation(given_to_a, key=OTHER_KEY))
    assert b.hellos.admits(A)
    assert b.hellos.revoke(revocation(given_to_a))
    assert b.cut == [A]
    assert (b.hellos.admits(A), b.hellos.admits(C)) == (False, True)
    pipe = await a.greets(b)  # a knows b, so it doesn't wait
    assert await next_frame(pipe) == REFUSED
    with pytest.raises(Unreachable, match="not a member"):
        await b.greets(a)


@plays(run)
async def test_an_expired_member_is_cut_by_the_next_look(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """No message of its need come."""
    monkeypatch.setattr(module, "SWEEP_EVERY_S", 0.01)
    a, b = start(A, invitation(life_s=1000.0)), start(B)
    await a.greets(b)
    await asyncio.sleep(0.05)
    assert b.cut == []
    b.clock = lambda: time.time() + 1001.0
    await until(lambda: b.cut == [A])


@plays(run)
async def test_a_member_may_open_only_so_many_streams(start: Start) -> None:
    """More are closed; once some have ended, further ones are served."""
    a, b, c = start(A), start(B), start(C)
    pipes = [await a.greets(b) for _ in range(STREAMS_PER_PEER_MAX)]
    await until(lambda: len(b.served) == STREAMS_PER_PEER_MAX)
    more = await a.greets(b)
    assert not await more.more(WITHIN_S)
    await c.greets(b)
    pipes[0].abort()
    await until(lambda: b.tasks[0].done())
    await a.greets(b)
    await until(lambda: len(b.served) == STREAMS_PER_PEER_MAX + 2)


@plays(run)
async def test_a_grant_is_good_for_so_many_peers_at_a_time(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """An invitation that names no peer can be used by many, also by a peer that has a new id at each start. The one
    that opened a stream longest ago is cut, and may come again; members by other grants stay."""
    monkeypatch.setattr(module, "PEERS_PER_GRANT_MAX", 3)
    shared, me = invitation(), start(ME)

    def comes(name: str) -> None:
        me.hellos.admit(name, shown[name])

    shown = {name: membership(name, shared).chain for name in PEERS}
    me.hellos.admit(OTHER, membership(OTHER).chain)
    for name in (P0, P1, P2, P0):
        comes(name)
    assert me.cut == []
    comes(P3)
    assert me.cut == [P1]
    comes(P1)
    assert me.cut == [P1, P2]
    assert [me.hellos.admits(name) for name in (OTHER, *shown)] == [True, True, True, False, True]
