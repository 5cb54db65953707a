"""What worlds with a hostile member found, each as a story that fails without its mend. X is the hostile member."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import pytest

from p2p_diloco.core import applying, claims, closing, holding, leading, owning, waits
from p2p_diloco.core import events as e
from p2p_diloco.core import messages as msg
from p2p_diloco.core.exchange import Exchange
from p2p_diloco.core.fetching import Fetch, Fetching
from p2p_diloco.core.fragment import FragmentLog
from p2p_diloco.core.lineage import Lineage
from p2p_diloco.core.plan import plan_after
from p2p_diloco.core.round import Phase
from p2p_diloco.core.state import append, key_of
from p2p_diloco.core.version import Version
from tests.core.parts import a_close, a_commit, a_log, a_ready, a_state, choice_of, sent, tells
from tests.core.sabotage import fails_if
from tests.core.world import LOST, World, rules


def a_leader(*names: str, closed: bool = False) -> FragmentLog:
    """Return the log of a peer that leads, knows all others, and has their contributions and no slices."""
    log = a_log("A", *names)
    log.state = replace(log.held, plan=replace(log.held.plan, succession=names, owners=("A",) * log.slices))
    log.begin(log.held, 0.0)
    log.round.readys = {name: a_ready(log.held) for name in names}
    if closed:
        leading.close(log, choice_of(log.held, *names), 1.0)
    return log


def a_slice(log: FragmentLog, author: str, number: int, hash: str = "", sequence: int = 99) -> msg.Slice:
    """Return a slice of the author's contribution; ``hash``: another one than the author signed."""
    ready = a_ready(log.held, sequence)
    return msg.Slice(0, log.held.version, author, ready.id, number, hash or ready.hashes[number])


def test_a_slice_that_its_author_did_not_sign_is_not_passed_on() -> None:
    """Its owner would lack the right one all the same, and be blamed in its author's place."""
    log = a_leader("A", "X", closed=True)
    log.round.slices[0, "X"] = a_slice(log, "X", 0, "another")
    log.round.lacks[0, "X"] = 1.0, False
    assert not leading.pass_on(log, a_slice(log, "X", 0, "another"), 2.0)
    (asked,) = leading._fetch(log, "B", 0, "X", 2.0)
    assert sent([asked], msg.Want) == [("X", msg.Want(0, log.held.version, msg.What.SLICES, (0,)))]
    log.round.slices[0, "X"] = a_slice(log, "X", 0)
    assert sent(leading._fetch(log, "B", 0, "X", 2.0), msg.Slice) == [("B", a_slice(log, "X", 0))]


@fails_if(owning.collect, "if closed and not fits(ready, part):", "if False:")
def test_slices_that_are_not_counted_are_no_progress_and_displace_none() -> None:
    """X sends slices of ever newer contributions: a round that waited while something comes would never end."""
    log = a_leader("A", "X", closed=True)
    owning.collect(log, "X", a_slice(log, "X", 0), 2.0)
    assert log.round.moved_at == 2.0
    owning.collect(log, "X", a_slice(log, "X", 0, sequence=100), 3.0)
    assert (log.round.moved_at, log.round.slices[0, "X"]) == (2.0, a_slice(log, "X", 0))


@fails_if(applying.got, "if mean.key not in keys:", "if False:")
def test_means_of_invented_choices_are_no_progress_and_do_not_pile_up() -> None:
    log = a_leader("A", "X", closed=True)
    for number in range(9):
        applying.got(log, "X", msg.Mean(0, log.held.version, f"invented {number}", 0, "h", "X"), 2.0 + number)
    assert (log.round.moved_at, [key for key, _ in log.round.means]) == (1.0, ["invented 8"])


@fails_if(applying.got, "if is_used and mean != known and is_owned(log, mean):", "if True:")
def test_means_that_are_here_or_not_by_the_owner_are_no_progress() -> None:
    """X sends them as often as it likes: a round that waited while something comes would never end."""
    log = a_leader("A", "X", closed=True)
    assert log.round.close is not None
    mean = msg.Mean(0, log.held.version, log.round.close.key, 0, "h", "A")
    applying.got(log, "X", replace(mean, owner="X"), 2.0)
    assert log.round.moved_at == 1.0
    for now in (3.0, 4.0):
        applying.got(log, "A", mean, now)
        assert log.round.moved_at == 3.0


@fails_if(owning.collect, " and round.commit is None else", " else")
def test_while_means_are_lacking_slices_are_no_progress() -> None:
    """X goes on sending its slices. A, which knows a commit and no choice, would never ask for the commit's means."""
    log = a_log("A", "A", "B", "X")
    applying.take(log, a_commit(log, choice_of(log.held, "B", by="B"), "B"))
    owning.collect(log, "X", a_slice(log, "X", 0), 5.0)
    asked = {(want.what, want.numbers) for _, want in sent(applying.tick(log, 5.0), msg.Want)}
    assert asked == {(msg.What.MEANS, (0, 1, 2))}


@fails_if(claims.would_promise, "if now < log.round.idle.get(peer, (0, now))[1]:", "if False:")
def test_a_leader_that_did_nothing_is_promised_nothing_for_a_while() -> None:
    """X claims again as soon as it is passed over. B leads next, and must have the time to make the commit."""
    log = a_log("A", "A", "B", "X")
    log.round.leader, log.round.handed = "X", ("X", 0.0)
    now = 0.0
    while "X" not in log.round.passed:
        now += log.rules.probe_every
        waits.pass_over(log, now)
    terms = {peer: next(t for t in range(1, 9) if claims.entitled(log, peer, t)) for peer in "BX"}
    later = now + waits.TURNS * log.grace()
    for peer, when, promised in (("X", now, False), ("X", later, True), ("B", now, True)):
        assert claims.would_promise(log, peer, terms[peer], when) is promised


@fails_if(claims.yields, "if leader != round.leader or leader not in round.idle:", "if True:")
def test_a_leader_that_claims_again_gets_more_time_only_once() -> None:
    log = a_log("A", "A", "B", "X")
    log.round.leader, log.round.waited = "X", {"X": 7.0, "B": 7.0}
    claims.yields(log, 4, "X")
    assert "X" not in log.round.waited  # it may have been away
    log.round.waited["X"] = 7.0
    claims.yields(log, 5, "X")
    assert log.round.waited["X"] == 7.0
    claims.yields(log, 6, "B")
    assert "B" not in log.round.waited


@fails_if(waits.awaited, "not claims.able(log, leader)", "not log.roster.live(leader)")
def test_a_leader_that_has_never_answered_a_probe_is_passed_over() -> None:
    """X sends contributions, so it is not dead, and the plan names it; nobody knows more of it."""
    log = a_log("A", "A", "B")
    log.roster.name("X")
    log.roster.heard("X")
    log.round.leader, log.round.handed = "X", ("X", 0.0)
    for now in range(1, 60):
        waits.pass_over(log, float(now))
    assert log.round.passed == {"X"}


@fails_if(waits.pass_over, "round.passed |= set(over)", "(round.promised if claims_it else round.passed).update(over)")
def test_one_that_refuses_a_claim_that_most_promise_is_not_asked_again() -> None:
    """D has promised a later term to X, which is gone. It repeats that vote, and serves nobody else in this round."""
    log = a_log("A", "A", "B", "C", "D")
    log.state = replace(log.held, plan=replace(log.held.plan, owners=("D",) * log.slices))
    log.begin(log.held, 0.0)
    log.round.term, log.round.leader, log.round.promised, log.round.phase = 1, "A", {"B", "C"}, Phase.CLAIMING
    for now in range(1, 60):
        claims.voted(log, "D", msg.Vote(0, log.held.version, 40, "X"))
        waits.pass_over(log, float(now))
    claims.voted(log, "D", msg.Vote(0, log.held.version, 40, "X"))
    assert claims.missing(log) == []
    assert "D" not in leading._owners(log)


@fails_if(claims.overtaken, "if 2 * len(told) <= len(others):", "if True:")
def test_a_claimant_that_most_are_ahead_of_claims_a_later_term() -> None:
    """X has claimed term 40, was promised it by B and C, and is gone. A claims term 1, and neither may promise it."""
    log = a_log("A", "A", "B", "C", "X")
    log.roster.peers["X"].dead = True
    log.round.term, log.round.leader, log.round.promised, log.round.phase = 1, "A", set(), Phase.CLAIMING
    vote = msg.Vote(0, log.held.version, 40, "X")
    claims.voted(log, "B", vote)
    assert (log.round.term, log.round.leader) == (1, "A")  # one alone may lie
    claims.voted(log, "C", vote)
    assert (log.round.term, log.round.leader) == (40, "X")
    term, next_one = claims.target(log)
    assert term > 40
    assert next_one != "X"


@fails_if(claims.overtaken, "min(term, log.round.term + TURNS_AHEAD * (len(line(log)) + 1))", "term")
def test_no_vote_drives_a_term_beyond_all_bounds() -> None:
    log = a_log("A", "A", "X")
    log.round.term, log.round.leader, log.round.promised, log.round.phase = 1, "A", set(), Phase.CLAIMING
    claims.voted(log, "X", msg.Vote(0, log.held.version, 2**40, "X"))
    assert log.round.term <= 1 + claims.TURNS_AHEAD * 3


@fails_if(claims.told_choice, "if not unsound(choice, log.held, log.rules)", "")
def test_a_choice_that_a_voter_invented_is_not_completed() -> None:
    """X promises, and tells a choice of its own that counts nothing: the round is closed without it."""
    log = a_log("A", "A", "X")
    log.round.term, log.round.leader, log.round.promised = 1, "A", {"X"}
    log.round.votes["X"] = msg.Vote(0, log.held.version, 1, "A", a_close(log, msg.Choice("X", 2, ()), "X", term=2))
    assert claims.told_choice(log) is None
    sound = choice_of(log.held, "A", "X", by="X")
    log.round.served = a_close(log, sound, "X")
    assert claims.told_choice(log) == sound


@fails_if(Fetching._advance, "if p in able and not", "if not")
def test_a_fetching_peer_follows_no_commit_that_only_its_author_tells() -> None:
    """It can't know who holds the term: X would lead every newcomer away from the others."""
    log = a_log("A", "A", "B", "X")
    log.state = replace(log.held, plan=replace(log.held.plan, succession=("B", "A", "X")))
    fetching = Fetching(log.rules, [log], log.roster)
    fetch = Fetch(0, ("B",), (0, 1, 2), 0.0, 0.0, head=log.held)
    log.round.phase = Phase.FETCHING
    commit = a_commit(log, choice_of(log.held, "A", "X", by="X", term=2), "X", term=2)
    for teller, followed in (("X", log.held.version), ("B", commit.version)):
        log.keep(teller, commit)
        fetching._advance(fetch, 0.0)
        assert fetch.head is not None
        assert fetch.head.version == followed


@fails_if(leading.collect, " or is_counted(log.held, sender, ready)", "")
def test_a_contribution_of_which_a_part_is_counted_is_not_collected() -> None:
    """No choice may have it, so a leader that kept it could close no round."""
    log = a_leader("A", "X")
    log.round.readys = {}
    ready = a_ready(log.held)
    for oldest, kept in ((log.held.roll["X"].id, False), (ready.id, True)):
        leading.collect(log, "X", replace(ready, oldest=oldest), 1.0)
        assert ("X" in log.round.readys) is kept


@fails_if(Exchange.wanted, " and claims.able(log, log.round.leader):", ":")
def test_slices_go_to_any_leader_that_asks_while_the_own_one_is_gone() -> None:
    """B had claimed a late term, and is dead; C has promised it that term and can't promise A an earlier one. The other
    peers have promised A, which counts C's contribution, too."""
    world = World("ABC", epoch=3)
    log = world.log("C")
    assert world.run(20, lambda: world.peers["C"].replica.own.sent() == (3,))
    want = msg.Want(0, log.held.version, msg.What.SLICES, (0,))
    log.round.term, log.round.leader = 40, "B"
    assert not sent(world.effects("C", e.Received("A", want)), msg.Slice)
    log.roster.peers["B"].dead = True
    slices = sent(world.effects("C", e.Received("A", want)), msg.Slice)
    assert [part.number for to, part in slices if to == "A"] == [0]


# -- one invitation, many peers


def test_after_a_peer_that_contributes_nothing_later_peers_of_its_grant_are_waited_for_only_briefly() -> None:
    """They say that they work, as X did. After two such peers that goes for all of their grant, and for no other."""
    log = a_log("A", "A", "B", "X", "Y")
    for peer, grant in (("X", "one"), ("Y", "one"), ("B", "other")):
        log.roster.granted(peer, grant, 0.0)
    log.round.opened = 1.0

    def meet(peer: str, grant: str) -> None:
        log.roster.granted(peer, grant, 3.0)
        log.roster.heard(peer)
        tells(log, peer, 3, log.held.version.chain)
        closing.shows(log, peer, 3)

    def briefly() -> str:
        long = 1.0 + log.rules.round_timeout
        return "".join(peer for peer in "BXYVW" if log.roster.live(peer) and closing.waits_until(log, peer) < long)

    notes = [closing.missed(log, choice_of(log.held, "A", "B", "Y"), 2.0) for _ in range(3)]
    assert [len(of) for of in notes] == [0, 1, 0]
    meet("V", "one")
    meet("W", "other")
    assert briefly() == "XV"
    for _ in range(2):
        closing.missed(log, choice_of(log.held, "A", "B", "W", "X", "Y"), 4.0)
    assert briefly() == "XYV"
    log.roster.expire(5.0 + log.rules.costs_for)
    log.misses.clear()
    assert briefly() == ""


@fails_if(closing.waits_until, "0.0 if log.epoch % TRIED_EVERY else usual", "usual")
def test_who_never_contributes_is_waited_for_in_every_fourth_round() -> None:
    """Else it would double each round for good. Of an invitation that has cost rounds, two misses are enough. A round
    that counts it ends that."""
    log = a_log("A", "A", "B", "X", "Y")
    for peer, grant in (("B", "other"), ("X", "one"), ("Y", "two")):
        log.roster.granted(peer, grant, 0.0)
    log.round.opened = 1.0

    def waits(peer: str) -> str:
        found = ""
        for epoch in range(4, 8):
            log.state = replace(log.held, version=replace(log.held.version, epoch=epoch))
            until = closing.waits_until(log, peer)
            found += "-" if until == 1.0 else "brief" if until == 1.0 + log.usual_round() else "long"
        return found

    for missed, found in ((1, 4 * "long"), (7, 4 * "brief"), (8, "brief---")):
        while len(log.misses.get("X", ())) < missed:
            closing.missed(log, choice_of(log.held, "A", "B", "Y"), 2.0)
        for peer in "BXY":
            closing.shows(log, peer, 7)
        assert waits("X") == found
    log.misses["X"].append(False)
    assert waits("X") == 4 * "brief"
    log.roster.granted("Y", "one", 3.0)
    log.misses["Y"] = deque([True])
    assert waits("Y") == 4 * "brief"
    log.misses["Y"].append(True)
    assert waits("Y") == "brief---"


def test_after_two_late_members_all_of_their_grant_come_last() -> None:
    """Else the holder of an invitation would have each of its peers lead in turn, and each would hold up a round."""
    state = a_state(3, "A", "B", "X", "Y", "Z")
    grants = {"A": "a", "B": "b", "X": "x", "Y": "x", "Z": "x"}

    def line(*late: str) -> str:
        roll = {
            peer: replace(member, grant=grants[peer], demoted=("A", 3, 60) if peer in late else ("", 0, 0))
            for peer, member in state.roll.items()
        }
        plan = plan_after(rules(), 0, 4, roll, tuple(roll), 5, ())
        assert not set(plan.owners) & set("".join(late))
        return "".join(plan.succession)

    assert set(line("X")[-1:]) == {"X"}
    assert set(line("X", "Y")[-3:]) == {"X", "Y", "Z"}


def test_no_leader_chooses_the_next_one() -> None:
    """A choice that names its author's successors makes the plan that every peer computes."""
    state = a_state(3, "A", "B", "X")
    choice = choice_of(state, "A", "B", "X")
    vain = replace(choice, by="X", successors=("X",))
    plans = [append(state, c, key_of(0, state.version, c), ("h",) * 3, rules()).plan for c in (choice, vain)]
    assert plans[1].succession[0] != "X"
    assert plans[1] == append(state, replace(vain, successors=()), "key", ("h",) * 3, rules()).plan


# -- members that say much and do nothing


OF_ROUNDS = (msg.Claim, msg.Close, msg.Commit, msg.Head, msg.Held, msg.Mean)
OF_ROUNDS += (msg.Part, msg.Ready, msg.Slice, msg.Vote, msg.Want)
"""What a silent member doesn't send. It still answers probes and questions about what it holds."""


def silence(world: World, silent: str) -> None:
    """From now on these peers say that they live, and do nothing."""
    world.rules_of_net.append(lambda sender, to, m: LOST if sender in silent and isinstance(m, OF_ROUNDS) else None)


def stands_by(world: World, silent: str, *, sent: bool) -> None:
    """From now on this peer says that it is where A is, and, if `sent`, that its contribution is out."""

    def changes(summary: msg.Summary) -> dict[str, Any]:
        here = world.log("A").held.version
        heads, out = ((here.epoch, here.chain),), (here.epoch if sent else -1,)
        return {"heads": heads, "sent": out} if summary.heads else {}

    world.misstate(silent, changes)


@fails_if(closing.waits_until, "if log.round.term and summary is not None", "if False and summary is not None", True)
@fails_if(waits.awaited, "if leader != claims.target(log)[1] or", "if leader != round.leader or", False)
@pytest.mark.parametrize("sent", [False, True])
def test_a_successor_that_only_says_that_it_lives_is_passed_over(sent: bool) -> None:
    """B leads and dies. C, the next, answers probes, and neither claims nor contributes. E leads without it; C may say
    that its contribution is out, which the others believe, so E does not wait for it until the deadline either."""
    world = World("ABCDE", rules(round_timeout=20.0), epoch=3)
    leader, second, *others = world.line
    assert "A" in others
    silence(world, second)
    stands_by(world, second, sent=sent)
    world.kill(leader)
    assert world.run(60.0, lambda: all(world.peers[peer].epoch > 3 for peer in others))


@fails_if(claims.announce, "if log.round.led and not log.leads:", "if False:")
def test_a_leader_that_yields_says_so() -> None:
    """A yields to a claim of X, of which the others have not heard, and X dies. They don't go on waiting for A."""
    world = World("ABCX", epoch=3)
    leader, *others = world.line
    gone = others.pop()
    world.kill(gone)
    claims.yields(world.log(leader), 3, gone)
    world.run(2 * world.rules.probe_every)
    assert all(leader in world.log(peer).round.passed for peer in others)
    assert world.run(20.0, lambda: all(world.peers[peer].epoch > 3 for peer in (leader, *others)))


def say_that_they_are_ahead(world: World, silent: str) -> None:
    """From now on these peers say that they are five epochs ahead of A, and do nothing."""

    def ahead() -> Version:
        here = world.log("A").held.version
        return replace(here, samples=here.samples + 500, epoch=here.epoch + 5, chain="lie")

    def told(_: object) -> dict[str, Any]:
        links = (*world.log("A").held.links, (ahead().epoch, "lie"))
        return {"versions": (ahead(),), "links": (links,), "fresh": False}

    world.misstate(silent, lambda _: {"heads": ((ahead().epoch, "lie"),)})
    world.lie(silent, msg.Told, told)
    silence(world, silent)


def longest_wait(world: World, silent: str, seconds: float) -> float:
    """Let time pass, and return for how long at most none of the others had a new epoch."""
    end, others = world.now + seconds, [peer for name, peer in world.peers.items() if name not in silent]
    since, epoch, longest = world.now, max(peer.epoch for peer in others), 0.0
    while world.now < end:
        world.run(1.0)
        if (newest := max(peer.epoch for peer in others)) > epoch:
            since, epoch = world.now, newest
        longest = max(longest, world.now - since)
    return longest


@fails_if(Lineage._doubted, "self.roster.doubted(peer, now)", "False", "async", "X")
@fails_if(Fetching._is_vain, "if fetch.repair or", "if True or", "async", "X")
@pytest.mark.parametrize(("mode", "silent"), [("sync", "XY"), ("async", "X")])
def test_who_says_that_it_is_ahead_and_sends_nothing_stops_the_others_only_for_a_while(mode: str, silent: str) -> None:
    """One is believed in asynchronous mode, two are in synchronous mode: it may be so. The others ask for that state,
    get nothing, and go on with their own. They doubt the next such word for longer and longer."""
    world = World("ABC" + silent, rules(mode=mode, round_timeout=600.0))
    world.run(40)

    say_that_they_are_ahead(world, silent)
    before, longest = world.peers["A"].epoch, longest_wait(world, silent, 600.0)
    assert longest < 3 * 2 * world.rules.fetch_again, longest
    assert world.peers["A"].epoch > before + 100
    told = {one.peer for one in world.peers["A"].seen if isinstance(one, e.Complaint) and "ahead" in one.why}
    assert told == set(silent)  # each that was asked, not only the last one


@fails_if(Fetching._is_vain, " or bool({*self.roster.holders()} - {*fetch.donors})", "", "sync", 3)
@pytest.mark.parametrize(("mode", "withheld"), [("sync", 3), ("async", 3), ("sync", 1)])
def test_a_newcomer_whose_first_donor_sends_nothing_turns_to_the_others(mode: str, withheld: int) -> None:
    """N meets X first, and believes it. X answers, but its slices never come: it withholds them, or the path drops
    long packets. Once N knows of others it asks them what they hold. While X is alone, N goes on asking it."""
    world = World("ABX", rules(mode=mode), epoch=3)
    for number in range(withheld):
        world.rules_of_net.append(lambda s, to, m, n=number: LOST if (s, to) == ("X", "N") and is_part(m, n) else None)
    world.rules_of_net.append(lambda sender, to, _: LOST if {sender, to} & {*"AB"} and "N" in (sender, to) else None)
    newcomer = world.join("N")
    world.run(4 * world.rules.fetch_again)
    assert len([ask for ask in world.sent(msg.Ask, by="N") if ask.numbers]) >= 4
    world.rules_of_net.pop()
    world.meet("N")
    world.run((3 if withheld == 3 else 9) * world.rules.fetch_again)
    assert newcomer.epoch > 3


@fails_if(Fetching._is_vain, "else VAIN_TIMES", "else 1")
def test_a_newcomer_that_has_a_part_of_a_state_waits_longer_for_the_rest() -> None:
    """B's other slices queue behind what it sends to a round. N began anew each time, and never had them all."""
    log = a_log("N", "B", "C")
    log.state, again = None, log.rules.fetch_again
    fetching = Fetching(log.rules, [log], log.roster)
    fetching.begin([0], ["B"], 0.0, together=False)
    fetch = fetching.fetches[0]
    assert not fetching._is_vain(fetch, 2 * again - 1)
    assert fetching._is_vain(fetch, 2 * again)
    fetch.staged[0] = Version(0, 0, 3, "of B"), 0.0
    assert not fetching._is_vain(fetch, 2 * again)
    assert fetching._is_vain(fetch, 8 * again)


def is_part(message: msg.Message, number: int) -> bool:
    return isinstance(message, msg.Part) and message.number == number


def test_one_that_says_that_it_is_ahead_is_not_believed_because_the_others_are_slow_to_answer() -> None:
    """A asks B, C and X. B and C are busy, so X's answer is the only one in time. Their Summaries have told where they
    are, so A stays with them."""
    world = World("ABCX", rules(round_timeout=600.0), epoch=3)
    say_that_they_are_ahead(world, "X")
    slow = 2 * world.rules.settle
    world.rules_of_net.append(lambda sender, to, m: slow if isinstance(m, msg.Told) and sender in "BC" else None)
    world.run(60.0)
    assert world.sent(msg.Told, by="X"), "nobody asked it"
    assert not [ask for ask in world.sent(msg.Ask, to="X") if ask.fragment is not None], "its state was asked for"


def test_a_lineage_of_which_one_fragment_does_not_come_is_given_up_whole() -> None:
    """X has sent all of the first fragment, and nothing of the second for long. A keeps its own model: one fragment of
    each lineage would be neither."""
    world = World("AX", rules(fragments=2), epoch=2)
    fetching, logs = world.peers["A"].replica.fetching, world.peers["A"].replica.logs
    fetching.begin([0, 1], ["X"], world.now, together=True)
    first, since = fetching.fetches[0], world.now
    first.head, first.asked = logs[0].held, {}
    first.staged = dict.fromkeys(first.numbers, (logs[0].held.version, since))
    assert first.done
    within = 2 * world.rules.fetch_again
    fetching.tick(since + within - 1.0)
    assert set(fetching.fetches) == {0, 1}
    first.questions.add((0, "B"))  # who else was asked for this one has more time
    effects = fetching.tick(since + within)
    assert not fetching.fetches
    assert not fetching.adopt(since + within)
    assert {one.peer for one in effects if isinstance(one, e.Complaint)} >= {"X"}
    assert all(log.phase is Phase.COLLECTING for log in logs)


@fails_if(holding.was_waited_for, "log.roster.has_cost(peer)", "False")
def test_an_asynchronous_leader_that_does_nothing_leads_no_more() -> None:
    """X is the peer that the election names. It is passed over once, with the excuse that it waits for another; then
    nobody hands the lead back to it."""
    world = World("ABC", rules(mode="async", round_timeout=600.0))
    world.run(40)
    leader = world.log("A").round.leader
    world.misstate(leader, lambda _: {"awaits": ((0, ("B" if leader != "B" else "C",)),)})
    silence(world, leader)
    assert longest_wait(world, leader, 200.0) < world.rules.round_timeout / 4
    assert longest_wait(world, leader, 400.0) < world.rules.promises_within


@fails_if(FragmentLog.holds_within, "max(self.rules.promises_within, usual)", "self.rules.confirms_within")
def test_an_asynchronous_successor_that_never_confirms_holds_up_one_commit() -> None:
    """The leader waits some times as long as usual, and from then on names another one."""
    world = World("ABC", rules(mode="async", round_timeout=600.0))
    world.run(40)
    silent = world.log("A").held.plan.succession[1]
    heads = world.peers[silent].replica.roster.mine.heads
    world.misstate(silent, lambda _: {"heads": heads})
    silence(world, silent)
    assert longest_wait(world, silent, 60.0) < 2 * world.rules.promises_within
    assert longest_wait(world, silent, 300.0) < world.rules.promises_within / 2


@fails_if(leading._delivered, ">= log.epoch", "> log.epoch + 1000")
def test_a_newcomer_that_sends_no_slices_is_left_out_for_ever_longer() -> None:
    """X contributes to each round and sends no slice of it; each round waited for these, twice a grace."""
    world = World("ABC", epoch=3)
    world.rules_of_net.append(lambda s, t, m: LOST if s == "X" and isinstance(m, msg.Slice) else None)
    world.join("X")
    world.delivered.clear()
    world.reach(43, "ABC", seconds=1000)
    again = {close.base.epoch for close in world.sent(msg.Close, by="ABC") if close.attempt}
    assert 0 < len(again) < 12
    world.check()


@fails_if(leading._delivered, "kept if left >=", "kept if 1000 >=")
def test_a_newcomer_that_lately_sent_no_slices_is_left_out_unless_too_few_are_left() -> None:
    """Nor is another one with its grant counted. Who was counted before is, and everybody once the time is over."""
    log = a_leader("A", "B")
    log.round.readys |= {"X": a_ready(log.held), "Y": a_ready(log.held, grant="g"), "B": a_ready(log.held, grant="g")}
    log.undelivered = dict.fromkeys(("X", "B", "g"), (1, log.epoch))
    assert [peer for peer, _ in leading.choose(log).entries] == ["A", "B", "X", "Y"]  # two of four are too few
    log.round.readys["C"] = a_ready(log.held)
    assert [peer for peer, _ in leading.choose(log).entries] == ["A", "B", "C"]
    log.undelivered = dict.fromkeys(("X", "g"), (1, log.epoch - 1))
    assert [peer for peer, _ in leading.choose(log).entries] == ["A", "B", "C", "X", "Y"]


def test_a_submission_of_nothing_is_refused() -> None:
    """X submits nothing, with the progress since a later submission than this one, so that no roll ever counts it. The
    leader counted it again and again, in commits of nothing that all others refused."""
    world = World("ABCX", rules(mode="async"))
    nothing = {"weight": 0.0, "samples": 0, "uses": (), "hashes": (), "root": ""}
    world.lie("X", msg.Ready, lambda m: {**nothing, "oldest": replace(m.id, sequence=m.id.sequence + 1)})
    world.run(100)
    honest = [world.peers[name] for name in "ABC"]
    refused = {one.peer for peer in honest for one in peer.seen if isinstance(one, e.Complaint)}
    assert refused == {"X"}
    assert min(peer.epoch for peer in honest) > 20


@pytest.mark.parametrize("link", [5e-324, 2.0**50])
def test_no_link_that_a_member_tells_ends_the_others(link: float) -> None:
    """The ratio of two links was 0, of which no peer could take the logarithm: each ended at the commit that counted
    it. Where most links are so slow, that of an honest peer is infinitely faster."""
    world = World("AX")
    world.lie("X", msg.Ready, lambda _: {"link": link})
    world.join("B")
    for name in "AB":
        world.effects(name, e.Measured(1e6))
    world.reach(6)
    assert world.peers["A"].state().roll["X"].link == link
