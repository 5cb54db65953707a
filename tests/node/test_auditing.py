"""Audits: peers find an owner that lies, prove it to each other, and go on without it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from p2p_diloco.core.messages import Close
from p2p_diloco.core.state import key_of, rooted
from p2p_diloco.net.interface import Refusal
from p2p_diloco.net.signing import pack
from p2p_diloco.node import auditing
from p2p_diloco.node.auditing import AT_ONCE, FAVOURS_AT_ONCE, STRANGERS_MAX, Audits
from p2p_diloco.node.examining import Case
from p2p_diloco.node.fields import encoded
from p2p_diloco.node.signatures import CLOSE, hash_of
from p2p_diloco.node.wire import Accusation, Audit, Contradicts, Copy
from tests.net.memory import MemoryNetwork
from tests.net.patience import awaited, until
from tests.node.conftest import QUICK, MemoryPeer, exchange

SIZES = (4, 4, 4, 4, 4, 4)


@pytest.fixture(autouse=True)
def little_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newcomers are told soon, and who shows nothing is waited for half as long."""
    monkeypatch.setattr(auditing, "LOOK", 0.01)
    monkeypatch.setattr(auditing, "SILENT", 1)


def audited(audits: Audits) -> int:
    """How many means a peer has computed again."""
    return sum(case.right or case.proves for case in (*audits._cases, *audits._alleged.values()))


OFTEN = {"heartbeat_interval": 0.15, "slice_elements": 4, "audit_rate": 1.0}
PATIENT_S = 20.0
"""For peers of which none dies: on a busy machine an honest one may answer an audit late."""
BY_HAND = {"audit_rate": 1e-9, "heartbeat_interval": 0.1, "heartbeat_timeout": PATIENT_S}
"""For tests that begin the audits themselves: the lot falls on no mean, and each peer makes its own."""


class Swarm:
    """Peers that have entered one run, and the audits of each, by name."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.peers: dict[str, MemoryPeer] = {}
        self.audits: dict[str, Audits] = {}

    @classmethod
    async def of(cls, names: str, **config: Any) -> Swarm:
        made = cls()
        for name in names:
            await made.enter(name, **{**OFTEN, **config})
        return made

    async def enter(self, name: str, **config: Any) -> Audits:
        self.peers[name] = peer = MemoryPeer(self.network, name, {**QUICK, **config} if config else {}, SIZES)
        await peer.enter()
        self.audits[name] = audits = peer.inbox.handler._audits  # type: ignore[attr-defined]
        return audits

    async def rounds(self, count: int, names: str = "") -> None:
        """Let these peers, or all, exchange `count` times."""
        for _ in range(count):
            await asyncio.wait_for(exchange(*(self.peers[name] for name in names or self.peers)), 60.0)

    async def means_of(self, owner: str, audits: Audits, count: int = 1) -> list[Case]:
        """The first means of an owner that a peer keeps, after as many exchanges as it takes: on a busy machine others
        may own slices in its place."""
        while len(found := [case for case in audits._cases if case.owner == owner]) < count:
            await self.rounds(1)
        return found[:count]

    @contextlib.asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Within the block all peers exchange without end; at its end the last exchange is cut off."""

        async def train(peer: MemoryPeer) -> None:
            while True:
                await peer.exchange(1.0)

        tasks = [asyncio.create_task(train(peer)) for peer in self.peers.values()]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def silent(audits: Audits) -> Iterator[None]:
    """Within the block nothing that this peer would send is sent, so no answer comes."""
    with mock.patch.object(audits._outbox, "put"):
        yield


def lies(audits: Audits) -> None:
    """From now on this peer's means are zeros. Its own audits are right."""
    honest = audits._work.mean_of
    audits._examiner._work = SimpleNamespace(mean_of=honest)

    def zeros(index: int, parts: Any) -> memoryview:
        return honest(index, [(author, weight, memoryview(bytes(part.nbytes))) for author, weight, part in parts])

    audits._work.mean_of = zeros


def off_by_one_bit(honest: Callable[..., memoryview]) -> Callable[..., memoryview]:
    """A mean whose last bit is another one."""

    def mean(index: int, parts: Any) -> memoryview:
        computed = bytearray(honest(index, parts))
        computed[-1] ^= 1
        return memoryview(computed)

    return mean


@pytest.mark.parametrize("mode", ["sync", "async"])
@awaited
async def test_honest_peers_audit_each_other_and_expel_none(mode: str) -> None:
    """In the asynchronous mode submissions were made on unlike versions, and each is shown as it was signed."""
    swarm = await Swarm.of("abc", heartbeat_timeout=PATIENT_S, mode=mode)
    async with swarm.training():
        await until(lambda: sum(map(audited, swarm.audits.values())) >= 6, 60.0)
    assert [audits.verdicts.expelled for audits in swarm.audits.values()] == [{}, {}, {}]


@awaited
async def test_a_wrong_mean_is_found_by_all_and_the_others_go_on() -> None:
    """They hold the same state. A newcomer is told of the liar, which is gone when it joins, by peers of which one had
    only heard of the lie itself; and it computes the lie itself."""
    swarm = await Swarm.of("abcd", heartbeat_timeout=PATIENT_S)
    await swarm.rounds(2)
    lies(swarm.audits["b"])
    going = asyncio.create_task(swarm.rounds(50, "b"))
    others = [swarm.audits[name] for name in "acd"]
    for _ in range(20):
        await swarm.rounds(1, "acd")
        if all("b" in audits.verdicts.expelled for audits in others):
            break
    await until(lambda: all("b" in audits.verdicts.expelled for audits in others))
    assert all("wrong mean" in audits.verdicts.expelled["b"] for audits in others)
    going.cancel()
    await swarm.rounds(3, "acd")
    assert [{*audits.verdicts.expelled} for audits in others] == [{"b"}] * 3
    assert all("b" not in audits._roster.alive() for audits in others)
    assert len({(await swarm.peers[name].ask("ask", "told"))["digest"] for name in "acd"}) == 1
    await swarm.peers["b"].stop()
    newcomer = await swarm.enter("e")
    await until(lambda: "b" in newcomer.verdicts.expelled)
    assert "wrong mean" in newcomer.verdicts.expelled["b"]
    assert audited(newcomer) >= 1
    assert not newcomer.verdicts.mistaken
    await swarm.rounds(2, "acde")


@awaited
async def test_a_peer_whose_audits_compute_wrongly_doubts_itself_and_splits_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its recomputation is off by one bit, so it finds a lie in each mean of the others. They compute these means
    and find none: no peer is expelled, the run goes on with all three, and it says loudly what is wrong."""
    monkeypatch.setattr(auditing, "PATIENCE", 1)
    swarm = await Swarm.of("abc")
    await swarm.rounds(1)
    a, b, c = swarm.audits.values()
    a._examiner._work = SimpleNamespace(mean_of=off_by_one_bit(a._work.mean_of))
    async with swarm.training():
        await until(lambda: bool(a.verdicts.doubt), 60.0)
    assert [audits.verdicts.expelled for audits in (a, b, c)] == [{}, {}, {}]
    assert (b.verdicts.doubt, c.verdicts.doubt) == ("", "")
    assert "a" in b.verdicts.mistaken | c.verdicts.mistaken
    assert "this peer's results differ from all others'" in a.verdicts.doubt
    assert [record.levelname for record in caplog.records if "results differ" in record.message].count("ERROR") == 1
    assert all({*audits._roster.alive()} == {*"abc"} - {audits._me} for audits in (a, b, c))
    before = audited(a)
    await asyncio.sleep(a._wait_s)
    assert audited(a) <= before + 2  # those that were under way


Played = Callable[[Swarm, Audits, Case], Awaitable[None]]


def met(names: str) -> Callable[[Played], Callable[[], None]]:
    """A decorator for a test that begins the audits itself. It gets these peers after some exchanges, the audits of a,
    and what a knows of a mean of b."""

    def decorate(test: Played) -> Callable[[], None]:
        @awaited
        async def played() -> None:
            swarm = await Swarm.of(names, **BY_HAND)
            await swarm.rounds(2)
            (case,) = await swarm.means_of("b", swarm.audits["a"])
            await test(swarm, swarm.audits["a"], case)

        return played

    return decorate


def accusation(audits: Audits, case: Case, **changes: Any) -> Accusation:
    """What a peer says that calls this mean a lie. `changes`: of the mean, or `choice` or `base`."""
    case = replace(case, choice=changes.pop("choice", case.choice), base=changes.pop("base", case.base))
    choice = memoryview(encoded(case.choice))
    return Accusation(replace(case.mean, **changes), case.base, case.seal, choice.nbytes, choice)


@met("abc")
async def test_an_accusation_must_name_a_mean_that_its_owner_signed(swarm: Swarm, a: Audits, case: Case) -> None:
    """Everything in it is covered by signatures, and no peer can accuse without end."""
    with silent(a):
        a._cases._cases.clear()
        ready = case.choice.entries[0][1]
        crowd = replace(case.choice, entries=tuple((f"p{n}", ready) for n in range(STRANGERS_MAX + 8)))
        with pytest.raises(Refusal, match=r"no mean that the accused|has not signed its mean"):
            a.accused("c", accusation(a, case, choice=crowd))
        key = key_of(case.mean.fragment, case.base, crowd)
        of = case.mean.fragment, case.base, key, case.mean.number, case.mean.hash
        signed = replace(case, seal=swarm.audits["b"]._signatures.of_mean(*of))
        with pytest.raises(Refusal, match="more peers than"):
            a.accused("c", accusation(a, signed, choice=crowd, key=key))
        few = replace(case.choice, entries=case.choice.entries[:1])
        other = replace(case.base, epoch=77)
        for changes in ({"hash": "00" * 32}, {"number": (case.mean.number + 1) % 6}, {"base": other}, {"choice": few}):
            with pytest.raises(Refusal, match=r"no mean that the accused|has not signed its mean"):
                a.accused("c", accusation(a, case, **changes))
        hidden = Accusation(case.mean, case.base, case.seal)
        a.accused("c", hidden)  # only who has seen the commit can find that nothing is shown
        assert not a._alleged
        stranger = replace(accusation(a, case, owner="nobody"), base=replace(case.base, chain="invented"))
        a.accused("c", stranger)  # a mean of no lineage, by a peer that was never met
        assert not a._alleged
        a.accused("c", accusation(a, case))
        assert [alleged.accusers for alleged in a._alleged.values()] == [{"c"}]
        a.verdicts.mistaken.add("c")
        with pytest.raises(Refusal, match="an earlier accusation"):
            a.accused("c", accusation(a, case))


@met("abc")
async def test_a_peer_that_accuses_wrongly_is_not_heard_again(swarm: Swarm, a: Audits, case: Case) -> None:
    """It has shown what the mean was made of, and it is right. Its word confirms nothing any more."""
    a._cases._cases.clear()
    a.accused("c", accusation(a, case))
    assert "b" in a.verdicts._claims["c"]
    await until(lambda: "c" in a.verdicts.mistaken)
    assert "c" not in a.verdicts._claims
    assert a.verdicts.expelled == {}
    assert "the mean is right" in dict(a._refusals.newest(8))["c"].why


@met("abc")
async def test_a_mean_that_counts_what_can_not_be_averaged_is_a_lie(swarm: Swarm, a: Audits, case: Case) -> None:
    """An honest owner refuses such a contribution; this one has made it itself."""
    b = swarm.audits["b"]
    payload = memoryview(np.full(4, np.nan, np.float32)).cast("B")
    hashes = tuple(hash_of(payload) for _ in SIZES)
    entry = case.choice.entries[1][1]
    id = replace(entry.id, sequence=99)
    ready = b._signatures.signed(rooted(replace(entry, id=id, oldest=id, hashes=hashes, seal=b"")))
    choice = replace(case.choice, entries=(("b", ready),)).bare()
    key = key_of(case.mean.fragment, case.base, choice)
    seal = b._signatures.of_mean(case.mean.fragment, case.base, key, case.mean.number, case.mean.hash)
    with silent(a):
        said = accusation(a, replace(case, seal=seal), choice=choice, key=key)
        a.accused("c", said)
        await until(lambda: a._alleged[said.mean].asked)
        body = memoryview("".join(hashes).encode() + bytes(payload))
        a.take(Copy(said.mean, "b", ready.seal, body))
        await until(lambda: "b" in a.verdicts.expelled)
    assert "an impossible contribution" in a.verdicts.expelled["b"]


async def with_a_mean_to_show(**config: Any) -> tuple[Swarm, Audits, Case]:
    """Peers a and b, and a mean that b must show to a: the two have heard of each other for long enough."""
    swarm = await Swarm.of("ab", audit_rate=1e-9, **config)
    a = swarm.audits["a"]
    for _ in range(1000):
        await swarm.rounds(1)
        made = [case for case in a._cases if case.owner == "b"]
        if made and a._examiner._must_show(made[-1]):
            return swarm, a, made[-1]
        await asyncio.sleep(0.05)
    raise AssertionError("no mean")


@pytest.mark.parametrize(("restarts", "cut_off"), [(False, False), (True, False), (False, True)])
@awaited
async def test_an_owner_that_lost_its_copies_is_expelled_if_it_had_to_keep_them(restarts: bool, cut_off: bool) -> None:
    """It may have restarted. Or the auditor was cut off, got the commit late, and the copies were kept long enough.
    Nothing else proves its lie, so newcomers are not told of it."""
    swarm, a, case = await with_a_mean_to_show()
    swarm.audits["b"]._cases.get(case.mean).copies = {}
    if cut_off:
        a._examiner.contact._since["b"] = case.since - 0.1
    a._begin(case)
    await asyncio.sleep(0.1)
    if restarts:
        known = a._roster.summary
        later = replace(known("b"), incarnation=known("b").incarnation + 1)
        a._roster.summary = lambda peer: later if peer == "b" else known(peer)
    await until(lambda: case.over)
    assert bool(a.verdicts.expelled) is not (restarts or cut_off)
    assert not a.verdicts._proofs


@met("abc")
async def test_copies_that_an_owner_refuses_come_from_others_at_once(swarm: Swarm, a: Audits, case: Case) -> None:
    """The wait for the owner would be longer than this test."""
    b, c = swarm.audits["b"], swarm.audits["c"]
    at_c = c._cases.get(case.mean)
    c._begin(at_c)
    await until(lambda: at_c.right)
    b._cases.get(case.mean).copies = {}
    a._begin(case)
    await until(lambda: case.right)


@met("ab")
async def test_means_that_waited_for_long_are_not_audited(swarm: Swarm, a: Audits, case: Case) -> None:
    """Their owners need not have the contributions any more. Audits that last could else make them liars."""
    case.since -= 1.1 * a._wait_s
    a._begin(case)
    await until(lambda: case.over)
    assert not case.asked
    assert not a.verdicts.expelled


@awaited
async def test_an_accusation_does_not_wait_for_audits_by_lot() -> None:
    """Of A, B, C, D: B and C have expelled D, and D shows A nothing. If A judged their accusation after its own audits
    of D's means, it would work with D until then, and B and C without them."""
    swarm = await Swarm.of("abcd", **BY_HAND)
    await swarm.rounds(6)
    a = swarm.audits["a"]
    a._wait_s = a._examiner._wait_s = 1000.0
    *hidden, accused = [case for case in a._cases if case.owner != "a"][: AT_ONCE + 2]
    with silent(a):
        for case in hidden:
            a._begin(case)
        await until(lambda: sum(case.asked for case in hidden) == AT_ONCE)
    a._begin(accused)
    accused.accusers.add("b")
    a._begin(accused)
    await until(lambda: accused.over)
    assert not any(case.over for case in hidden)


@met("ab")
async def test_a_copy_must_be_asked_for_and_signed(swarm: Swarm, a: Audits, case: Case) -> None:
    seal = b"-" * 64
    copy = Copy(case.mean, "b", seal, memoryview(bytes(6 * 64 + case.nbytes // 2)))
    unknown = replace(copy, mean=replace(case.mean, hash="another"))
    for asked, unwanted in ((False, copy), (True, unknown), (True, replace(copy, author="c"))):
        case.asked = asked
        with pytest.raises(Refusal, match="did not ask"):
            a.nbytes(unwanted)
    assert a.nbytes(copy) == copy.payload.nbytes
    with pytest.raises(Refusal, match="signed"):
        a.take(copy)
    shown = swarm.audits["b"]._cases.get(case.mean)
    ready, payload = shown.readys["b"], shown.copies["b"]
    right = memoryview("".join(ready.hashes).encode() + bytes(payload))
    for wrong in (replace(copy, payload=right), Copy(case.mean, "a", ready.seal, right)):
        with pytest.raises(Refusal, match="signed"):
            a.take(wrong)
    assert a.nbytes(copy)
    a.take(Copy(case.mean, "b", ready.seal, right))
    assert case.missing() == ["a"]


@met("abc")
async def test_one_peer_makes_others_audit_few_means(swarm: Swarm, a: Audits, case: Case) -> None:
    """One at a time, and few in all, none that is old. Else one peer could have all others get the contributions to
    each mean, which its owner sends."""
    cases = await swarm.means_of("b", a, FAVOURS_AT_ONCE + 1)
    with silent(a):
        a._wait_s = 1000.0  # no mean becomes old, however slow the machine is
        a._inbox.grant_of = lambda peer: {"c": "grant", "d": "grant"}.get(peer)
        last, unknown = Audit(cases[-1].mean), Audit(replace(case.mean, key="unknown"))
        for turn, one in enumerate(cases[:FAVOURS_AT_ONCE]):
            a.asked("cd"[turn % 2], Audit(one.mean))
            for mean, why in ((last, "another mean"), (unknown, "not kept")):
                with pytest.raises(Refusal, match=why):
                    a.asked("cd"[turn % 2], mean)
            one.askers.clear()
        for asker in "cd":
            with pytest.raises(Refusal, match="many means for the sender, or others with its invitation"):
                a.asked(asker, last)
        cases[-1].since -= 2 * a._wait_s + 1
        with pytest.raises(Refusal, match="too old"):
            a.asked("b", last)
        cases[-1].since += 2 * a._wait_s + 1
        a.asked("b", last)  # others still have theirs


@met("ab")
async def test_copies_are_sent_again_a_few_times(swarm: Swarm, a: Audits, case: Case) -> None:
    """They may be lost; but a peer that breaks each transfer can't have the same copies sent without end."""
    sent = list[str]()
    a._outbox.put = lambda to, header, payload: sent.append(to)
    (own,) = await swarm.means_of("a", a)
    for _ in range(3 * FAVOURS_AT_ONCE):
        a.asked("b", Audit(own.mean))
    assert sent == ["b"] * (1 + FAVOURS_AT_ONCE) * len(own.counted)


# -- two statements that contradict each other


def closes(audits: Audits, case: Case, *samples: int, attempt: int = 0) -> list[Close]:
    """Closes of one attempt, each with a choice of its own: it counts a contribution with so many samples."""
    (peer, entry), *_ = [(peer, ready) for peer, ready in case.choice.entries if peer == audits._me]
    found = []
    for number in samples:
        ready = audits._signatures.signed(replace(case.readys[peer], samples=number, seal=b""))
        choice, owners = replace(case.choice, by=peer, entries=((peer, ready),), seal=b""), (peer,) * len(SIZES)
        key = key_of(entry.fragment, entry.base, choice)
        close = Close(entry.fragment, entry.base, 0, peer, attempt, key, choice, owners)
        found.append(audits._signatures.signed(close))
    return found


@met("abc")
async def test_a_peer_that_contradicts_itself_is_expelled_by_all(swarm: Swarm, a: Audits, case: Case) -> None:
    """a gets two Closes of one attempt from b. It shows them to c, and to d, which joins later."""
    b, c = swarm.audits["b"], swarm.audits["c"]
    own = b._cases.get(case.mean)
    first, second = closes(b, own, 1, 2)
    (later,) = closes(b, own, 3, attempt=1)
    for close in (first, later, first):
        a._signatures.check("b", close)
    assert not a.verdicts.expelled
    a._signatures.check("b", second)
    await until(lambda: "b" in c.verdicts.expelled)
    assert (
        a.verdicts.expelled
        == c.verdicts.expelled
        == {"b": "it signed two Closes of one attempt that contradict each other"}
    )
    await swarm.peers["b"].stop()
    newcomer = await swarm.enter("d")
    await until(lambda: "b" in newcomer.verdicts.expelled)


@met("ab")
async def test_statements_that_contradict_nothing_expel_nobody(swarm: Swarm, a: Audits, case: Case) -> None:
    """Two of one content, two of other attempts, two of which one isn't signed, and those of two lives: who starts
    again has forgotten which choice it made."""
    b = swarm.audits["b"]
    own = b._cases.get(case.mean)
    assert own is not None
    first, second = closes(b, own, 1, 2)
    (later,) = closes(b, own, 3, attempt=1)
    b._signatures._life, life = b"another!", b._signatures._life
    (again,) = closes(b, own, 2)
    b._signatures._life = life
    one, two, other, new = (next(b._signatures._statements("b", close))[2:] for close in (first, second, later, again))
    for pair in ((one, one), (one, other), (one, (two[0], one[1])), ((b"?", b"?"), two), (one, new)):
        body = memoryview(pack(*pair[0], *pair[1]))
        with pytest.raises(Refusal, match="prove no lie"):
            a.shown(Contradicts("b", CLOSE, body.nbytes, body))
    for close in (first, later, again):
        a._signatures.check("b", close)
    assert not a.verdicts.expelled
    a.shown(Contradicts("b", CLOSE, 0, memoryview(pack(*one, *two))))
    assert "b" in a.verdicts.expelled
