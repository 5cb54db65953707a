"""Stories of a few peers in asynchronous mode."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from p2p_diloco.core import events as e
from p2p_diloco.core import holding
from p2p_diloco.core.exchange import Exchange
from p2p_diloco.core.fragment import FragmentLog
from p2p_diloco.core.messages import Commit, Head, Held, Mean, Ready, Slice, Want, What
from p2p_diloco.core.replica import Replica
from p2p_diloco.core.round import Phase
from tests.core.sabotage import fails_if
from tests.core.world import LOST, World, rules


def asynchronous(**changes: Any) -> World:
    return World("ABC", rules(mode="async", **changes))


def test_each_submission_is_a_commit() -> None:
    """Three peers submit at their own pace; each is counted again and again."""
    world = asynchronous()
    world.peers["B"].trains_s = 1.0
    world.reach(12, "A")
    world.run(20)
    roll = world.peers["A"].state().roll
    assert set(roll) == {"A", "B", "C"}
    assert roll["B"].id.sequence > roll["C"].id.sequence > 2
    world.check()


def test_a_peer_that_submits_nothing_holds_what_another_makes() -> None:
    """A is the first peer, and alone submits. B was never counted; still A's commits are held by B before A shows them,
    so they outlive A."""
    world = World("AB", rules(mode="async"))
    world.peers["B"].trains_s = 900.0
    world.reach(5, "A")
    assert world.peers["A"].state().roll.keys() == {"A"}
    told = world.peers["A"].state().version.epoch
    assert world.peers["B"].state().version.epoch >= told - 1
    world.check()


@pytest.mark.parametrize("kind", [Ready, Slice, Mean, Commit, Held])
@pytest.mark.parametrize("seen", [0, 2])
def test_anybody_may_die(kind: type, seen: int) -> None:
    """The leader or its successor dies at any message: what a trainer was told is counted stays counted."""
    for place in (0, 1):
        world = asynchronous()
        world.run(30)
        plan = world.peers["A"].state().plan
        victim = plan.succession[place] if len(plan.succession) > place else "A"
        world.dies_at(victim, kind, seen)
        others = [name for name in "ABC" if name != victim]
        world.run(30)
        world.kill(victim)
        epoch = max(world.peers[name].epoch for name in others)
        world.run(40)
        assert all(world.peers[name].epoch > epoch for name in others), world.tell()
        world.check()


def test_after_a_split_a_claim_decides_nothing() -> None:
    """D and E, cut off, made many more commits than A, B and C. As the link is back their leader, which stood still for
    a moment, claims its term. The others don't fetch what it holds: most hold another lineage, which goes on."""
    world = World("ABCDE", rules(2, mode="async", successors=1))
    world.busy = 8000
    world.reach(4)
    for name, peer in world.peers.items():
        peer.trains_s = 12.0 if name in "ABC" else 1.0
    world.cut("ABC", "DE")
    world.run(60)
    kept = {name: world.peers[name].state().version for name in "ABC"}
    world.cuts.clear()
    leader = world.peers["D"].state().plan.succession[0]
    replica = world.peers[leader].replica
    assert world.run(20, lambda: {*"ABC"} <= {*replica.roster.holders()})
    replica.planned = world.now - world.rules.frozen_after - 1
    world.handle(leader, e.Wakeup())
    world.run(60)
    for name, peer in world.peers.items():
        assert all(version.chain in dict(peer.state().links).values() for version in kept.values()), name
    world.check()


@fails_if(holding.missed, "isinstance(message, Claim) and", "False and", peers=5, trains_s=3.0)
@pytest.mark.parametrize(("peers", "trains_s"), [(8, 0.5), (5, 3.0)])
def test_a_dead_leader_is_replaced_though_most_are_behind(peers: int, trains_s: float) -> None:
    """A leads and dies. B, its successor, claims the term, and needs the promises of C, D and E, which are some
    versions behind. At once they ask B for what they lack, so nobody waits for long."""
    took = []
    for moment in range(4):
        world = unlike(peers, trains_s)
        world.run(20 + 3.37 * moment)
        leader = world.peers["A"].state().plan.succession[0]
        left = [peer for name, peer in world.peers.items() if name != leader]
        newest = max(peer.epoch for peer in left)
        world.kill(leader)
        died = world.now
        assert world.run(30, lambda left=left, newest=newest: max(peer.epoch for peer in left) > newest + 1)
        took.append(world.now - died)
        world.run(8)
        world.check()
    assert statistics.median(took) < 1.5 * world.rules.settle, took


@fails_if(Replica._follow, "(Phase.COLLECTING, Phase.LACKING)", "(Phase.COLLECTING,)")
@fails_if(FragmentLog.leads_to, "return at == version", "return True")
def test_short_rounds_starve_nobody() -> None:
    """While D trains for a second, the others make more commits than are kept for it. Its submission is answered with
    the newest one; so it fetches the state at once, also if it has the header of an earlier one from its last fetch."""
    world = unlike(5, 1.0)
    world.run(10)
    before = {name: peer.made for name, peer in world.peers.items()}
    world.run(30)
    for name, peer in world.peers.items():
        assert (peer.made - before[name]) * peer.trains_s > 0.6 * 30, (name, world.tell())
    world.check()


@fails_if(Replica._follow, "if follows or ", "if ")
def test_who_lacks_means_alone_fetches_nothing() -> None:
    """Three peers; means are longer than commits, and come later. A peer that is answered knows all commits since its
    base before it can take their steps: it waits for the means."""
    world = unlike(3, 1.0)
    world.rules_of_net.append(lambda sender, to, message: 0.5 if isinstance(message, Mean) else None)
    world.run(12)
    fetched = len(world.sent(Head))
    world.run(20)
    assert len(world.sent(Head)) == fetched
    world.check()


def unlike(peers: int, trains_s: float) -> World:
    """So many peers; each next one trains for a little longer."""
    world = World("ABCDEFGH"[:peers], rules(mode="async", heartbeat_timeout=10.0))
    world.busy = 4000
    for place, peer in enumerate(world.peers.values()):
        peer.trains_s = trains_s * (1 + 0.13 * (place % 5))
    return world


def test_old_work_is_refused() -> None:
    """A submission that is too far behind is refused, and its progress goes into the next one, or is dropped: each step
    is accounted for."""
    world = asynchronous(max_staleness=2)
    world.peers["B"].trains_s = 0.4
    world.peers["A"].trains_s = 8.0
    world.run(120)
    assert world.peers["A"].made >= 5, world.tell()
    assert world.peers["A"].notes("stale")
    world.check()


def test_others_commits_are_no_reason_to_merge() -> None:
    """The steps since were made on the older base: a submission that names the newer one would pass as fresh. At the
    end of an exchange the trainer merges, even if nothing newer has come: what was refused is carried or dropped."""
    world = asynchronous()
    world.peers["A"].trains_s = 20.0
    world.run(30, lambda: world.peers["A"].made > 0)
    own, log = world.peers["A"].replica.own, world.log("A")
    assert world.run(60, lambda: not (own.flying or own.over) and own.merged[0] != log.version), world.tell()
    assert loaded(world) == ()
    own.over.add(0)
    assert [one.version for one in loaded(world)] == [log.version]
    own.over.add(0)
    assert [one.version for one in loaded(world)] == [log.version]
    assert loaded(world) == ()


def loaded(world: World) -> tuple[e.Loaded, ...]:
    """What A's trainer is told to load now."""
    effects = world.peers["A"].replica.handle(e.Merge(), world.now)
    (load,) = (effect for effect in effects if isinstance(effect, e.Load))
    return load.fragments


@fails_if(Exchange.delivered, "self.flying if self.rules.asynchronous", "True if self.rules.asynchronous")
def test_an_answered_submitter_waits_for_nobody() -> None:
    """B learns that its submission has arrived only after A's answer to it. Then it trains for half a minute, and
    nobody commits anything: no reason to go on without A."""
    world = World("AB", rules(mode="async"))
    world.peers["A"].trains_s, world.peers["B"].trains_s = 900.0, 30.0
    world.confirms_after_s = 0.5
    world.run(150)
    assert world.peers["B"].epoch >= 3, world.tell()
    assert world.peers["B"].notes("passed") == []
    world.check()


@fails_if(holding.answers, "() if log.leads else log.round.readys.items()", "()", 0.05, 45.0)
@fails_if(Replica._settle, "if moved and self.rules.asynchronous else ()", "if False else ()", 0.05, 45.0)
@pytest.mark.parametrize(("trains_s", "seconds"), [(0.05, 45.0), (1.0, 26.0)])
def test_nobody_waits_long_for_an_answer(trains_s: float, seconds: float) -> None:
    """Ten peers submit at once again and again. Most are several versions behind when they are answered, and while
    they still apply an earlier commit; now and then the leader hands over. Each is answered all the same: within
    seconds, not once it has asked again after `heartbeat_timeout`."""
    world = World("ABCDEFGHIJ", rules(mode="async", heartbeat_interval=0.2, heartbeat_timeout=20.0), trains_s=trains_s)
    world.busy = 4000
    world.run(seconds)
    assert len({commit.leader for commit in world.sent(Commit)}) > 1, "the leader has handed over"
    assert all(wait < 6.0 for peer in world.peers.values() for wait in peer.waits), world.tell()
    assert min(peer.made for peer in world.peers.values()) > 10, world.tell()
    world.check()


def test_an_answered_submitter_asks_for_nothing() -> None:
    """In a calm run each submitter gets the commits since its base with their means, so its exchange takes as long as
    the messages do."""
    world = asynchronous()
    world.run(30)
    began = len(world.sent(Want))
    world.run(60)
    asked = [want for want in world.sent(Want)[began:] if want.what is What.MEANS]
    assert asked == [], world.tell()
    world.check()


def test_means_are_told_of_the_commit_that_is_offered_too() -> None:
    """Whoever fetches the version before it asks without a key: it knows the commit, and lacks a mean."""
    world = asynchronous()
    world.run(30)
    leader = world.peers[world.line[0]]
    world.rules_of_net.append(lambda sender, to, message: LOST if isinstance(message, Held) else None)
    world.run(40, lambda: leader.replica.logs[0].phase is Phase.HOLDING)
    version = leader.state().version
    want = Want(0, version, What.MEANS, (0, 1))
    told = leader.replica.handle(e.Received("B" if leader.name != "B" else "C", want), world.now)
    assert [one.message.number for one in told if isinstance(one, e.Send) and isinstance(one.message, Mean)] == [0, 1]
