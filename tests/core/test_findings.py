"""What two reviews found in the first version of docs/decisions/0085, each as a story that fails without its rule."""

from __future__ import annotations

from dataclasses import replace

from p2p_diloco.core import admission, applying, claims, closing, digests, leading, owning, plan, state
from p2p_diloco.core import events as e
from p2p_diloco.core import messages as msg
from p2p_diloco.core.admission import countable, unsound
from p2p_diloco.core.carry import PART, Carried
from p2p_diloco.core.exchange import Exchange
from p2p_diloco.core.fetching import Fetching
from p2p_diloco.core.fragment import FragmentLog
from p2p_diloco.core.lineage import Lineage
from p2p_diloco.core.plan import Member, plan_after
from p2p_diloco.core.replica import Replica
from p2p_diloco.core.round import Phase
from p2p_diloco.core.rounds import Rounds
from p2p_diloco.core.state import append, founded_by, founding, is_sound, key_of, relation
from p2p_diloco.core.version import SALT_BITS, ContributionId, Version
from tests.core.parts import a_close, a_commit, a_log, a_ready, a_state, after, choice_of, sent
from tests.core.sabotage import fails_if
from tests.core.world import LOST, NOTHING, World, rules


def test_a_newcomer_is_counted_though_all_others_started_months_ago() -> None:
    """An incarnation is the time of a start. One of the far future uses up all numbers, and is counted by nobody; in
    the first commit after a run was founded from a checkpoint, no other is known."""
    state, month = a_state(2, "a", "b"), 30 * 86_400_000 << SALT_BITS
    for later, fits in ((3 * month, True), (13 * month, False)):
        entries = (("a", a_ready(state)), ("b", a_ready(state)), ("c", a_ready(state, life=1 + later)))
        assert (unsound(msg.Choice("a", 0, entries), state, rules()) == "") == fits
    other = founded_by("x", state, rules())
    assert is_sound(other)
    assert unsound(msg.Choice("x", 0, (("x", a_ready(other, life=13 * month)),)), other, rules()) == ""


# -- the key fixes the version


def test_whoever_commits_one_key_makes_one_version() -> None:
    """Term and author of a commit are not in its version; everything that its leader chose is."""
    state = a_state(2, "A", "B", "C")
    one = choice_of(state, "A", "B", "C")
    assert after(state, choice=one).version == after(state, choice=one).version
    for other in (replace(one, late=("C",)), replace(one, by="C"), replace(one, entries=one.entries[:2])):
        assert after(state, choice=other).version.chain != after(state, choice=one).version.chain
    unlike = replace(one.entries[0][1], root="another")
    assert key_of(0, state.version, replace(one, entries=(("A", unlike), *one.entries[1:]))) != key_of(
        0, state.version, one
    )


@fails_if(state.relation, "theirs.generation != mine.generation", "False")
def test_another_generation_is_another_lineage_however_far_it_was_set_back() -> None:
    """The run was set back by more commits than links name. The old generation, far ahead, would be followed."""
    new, old = replace(a_state(3, "A").version, generation=1), Version(0, 9000, 900, "old")
    for mine, theirs in ((new, old), (old, new)):
        links = ((mine.epoch, mine.chain),)
        assert relation(mine, links, theirs, ((theirs.epoch, theirs.chain),)) == "fork"


# -- leading


@fails_if(state._had_their_turn, "(*before, choice.by)", "before")
def test_a_leader_that_counts_only_itself_does_not_lead_again() -> None:
    """A commit of one entry leaves the others candidates and owners; who chose comes last."""
    state = a_state(4, "A", "B", "C")
    selfish = state.plan.succession[0]
    later = after(state, selfish, sequence=50).plan
    assert set(later.succession) == set(later.owners) == {"A", "B", "C"}
    assert later.succession[-1] == selfish
    assert "needs 2" in unsound(choice_of(state, selfish), state, rules(min_peers=2))


@fails_if(state._had_their_turn, "(*before, choice.by)", "(choice.by,)")
def test_a_leader_that_is_dead_comes_last_after_one_takeover() -> None:
    """The candidates before the one that chose have had their turn."""
    state = a_state(4, "A", "B", "C")
    dead, second, third = state.plan.succession
    later = after(state, choice=choice_of(state, second, third, by=second, term=1))
    assert later.plan.succession == (third, *sorted((dead, second), key=later.plan.succession.index))
    assert later.plan.succession[0] == third


@fails_if(plan.most_owned, "Fraction(1, 2) if len(able) >= 3 else Fraction(1)", "Fraction(1)")
def test_nobody_owns_more_than_half_where_three_may_own() -> None:
    """A link a hundred times faster than the others owns half of the slices at most; a very slow one owns none."""
    links = {"A": 100.0, "B": 1.0, "C": 1.0, "D": 0.1}
    roll = {name: Member(ContributionId(1, 1), 5, 5, link) for name, link in links.items()}
    plan = plan_after(rules(slices=8), 0, 6, roll, "ABCD", 4, ())
    assert plan.owners.count("A") <= 4
    assert "D" not in plan.owners
    plan = plan_after(rules(slices=8), 0, 6, {name: roll[name] for name in "ABC"}, "ABC", 3, ())
    assert plan.owners.count("A") == 4


@fails_if(state._demoted_after, "first != accuser and ", "")
def test_a_mark_of_one_leader_demotes_nobody() -> None:
    """Two leaders must name a member late within 64 epochs; one may say it as often as it likes."""
    state = a_state(4, "A", "B", "C", "D")
    for _ in range(3):
        choice = replace(choice_of(state, "A", "B", "C", "D", sequence=state.version.epoch + 50, by="A"), late=("D",))
        state = after(state, choice=choice)
    assert state.roll["D"].demoted[2] == 0
    choice = replace(choice_of(state, "A", "B", "C", "D", sequence=90, by="B"), late=("D",))
    state = after(state, choice=choice)
    assert state.roll["D"].demoted[2] > state.version.epoch
    assert state.plan.succession[-1] == "D"
    assert "D" not in state.plan.owners


@fails_if(admission.may_be_gone, "member.epoch < state.version.epoch and ", "")
def test_gone_can_not_name_those_that_take_part() -> None:
    """A leader can't remove a member that this commit or its base's counts."""
    state = a_state(3, "A", "B", "C")
    bad = replace(choice_of(state, "A", "B"), gone=("C",))
    assert "gone" in unsound(bad, state, rules())
    state = after(after(state, "A", "B", sequence=50), "A", "B", sequence=51)
    good = replace(choice_of(state, "A", "B"), gone=("C",))
    assert unsound(good, state, rules()) == ""
    assert "C" not in after(state, choice=good).plan.succession


@fails_if(claims.would_promise, "or not able(log, log.round.leader)", "or True")
def test_claims_while_the_leader_works_get_no_promise() -> None:
    """A member claims from each version's start; nobody promises, and rounds go on without a takeover."""
    world = World("ABC", epoch=3)
    hostile = "C"
    for _ in range(60):
        state = world.peers[hostile].state()
        line = state.plan.succession
        term = next(t for t in range(1, 9) if line[t % 3] == hostile)
        for to in "AB":
            world.handle(to, e.Received(hostile, msg.Claim(0, state.version, term)))
        world.run(0.5)
    promises = [vote for vote in world.sent(msg.Vote, by="AB") if vote.leader == hostile and vote.term]
    assert not promises
    assert world.peers["A"].epoch >= 7
    world.check()


@fails_if(claims._outvoted, "2 * sum", "10 * sum")
def test_one_refusing_owner_does_not_void_a_close() -> None:
    """Of three owners one votes for a greater claim: the leader goes on; only with most owners does it yield."""
    world = World("ABCD", rules(slices=8), epoch=3)
    leader, second = world.line[:2]
    log = world.log(leader)
    assert world.run(30, lambda: log.phase is Phase.CLOSING)
    owners = sorted(set(log.held.plan.owners) - {leader})
    vote = msg.Vote(0, log.held.version, 1, second)
    world.handle(leader, e.Received(owners[0], vote))
    assert log.phase is Phase.CLOSING
    for owner in owners[1:]:
        world.handle(leader, e.Received(owner, vote))
    assert log.round.leader == second


@fails_if(claims._gives_up, "log.phase in (Phase.CLAIMING, Phase.COLLECTING) and", "log.phase is Phase.CLAIMING and")
def test_a_claim_whose_promises_are_lost_is_given_up() -> None:
    """B has claimed A's term, and had its promises. A is back, and C holds to it, too: neither promises again."""
    log, (first, second, third) = claiming()
    assert log.phase is Phase.COLLECTING
    vote = msg.Vote(0, log.held.version, 0, first)
    claims.voted(log, third, vote)
    assert log.round.leader == second
    claims.voted(log, first, vote)
    assert (log.round.term, log.round.leader) == (0, first)


def claiming() -> tuple[FragmentLog, tuple[str, ...]]:
    """Return the log of the second of three in line, which has claimed the leader's term, and the line."""
    line = a_state(3, "A", "B", "C").plan.succession
    log = a_log(line[1], *line)
    log.round.term, log.round.leader, log.round.promised = 1, line[1], set()
    return log, line


@fails_if(claims.voted, "!= message.leader and", "!= message.leader != log.me and")
def test_a_holder_that_has_given_its_claim_up_is_not_waited_for() -> None:
    """A has claimed the term, and B has promised it. A gives its claim up for B's, which is on its way: B goes on when
    A votes for B. A vote that A gave before its claim, and that comes late, says nothing."""
    world = World("ABC", epoch=3)
    first, second, _ = world.line
    log, number = world.log(second), 100
    version = log.held.version
    log.round.passed.add(first)
    for message, held_by in (
        (msg.Claim(0, version, 3, number), (3, first)),
        (msg.Vote(0, version, 1, second, turn=number - 1), (3, first)),
        (msg.Vote(0, version, 1, second, turn=number + 1), (4, second)),
    ):
        world.handle(second, e.Received(first, message))
        assert (log.round.term, log.round.leader) == held_by


@fails_if(claims.claimed, "round.since = message.turn", "pass")
@fails_if(claims.yields, "(leader, (term, math.inf))", "(leader, (term, -1))")
def test_a_vote_of_a_holder_whose_claim_was_not_heard_says_nothing() -> None:
    """C tells B that A has claimed the term. Of A's votes B can't know whether they are older than that claim."""
    first, second, third = a_state(3, "A", "B", "C").plan.succession
    log = a_log(second, first, second, third)
    log.round.passed.add(first)  # else nobody promises A's claim
    claims.yields(log, 3, first)
    claims.voted(log, first, msg.Vote(0, log.held.version, 1, third, turn=100))
    assert first not in log.round.passed
    claims.claimed(log, first, msg.Claim(0, log.held.version, 3, 101), 1.0)
    claims.voted(log, first, msg.Vote(0, log.held.version, 1, third, turn=102))
    assert first in log.round.passed


@fails_if(claims._is_old, "return message.turn < newest", "return False")
def test_a_promise_that_was_overtaken_is_none() -> None:
    """C promises B's claim, and then A's later one. B hears of them in the other order, and does not count C."""
    log, (first, second, third) = claiming()
    claims.voted(log, third, msg.Vote(0, log.held.version, 3, first, turn=8))
    log.round.term, log.round.leader, log.round.promised = 1, second, set()
    claims.voted(log, third, msg.Vote(0, log.held.version, 1, second, turn=7))
    assert log.round.promised == set()
    claims.voted(log, third, msg.Vote(0, log.held.version, 1, second, turn=8))
    assert log.round.promised == {third}


@fails_if(owning.closed, "if not claims.would_promise(log, sender, close.term, now):", "if False:")
def test_an_owner_serves_only_the_holder_that_it_has_promised_to() -> None:
    """Once an owner has promised a claim, a Close of the earlier leader gets a vote and no mean."""
    old, new, owner = a_state(3, "A", "B", "C").plan.succession
    log = a_log(owner, old, new, owner)
    log.round.term, log.round.leader = 1, new
    effects = owning.closed(log, old, a_close(log, msg.Choice(old, 0, ((old, a_ready(log.held)),)), owner), 1.0)
    assert [(vote.term, vote.leader) for _, vote in sent(effects, msg.Vote)] == [(1, new)]
    assert log.round.close is None


@fails_if(claims.spare, "return peer not in log.round.votes or", "return True or")
@fails_if(claims.missing, "if promised is None:", "if True:")
def test_a_claim_waits_for_those_that_refuse() -> None:
    """One of three finds the leader slow and claims; the third one refuses, as the leader is able in its view: no fork
    follows, and the leader's commit is taken."""
    world = World("ABC", epoch=3)
    leader, other, _ = world.line
    log = world.log(other)
    log.round.passed.add(leader)
    world.wake(other)
    assert log.phase is Phase.CLAIMING
    world.reach(4)
    assert len({peer.state().version for peer in world.peers.values()}) == 1
    assert dict(log.held.roll)[leader].led == 4
    world.reach(6)
    world.check()


@fails_if(claims.vote, "round.commit if log.phase in (Phase.LACKING, Phase.APPLYING)", "None if True")
def test_a_claimant_learns_of_the_commit_that_a_voter_knows() -> None:
    """The leader is gone after its commit has reached B and another peer, which is cut off and has applied it. C, which
    claims, has made no mean for it: it would make another commit on the same base."""
    leader, voter, claimant = a_state(3, "A", "B", "C").plan.succession
    knows, log = (a_log(me, "A", "B", "C") for me in (voter, claimant))
    commit = a_commit(knows, choice_of(knows.held, "A", "B", by=leader), leader)
    assert applying.committed(knows, leader, commit, 1.0) == []
    log.round.term, log.round.leader, log.round.promised, log.round.phase = 2, claimant, set(), Phase.CLAIMING
    (told,) = sent(claims.claimed(knows, claimant, msg.Claim(0, log.held.version, 2, 1), 1.0), msg.Vote)
    Rounds([log], Exchange(claimant, log.rules, [log], 1)).received(voter, told[1], 1.0)
    assert log.round.commit == commit


@fails_if(claims.forgotten_by, "log.round.refused.pop(peer, None)", "pass")
@fails_if(claims.forgotten_by, "log.round.heard.pop(peer, None)", "pass")
def test_a_claim_of_an_earlier_life_is_void() -> None:
    """B claims, and restarts. If the leader dies then, nobody promises what B no longer claims. What it claims anew is
    promised, though its numbers begin again."""
    leader, claimant, me = a_state(3, "A", "B", "C").plan.succession
    log = a_log(me, leader, claimant, me)
    claims.claimed(log, claimant, msg.Claim(0, log.held.version, 1, 100), 1.0)
    claims.forgotten_by(log, claimant)
    log.roster.peers[leader].dead = True
    assert claims.promise(log, 2.0) == []
    claims.claimed(log, claimant, msg.Claim(0, log.held.version, 1, 1), 2.0)
    assert (log.round.leader, log.round.term) == (claimant, 1)


@fails_if(claims.forgotten_by, "log.round.promised.discard(peer)", "pass")
def test_a_promise_of_an_earlier_life_is_none() -> None:
    """C promises B's claim, and restarts: it knows nothing of that, and may promise another one now."""
    log, (_, second, third) = claiming()
    claims.voted(log, third, msg.Vote(0, log.held.version, 1, second, turn=8))
    assert third not in claims.missing(log)
    claims.forgotten_by(log, third)
    assert third in claims.missing(log)


# -- means and slices


@fails_if(leading.failed_authors, " or now - since > log.grace()", "")
def test_an_author_without_slices_is_left_out() -> None:
    """C sends Ready and no slice: the round goes on without it, and it is named late."""
    world = World("ABC", epoch=3)
    world.rules_of_net.append(lambda s, t, m: LOST if s == "C" and isinstance(m, msg.Slice) else None)
    world.reach(7, seconds=200)
    assert world.peers["A"].state().roll["C"].epoch <= 5
    assert world.peers["A"].state().roll["C"].demoted[0]
    world.check()


@fails_if(owning.fits, "return (part.id, part.hash) == (ready.id, ready.hashes[part.number])", "return True")
def test_slices_that_differ_from_the_signed_hashes_are_missing() -> None:
    """C sends other bytes to one owner than it signed: they are not counted."""
    world = World("ABC", epoch=3)
    world.lie("C", msg.Slice, lambda m: {"payload": frozenset({"lie"}), "hash": "another"})
    world.reach(6, seconds=200)
    assert all("lie" not in steps for peer in world.peers.values() for steps in peer.theta[0])
    world.check()


@fails_if(applying.is_owned, "return any(", "return True or any(")
def test_a_mean_that_its_owner_did_not_make_is_not_used() -> None:
    """C sends means of slices that it does not own, before their owners do."""
    world = World("ABC", epoch=3)
    done: set[str] = set()

    def lie(sender: str, to: str, message: msg.Message) -> msg.Message:
        if isinstance(message, msg.Close) and message.choice is not None and message.key not in done:
            done.add(message.key)
            for number, owner in enumerate(message.owners):
                if owner != "C":
                    false = msg.Mean(0, message.base, message.key, number, "false", "C", frozenset({"lie"}))
                    for victim in "AB":
                        world.handle(victim, e.Received("C", false))
        return message

    world.lies.append(lie)
    world.reach(6, seconds=200)
    assert all("lie" not in steps for peer in world.peers.values() for steps in peer.theta[0])


def test_an_owner_that_is_always_late_owns_nothing_in_the_end() -> None:
    """B leads and authors in time, but its means never come: it is replaced, and demoted by two leaders."""
    world = World("ABCD", rules(slices=8), epoch=3)
    world.rules_of_net.append(lambda s, t, m: LOST if s == "B" and isinstance(m, msg.Mean) else None)
    world.reach(9, seconds=300)
    state = world.peers["A"].state()
    assert state.roll["B"].demoted[2] > state.version.epoch
    assert "B" not in state.plan.owners
    began = world.now
    world.reach(14, "ACD")
    assert world.now - began < 40
    world.check()


# -- closing


@fails_if(closing.open_round, "min(least, max(2, math.ceil(least / 2)))", "1")
def test_one_early_contribution_opens_nothing() -> None:
    """One fast peer's contribution does not let the waits for the others begin."""
    world = World("ABCD", epoch=3)
    for name in "BCD":
        world.peers[name].trains_s = 10.0
    world.peers["A"].trains_s = 1.0
    world.reach(5)
    leader = world.line[0]
    log = world.log(leader)
    assert world.run(20, lambda: "A" in log.round.readys and len(log.round.readys) == 1)
    assert log.round.opened is None


@fails_if(closing.misses_often, "return sum(", "return False and sum(")
def test_a_peer_that_misses_every_other_round_is_waited_for_briefly() -> None:
    """D works and sends nothing in every other round: these wait for a usual round, not for round_timeout."""
    world = World("ABCD", epoch=3)
    world.rules_of_net.append(
        lambda s, t, m: LOST if s == "D" and isinstance(m, msg.Ready) and m.base.epoch % 2 == 0 else None
    )
    world.reach(11, seconds=400)
    began = world.now
    world.reach(17, seconds=400)
    assert world.now - began < 6 * 15
    world.check()


# -- sums that one peer can move


@fails_if(state.samples_of, "credited(list(told.values()), others)", "list(told.values())")
def test_samples_of_one_entry_count_four_times_the_median_at_most() -> None:
    """One member that tells a million samples does not drive the version."""
    state = a_state(2, "A", "B", "C")
    entries = tuple((n, a_ready(state, samples=10**6 if n == "C" else 10)) for n in "ABC")
    later = after(state, choice=msg.Choice("A", 0, entries))
    assert later.version.samples - state.version.samples == 10 + 10 + 40


def test_an_asynchronous_entrys_samples_are_held_against_what_others_told_last() -> None:
    """A commit counts C's submission alone. A and B told ten each, so forty of C's million count; with one other that
    has told something, nothing shows which of the two lies."""
    these = rules(mode="async")
    state = founding(0, Version(0, 0, 0, "theta0"), "A", 3)
    for name, samples, counted in (("A", 10, 10), ("B", 10, 10), ("C", 10**6, 40), ("C", 20, 20)):
        entries = ((name, a_ready(state, state.version.epoch + 1, samples=samples)),)
        choice = msg.Choice("A", 0, entries, successors=("A",))
        later = append(state, choice, key_of(0, state.version, choice), ("h",) * 3, these)
        assert later.version.samples - state.version.samples == counted
        state = later


def test_newcomers_of_one_grant_are_bounded() -> None:
    """Of twenty newcomers under one invitation eight are counted; of unlike grants, as many as there are others."""
    state = a_state(2, "A", "B", "C")
    same = {f"n{number:02}": a_ready(state, grant="one") for number in range(20)}
    assert len(countable(same, state)) == 8
    unlike = {f"n{number:02}": a_ready(state, grant=f"g{number}") for number in range(20)}
    assert len(countable(unlike, state)) == 8
    others = {f"m{number:02}": Member(ContributionId(1, 1), 2, 2) for number in range(12)}
    state = replace(state, roll={**state.roll, **others})
    assert len(countable({**unlike, **dict.fromkeys(others, a_ready(state))}, state)) == 24


@fails_if(admission.objection, "mine.bare() != listed.bare()", "False")
def test_a_commit_that_counts_what_this_peer_did_not_sign_is_refused() -> None:
    """The leader changes C's samples: C refuses the commit."""
    world = World("ABC", epoch=3)
    log, leader = world.log("C"), world.line[0]
    assert world.run(20, lambda: "C" in log.round.readys and log.phase is Phase.COLLECTING)
    entries = (("C", replace(log.round.readys["C"].bare(), samples=11)),)
    world.handle("C", e.Received(leader, a_commit(log, msg.Choice(leader, 0, entries), leader)))
    assert log.phase is Phase.COLLECTING
    assert any("did not sign" in why for why in world.peers["C"].complaints())


# -- newer states


@fails_if(Fetching.headed, "if not is_sound(message.state):", "if False:")
def test_a_head_with_a_false_roll_is_noticed() -> None:
    """A donor tells a state whose roll it has changed: it does not have the chain of its version."""
    world = World("ABC", epoch=3)
    unheard = {"X": Member(ContributionId(1, 1), 3, 3)}
    world.lie("A", msg.Head, lambda m: {"state": replace(m.state, roll={**m.state.roll, **unheard})})
    world.join("D")
    world.reach(5)
    assert "X" not in world.peers["D"].state().roll
    assert any("chain" in why for why in world.peers["D"].complaints())


@fails_if(Lineage._judged, "for_it < against or (for_it == against and (model <= mine or in_vain))", "model <= mine")
def test_a_greater_lineage_of_one_member_is_not_believed() -> None:
    """C tells a version far ahead of what the two others hold: both stay, and rounds go on."""
    world = World("ABC", epoch=3)
    world.delivered.clear()
    far, head = Version(0, 10**9, 1000, "f" * 32), (1000, "f" * 32)
    world.misstate("C", lambda summary: {"heads": (head,) if summary.heads else ()})
    world.lie("C", msg.Told, lambda m: {"versions": (far,), "links": (((999, "e" * 32), head),)})
    world.reach(8, "AB", seconds=300)
    assert all(world.peers[name].state().version.epoch < 900 for name in "AB")
    assert not any(log.phase is Phase.FETCHING for name in "AB" for log in world.peers[name].replica.logs)
    asked = {ask.fragment for ask in world.sent(msg.Ask, by="AB", to="C")}
    assert asked == {None}


@fails_if(Fetching._roll, "elif mean is not None:", "elif False:")
def test_slices_are_rolled_forward_while_rounds_are_faster_than_the_state() -> None:
    """Each slice takes longer than three rounds; the newcomer gets a whole state nevertheless."""
    world = World("ABC", rules(slices=6, fetch_window=1), trains_s=1.0, epoch=3)
    world.rules_of_net.append(lambda s, t, m: 3.5 if isinstance(m, msg.Part) else None)
    world.join("D")
    world.reach(1, "D", seconds=120)
    world.rules_of_net.clear()
    epoch = world.peers["D"].epoch
    world.reach(epoch + 4, seconds=60)
    assert world.peers["A"].state().roll["D"].epoch > epoch
    world.check()


# -- digests and damage


@fails_if(Replica._mend, "if others := digests.majority(log):", "if others := []:")
def test_damage_of_one_peer_is_repaired_beside_the_rounds() -> None:
    """C's tensors change in memory: most tell another digest, so it fetches its slices, and goes on taking part."""
    world = World("ABC", epoch=3)
    world.strict = False
    damaged = world.peers["C"]
    damaged.theta[0][0] = frozenset({"damage"})
    assert world.run(60, lambda: "damage" not in damaged.theta[0][0]), world.tell()
    world.strict = True
    world.versions.clear()
    world.reach(damaged.epoch + 2)
    world.check()


def test_a_leader_that_tells_another_digest_changes_nothing() -> None:
    """One of three tells other digests than it has: nobody repairs."""
    world = World("ABC", epoch=3)
    world.misstate("A", lambda s: {"digests": tuple(tuple((epoch, "lie") for epoch, _ in one) for one in s.digests)})
    world.reach(7)
    assert not any(world.peers[name].notes("repair") for name in "BC")


@fails_if(digests.unlike, "len(outvoted) >= UNLIKE", "False")
def test_a_machine_that_computes_unlike_the_others_says_so_once() -> None:
    """It notes nothing of itself as of a peer: else it would probe itself, find that dead, and free its own leases."""
    log, said = a_log("A", "A", "B", "C"), list[e.Note]()
    for epoch in range(2 * digests.UNLIKE):
        digests.record(log, epoch, ("unlike",) * log.slices)
        said += digests.unlike(log, ["B", "C"])
    assert [note.kind for note in said] == ["mismatch"]
    assert set(log.roster.peers) == {"B", "C"}
    assert len(log.roster.outvoted) == digests.UNLIKE


# -- the exchange, revisions, the end


@fails_if(Carried.send, "if self.last is None or self.included:", "if True:")
def test_a_contribution_says_of_which_earlier_ones_it_has_the_progress() -> None:
    """The first was not counted here, and the second has its steps, too. Who counts both would count these twice."""
    carried, old, new = Carried(), ContributionId(1, 1), ContributionId(1, 2)
    for number, id in enumerate((old, new)):
        carried.merge(Version(0, 0, number, ""), None, kin=True, most=2)
        carried.send(id)
    assert (carried.oldest, carried.last) == (old, new)
    assert carried.merge(Version(0, 0, 3, ""), old, kin=True, most=2).dropped == PART


@fails_if(Exchange.contribute, "not self.is_out(event.fragment)", "True")
def test_an_exchange_taken_up_again_has_the_same_id() -> None:
    """The trainer contributes twice on one version: the second one is the first."""
    world = World("ABC", epoch=3)
    peer = world.peers["C"]
    assert world.run(20, lambda: peer.waits_for_release)
    ready = peer.replica.own.ready
    world.handle("C", e.Contribute(0, 1.0, 10, ("p", "q", "r"), (NOTHING,) * 3))
    assert peer.replica.own.ready == ready is not None


def test_an_aggregator_takes_part_without_a_weight() -> None:
    """A peer that only aggregates is an entry of commits, may lead and own, and counts in no quorum."""
    world = World("AB")
    world.join("M", role="aggregator")
    world.reach(8)
    state = world.peers["A"].state()
    assert "M" in state.roll
    assert "M" in state.plan.succession
    assert world.sent(msg.Commit, by="M")
    world.check()
