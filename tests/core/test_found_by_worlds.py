"""What simulated worlds found in the first version of the core, each as a story that fails without its mend."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import pytest

from p2p_diloco.core import applying, claims, closing, digests, holding, leading, waits
from p2p_diloco.core import events as e
from p2p_diloco.core import messages as msg
from p2p_diloco.core.admission import objection
from p2p_diloco.core.carry import LEFT
from p2p_diloco.core.exchange import Exchange
from p2p_diloco.core.fetching import HEAD, Fetch, Fetching, part_of
from p2p_diloco.core.fragment import FragmentLog
from p2p_diloco.core.leases import DataSet, Table, Use
from p2p_diloco.core.lineage import Inquiry, Lineage
from p2p_diloco.core.replica import Replica
from p2p_diloco.core.roster import Roster
from p2p_diloco.core.round import Phase
from p2p_diloco.core.rounds import Rounds
from p2p_diloco.core.state import append, founding, hash_of, is_sound, key_of
from p2p_diloco.core.version import ModelVersion, Version
from tests.core.parts import a_close, a_commit, a_log, a_ready, a_state, asks, blamed, choice_of, keeps, sent, tells
from tests.core.sabotage import fails_if
from tests.core.world import LOST, NOTHING, Peer, World, rules

# -- what a commit and a state say


def test_a_commit_has_the_key_of_its_choice() -> None:
    """Else one version could be told with unlike choices."""
    log = a_log("A", "A", "B", "C")
    commit = a_commit(log, choice := choice_of(log.held, "A", "B", "C", by="A"), "A")
    assert not objection(commit, log.held, rules(), None, "A")
    other = append(log.held, choice, "made up", commit.hashes, rules()).version
    assert "key" in objection(replace(commit, key="made up", version=other), log.held, rules(), None, "A")


def test_the_key_covers_on_which_version_each_entry_was_made() -> None:
    state = a_state(3, "A", "B")
    one = choice_of(state, "A", "B")
    older = tuple((peer, replace(ready, base=Version(0, 0, 1, "older"))) for peer, ready in one.entries)
    assert key_of(0, state.version, one) != key_of(0, state.version, replace(one, entries=older))


def test_at_epoch_0_only_the_founder_is_in_the_roll() -> None:
    """A told state at epoch 0 can't bring members that nobody has counted, nor used data."""
    state = founding(0, Version(0, 0, 0, "theta0"), "A", 3)
    assert is_sound(state)
    assert not is_sound(replace(state, roll={**state.roll, "X": state.roll["A"]}))
    assert not is_sound(replace(state, tables=(Table(DataSet("train", 10), 10),)))


def test_a_step_is_told_how_many_peers_train() -> None:
    world = World("ABC", epoch=3)
    plan, found = world.peers["A"].state().plan, []
    carry_out = world.carry_out

    def watch(peer: Any, effect: e.Effect) -> None:
        found.extend([effect.peers] if isinstance(effect, e.Apply) and effect.commit.base.epoch == 3 else [])
        carry_out(peer, effect)

    world.carry_out = watch  # type: ignore[method-assign]
    world.reach(4)
    assert found == [len(plan.succession)] * 3


# -- lives


@fails_if(Roster.summarized, "restarted = known not in (None, summary.incarnation)", "restarted = False")
def test_a_peer_whose_clock_is_behind_is_met_again() -> None:
    """After a restart its incarnation may be lower than before."""
    roster = Roster("A", rules(), msg.Summary(9, "worker"))
    roster.heard("B")
    roster.summarized("B", msg.Summary(50, "worker"))
    roster.departed("B", 50)
    assert roster.summarized("B", msg.Summary(7, "worker"))
    assert roster.live("B")


@fails_if(Roster.summarized, "last.number > summary.number", "last.number < 0")
def test_an_older_summary_replaces_no_newer_one() -> None:
    """Messages overtake each other. B has just fetched the state and said so; its answer to an earlier probe, which
    comes later, says that it holds none: A would take over the term that it has handed to B."""
    roster, told = Roster("A", rules(), msg.Summary(9, "worker")), Roster("B", rules(), msg.Summary(50, "worker"))
    answer = told.mine
    told.says(heads=((3, "chain"),))
    roster.heard("B")
    roster.summarized("B", told.mine)
    roster.summarized("B", answer)
    assert roster.holds_state("B")
    told.says(heads=((3, "chain"),))
    assert told.mine.number == 1
    roster.summarized("B", msg.Summary(51, "worker"))
    assert not roster.holds_state("B")


@fails_if(Rounds.lost, "log.shown.pop(peer, None)", "pass")
def test_who_restarts_in_the_middle_of_a_round_is_a_newcomer() -> None:
    """What its earlier life showed says nothing: the round would wait for it until its deadline."""
    log = a_log("A", "A", "B")
    closing.shows(log, "B", log.epoch)
    assert log.roster.summarized("B", msg.Summary(2, "worker", heads=(log.held.links[-1],)))
    Rounds([log], Exchange("A", log.rules, [log], 1)).lost("B", 1.0)
    assert closing.is_newcomer(log, "B")


# -- who leads


@fails_if(claims.would_promise, "if log.leads and log.unproven:", "if False:")
@fails_if(claims.would_promise, "if log.phase in WORKING and log.leads:", "if False:")
def test_a_leader_that_was_away_yields() -> None:
    """It has fetched its state in this round, and others claim: they may have had to go on without it. It finishes what
    it has begun."""
    leader, other, _ = a_state(3, "A", "B", "C").plan.succession
    log = a_log(leader, "A", "B", "C")
    assert not claims.would_promise(log, other, 1, 1.0)
    log.unproven = True
    assert claims.would_promise(log, other, 1, 1.0)
    log.round.phase = Phase.HOLDING
    assert not claims.would_promise(log, other, 1, 1.0)


@fails_if(claims.would_promise, "impatient(log, now) or", "")
def test_a_claim_is_promised_once_a_round_lasts_far_too_long() -> None:
    """Two honest views of who is able could else block each other for ever."""
    leader, other, me = a_state(3, "A", "B", "C").plan.succession
    log = a_log(me, "A", "B", "C")
    log.round.opened = 5.0
    late = 5.0 + log.rules.round_timeout + claims.GRACES * log.grace()
    assert claims.able(log, leader)
    assert not claims.would_promise(log, other, 1, late)
    assert claims.would_promise(log, other, 1, late + 1)


@fails_if(claims.missing, "(*live, *unmet)", "live")
@fails_if(claims.missing, "if log.is_here(peer)", "")
def test_a_claim_needs_the_promises_of_its_lineage_and_of_candidates_that_were_not_met_yet() -> None:
    """One of them may have promised another claim. Who is on another lineage has nothing to promise."""
    log = a_log("A", "A", "B", "C")
    log.round.promised, log.roster.peers["C"].summary = set(), None
    log.roster.name("C")
    assert claims.missing(log) == ["B", "C"]
    tells(log, "B", 3, "another")
    assert claims.missing(log) == ["C"]


@fails_if(Rounds._present, "if log.phase is Phase.FINAL:", "if False:")
def test_nothing_follows_a_final_state() -> None:
    log = a_log("A", "A", "B", "C", of=rules(stop_after_epochs=3))
    commit = a_commit(log, choice_of(log.held, "A", "B", "C", by="A"), "A")
    for sender, message, said in (("A", commit, ["A"]), ("B", a_ready(log.held), [])):
        assert blamed(Rounds([log], Exchange("A", log.rules, [log], 1)).received(sender, message, 1.0)) == said
    assert log.round.commit is None
    assert not log.round.readys


def test_a_claimant_sends_its_contribution_to_a_leader_that_asks() -> None:
    """Else each of the two waits for the other for ever."""
    world = World("ABC", epoch=3)
    leader, other, _ = world.line
    world.run(20, lambda: world.peers[other].replica.own.sent() == (3,))
    log = world.log(other)
    log.round.term, log.round.leader, log.round.promised, log.round.phase = 1, other, set(), Phase.CLAIMING
    effects = world.effects(other, e.Received(leader, msg.Want(0, log.held.version, msg.What.READY)))
    assert [to for to, _ in sent(effects, msg.Ready)] == [leader]


@fails_if(leading._may_work, " or claims.serves_another(log, peer)", "")
def test_an_owner_that_has_promised_another_claim_is_replaced_at_once() -> None:
    """It computes no mean for the leader any more. The leader waited for it as for one whose means are on their way."""
    world = World("ABCD", trains_s=10.0, epoch=3)
    leader, claimant, *_ = world.line
    owner = next(peer for peer in world.peers["A"].state().plan.owners if peer not in (leader, claimant))
    world.rules_of_net.append(
        lambda sender, _, message: LOST if sender == owner and isinstance(message, msg.Mean) else None
    )
    log = world.log(leader)
    assert world.run(30, lambda: log.phase is Phase.CLOSING)
    world.handle(leader, e.Received(owner, msg.Vote(0, log.held.version, 1, claimant, turn=1000)))
    assert world.run(2.0, lambda: world.peers[leader].epoch > 3), world.tell()
    assert owner not in [mean.owner for _, means in log.last for mean in means]


@fails_if(claims.voted, "round.votes.pop(sender, None)", "pass")
def test_an_owner_that_is_back_with_the_leader_keeps_its_slices() -> None:
    world = World("ABCD", trains_s=10.0, epoch=3)
    leader, claimant, owner, *_ = world.line
    log = world.log(leader)
    for turn, held_to in enumerate((claimant, leader)):
        term = 1 if held_to == claimant else 0
        claims.voted(log, owner, msg.Vote(0, log.held.version, term, held_to, turn=1000 + turn))
        assert claims.serves_another(log, owner) == (held_to == claimant)


def test_a_peer_outside_the_plan_may_lead_once_no_candidate_is_able() -> None:
    """And gives way to a candidate that is able again."""
    log = a_log("D", "A", "D")
    log.state = replace(log.held, plan=replace(log.held.plan, succession=("A",)))
    log.round.leader = "A"
    assert not claims.would_promise(log, "E", 2, 1.0)
    log.roster.peers["A"].dead = True
    log.roster.heard("E")
    tells(log, "E", 3, log.held.version.chain)
    assert claims.would_promise(log, "E", 2, 1.0)
    assert claims.target(log) == (2, "D")
    log.round.passed.add("D")
    assert claims.target(log) == (2, "E")
    log.round.term, log.round.leader, log.round.promised, log.round.phase = 2, "D", set(), Phase.CLAIMING
    vote = msg.Vote(0, log.held.version, 0, "A")
    claims.voted(log, "A", vote)
    assert log.round.leader == "D"  # A is dead in its view
    log.roster.peers["A"].dead = False
    claims.voted(log, "A", vote)
    assert log.round.leader == "A"


# -- lineages


def told(*chain: str) -> msg.Told:
    links = tuple(enumerate(("theta0", *chain)))
    return msg.Told((Version(0, 10 * len(chain), len(chain), links[-1][1]),), (links,))


def decided(mine: msg.Told | None, *others: msg.Told, doubted: str = "") -> tuple[str, set[str]]:
    """Return what a peer goes over to, and for whom its rounds don't wait. A newcomer holds nothing of its own."""
    log = a_log("A", "A", *"BCDE"[: len(others)])
    log.state = None if mine is None else replace(log.held, version=mine.versions[0], links=mine.links[0])
    lineage = Lineage(log.rules, [log], log.roster)
    names = "BCDE"[: len(others)]
    for peer in doubted:
        log.roster.doubt(peer, 9.0)
    lineage.inquiry = Inquiry(0.0, list(names), dict(zip(names, others, strict=True)))
    belief = lineage.decide(10.0)
    return "" if belief is None else belief.told.versions[0].chain, {*filter(log.roster.is_elsewhere, log.roster.peers)}


@fails_if(Lineage._note, "elsewhere = how", "elsewhere |= how")
def test_those_that_are_believed_at_last_are_waited_for_again() -> None:
    """B was ahead, and nobody else said so. Once C does, A takes their commit; it needs their promises again before."""
    log = a_log("A", "A", "B", "C")
    lineage, mine = Lineage(log.rules, [log], log.roster), told("one")
    log.state = replace(log.held, version=mine.versions[0], links=mine.links[0])
    log.roster.peers["B"].elsewhere = True
    lineage.inquiry = Inquiry(0.0, ["B", "C"], dict.fromkeys("BC", told("one", "two")))
    assert lineage.decide(10.0) is not None
    assert not log.roster.is_elsewhere("B")


def test_what_is_made_after_a_change_of_lineage_has_another_id() -> None:
    """A contributed to a version, a commit counted that, and A went over to a lineage without this commit. If its new
    progress had the old id, that commit would pass for one of it, and its steps would be lost in silence."""
    log = a_log("A", "A", "B")
    exchange = Exchange("A", log.rules, [log], 2)
    old, new = (e.Contribute(0, 1.0, 10, (name,) * log.slices, (name,) * log.slices) for name in ("old", "new"))
    exchange.merge()
    exchange.contribute(old, 0.0)
    first, _ = exchange.ready, exchange.contribute(old, 0.0)
    assert exchange.ready is first  # taken up again on the same base
    exchange.flying, exchange.carried[0].base = False, replace(log.held.version, chain="of the lost lineage")
    assert [loaded.outcome.dropped for loaded in exchange.merge().fragments] == [LEFT]
    exchange.contribute(new, 1.0)
    assert first is not None
    assert exchange.ready is not None
    assert exchange.ready.id > first.id


@fails_if(
    Lineage._judged, 'if how[peer] == "held" and not told[peer].fresh]', 'if how[peer] != "ahead" and peer not in kin]'
)
@fails_if(Lineage._judged, "model <= mine", "model >= mine")
def test_of_three_lineages_the_greatest_is_taken() -> None:
    """Each of three peers is alone on its own: nobody has a majority, so versions decide."""
    assert decided(told("a"), told("b", "b2"), told("c", "c2", "c3"))[0] == "c3"
    assert not decided(told("a", "a2", "a3", "a4"), told("b"), told("c"))[0]
    assert not decided(told("a"), told("a"), told("c", "c2"))[0]


@fails_if(Lineage.decide, "b[:3]", "(b[0], b[2])")
def test_of_two_that_are_ahead_the_one_that_sends_its_state_is_taken() -> None:
    """B and C have each made a commit alone, C's is greater, and C's slices never come. A, which stays behind both,
    asked C again and again, and so did a newcomer."""
    for mine in (told("a"), None):
        assert decided(mine, told("a", "b"), told("a", "c", "c2"))[0] == "c2"
        assert decided(mine, told("a", "b"), told("a", "c", "c2"), doubted="C")[0] == "b"


@fails_if(Lineage._judged, " or in_vain", "")
def test_for_one_that_sent_nothing_a_peer_leaves_its_lineage_only_if_others_are_there() -> None:
    """A went over to B's greater lineage, got nothing of it, went back and over again, and made no round meanwhile."""
    assert decided(told("a"), told("b", "b2"))[0] == "b2"
    assert not decided(told("a"), told("b", "b2"), doubted="B")[0]
    assert decided(told("a"), told("b", "b2"), told("b", "b2"), doubted="B")[0] == "b2"


def test_a_split_of_which_nobody_remembers_the_beginning_ends() -> None:
    """A is so far ahead that its links begin after the others' versions: it can't tell that they are no ancestors. It
    asks, and goes over to what most others hold."""
    whole = told("a", "a2", "a3", "a4")
    ahead = replace(whole, links=(whole.links[0][3:],))
    many = told("b", "b2")
    assert decided(ahead, many, many)[0] == "b2"
    assert not decided(ahead, many)[0]
    assert not decided(ahead, many, ahead, ahead)[0]
    log = a_log("A", "A", "B")
    log.state = replace(log.held, links=log.held.links[-1:])
    log.roster.summarized("B", msg.Summary(1, "worker", model=ModelVersion(0, 1, 1, ""), heads=((1, "b"),)))
    assert not log.is_here("B")


def test_rounds_do_not_wait_for_one_that_is_ahead_and_not_believed() -> None:
    assert decided(told("a"), told("a"), told("a", "a2")) == ("", {"C"})


def test_one_that_was_on_another_lineage_and_came_over_is_waited_for_again() -> None:
    """B is a commit ahead of A a moment later. A, which took B for one on another lineage still, would not ask for its
    promise, and make a second commit on the same base."""
    log = a_log("A", "A", "B")
    lineage = Lineage(log.rules, [log], log.roster)
    log.roster.peers["B"].elsewhere = True
    log.roster.summarized("B", replace(log.roster.mine, heads=((0, "another"),)))
    lineage.tick(1.0, fetching=False)
    assert log.roster.is_elsewhere("B")
    log.roster.summarized("B", replace(log.roster.mine, heads=(log.held.links[-1],)))
    lineage.tick(2.0, fetching=False)
    log.roster.summarized("B", replace(log.roster.mine, heads=((log.epoch + 1, "next"),)))
    assert log.is_here("B")


@fails_if(Lineage.tick, "self.patience = 1", "pass")
def test_a_peer_asks_soon_again_once_an_old_sign_is_gone() -> None:
    """B is on a lesser lineage, and A asks more and more seldom, because it never goes over. Then B comes to A's
    lineage, and leaves it again. Now A's question may be answered otherwise: A asks as often as at first."""
    log = a_log("A", "A", "B")
    lineage, mine = Lineage(log.rules, [log], log.roster), told("one", "two")
    log.state = replace(log.held, version=mine.versions[0], links=mine.links[0])

    def asks_at(seconds: range, head: tuple[int, str]) -> list[int]:
        times = []
        for now in seconds:
            log.roster.summarized("B", replace(log.roster.mine, heads=(head,)))
            lineage.tick(float(now), fetching=False)
            if lineage.inquiry is not None:
                times.append(now)
                lineage.told("B", told("other"))
                assert lineage.decide(float(now)) is None
        return times

    first = asks_at(range(500), (1, "other"))
    assert first[-1] - first[-2] > 4 * (first[1] - first[0])
    assert not asks_at(range(500, 1000), mine.links[0][-1])
    then = asks_at(range(1000, 1500), (1, "other"))
    assert then[1] - then[0] == first[1] - first[0]


@fails_if(Lineage.tell, "fresh = leaves or", "fresh =")
def test_one_that_goes_over_to_another_lineage_is_no_voice_for_its_own() -> None:
    """A state may travel for long. Meanwhile those to which it goes over would count it, and go over to its lineage:
    two halves would change places again and again."""
    world = World("AB", epoch=2)
    for together in (False, True):
        world.peers["A"].replica.fetching.begin([0], ["B"], world.now, together=together)
        ((_, answer),) = sent(world.effects("A", e.Received("B", msg.Ask())), msg.Told)
        assert answer.fresh is together


def test_a_newer_version_of_the_own_lineage_needs_two_that_tell_it() -> None:
    """However many are still behind: they tell nothing else. One that tells it alone could lie."""
    assert decided(told("a"), told("a", "a2"), told("a", "a2"), told("a"), told("a"))[0] == "a2"


@fails_if(Lineage._judged, "this if fork else", "this if True else")
def test_who_is_ahead_in_one_fragment_is_followed_there() -> None:
    """B leads fragment 1 after its leader's death, and is behind in fragment 0. All went by C, which is ahead in
    fragment 0 alone, again and again, and B waited for their promises."""
    log = a_log("A", *"ABC", of=rules(2))
    log.state = replace(log.held, version=told("a").versions[0], links=told("a").links[0])
    b, c = ((told("a"), told("a", "a2")), (told("a", "a2", "a3"), told("a")))
    answers = [msg.Told(one.versions + other.versions, one.links + other.links) for one, other in (b, c)]
    lineage = Lineage(rules(2, mode="async"), [log, log], log.roster)
    lineage.inquiry = Inquiry(0.0, ["B", "C"], dict(zip("BC", answers, strict=True)))
    belief = lineage.decide(10.0)
    assert belief is not None
    assert [version.chain for version in belief.told.versions] == ["a3", "a2"]


@fails_if(Rounds._older, "message.version < commit.version", "True")
def test_two_that_are_on_two_lineages_do_not_answer_each_other_for_ever() -> None:
    """Only the one with the greater commit answers the other's."""
    world = World("AB", epoch=2)
    commit, _ = world.log("A").last[-1]
    for chain, answers in (("", [("B", commit)]), ("z", [])):
        told = replace(commit, version=replace(commit.version, chain=chain))
        assert sent(world.effects("A", e.Received("B", told)), msg.Commit) == answers


def test_a_leader_may_wait_for_its_own_trainer() -> None:
    """As any other member may, which no round gives up before its time; but not in round after round."""
    log = a_log("B", "A", "B")
    summary = log.roster.summary("A")
    assert summary is not None
    log.round.leader = "A"
    log.roster.summarized("A", replace(summary, sent=(2,), awaits=((0, ("A",)),)))
    assert waits.excuses(log, "A") == ["A"]
    log.misses["A"] = deque([True, True])
    assert not waits.excuses(log, "A")


@fails_if(closing.is_newcomer, " and member.id.incarnation == record.summary.incarnation", "")
def test_a_peer_that_starts_again_in_the_middle_of_a_round_is_a_newcomer() -> None:
    """Whatever an earlier life of it did: the round does not wait for it."""
    log = a_log("B", "A", "B")
    assert "A" in log.held.roll
    assert not closing.is_newcomer(log, "A")
    log.roster.summarized("A", msg.Summary(2, "worker", heads=((3, log.held.version.chain),)))
    assert closing.is_newcomer(log, "A")


# -- fetching


def fetches(world: World, newcomer: Peer, moves: str, seconds: int = 100) -> None:
    """Run until the newcomer has its state, while transfers of these peers to it go on and on."""
    for _ in range(seconds):
        if world.run(1.0, lambda: newcomer.replica.has_state):
            return
        for owner in moves:
            world.handle(newcomer.name, e.Moving(owner))
    raise AssertionError(world.tell())


@pytest.mark.parametrize(("trains_s", "last_s", "late_s", "moves"), [(3.0, 16.0, 3.0, ""), (25.0, 40.0, 18.0, "AB")])
def test_a_newcomer_whose_means_come_after_the_commits_keeps_its_slices(
    trains_s: float, last_s: float, late_s: float, moves: str
) -> None:
    """X has a slow link, so a commit, which is short, overtakes the commit's means. X dropped what it had at each of
    them, and asked for it again: it might have had its state never. A mean may take long, while it moves."""
    world = World("AB", trains_s=trains_s, epoch=2)
    takes_s = 2.0, 9.0, last_s

    def slow(_sender: str, to: str, message: msg.Message) -> float | None:
        if to != "X" or not isinstance(message, msg.Mean | msg.Part):
            return None
        return late_s if isinstance(message, msg.Mean) else takes_s[message.number]

    world.rules_of_net.append(slow)
    fetches(world, world.join("X"), moves)
    asked = [number for ask in world.sent(msg.Ask, by="X") for number in ask.numbers]
    assert len(asked) <= 4, f"asked for {asked}"


@fails_if(Fetching._roll, "or self._has_passed(fetch, commit, number)", "")
def test_a_mean_that_was_missed_is_not_waited_for_while_later_ones_come() -> None:
    """A's and B's transfers to X go on and on. X kept slices whose next mean was lost, and never had its state."""
    world = World("AB", epoch=2)
    newcomer, lost = world.join("X"), list[msg.Mean]()

    def loses(_sender: str, to: str, message: msg.Message) -> float | None:
        if to != "X" or not isinstance(message, msg.Mean | msg.Part):
            return None
        staged = newcomer.replica.fetching.fetches[0].staged if newcomer.replica.fetching.fetches else {}
        if isinstance(message, msg.Mean) and message.number in staged and len(lost) < 2:
            lost.append(message)
            return LOST
        return 1.0 + 2 * message.number if isinstance(message, msg.Part) else None

    world.rules_of_net.append(loses)
    fetches(world, newcomer, "AB", seconds=60)
    assert lost


def test_a_mean_that_comes_just_before_its_slice_is_asked_for_is_kept() -> None:
    """An owner is a little ahead of X's donor, whose slice is at the version before. The mean was dropped, and X waited
    for it in vain."""
    world = World("AB", epoch=2)
    newcomer = world.join("X")
    fetching, log = newcomer.replica.fetching, newcomer.replica.logs[0]
    assert world.run(20.0, lambda: 0 in fetching.fetches and fetching.fetches[0].head is not None), world.tell()
    head = fetching.fetches[0].head
    assert head is not None
    for base, is_kept in ((head.version, True), (world.log("A").last[-1][0].base, False)):
        fetching.fetches[0].asked = {}
        mean = msg.Mean(0, base, "key", 2, "hash", "A", NOTHING, b"signed")
        newcomer.replica.handle(e.Received("A", mean), world.now)
        assert (mean in log.early.values()) == is_kept


def test_a_repair_under_way_explains_why_the_others_have_other_digests() -> None:
    """One slice of A's is damaged, and on its way. A's next digests differ from the others' by it, and A fetched all
    other slices too."""
    world = World("ABC", rules(slices=6))
    world.strict = False
    world.reach(3)
    damaged = world.peers["A"]
    damaged.theta[0][1] |= {"damage"}
    world.rules_of_net.append(lambda _s, to, m: 6.0 if to == "A" and isinstance(m, msg.Part) else None)
    world.handle("A", e.Damaged(0, (1,)))
    world.reach(6)
    assert {number for ask in world.sent(msg.Ask, by="A") for number in ask.numbers if ask.fragment == 0} == {1}
    assert len({*map(frozenset, damaged.theta[0])}) == 1


def test_means_are_no_slices_of_a_state() -> None:
    """X has one slice of three. The means of rounds come, and don't make a wait for the others begin anew."""
    world = World("AB", epoch=2)
    world.rules_of_net.append(lambda _s, to, m: 30.0 if to == "X" and isinstance(m, msg.Part) and m.number else None)
    newcomer = world.join("X")
    world.run(12.0)
    assert world.sent(msg.Mean, to="X")
    fetching = newcomer.replica.fetching
    assert 0 < fetching.grew_at < world.now - 8.0
    assert fetching.rounds_since >= 3


def test_a_slice_that_comes_late_is_taken() -> None:
    """A slice may take longer than a fetch waits before it asks another donor."""
    world = World("AB", rules(heartbeat_timeout=2.0), epoch=2)
    world.rules_of_net.append(lambda sender, to, message: 9.0 if isinstance(message, msg.Part) else None)
    world.join("C")
    assert world.run(25, lambda: world.peers["C"].epoch > 0), world.tell()


@fails_if(Fetching.headed, "if not self.together and held is not None and", "if False and")
def test_a_donor_that_is_behind_sets_nobody_back() -> None:
    world = World("AB", epoch=3)
    fetching = world.peers["A"].replica.fetching
    fetching.begin([0], ["B"], world.now, together=False)
    assert asks(world.effects("A", e.Received("B", msg.Head(0, a_state(2, "A", "B"))))) == [("B", ())]
    assert fetching.fetches[0].head is None


@fails_if(Replica._delivered, "self.fetching.unsent.add((", "set().add((", 1)
@pytest.mark.parametrize("number", [HEAD, 1])
def test_a_part_of_a_state_that_did_not_arrive_is_sent_again(number: int) -> None:
    """Not after as long as a slow slice may take: meanwhile a leader that waits for this peer passes it over."""
    world = World("AB", epoch=2)
    part = part_of(world.log("A"), number)
    world.effects("A", e.SendFailed("B", part, gone=False))
    world.peers["A"].replica.next_tick = world.now
    assert sent(world.effects("A", e.Wakeup()), type(part)) == [("B", part)]


def test_a_question_for_slices_that_did_not_arrive_is_asked_again_at_once() -> None:
    """Not after as long as a slow answer may take: meanwhile a leader that waits for this peer passes it over."""
    world = World("AB", epoch=2)
    lost: list[msg.Message] = []

    def first(_sender: str, _to: str, message: msg.Message) -> float | None:
        if lost or not isinstance(message, msg.Ask) or not message.numbers:
            return None
        lost.append(message)
        return LOST

    world.rules_of_net.append(first)
    world.join("C")
    assert world.run(world.rules.fetch_again / 2, lambda: world.peers["C"].epoch > 0), world.tell()
    assert lost


def damaged(names: str = "AB") -> tuple[World, Fetching, list[e.Effect]]:
    """Return a world in which A finds its slice 1 damaged, what A fetches, and what A does at once."""
    world = World(names, epoch=2)
    effects = world.effects("A", e.Damaged(0, (1,)))
    return world, world.peers["A"].replica.fetching, effects


def test_a_repair_outlives_a_question_that_did_not_arrive() -> None:
    """Else one lost message would make damage a part of the state."""
    world, fetching, effects = damaged()
    ((_, ask),) = sent(effects, msg.Ask)
    world.effects("A", e.SendFailed("B", ask, gone=False))
    assert asks(fetching.tick(world.now + 1)) == asks(effects)
    assert not keeps(fetching.tick(world.now + world.rules.fetch_again))


@fails_if(Replica._wakeup, "self.fetching.forgive(now)", "pass")
def test_a_repair_goes_on_after_the_process_stood_still() -> None:
    """To a process that was suspended the others seem silent. Else the damage would become a part of the state."""
    world, fetching, _ = damaged()
    world.peers["A"].replica.roster.peers["B"].unanswered = world.now
    world.now += 2 * world.rules.fetch_again
    assert not keeps(world.effects("A", e.Wakeup()))
    assert 0 in fetching.fetches


def test_damage_that_is_found_during_a_repair_is_repaired_too() -> None:
    """Else its digests, computed anew after the repair, would be those of the damage."""
    world, fetching, _ = damaged()
    version, fetch = world.log("A").held.version, fetching.fetches[0]
    assert asks(world.effects("A", e.Damaged(0, (1, 2)))) == [("B", (2,))]
    fetch.staged[1] = version, world.now
    assert not fetch.done
    fetch.staged[2] = version, world.now
    assert fetch.done


@fails_if(Fetching._give_up, "return self.repair(log, damaged,", "return self.repair(log, (),")
@fails_if(Replica._answer, "if number not in self.fetching.repaired(log.fragment)", "if True")
def test_damaged_slices_are_sent_once_they_are_repaired() -> None:
    """Else damage would spread, and the damaged peer get it back. A fetch of a newer state takes the place of the
    repair, and may be in vain: then the repair begins again."""
    world, fetching, _ = damaged()
    for _ in range(2):
        effects = world.effects("A", e.Received("B", msg.Ask(0, (0, 1))))
        assert [message.number for _, message in sent(effects, msg.Part)] == [0]
        assert fetching.unsent == {("B", 0, 1)}
        fetching.begin([0], ["B"], world.now, together=False)
    assert asks(fetching._give_up(fetching.fetches.pop(0), world.now)) == [("B", (1,))]


@fails_if(digests.majority, "sorted(log.digests, reverse=True)", "sorted(log.digests)[-1:]")
def test_damage_is_noticed_though_nobody_has_told_the_newest_digest_yet() -> None:
    """Where a round is no longer than the time between two probes, the others' Summaries are always behind."""
    log = a_log("A", "A", "B", "C")
    digests.record(log, 2, ("damage",))
    digests.record(log, 3, ("damage, and a step",))
    right = (((2, hash_of(("right",))),),)
    for name in "BC":
        log.roster.summarized(name, msg.Summary(1, "worker", heads=((3, log.held.version.chain),), digests=right))
    assert digests.majority(log) == ["B", "C"]
    log.digests[2] = ("right",)
    assert not digests.majority(log)


@fails_if(Fetching._give_up, "return [kept, Keep(fetch.fragment, fetch.numbers)]", "return [kept]")
def test_damage_that_nobody_can_mend_is_kept_and_said_to_the_node() -> None:
    world = World("A")
    world.effects("A", e.Damaged(0, (1,)))
    world.peers["A"].replica.next_tick = world.now
    assert e.Keep(0, (1,)) in world.effects("A", e.Wakeup())


@fails_if(Fetching.tick, "if fetch.repair:", "if not fetch:", behind=False)
@pytest.mark.parametrize("behind", [False, True])
def test_a_repair_does_not_wait_for_ever(behind: bool) -> None:
    """B repairs the same slice as A, or is behind and wants it from A: each would wait for the other for ever."""
    world, fetching, _ = damaged()
    if behind:
        tells(world.log("A"), "B", *world.log("A").held.links[0])
    assert not keeps(fetching.tick(world.now + 1))
    assert keeps(fetching.tick(world.now + world.rules.fetch_again))


def test_a_repair_does_not_wait_for_ever_for_slices_that_are_of_no_use() -> None:
    """B repairs the same slice as A. C is behind: it sends its own one whenever it is asked, and wants A's or B's."""
    world, fetching, _ = damaged("ABC")
    older = Version(0, 0, *world.log("A").held.links[0])
    tells(world.log("A"), "C", older.epoch, older.chain)
    for second in range(1, 60):
        now = world.now + second
        if keeps(fetching.tick(now)):
            return
        fetching.part("C", msg.Part(0, older, 1), now)
        fetching.filled(e.Filled(0, older, 1, "another"), now)
    raise AssertionError("A asks C for ever")


@fails_if(applying._anew, "None if log.rules.asynchronous else claims.told_choice(log)", "claims.told_choice(log)")
def test_in_asynchronous_mode_a_commit_that_nobody_can_complete_gives_way_to_a_window() -> None:
    """A leads after B, whose commit it knows but not its means. It collects anew as in this mode, so that the buffer
    is not overfilled and its successors hold the commit first."""
    log = a_log("A", "A", "B", of=rules(mode="async", dn_buffer_size=1))
    choice = choice_of(log.held, "B", by="B")
    log.round.commit, log.round.served = a_commit(log, choice, "B"), a_close(log, choice, "B")
    log.round.phase, log.round.term, log.round.leader, log.round.promised = Phase.LACKING, 1, "A", {"B"}
    log.round.asked["A"] = 0.0
    assert applying.tick(log, 100.0) == []
    assert (log.phase, log.round.close) == (Phase.COLLECTING, None)


@fails_if(holding.offer, "[0] > log.epoch", "[0] > 2**40")
def test_a_leader_that_stood_still_does_not_offer_what_others_have_gone_beyond() -> None:
    """A stood still, and B made another commit of the same epoch. C, which comes later, would take A's step, and nobody
    else."""
    log = a_log("A", "A", "B", "C", of=rules(mode="async", successors=2))
    choice = replace(choice_of(log.held, "A"), successors=("A", "B", "C"))
    log.round.commit, log.round.phase = a_commit(log, choice, "A"), Phase.HOLDING
    tells(log, "B", 4, "another")
    assert holding.offer(log, 0.0) == []
    tells(log, "B", 3, log.held.version.chain)
    assert {to for to, _ in sent(holding.offer(log, 0.0), msg.Commit)} == {"B", "C"}


@fails_if(holding.offer, "rival.term > round.term", "rival.term > 2**40")
@fails_if(holding.offer, "if rivals and not round.holding:", "if rivals:")
@fails_if(holding.offer, "and rival.version.chain not in round.void", "")
def test_a_leader_that_stood_still_takes_its_successors_commit_in_place_of_its_own() -> None:
    """A offered a commit and stood still. B claimed the term, and waits for A to hold its commit, as A waits for B. A
    takes B's commit; but not if C has already taken the step of A's, which B will be told, or if nobody can complete
    B's."""
    for holders, is_void, taken in (set[str](), False, "B"), ({"C"}, False, "A"), (set[str](), True, "A"):
        log = a_log("A", "A", "B", "C", of=rules(mode="async", successors=2))
        choice = replace(choice_of(log.held, "A", by="A"), successors=("A", "B", "C"))
        log.begin(replace(log.held, plan=replace(log.held.plan, succession=("A", "B", "C"), named=3)), 0.0)
        log.round.commit, log.round.phase = a_commit(log, choice, "A"), Phase.HOLDING
        claimed = choice_of(log.held, "B", by="B", term=1)
        log.round.commits["B"] = told = a_commit(log, claimed, "B", term=1)
        log.round.holding, log.round.void = holders, {told.version.chain} if is_void else set()
        holding.offer(log, 0.0)
        assert log.round.commit.leader == taken


@fails_if(Rounds.lost, "log.round.holding.discard(peer)", "pass")
@fails_if(Rounds.lost, "log.round.offered.pop(peer, None)", "pass")
def test_what_a_peer_held_before_it_restarted_is_offered_to_it_again() -> None:
    """B held A's proposal, restarts, and has fetched the version before: it holds that proposal no more."""
    log = a_log("A", "A", "B", of=rules(mode="async", successors=1))
    choice = replace(choice_of(log.held, "A"), successors=("A", "B"))
    log.round.commit, log.round.phase = a_commit(log, choice, "A"), Phase.HOLDING
    log.round.holding, log.round.offered = {"B"}, {"B": 100.0}
    effects = Rounds([log], Exchange("A", log.rules, [log], 1)).lost("B", 1.0)
    assert [to for to, _ in sent(effects, msg.Commit)] == ["B"]


def test_a_donor_that_left_the_lineage_is_asked_no_more() -> None:
    """A goes over to B's lineage while B goes over to another one: nobody holds what A wants any more."""
    world = World("AB", epoch=3)
    fetching, log = world.peers["A"].replica.fetching, world.log("A")
    fetching.begin([0], ["B"], world.now, together=True)
    fetching.fetches[0].head = log.held
    tells(log, "B", 2, "another")
    fetching.tick(world.now)
    assert (fetching.fetches, log.phase) == ({}, Phase.COLLECTING)


@fails_if(Fetching.filled, "if fetch is None or fetch.busy.get(done.number) != done.version:", "if fetch is None:")
def test_the_answer_to_an_earlier_fetch_is_not_taken_for_a_later_one() -> None:
    """Else a slice would be rolled forward from a version that it doesn't have."""
    world = World("AB", epoch=3)
    fetching, held = world.peers["A"].replica.fetching, world.log("A").held
    fetching.begin([0], ["B"], world.now, together=True)
    fetching.fetches[0].questions.add((0, "B"))
    fetching.part("B", msg.Part(0, held.version, 0), world.now)
    fetching.filled(e.Filled(0, Version(0, 0, *held.links[-2]), 0, "x"), world.now)
    assert (fetching.fetches[0].staged, fetching.fetches[0].busy) == ({}, {0: held.version})


# -- asynchronous mode


def asynchronous(**changes: Any) -> World:
    return World("ABC", rules(mode="async", successors=1, **changes), epoch=3)


def submitting(**changes: Any) -> tuple[World, Exchange, FragmentLog]:
    """Return a world in which the submission of a peer that does not lead is out, and what this peer knows."""
    world = asynchronous(**changes)
    replica = next(peer.replica for name, peer in world.peers.items() if name != world.line[0])
    assert world.run(20, lambda: replica.own.flying)
    return world, replica.own, replica.logs[0]


def test_the_step_of_a_proposal_is_taken_once_it_is_held() -> None:
    """The leader computes nothing for a commit that may never be."""
    world = asynchronous()
    world.rules_of_net.append(lambda sender, to, message: LOST if isinstance(message, msg.Held | msg.Probe) else None)
    leader = world.line[0]
    assert world.run(20, lambda: world.log(leader).phase is Phase.HOLDING)
    assert not world.peers[leader].proposals


def test_a_submission_has_weight_1() -> None:
    """Whatever its trainer says; also in other fragments, where only the names of data sets are told."""
    replica = Replica("A", rules(2, mode="async"), incarnation=1 << 20, now=0.0)
    replica.handle(e.Found(0, ("a", "b")), 0.0)
    replica.handle(e.Merge(), 0.0)
    use = Use(DataSet("train", 10), ((0, 3),), 5)
    hashes = (hash_of(1),) * 3
    replica.handle(e.Contribute(1, 7.0, 7, hashes, (1, 1, 1), (use,)), 0.0)
    assert replica.own.ready is not None
    assert (replica.own.ready.weight, replica.own.ready.uses) == (1.0, (Use(DataSet("train", 10), (), 0),))


def test_a_proposal_that_is_offered_again_is_answered_again() -> None:
    """The first Held was lost, and its sender has gone on."""
    world = asynchronous()
    other = next(name for name in "ABC" if name != world.line[0])
    commit, _ = world.log(other).last[-1]
    effects = world.effects(other, e.Received(commit.leader, commit))
    assert sent(effects, msg.Held) == [(commit.leader, msg.Held(0, commit.version))]


@fails_if(holding.carry_over, " or unfit(peer, ready, log.held, log.rules)", "", "its data went to others")
@fails_if(holding.carry_over, "is_stale(log, ready.base) or ", "", "it became too old")
@pytest.mark.parametrize("because", ["it became too old", "its data went to others"])
def test_a_submission_that_can_not_be_counted_any_more_does_not_wait_on(because: str) -> None:
    """The leader would count it, and all others would refuse its commit."""
    old = because == "it became too old"
    world = asynchronous(max_staleness=1 if old else None)
    log = world.log(world.line[0])
    earlier = {"base": Version(0, 0, *log.held.links[-2])}
    others = {"uses": (Use(DataSet("train", 10), ((0, 3),), 5),)}
    log.round.readys["X"] = replace(a_ready(log.held, life=9), **(earlier if old else others))
    world.reach(log.epoch + 2)
    assert "X" not in log.round.readys


@fails_if(Exchange.refused, " and self.is_at(sender)", "")
def test_a_refused_submission_is_said_to_the_user() -> None:
    """A refusal by a peer that is not the leader says nothing: it could have the others' progress dropped."""
    world, own, log = submitting(max_staleness=2)
    assert own.ready is not None
    ahead = replace(own.ready.base, epoch=own.ready.base.epoch + 3)
    other = next(name for name in "ABC" if name not in (own.me, log.round.leader))
    for sender, refused in ((other, False), (log.round.leader, True)):
        world.effects(own.me, e.Received(sender, msg.Stale(0, own.ready.id, ahead)))
        assert (own.stale is not None) == refused
    log.begin(replace(log.held, version=ahead), world.now)
    effects = world.effects(own.me, e.Wakeup())
    assert "stale" in [one.kind for one in effects if isinstance(one, e.Note)]


def test_after_its_answer_a_submitter_waits_for_nobody() -> None:
    world, own, log = submitting()
    assert world.run(20, lambda: not own.flying)
    assert log.round.handed[0] == ""


def test_a_submission_on_an_earlier_version_is_waited_for_and_sent_again() -> None:
    """Else a peer that is behind never finds that its answer is late, and never asks. The leader asks for a slice that
    was lost, by the version on which it was made."""
    world, own, log = submitting()
    assert own.ready is not None
    base = Version(0, 0, *log.held.links[-2])
    own.ready, own.going[-1] = replace(own.ready, base=base), "A"
    own.delivered("A", own.ready, world.now, ok=True)
    assert log.round.handed == ("A", world.now)
    effects = world.effects(own.me, e.Received(log.round.leader, msg.Want(0, base, msg.What.SLICES, (1,))))
    assert [message.number for _, message in sent(effects, msg.Slice)] == [1]


@fails_if(Fetching._advance, "head.version, fetch.donors, now", "head.version, [*fetch.sources.values()], now")
def test_a_commit_between_slices_is_asked_of_those_whose_commits_are_followed() -> None:
    """A slice may come from any peer near the head; a commit that such a peer tells is not believed."""
    log = a_log("A", "A", "B", "C", of=rules(mode="async"))
    fetching, state = Fetching(log.rules, [log], log.roster), log.held
    fetching.begin([0], ["B"], 1.0, together=False)
    fetching.headed("B", msg.Head(0, state), 1.0)
    later = replace(state.version, epoch=4, chain="later")
    fetching.fetches[0].head = state
    fetching.fetches[0].busy[0], fetching.fetches[0].sources[0] = later, "C"
    wanted = sent(fetching.filled(e.Filled(0, later, 0, "digest"), 1.0), msg.Want)
    assert [to for to, _ in wanted] == ["B"]


def test_a_leader_that_was_away_may_claim_anew() -> None:
    """In asynchronous mode a leader that has restored its state claims its own next turn, and gets the promises."""
    log = a_log("B", "A", "B", "C", of=rules(mode="async"))
    leader = log.round.leader
    term = len(claims.line(log))
    assert claims.would_promise(log, leader, term, 1.0)


@fails_if(Replica._wakeup, "log.unproven = True", "pass")
def test_an_asynchronous_leader_that_stood_still_claims_anew() -> None:
    """Others may have gone on without it. A newcomer, which knows nothing of them, would hold its next commit."""
    world = asynchronous()
    leader = world.peers[world.line[0]].replica
    assert world.run(20, lambda: leader.logs[0].phase is Phase.COLLECTING)
    effects = leader.handle(e.Wakeup(), leader.planned + leader.rules.frozen_after + 1)
    assert {to for to, _ in sent(effects, msg.Claim)} == {*"ABC"} - {leader.me}


@pytest.mark.parametrize("phase", [Phase.CLOSING, Phase.APPLYING])
def test_a_leader_that_gives_up_a_fetch_signs_nothing_that_contradicts_it(phase: Phase) -> None:
    """It has closed its round, or made its commit, takes itself for behind, and finds no donor. It goes on on the
    version that it had: two choices of one attempt, or two commits of one term, would expel it."""
    world = World("ABC", epoch=2)

    def leads(name: str) -> bool:
        log = world.log(name)
        return log.phase is phase and log.leads

    assert world.run(60, lambda: any(map(leads, "ABC")))
    leader = next(name for name in "ABC" if leads(name))
    replica = world.peers[leader].replica
    replica.fetching.begin([0], [name for name in "ABC" if name != leader], world.now, together=False)
    world.kill(next(name for name in "ABC" if name != leader))  # so its next choice would be another one
    replica.logs[0].round.readys.clear()
    replica.fetching._give_up(replica.fetching.fetches.pop(0), world.now)
    world.run(60)
    said: dict[object, str] = {}
    for close in world.sent(msg.Close):
        if close.choice is not None:
            assert said.setdefault((close.base, close.term, close.leader, close.attempt), close.key) == close.key
    for commit in world.sent(msg.Commit):
        assert said.setdefault((commit.base, commit.term, commit.leader), commit.key) == commit.key
    assert all(peer.epoch > 4 for peer in world.peers.values() if peer.alive)
    world.check()


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_peer_that_comes_back_to_a_version_claims_a_later_term_there(attempt: int) -> None:
    """It has led a round on it, goes over to the others' lineage, and is to make another commit on the same version:
    two of one term would expel it."""
    log = a_log("A", "A", "B")
    state, choice = log.held, choice_of(log.held, "A", "B")
    log.round.attempt, log.round.term, log.round.leader = attempt, 3, "A"
    log.begin(append(state, choice, key_of(0, state.version, choice), ("x", "y", "z"), log.rules), 1.0)
    assert (log.round.term, log.epoch) == (0, 4)
    log.begin(state, 2.0)
    assert log.round.term == 3
    assert not log.leads
    assert claims.target(log)[0] > 3


def test_a_commit_whose_means_nobody_has_is_not_taken_again() -> None:
    """A leads, has waited in vain for the means of B's commit, and closes anew. B's word for its own one is still
    there: A would take it again and again, and never make another."""
    log = a_log("A", "A", "B")
    commit = a_commit(log, choice_of(log.held, "A", "B", by="B"), "B")
    log.round.term, log.round.leader, log.round.commits = 2, "A", {"B": commit}
    assert applying.retake(log, 0.0)
    assert log.phase is Phase.LACKING
    applying._anew(log, 1.0)
    assert log.phase is Phase.COLLECTING
    assert not applying.retake(log, 2.0)


def test_a_fetching_peer_follows_the_commits_that_others_make_meanwhile() -> None:
    """In asynchronous mode A is not told them. A slice may take as long as many commits, and nobody keeps their means
    for so long: A would never have all slices at one version."""
    log = a_log("A", "B", of=rules(mode="async"))
    state, log.round.phase = log.held, Phase.FETCHING
    fetching = Fetching(log.rules, [log], log.roster)
    fetch = Fetch(0, ("B",), (0, 1, 2), 0.0, 0.0, head=state, asked={1: ("B", 0.0)}, sources={0: "B"})
    fetch.staged[0] = state.version, 0.0
    assert fetching._advance(fetch, 0.0) == []
    assert sent(fetching._advance(fetch, 0.1), msg.Want) == [("B", msg.Want(0, state.version, msg.What.NEXT))]
    log.keep("B", commit := a_commit(log, choice_of(state, "B", by="B"), "B"))
    wants = sent(fetching._advance(fetch, 0.2), msg.Want)
    assert [(want.what, want.numbers, want.base) for _, want in wants] == [
        (msg.What.MEANS, (0,), state.version),
        (msg.What.MEANS, (1,), state.version),
        (msg.What.NEXT, (), commit.version),
    ]
    assert fetching._advance(fetch, 0.3) == []
    again = sent(fetching._advance(fetch, 0.2 + log.rules.settle), msg.Want)
    assert [want.what for _, want in again] == [msg.What.NEXT]


@fails_if(claims._gives_up, "return log.phase in (Phase.CLAIMING, Phase.COLLECTING) and", "return False and")
def test_a_claim_that_nobody_needs_any_more_is_given_up() -> None:
    """D and the leader can't reach each other for a while, so D claims. The others see the leader able, and promise D
    nothing. Then the link is there again: D held to its claim, served the leader no more, and was left out."""
    world = World("ABCD", rules(round_timeout=600.0), trains_s=16.0, epoch=2)
    leader = world.line[0]
    claimant = next(peer for peer in "DC" if peer != leader)
    world.cut(claimant, leader)
    world.run(13.0)
    assert world.log(claimant).phase is Phase.CLAIMING
    world.cuts.clear()
    world.reach(3, seconds=6.0)
    (counted,) = {frozenset(dict(m.choice.entries)) for m in world.sent(msg.Commit) if m.version.epoch == 3}
    assert counted == set("ABCD")


@fails_if(claims.voted, "if message.leader == log.me and", "if False and")
def test_of_two_that_have_yielded_to_each_other_the_greater_claim_stands() -> None:
    """B claims term 1 while A is away. A comes back, claims its own next turn, and yields, because most have promised
    B. But the last of them has promised A, so B yields, too. Nobody led then, until A was said to do nothing."""
    first, second, *others = a_state(3, *"ABCD").plan.succession
    log = a_log(first, *"ABCD")
    claims.yields(log, 1, second)
    claims.claimed(log, second, msg.Claim(0, log.held.version, 1, 8), 1.0)
    word = msg.Vote(0, log.held.version, 4, first, turn=9)
    claims.voted(log, others[0], word)
    assert log.round.leader == second
    claims.voted(log, second, word)
    assert (log.round.leader, log.round.term, log.round.promised) == (first, 4, set())
    assert {to for to, _ in sent(claims.announce(log), msg.Claim)} == {second, *others}
