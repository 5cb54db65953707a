"""Audits: peers find an aggregator that lies, prove it to each other, and go on without it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from p2p_diloco.core import contributing
from p2p_diloco.core.events import Average
from p2p_diloco.core.messages import Contribution
from p2p_diloco.net.interface import Refusal, Unreachable
from p2p_diloco.node import participation
from p2p_diloco.node.auditing import AT_ONCE, FAVOURS_AT_ONCE, STRANGERS_MAX, Audits
from p2p_diloco.node.cases import Case
from p2p_diloco.node.examining import SLICES
from p2p_diloco.node.wire import Accusation, Audit, Copy
from tests.net.memory import MemoryNetwork

Peers = dict[str, Any]


def run(test: Any) -> Any:
    """Run an async test in a loop of its own."""

    @functools.wraps(test)
    def ran(**given: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**given), 120.0))

    return ran


SIZES = (4, 4, 4, 4, 4, 4)


@pytest.fixture
def auditors(monkeypatch: pytest.MonkeyPatch) -> dict[str, Audits]:
    """The audits of each peer, by name."""
    found: dict[str, Audits] = {}

    class Found(Audits):
        def __init__(self, common: Any, *given: Any) -> None:
            super().__init__(common, *given)
            found[common.transport.peer_id] = self

    monkeypatch.setattr(participation, "Audits", Found)
    return found


PATIENT_S = 20.0
"""For peers of which none dies: on a busy machine an honest one may answer an audit late."""
BY_HAND = {"audit_rate": 1e-9, "heartbeat_timeout": PATIENT_S}
"""For tests that begin the audits themselves: the lot falls on no commit, and each peer makes its commits."""


async def swarm(
    memory_peer: Any, quick: dict[str, Any], names: str, network: MemoryNetwork | None = None, **config: Any
) -> Peers:
    """Peers that have entered one run, in order."""
    network = network or MemoryNetwork()
    config = {**quick, "shard_elements": 4, "audit_rate": 1.0, **config}
    peers = {name: memory_peer(network, name, config, SIZES) for name in names}
    for peer in peers.values():
        await peer.enter()
    return peers


async def rounds(peers: Peers, count: int) -> None:
    """Let these peers exchange `count` times."""
    for _ in range(count):
        await asyncio.wait_for(asyncio.gather(*(peer.exchange(1.0) for peer in peers.values())), 60.0)


async def commits_of(peers: Peers, audits: Audits, aggregator: str, count: int = 1) -> list[Case]:
    """The first commits of an aggregator that a peer keeps, after as many exchanges as it takes: on a busy machine
    others may aggregate in its place."""
    while len(found := [case for case in audits._cases if case.aggregator == aggregator]) < count:
        await rounds(peers, 1)
    return found[:count]


@contextlib.asynccontextmanager
async def training(peers: Peers, *, to_the_end: str) -> AsyncIterator[None]:
    """Within the block these peers exchange without end. At its end those of the given names end their last exchange,
    and that of others is cut off."""
    over = asyncio.Event()

    async def train(name: str) -> None:
        while not over.is_set():
            await peers[name].exchange(1.0)

    tasks = {name: asyncio.create_task(train(name)) for name in peers}
    try:
        yield
        over.set()
        await asyncio.wait_for(asyncio.gather(*(tasks[name] for name in to_the_end)), 60.0)
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


async def until(holds: Callable[[], bool], within_s: float = 30.0) -> None:
    """Wait until this is so."""
    give_up_at = asyncio.get_running_loop().time() + within_s
    while not holds():
        assert asyncio.get_running_loop().time() < give_up_at
        await asyncio.sleep(0.02)


@contextlib.contextmanager
def silent(audits: Audits) -> Iterator[None]:
    """Within the block nothing that this peer would send is sent, so no answer comes."""
    with mock.patch.object(audits._outbox, "put"):
        yield


async def stop(peers: Peers) -> None:
    for peer in peers.values():
        await peer.stop()


def works_for(audits: Audits) -> bool:
    return bool(audits._roster.mine.epochs)


def lies(audits: Audits) -> None:
    """From now on this peer commits means of zeros. Its own audits are right."""
    work = audits._work
    honest = work.mean_of = work._mean
    work._mean = lambda shard, parts: honest(shard, [(peer, w, memoryview(bytes(p.nbytes))) for peer, w, p in parts])


def off_by_one_bit(honest: Callable[..., memoryview]) -> Callable[..., memoryview]:
    """A mean whose last bit is another one."""

    def mean(shard: int, parts: Any) -> memoryview:
        computed = bytearray(honest(shard, parts))
        computed[-1] ^= 1
        return memoryview(computed)

    return mean


@run
async def test_honest_peers_audit_each_other_and_expel_none(memory_peer: Any, quick: Any, auditors: Any) -> None:
    peers = await swarm(memory_peer, quick, "abc", heartbeat_timeout=PATIENT_S)
    await rounds(peers, 4)
    await until(lambda: all(audits.audited >= 3 for audits in auditors.values()))
    assert [audits.expelled for audits in auditors.values()] == [{}, {}, {}]
    await stop(peers)


@run
async def test_a_wrong_mean_is_found_by_all_and_the_others_go_on(memory_peer: Any, quick: Any, auditors: Any) -> None:
    peers = await swarm(memory_peer, quick, "abcd")
    await rounds(peers, 2)
    lies(auditors["b"])
    going = asyncio.create_task(rounds({"b": peers["b"]}, 50))
    others = {name: peer for name, peer in peers.items() if name != "b"}
    for _ in range(20):
        await rounds(others, 1)
        if all("b" in auditors[name].expelled for name in others):
            break
    await until(lambda: all("b" in auditors[name].expelled for name in others))
    assert all("wrong mean" in auditors[name].expelled["b"] for name in others)
    going.cancel()
    await rounds(others, 3)
    assert {name: auditors[name].expelled.keys() for name in others} == {name: {"b"} for name in others}
    assert all("b" not in auditors[name]._roster.alive() for name in others)
    digests = {(await peer.ask("ask", "told"))["digest"] for peer in others.values()}
    assert len(digests) == 1
    await stop(peers)


@run
async def test_a_newcomer_is_told_of_an_expelled_peer_and_computes_the_lie_itself(
    memory_peer: Any, quick: Any, auditors: Any
) -> None:
    """The liar is gone when it joins, and it was told by peers of which one had only heard of the lie itself."""
    network = MemoryNetwork()
    peers = await swarm(memory_peer, quick, "abcd", network)
    await rounds(peers, 2)
    lies(auditors["b"])
    going = asyncio.create_task(rounds({"b": peers["b"]}, 50))
    others = {name: peer for name, peer in peers.items() if name != "b"}
    for _ in range(20):
        await rounds(others, 1)
        if all("b" in auditors[name].expelled for name in others):
            break
    await until(lambda: all("b" in auditors[name].expelled for name in others))
    going.cancel()
    await peers["b"].stop()
    await rounds(others, 2)
    newcomer = memory_peer(network, "e", {**quick, "shard_elements": 4, "audit_rate": 1.0}, SIZES)
    await newcomer.enter()
    await until(lambda: "b" in auditors["e"].expelled)
    assert "wrong mean" in auditors["e"].expelled["b"]
    assert auditors["e"].audited >= 1
    assert not auditors["e"]._verdicts.mistaken
    await rounds({**others, "e": newcomer}, 2)
    await stop({**others, "e": newcomer})


@run
async def test_a_peer_whose_audits_compute_wrongly_doubts_itself_and_splits_nothing(
    memory_peer: Any, quick: Any, auditors: Any, caplog: Any
) -> None:
    """Its recomputation is off by one bit, so it finds a lie in each commit of the others. They compute these commits
    and find none: no peer is expelled, the run goes on with all three, and it says loudly what is wrong."""
    peers = await swarm(memory_peer, quick, "abc")
    await rounds(peers, 1)
    a = auditors["a"]
    a._work.mean_of = off_by_one_bit(a._work._mean)
    async with training(peers, to_the_end="abc"):
        await until(lambda: bool(a.doubt), 60.0)
    assert [audits.expelled for audits in auditors.values()] == [{}, {}, {}]
    assert [audits.doubt for name, audits in auditors.items() if name != "a"] == ["", ""]
    assert any("a" in auditors[name]._verdicts.mistaken for name in "bc")
    assert "this peer's results differ from all others'" in a.doubt
    assert [record.levelname for record in caplog.records if "results differ" in record.getMessage()].count(
        "ERROR"
    ) == 1
    assert all(set(audits._roster.alive()) == {*"abc"} - {name} for name, audits in auditors.items())
    audited = a.audited
    await asyncio.sleep(2 * a._wait_s)
    assert a.audited <= audited + 2  # those that were under way
    await stop(peers)


@run
async def test_a_peer_whose_commits_and_audits_compute_wrongly_is_expelled_and_expels_none(
    memory_peer: Any, quick: Any, auditors: Any
) -> None:
    """The others agree with each other, and it with no peer."""
    peers = await swarm(memory_peer, quick, "abc")
    await rounds(peers, 1)
    work = auditors["a"]._work
    work._mean = off_by_one_bit(work._mean)
    async with training(peers, to_the_end="bc"):
        await until(lambda: all("a" in auditors[name].expelled for name in "bc"), 60.0)
    assert auditors["a"].expelled == {}
    await rounds({name: peers[name] for name in "bc"}, 2)
    await stop(peers)


def accusation(case: Any, **changes: Any) -> Accusation:
    """What a peer says that calls this commit a lie."""
    of = case.shard, case.base, case.epoch, case.digest, case.aggregator, case.counted
    return replace(Accusation(*of, case.sealed.pack(), True), **changes)


@run
async def test_an_accusation_must_name_a_commit_that_the_aggregator_made(
    memory_peer: Any, quick: Any, auditors: Any
) -> None:
    """Everything in it is covered by the seals, and no peer can accuse without end."""
    peers = await swarm(memory_peer, quick, "abc", **BY_HAND)
    await rounds(peers, 2)
    a = auditors["a"]
    (case,) = await commits_of(peers, a, "b")
    with silent(a):
        a._cases._cases.clear()
        crowd = tuple(replace(case.counted[0], peer=f"p{n}") for n in range(STRANGERS_MAX + 8))
        with pytest.raises(Refusal, match="more peers than"):
            a.accused("c", accusation(case, counted=crowd))
        for changes in ({"digest": "another"}, {"base": "another"}, {"epoch": 77}, {"counted": case.counted[:1]}):
            with pytest.raises(Refusal, match="no commit that the accused"):
                a.accused("c", accusation(case, **changes))
        a.accused("c", accusation(case, shown=False))  # only who has seen the commit can find that nothing is shown
        assert not a._alleged
        known, a._roster.known = a._roster.known, lambda peer: False
        a.accused("c", accusation(case, digest="invented"))  # a commit of no lineage, by a peer that was never met
        assert not a._alleged
        a._roster.known = known
        a.accused("c", accusation(case))
        assert [alleged.accusers for alleged in a._alleged.values()] == [{"c"}]
        a._verdicts.mistaken.add("c")
        with pytest.raises(Refusal, match="an earlier accusation"):
            a.accused("c", accusation(case))
    await stop(peers)


@run
async def test_a_peer_that_accuses_wrongly_is_not_heard_again(memory_peer: Any, quick: Any, auditors: Any) -> None:
    """It has shown what the commit was made of, and the commit is right. Its word confirms nothing any more."""
    peers = await swarm(memory_peer, quick, "abc", **BY_HAND)
    await rounds(peers, 2)
    a, c = auditors["a"], auditors["c"]
    (case,) = await commits_of(peers, c, "b")
    a._cases._cases.clear()
    a.accused("c", accusation(case))
    assert "b" in a._verdicts._claims["c"]
    await until(lambda: "c" in a._verdicts.mistaken)
    assert "c" not in a._verdicts._claims
    assert a.expelled == {}
    assert "the commit is right" in dict(a._refusals.newest(8))["c"].why
    await stop(peers)


@run
async def test_a_commit_that_counts_what_can_not_be_averaged_is_a_lie(
    memory_peer: Any, quick: Any, auditors: Any
) -> None:
    """An honest aggregator refuses such a contribution; this one has made it itself."""
    peers = await swarm(memory_peer, quick, "abc")
    await rounds(peers, 1)
    liar = auditors["b"]
    honest = liar.made

    def counting(effect: Average, averaged: Any) -> Any:
        def unfit(c: Contribution) -> Contribution:
            payload = np.full(c.payload.nbytes // 4, np.nan, np.float32)
            return replace(c, payload=memoryview(payload).cast("B"))

        given = tuple((peer, unfit(c) if peer == "b" else c) for peer, c in effect.contributions)
        return honest(replace(effect, contributions=given), averaged)

    liar.made = counting
    going = asyncio.create_task(rounds(peers, 1000))
    await until(lambda: all("b" in auditors[name].expelled for name in "ac"), 60.0)
    going.cancel()
    assert "an impossible contribution" in auditors["a"].expelled["b"]
    await stop(peers)


@run
async def test_an_aggregator_that_shows_nothing_is_expelled(memory_peer: Any, quick: Any, auditors: Any) -> None:
    peers = await swarm(memory_peer, quick, "abc")
    await rounds(peers, 1)
    auditors["b"]._give = lambda to, case: None
    going = asyncio.create_task(rounds(peers, 1000))
    await until(lambda: all("b" in auditors[name].expelled for name in "ac"), 60.0)
    assert "doesn't show" in auditors["a"].expelled["b"]
    going.cancel()
    assert not auditors["a"].expelled.keys() - {"b"}
    await stop(peers)


@run
async def test_an_aggregator_that_invents_a_contribution_is_expelled(
    memory_peer: Any, quick: Any, auditors: Any
) -> None:
    peers = await swarm(memory_peer, quick, "abc")
    await rounds(peers, 1)
    liar = auditors["b"]
    honest = liar.made

    def inventing(effect: Average, averaged: Any) -> Any:
        def invented(c: Contribution) -> Contribution:
            zeros = replace(c, payload=memoryview(bytes(c.payload.nbytes)))
            return replace(zeros, seal=liar._seals.of_contribution(zeros))

        given = tuple((peer, c if peer == "b" else invented(c)) for peer, c in effect.contributions)
        return honest(replace(effect, contributions=given), averaged)

    liar.made = inventing
    going = asyncio.create_task(rounds(peers, 1000))
    await until(lambda: all("b" in auditors[name].expelled for name in "ac"), 60.0)
    going.cancel()
    assert "didn't make" in auditors["a"].expelled["b"]
    await stop(peers)


async def commit_to_show(peers: Peers, audits: Audits, aggregator: str) -> Any:
    """Train until this peer has a commit of the aggregator that this one must show to it: the two have heard of each
    other for long enough."""
    for _ in range(1000):
        await rounds(peers, 1)
        made = [case for case in audits._cases if case.aggregator == aggregator]
        if made and audits._examiner._must_show(made[-1]):
            return made[-1]
        await asyncio.sleep(0.05)
    raise AssertionError("no commit")


@pytest.mark.parametrize(("restarts", "cut_off"), [(False, False), (True, False), (False, True)])
def test_an_aggregator_that_lost_its_copies_is_expelled_unless_it_may_have_done_nothing_wrong(
    memory_peer: Any, quick: Any, auditors: Any, restarts: bool, cut_off: bool
) -> None:
    """It may have restarted. Or the auditor was cut off, got the commit late, and the copies were kept long enough."""

    async def test() -> None:
        peers = await swarm(memory_peer, quick, "ab", audit_rate=1e-9)
        a, b = auditors["a"], auditors["b"]
        case = await commit_to_show(peers, a, "b")
        b._cases.get(case.key).copies = {}
        if cut_off:
            a._examiner.contact._since["b"] = case.since - 0.1
        a._begin(case)
        await asyncio.sleep(0.1)
        if restarts:
            known = a._roster.summary
            later = replace(known("b"), incarnation=known("b").incarnation + 1)
            a._roster.summary = lambda peer: later if peer == "b" else known(peer)
        await until(lambda: case.over)
        assert bool(a.expelled) is not (restarts or cut_off)
        await stop(peers)

    asyncio.run(asyncio.wait_for(test(), 60.0))


@pytest.mark.parametrize("lost", [Audit, Copy])
def test_an_aggregator_is_not_taken_for_a_liar_because_a_message_was_lost(
    memory_peer: Any, quick: Any, auditors: Any, monkeypatch: Any, lost: type
) -> None:
    """The auditor asks again, and gets what did not arrive the first time, and nothing twice."""

    async def test() -> None:
        peers = await swarm(memory_peer, quick, "ab", audit_rate=1e-9)
        a = auditors["a"]
        case = await commit_to_show(peers, a, "b")
        sender, sent = peers["a" if lost is Audit else "b"].transport, 0
        send = sender.send

        async def fails_once(to: str, header: bytes, payload: Any, **given: Any) -> None:
            nonlocal sent
            if f"{lost.__name__}".encode() in header:
                sent += 1
                if sent == 1:
                    raise Unreachable("the link broke")
            await send(to, header, payload, **given)

        monkeypatch.setattr(sender, "send", fails_once)
        a._begin(case)
        await until(lambda: case.over)
        assert case.right
        assert not a.expelled
        assert sent <= (2 if lost is Audit else 4)
        await stop(peers)

    asyncio.run(asyncio.wait_for(test(), 60.0))


@run
async def test_a_commit_is_shown_before_its_aggregator_has_accepted_it_itself(
    memory_peer: Any, quick: Any, auditors: Any
) -> None:
    """b accepts a shard's commit together with those of the other shards, and a may have all of them earlier."""
    peers = await swarm(memory_peer, quick, "ab", **BY_HAND)
    a, b = auditors["a"], auditors["b"]
    b.accepted = lambda proposals: None
    (case,) = await commits_of(peers, a, "b")
    a._begin(case)
    await until(lambda: case.right)
    await stop(peers)


@run
async def test_copies_that_an_aggregator_refuses_come_from_others_at_once(
    memory_peer: Any, quick: Any, auditors: Any
) -> None:
    """The wait for the aggregator would be longer than this test."""
    peers = await swarm(memory_peer, quick, "abc", **BY_HAND)
    a, b, c = (auditors[name] for name in "abc")
    (case,) = await commits_of(peers, a, "b")
    at_c = c._cases.get(case.key)
    c._begin(at_c)
    await until(lambda: at_c.right)
    b._cases.get(case.key).copies = {}
    a._begin(case)
    await until(lambda: case.right)
    await stop(peers)


@run
async def test_copies_for_another_audit_do_not_shorten_the_wait(memory_peer: Any, quick: Any, auditors: Any) -> None:
    peers = await swarm(memory_peer, quick, "ab", **BY_HAND)
    a = auditors["a"]
    (case,) = await commits_of(peers, a, "b")
    with silent(auditors["b"]):
        a._begin(case)
        for _ in range(3 * SLICES):
            await asyncio.sleep(0.01)
            a._examiner.came.set()
        assert not case.over
    await stop(peers)


@run
async def test_commits_that_waited_for_long_are_not_audited(memory_peer: Any, quick: Any, auditors: Any) -> None:
    """Their aggregators need not have the contributions any more. Audits that last could else make them liars."""
    peers = await swarm(memory_peer, quick, "ab", **BY_HAND)
    await rounds(peers, 2)
    a = auditors["a"]
    (case,) = await commits_of(peers, a, "b")
    case.since -= 1.1 * a._wait_s
    a._begin(case)
    await until(lambda: case.over)
    assert not case.asked
    assert not a.expelled
    await stop(peers)


@run
async def test_an_accusation_does_not_wait_for_audits_by_lot(memory_peer: Any, quick: Any, auditors: Any) -> None:
    """Of A, B, C, D: B and C have expelled D, and D shows A nothing. If A judged their accusation after its own audits
    of D's commits, it would work with D until then, and B and C without them."""
    peers = await swarm(memory_peer, quick, "abcd", **BY_HAND)
    await rounds(peers, 6)
    a = auditors["a"]
    a._wait_s = a._examiner._wait_s = 1000.0
    *hidden, accused = [case for case in a._cases if case.aggregator != "a"][: AT_ONCE + 2]
    with silent(a):
        for case in hidden:
            a._begin(case)
        await until(lambda: sum(case.asked for case in hidden) == AT_ONCE)
    a._begin(accused)
    accused.accusers.add("b")
    a._begin(accused)
    await until(lambda: accused.over)
    assert not any(case.over for case in hidden)
    await stop(peers)


@run
async def test_an_asynchronous_submission_of_another_weight_makes_its_aggregator_no_liar(
    memory_peer: Any, quick: Any, auditors: Any, monkeypatch: Any
) -> None:
    """It is refused. Counted with the weight 1, it would not fit to its author's seal."""
    monkeypatch.setattr(contributing, "weight_of", lambda event: event.weight)
    peers = await swarm(memory_peer, quick, "abc", heartbeat_timeout=PATIENT_S, mode="async")
    peer = {name: asyncio.create_task(rounds({name: peers[name]}, 6)) for name in "ab"}
    half = asyncio.create_task(peers["c"].exchange(1.0, 0.5))
    await asyncio.gather(*peer.values())
    refused = [dict(auditors[name]._refusals.newest(8)).get("c") for name in "ab"]
    assert any("weight of a submission must be 1" in told.why for told in refused if told)
    assert [audits.expelled for audits in auditors.values()] == [{}, {}, {}]
    half.cancel()
    await stop(peers)


@run
async def test_a_copy_is_taken_only_if_it_was_asked_for_and_is_what_its_author_sealed(
    memory_peer: Any, quick: Any, auditors: Any
) -> None:
    peers = await swarm(memory_peer, quick, "ab", **BY_HAND)
    await rounds(peers, 2)
    a = auditors["a"]
    (case,) = await commits_of(peers, a, "b")
    copy = Copy(case.shard, case.digest, "b", memoryview(bytes(case.nbytes // 2)))
    assert not a.expects(copy)
    assert not a.expects(replace(copy, digest="another"))
    case.asked = True
    assert a.expects(copy)
    assert not a.expects(replace(copy, author="c"))
    with pytest.raises(Refusal, match="sealed"):
        a.take(copy)
    assert a.expects(copy)
    await stop(peers)


@run
async def test_one_peer_makes_others_audit_one_commit_at_a_time(memory_peer: Any, quick: Any, auditors: Any) -> None:
    peers = await swarm(memory_peer, quick, "abc", **BY_HAND)
    await rounds(peers, 2)
    a = auditors["a"]
    first, second = await commits_of(peers, a, "b", 2)
    with silent(a):
        a._wait_s = 1000.0  # no commit becomes old, however slow the machine is
        a.asked("c", Audit(first.shard, first.digest))
        with pytest.raises(Refusal, match="another commit"):
            a.asked("c", Audit(second.shard, second.digest))
        with pytest.raises(Refusal, match="not kept"):
            a.asked("c", Audit(0, "unknown"))
        second.since -= 2 * a._wait_s + 1
        with pytest.raises(Refusal, match="too old"):
            a.asked("b", Audit(second.shard, second.digest))
    await stop(peers)


@run
async def test_one_peer_makes_others_audit_few_commits(memory_peer: Any, quick: Any, auditors: Any) -> None:
    """Else one peer could have all others get the contributions to each commit, which its aggregator sends."""
    peers = await swarm(memory_peer, quick, "abc", **BY_HAND)
    await rounds(peers, 8)
    a = auditors["a"]
    cases = await commits_of(peers, a, "b", FAVOURS_AT_ONCE + 1)
    with silent(a):
        a._wait_s = 1000.0  # no commit becomes old, however slow the machine is
        a._grant_of = lambda peer: {"c": "grant", "d": "grant"}.get(peer)
        for turn, case in enumerate(cases[:FAVOURS_AT_ONCE]):
            a.asked("cd"[turn % 2], Audit(case.shard, case.digest))
            case.askers.clear()
        last = Audit(cases[-1].shard, cases[-1].digest)
        for asker in "cd":
            with pytest.raises(Refusal, match="many commits for the sender, or others with its invitation"):
                a.asked(asker, last)
        a.asked("b", last)  # others still have theirs
    await stop(peers)


@run
async def test_copies_that_are_lost_are_sent_again_a_few_times(memory_peer: Any, quick: Any, auditors: Any) -> None:
    """Else a peer that breaks each transfer could have the same copies sent without end."""
    peers = await swarm(memory_peer, quick, "ab", **BY_HAND)
    await rounds(peers, 2)
    a, sent = auditors["a"], list[str]()

    def put(to: str, header: bytes, payload: Any, answered: Any) -> None:
        sent.append(to)
        answered(Unreachable("the link broke"))

    a._outbox.put = put
    (own,) = await commits_of(peers, a, "a")
    for _ in range(3 * FAVOURS_AT_ONCE):
        a.asked("b", Audit(own.shard, own.digest))
    assert sent == ["b"] * (1 + FAVOURS_AT_ONCE) * len(own.counted)
    await stop(peers)
