"""A link on which one slice takes longer than a grace: what is on its way is waited for, and nothing else.

Found with real peers on links of 8 Mbit/s, and by attacks on what mended it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from p2p_diloco.core import applying, claims, closing, leading, owning, waits
from p2p_diloco.core import events as e
from p2p_diloco.core.fragment import FragmentLog
from p2p_diloco.core.lineage import Lineage
from p2p_diloco.core.messages import Close, Commit, Head, Lack, Mean, Message, Part, Slice, Summary
from p2p_diloco.core.replica import Replica
from p2p_diloco.core.round import Phase
from p2p_diloco.core.state import commit_of, key_of
from p2p_diloco.core.version import ContributionId, ModelVersion
from tests.core.parts import a_log, a_ready, choice_of
from tests.core.sabotage import fails_if
from tests.core.world import LOST, World, rules


def behind_a_slow_link(world: World, name: str, takes_s: float) -> None:
    """Let all tensors from and to a peer pass one after the other, each in this time; a slice of a state has θ and the
    momentum, so it takes twice as long. What is on its way isn't sent again to the same peer."""
    free, arrives = {"up": 0.0, "down": 0.0}, dict[Any, float]()

    def rule(sender: str, to: str, message: Message) -> float | None:
        if not isinstance(message, Slice | Mean | Part) or name not in (sender, to):
            return None
        way, other = ("up", to) if sender == name else ("down", sender)
        what = sender, to, replace(message, payload=None)
        if arrives.get(what, 0.0) <= world.now:
            began = max(free[way], world.now)
            arrives[what] = free[way] = began + takes_s * (1 + isinstance(message, Part))
            for second in range(int(arrives[what] - world.now)):
                for one, another in ((name, other), (other, name)):
                    world.after(second, lambda one=one, another=another: world.handle(one, e.Moving(another)))
        return arrives[what] - world.now

    world.rules_of_net.append(rule)


@pytest.mark.parametrize(("slices", "takes_s", "trains_s"), [(12, 2.0, 10.0), (6, 4.0, 20.0), (6, 8.0, 20.0)])
def test_a_peer_on_a_slow_link_is_counted_in_each_round(slices: int, takes_s: float, trains_s: float) -> None:
    """C takes longer for one slice than a grace. It doesn't blame a leader that waits for the means which C is still
    sending, and fetches no state while means come; a leader waits for slices that are on their way, and leaves nobody
    out; and no mean comes twice."""
    world = World("ABC", rules(slices=slices, round_timeout=600.0, start_peers=3), trains_s=trains_s)
    behind_a_slow_link(world, "C", takes_s)
    world.reach(5, seconds=5 * (trains_s + 2 * slices * takes_s) + 4 * slices * takes_s)
    counted = {m.version.epoch: {peer for peer, _ in m.choice.entries} for m in world.sent(Commit)}
    assert all(peers == set("ABC") for epoch, peers in counted.items() if epoch <= 5), counted
    assert len(world.sent(Part, to="C")) == slices
    means = [(m.base.epoch, m.number) for m in world.sent(Mean, to="C")]
    assert len(means) <= 1.1 * len({*means})
    assert not world.peers["C"].notes("passed")
    assert not world.peers["C"].notes("takeover")


def lacking(me: str, *names: str, applied_by: str) -> FragmentLog:
    """Return a log that has the commit of epoch 4 and waits for its means, which one peer has applied."""
    log = a_log(me, *names)
    choice = choice_of(log.held, *names)
    key = key_of(0, log.held.version, choice)
    close = Close(0, log.held.version, 0, names[0], 0, key, choice, (names[0],) * 3)
    log.round.commit = commit_of(log.held, close, ("x", "y", "z"), (names[0],) * 3, log.rules)
    log.round.phase = Phase.LACKING
    heads = ((4, log.round.commit.version.chain),)
    log.roster.summarized(applied_by, Summary(1, "worker", heads=heads, model=ModelVersion(0, 9, 4, "")))
    return log


def test_who_has_applied_the_commit_whose_means_come_is_of_this_lineage() -> None:
    """C, on a slow link, has A's commit, and not yet its means. Nobody but A tells that version, so A isn't believed;
    but C doesn't go on without it."""
    log = lacking("C", "A", "B", "C", applied_by="A")
    log.roster.peers["A"].elsewhere = True
    assert claims.able(log, "A")
    log.round.commit = None
    assert not claims.able(log, "A")


@fails_if(applying.got, " - round.in_vain", "", "AB")
@pytest.mark.parametrize("whom", ["AB", "A"])
def test_a_peer_whose_long_messages_are_lost_holds_no_round_up_for_long(whom: str) -> None:
    """C's path drops long packets, to all or to A alone. It contributes, and its slices and means don't come. Each wait
    for them was counted into the usual time, so the next wait was twice as long, until rounds stood still."""
    world = World("ABC", rules(round_timeout=600.0), trains_s=60.0)
    world.run(200.0)
    before = world.peers["A"].epoch
    long = Slice | Mean | Part
    world.rules_of_net.append(lambda s, to, m: LOST if s == "C" and to in whom and isinstance(m, long) else None)
    world.run(3000.0)
    assert world.peers["A"].epoch - before > 0.75 * 3000 / 60
    assert world.peers["B"].epoch >= world.peers["A"].epoch - 1


@fails_if(closing.open_round, "log.round.opened, log.round.in_vain = now, 0.0", "log.round.opened = now")
@fails_if(leading.lacks, "if not message.missing:", "if False:")
def test_only_waits_in_vain_since_the_round_opened_are_taken_off() -> None:
    """Two takeovers were waited for before it opened: the usual time would be below zero. And while an owner says that
    all that it lacks is on its way, the leader, to which nothing moves, does not wait in vain."""
    log = a_log("B", "A", "B", "C")
    for now in (10.0, 40.0):
        log.round.closes(now)
    assert log.round.in_vain == 30.0
    for name in "AB":
        leading.collect(log, name, a_ready(log.held), 50.0)
    assert (log.round.opened, log.round.in_vain) == (50.0, 0.0)
    leading.close(log, leading.choose(log), 60.0)
    assert log.round.close is not None
    leading.lacks(log, "C", Lack(0, log.held.version, log.round.close.key, ()), 70.0)
    log.round.closes(75.0)
    assert log.round.in_vain == 15.0  # from 50 to 60, and from 70 to 75


def test_an_owner_from_which_its_mean_comes_is_not_replaced() -> None:
    """X, whose contribution is counted, tells another lineage: A asks owner C at once what it lacks. C lacks nothing,
    and sends its mean for longer than a grace."""
    log = a_log("B", "A", "B", "C")
    for name in "BC":
        leading.collect(log, name, a_ready(log.held), 0.0)
    log.round.owners = ("C",) * 3
    leading.close(log, leading.choose(log), 1.0)
    log.round.asked["C"], log.round.moving["C"] = 2.0, 9.5
    leading.tick(log, 10.0)
    assert not log.round.excluded
    leading.tick(log, 20.0)
    assert log.round.excluded == {"C"}


@fails_if(Replica._notice_idleness, " or self.fetching.starves", "", "ABC")
@pytest.mark.parametrize("names", ["ABC", "ABCD"])
def test_a_peer_to_which_nothing_long_comes_holds_no_round_up_for_long(names: str) -> None:
    """C contributes, and neither means nor states reach it. A and B waited for its next contribution until
    `round_timeout`, and then for longer and longer ones. C says that it is idle, and is told why; once its path is
    mended it is counted again."""
    world = World(names, rules(round_timeout=600.0), trains_s=30.0)
    world.run(150.0)
    before, lost = world.peers["A"].epoch, Slice | Mean | Part
    world.rules_of_net.append(lambda _, to, m: LOST if to == "C" and isinstance(m, lost) else None)
    world.run(900.0)
    assert world.peers["A"].epoch - before > 0.9 * 900 / 30
    assert len(world.peers["C"].notes("starved")) == 1
    world.rules_of_net.pop()
    world.run(300.0)
    assert world.peers["A"].state().roll["C"].epoch >= world.peers["A"].epoch - 1


@fails_if(leading._sends_no_more, " or not log.is_here(author)", "")
def test_an_author_that_went_to_another_version_is_left_out_at_once() -> None:
    """A closes with B's contribution and lacks its slices. Meanwhile B has taken the step of C, whose claim A had
    refused: B sends no more for A's round. A doesn't wait for that two graces, which are long where rounds are."""
    log = a_log("A", "A", "B", "C")
    log.usual[0].append(50.0)
    for name in "AB":
        leading.collect(log, name, a_ready(log.held), 0.0)
    for number in range(3):
        log.round.slices[number, "A"] = Slice(0, log.held.version, "A", ContributionId(1, 99), number, "abc"[number])
    log.round.owners = ("A",) * 3
    leading.close(log, leading.choose(log), 1.0)
    log.roster.summarized("B", Summary(1, "worker", heads=((4, "of C"),), model=ModelVersion(0, 9, 4, "")))
    log.roster.peers["B"].elsewhere = True
    for now in (2.0, 3.0):
        leading.tick(log, now)
    assert log.round.close is not None
    assert log.round.close.choice is not None
    assert [peer for peer, _ in log.round.close.choice.entries] == ["A"]


def test_what_a_leader_at_an_older_version_waits_for_excuses_it_from_nothing() -> None:
    """C leads the next round, is still at the version before, and waited for B there. A and B went without it only
    after `round_timeout`."""
    log = a_log("A", "A", "B", "C")
    log.round.leader, waits_for_b = "C", ((0, ("B",)),)
    for epoch, excused in ((3, ["B"]), (2, [])):
        log.roster.summarized("C", Summary(1, "worker", heads=((epoch, f"at {epoch}"),), awaits=waits_for_b))
        assert waits.excuses(log, "C") == excused


def test_in_asynchronous_mode_a_leader_is_the_last_at_its_version() -> None:
    """It takes a commit's step once its successors hold it. They waited for it no longer, though it waited for them."""
    log = a_log("A", "A", "B", "C", of=rules(mode="async"))
    log.round.leader = "C"
    log.roster.summarized("C", Summary(1, "worker", heads=((2, "at 2"),), awaits=((0, ("B",)),)))
    assert waits.excuses(log, "C") == ["B"]


@fails_if(owning.collect, "if is_new and", "if")
def test_what_comes_again_is_no_progress() -> None:
    """A member sent one slice, or two means under one number, again and again, and the round waited on."""
    log = lacking("C", "A", "B", "C", applied_by="A")
    log.round.commit, commit = None, log.round.commit
    part = Slice(0, log.held.version, "B", ContributionId(1, 4), 0, "hash")
    for now in (1.0, 2.0):
        owning.collect(log, "B", part, now)
        assert log.round.moved_at == 1.0
    assert commit is not None
    log.round.commit = commit
    for now, hash in ((3.0, "x"), (4.0, "y"), (5.0, "x")):
        applying.got(log, "A", Mean(0, commit.base, commit.key, 0, hash, "A"), now)
        assert log.round.moved_at == 3.0


def test_without_a_head_a_newcomer_keeps_the_means_of_one_round() -> None:
    """A donor that withholds its head made it keep all."""
    world = World("AB", trains_s=0.5, epoch=2)
    world.rules_of_net.append(lambda _s, to, m: LOST if to == "X" and isinstance(m, Head) else None)
    newcomer = world.join("X")
    world.run(20.0)
    means = [m for m in newcomer.replica.logs[0].early.values() if isinstance(m, Mean)]
    assert newcomer.replica.fetching.fetches[0].head is None
    assert 0 < len(means) <= 2 * 3


def test_no_state_is_fetched_while_the_means_of_a_commit_come() -> None:
    """But it is once none has come for long, whatever else is transferred."""
    log = lacking("C", "A", "B", "C", applied_by="A")
    lineage, asked = Lineage(log.rules, [log], log.roster), dict[float, bool]()
    for second in map(float, range(1, 60)):
        log.round.moving["A"] = second
        log.round.moved_at = min(second, 20.0)
        asked[second] = bool(lineage.tick(second, fetching=False))
        lineage.inquiry = None
    assert not any(asked[second] for second in asked if second < 20.0 + log.rules.fetch_again)
    assert any(asked.values())


@fails_if(FragmentLog.may_wait, "self.usual_round() / 2", "self.usual_round()")
def test_transfers_hold_a_round_up_for_half_a_usual_round_at_most() -> None:
    """A sends on and on. While no usual round is known, a part must come now and then."""
    log = a_log("C", "A", "B", "C")
    log.round.closed_at = 0.0
    for usual, within in (((), log.rules.mended_within), ((14.0,), 7.0), ((900.0,), 450.0)):
        log.usual[1].clear()
        log.usual[1].extend(usual)
        for now in (0.0, within - 0.1, within + 0.1):
            log.round.moving["A"] = now
            log.round.moved_at = now - 1.0 if usual else 0.0
            assert log.comes("A", now) == (now < within)
            assert not log.comes("A", now + log.rules.settle)
