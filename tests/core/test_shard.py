"""One shard's log: rounds, the plans that commits name, and who takes over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from p2p_diloco.core.election import assign
from p2p_diloco.core.events import (
    Accept,
    Applied,
    Apply,
    Average,
    Averaged,
    Changed,
    Closed,
    Delivered,
    Filled,
    Found,
    Measured,
    Merge,
    Note,
    Pause,
    Progress,
    Release,
    Restore,
    Send,
    SendFailed,
)
from p2p_diloco.core.messages import (
    Commit,
    Counted,
    Leave,
    Outdated,
    Plan,
    Probe,
    ProbeAck,
    Promise,
    State,
    TakeOver,
    Versions,
    Want,
)
from p2p_diloco.core.state import meta_of
from p2p_diloco.core.version import ContributionId, ModelVersion, Version, model_version


def meta(version: Version, term: int, plan: Plan, counted: dict[str, ContributionId]) -> bytes:
    """What a digest covers beside the tensors."""
    return meta_of(State(0, version, term, plan, counted, {}))


# -- the replicated state's canonical bytes


def test_meta_is_canonical() -> None:
    """The same state gives the same bytes on every peer: they are spelt out, and the table is sorted."""
    table = {"b": ContributionId(9, 2), "a": ContributionId(7, 1)}
    plan = Plan(("a", "b"), ("b", "a"))
    expected = b'[1,50,3,4,["a","b"],["b","a"],[["a",7,1],["b",9,2]]]'
    assert meta(Version(1, 50, 3, "x"), 4, plan, table) == expected
    assert meta(Version(1, 50, 3, "another"), 4, plan, dict(sorted(table.items(), reverse=True))) == expected


# -- a round


def test_the_aggregator_waits_for_its_group(peer: Any, life: int) -> None:
    """Every member of the group that makes progress is waited for; then the mean is taken in order of their ids."""
    a = peer("a")
    b, c = a.contribution(a.held, 1), a.contribution(a.held, 4, samples=7)
    assert a.hear("c", c) == []
    assert a.contribute() == []
    (average,) = a.hear("b", b)
    own = ContributionId(life, 1)
    counted = {"a": own, "b": b.id, "c": c.id}
    order = assign("run", 2, (0,), dict.fromkeys("abc", 1.0))[0]
    covered = meta(Version(0, 10 + 5 + 5 + 7, 2, ""), 0, Plan(("a", "b", "c"), order), counted)
    assert isinstance(average, Average)
    assert (average.shard, average.base, average.meta) == (0, a.version(1), covered)
    assert [who for who, _ in average.contributions] == ["a", "b", "c"]
    assert [c.payload for _, c in average.contributions] == ["Δ", "Δ1", "Δ4"]


def test_the_commit_goes_to_all_and_names_what_it_counts(peer: Any, life: int) -> None:
    """One commit, the same for everybody: base, version, term, weights, next plan, and the mean that was computed."""
    a = peer("a", succession="acb")
    a.contribute(samples=3)
    a.hear("b", a.contribution(a.held))
    base = a.held
    average = a.hear("c", a.contribution(a.held))
    effects = a.averaged(average, "new")
    listed = (
        Counted("a", ContributionId(life, 1), 2.0, 3),
        Counted("b", ContributionId(1, 1), 2.0, 5),
        Counted("c", ContributionId(1, 1), 2.0, 5),
    )
    plan = Plan(("a", "b", "c"), assign("run", 2, (0,), dict.fromkeys("abc", 1.0))[0])
    commit = Commit(0, base, Version(0, 23, 2, "new"), 0, "a", listed, plan)
    assert effects == [Accept(((0, "new"),)), Send("b", commit), Send("c", commit), Changed(), Release(sent=True)]
    assert effects[1].message.payload == "mean"
    assert a.held == commit.version


def test_min_peers_is_a_floor(peer: Any) -> None:
    """With fewer contributions than min_peers no outer step is taken, not even when the time is up."""
    a = peer("a", group="a", live="d", min_peers=2)
    assert a.contribute() == []
    assert a.averages(a.pass_time(60.0)) == []
    assert isinstance(a.hear("d", a.contribution(a.held))[-1], Average)


def test_start_peers_opens_the_first_round(peer: Any) -> None:
    """The founding state waits for as many; later epochs don't."""
    a = peer("a", epoch=None, group="", start_peers=2)
    a.feed(Found(0, ("zero",)))
    assert a.contribute() == []
    a.meet("b", epochs=(0,))
    assert a.averages(a.pass_time(60.0)) == []
    effects = a.hear("b", a.contribution(a.held))
    assert isinstance(effects[-1], Average)
    a.averaged(effects)
    a.lose("b")
    assert isinstance(a.contribute()[-1], Average)


def test_the_floor_holds_at_founding_too(peer: Any) -> None:
    """Of min_peers and start_peers the first round needs the greater."""
    a = peer("a", epoch=None, group="", start_peers=1, min_peers=2)
    a.feed(Found(0, ("zero",)))
    assert a.contribute() == []


def test_a_round_ends_by_time(peer: Any) -> None:
    """Who is live and makes progress is waited for until round_timeout after the first contribution, to the second."""
    a = peer("a", round_timeout=5.5)
    opened = a.now
    a.hear("b", a.contribution(a.held))
    assert a.contribute() == []
    assert a.averages(a.pass_time(5.4)) == []
    assert a.averages(a.pass_time(0.2)) == [["a", "b"]]
    assert a.replica.logs[0].waits.deadline == opened + 5.5


def test_the_time_counts_from_the_first_contribution(peer: Any) -> None:
    """Not from the last one, and not from the beginning of the epoch."""
    a = peer("a", round_timeout=5.5)
    a.pass_time(4.0)
    a.hear("b", a.contribution(a.held))
    a.pass_time(3.0)
    assert a.contribute() == []
    assert a.averages(a.pass_time(2.4)) == []
    assert a.averages(a.pass_time(0.2)) == [["a", "b"]]


@pytest.mark.parametrize("why", ["idle", "dead", "left"])
def test_nobody_waits_for_who_makes_no_progress(peer: Any, why: str) -> None:
    """A group member that is idle, dead or gone on purpose ends nobody's patience."""
    a = peer("a")
    a.contribute()
    a.hear("b", a.contribution(a.held))
    match why:
        case "idle":
            effects = a.meet("c", idle=True)
        case "dead":
            effects = a.lose("c")
        case "left":
            effects = a.hear("c", Leave(1))
    assert isinstance(effects[-1], Average)
    assert [who for who, _ in effects[-1].contributions] == ["a", "b"]


def test_who_was_not_named_is_counted_all_the_same(peer: Any) -> None:
    """A contribution from outside the group is welcome, only not waited for."""
    a = peer("a", group="a", live="d")
    a.hear("d", a.contribution(a.held))
    (average,) = a.contribute()
    assert [who for who, _ in average.contributions] == ["a", "d"]


def test_a_duplicate_changes_nothing(peer: Any) -> None:
    """The same contribution twice is one; a newer one of the same peer takes the older one's place."""
    a = peer("a")
    first, second = a.contribution(a.held, 1), a.contribution(a.held, 2)
    assert a.hear("b", first) == []
    assert a.hear("b", first) == []
    assert a.hear("b", second) == []
    assert a.hear("b", first) == []
    a.contribute()
    (average,) = a.hear("c", a.contribution(a.held))
    assert [c.id.sequence for who, c in average.contributions if who == "b"] == [2]


@pytest.mark.parametrize("sequence", [3, 2])
def test_what_is_counted_is_refused(peer: Any, sequence: int) -> None:
    """The table holds the last one counted: neither it nor any before it counts again; the next one does."""
    a = peer("a", counted=(("b", ContributionId(1, 3)),))
    (note,) = a.hear("b", a.contribution(a.held, sequence))
    assert note.kind == "refused"
    a.contribute()
    a.hear("c", a.contribution(a.held))
    assert a.replica.logs[0].round.working is None
    (average,) = a.hear("b", a.contribution(a.held, 4))
    assert len(average.contributions) == 3


def test_a_late_contribution_is_answered_with_the_commit(peer: Any) -> None:
    """Who comes after the round was closed gets the commit that closed it; who is further behind, the whole state."""
    a = peer("a", group="a", live="bc")
    base = a.held
    a.meet("b", idle=True)
    a.meet("c", idle=True)
    a.averaged(a.contribute(), "new")
    commit = a.replica.logs[0].outgoing.last
    assert a.hear("b", a.contribution(base)) == [Send("b", commit)]
    a.hear("b", a.contribution(a.held, 2))
    a.hear("c", a.contribution(a.held, 2))
    a.averaged(a.contribute(), "newer")
    assert a.hear("b", a.contribution(base)) == [Send("b", a.replica.state(0))]


def test_a_commit_is_kept_as_long_as_somebody_may_lack_it(peer: Any) -> None:
    """Until all who were there have taken it, or show that they have it; who comes later takes the whole state."""
    a = peer("a", group="a", live="bcd")
    log, base = a.replica.logs[0], a.held
    for name in "bcd":
        a.meet(name, idle=True)
    a.averaged(a.contribute(), "new")
    commit = log.outgoing.last
    assert commit is not None
    a.feed(Delivered("b", commit))
    a.feed(Delivered("c", replace(commit, version=base)))  # of an earlier one
    a.hear("c", a.contribution(a.held, 2))
    assert log.outgoing.last is commit
    a.meet("d", epochs=(a.held.epoch - 1,))
    assert log.outgoing.last is commit
    a.meet("d", epochs=(a.held.epoch,))
    assert log.outgoing.last is None
    assert a.hear("b", a.contribution(base)) == [Send("b", a.replica.state(0))]


def test_what_nobody_else_could_lack_is_not_kept(peer: Any) -> None:
    """Of two, the one that takes a commit of the other is the last to have it; with a third one it may have to tell."""
    for live, kept in (("a", False), ("ac", True)):
        b = peer("b", group="ab", live=live)
        commit = Commit(0, b.held, b.version(2), 0, "a", (), Plan(("a", "b"), ("a", "b")), "mean")
        b.hear("a", commit)
        b.feed(Applied(0, commit.base, commit.version.digest))
        assert b.held == commit.version
        assert (b.replica.logs[0].outgoing.last is not None) is kept


def take(b: Any, shard: int, maker: str = "a") -> Commit:
    """``b`` applies a commit on a shard's present version, which another peer made."""
    base = b.replica.versions[shard]
    commit = Commit(shard, base, b.version(base.epoch + 1), 0, maker, (), b.plan("abc"), f"mean of {shard}")
    b.hear(maker, commit)
    b.feed(Applied(shard, base, commit.version.digest))
    assert b.replica.versions[shard] == commit.version
    return commit


def kept(b: Any) -> list[int]:
    """The shards whose last commit is there with its payload."""
    return [log.shard for log in b.replica.logs if log.outgoing.last is not None]


def test_of_others_commits_the_newest_are_kept(peer: Any) -> None:
    """As many as half of the shards; one that is let go is answered with the state. What is collected takes room, too,
    and the oldest gives way; the next commits find room again once it is averaged."""
    b = peer("b", group="abc", fragments=(tuple(range(8)),))
    assert b.rules.payloads_kept == 4
    base = b.held
    commits = [take(b, shard) for shard in range(5)]
    assert kept(b) == [1, 2, 3, 4]
    assert b.hear("c", b.contribution(base)) == [Send("c", b.replica.state(0))]
    assert b.hear("c", b.contribution(base, shard=1)) == [Send("c", commits[1])]
    b.hear("a", b.contribution(base, shard=6))
    assert kept(b) == [2, 3, 4]
    b.hear("c", b.contribution(base, shard=6))
    b.hear("c", b.contribution(b.version(2), shard=0))
    assert b.replica.collected == 3
    assert kept(b) == [4]
    b.contribute(6)
    assert b.replica.collected == 3  # this peer's own is the trainer's memory
    take(b, 6)
    assert (b.replica.collected, kept(b)) == (1, [4, 6])


def test_a_shard_that_moves_on_is_among_the_newest(peer: Any) -> None:
    """What counts is when its last commit came."""
    b = peer("b", group="abc", fragments=(tuple(range(6)),))
    for shard in (0, 1, 2, 0):
        take(b, shard)
    take(b, 3)
    assert kept(b) == [0, 2, 3]


def test_what_this_peer_made_is_kept_however_much_comes(peer: Any) -> None:
    """It is the one that sends it, until it was taken; another's gives way."""
    a = peer("a", group="abc", fragments=((0, 1, 2, 3),))
    for who in "bc":
        a.hear(who, a.contribution(a.held))
    a.averaged(a.contribute())
    take(a, 1, "c")
    assert kept(a) == [0, 1]
    a.hear("b", a.contribution(a.version(3), shard=1))
    a.hear("c", a.contribution(a.version(3), shard=1))
    assert kept(a) == [0]


def test_the_commits_of_a_peer_that_may_be_gone_are_kept(peer: Any) -> None:
    """Who lacks one has nobody else to ask for it than those that took it."""
    b = peer("b", group="abc", fragments=((0, 1, 2, 3),))
    take(b, 0)
    take(b, 1, "c")
    b.feed(Closed("a"))
    take(b, 2, "c")
    take(b, 3, "c")
    assert kept(b) == [0, 2, 3]
    b.meet("a")


def test_submitters_keep_what_they_are_answered_with(peer: Any) -> None:
    """In asynchronous mode commits are answers: those that are kept are kept anyway."""
    b = peer("b", group="abc", fragments=((0, 1, 2),), mode="async", succession="ac")
    assert b.rules.payloads_kept == 1
    for shard in range(3):
        take(b, shard)
    assert kept(b) == [0, 1, 2]


def test_no_more_is_collected_than_has_room_but_for_the_first_shard(peer: Any) -> None:
    """Contributions come in the order of shards, so those for the first one that is collected for make room; where
    none is, and in asynchronous mode, where no round waits, all may come."""
    b = peer("b", group="abcd", fragments=((0, 1, 2, 3),))
    assert not any(b.replica.crowded(shard) for shard in range(4))
    b.hear("a", b.contribution(b.held, shard=1))
    b.hear("a", b.contribution(b.held, shard=2))
    assert [b.replica.crowded(shard) for shard in range(4)] == [False, False, True, True]
    b.hear("c", b.contribution(b.held, shard=1))
    take(b, 1)
    assert (b.replica.collected, b.replica.crowded(3)) == (1, False)
    ahead = peer("b", group="abcd", fragments=((0, 1, 2, 3),))
    for who in "acd":
        ahead.hear(who, ahead.contribution(ahead.version(2), shard=3))
    assert ahead.replica.collected == 3
    assert not ahead.replica.crowded(3)
    submits = peer("b", group="abcd", fragments=((0, 1),), mode="async")
    for who in "acd":
        submits.hear(who, submits.contribution(submits.held))
    assert not submits.replica.crowded(1)


def test_an_early_contribution_is_kept_until_its_base_is_reached(peer: Any) -> None:
    """The next aggregator may hear of a round before it has the commit that opens it."""
    b = peer("b", group="ab")
    plan = Plan(("a", "b"), ("b", "a"))
    commit = Commit(0, b.held, b.version(2), 0, "a", (), plan)
    assert b.hear("a", b.contribution(b.version(2))) == []
    (apply,) = b.hear("a", commit)
    assert apply == Apply(commit, meta(commit.version, 0, plan, {}))
    effects = b.feed(Applied(0, commit.base, "d2"))
    assert effects == [Accept(((0, "d2"),)), Send("a", Probe(b.replica.roster.mine)), Changed()]
    (average,) = b.contribute()
    assert [who for who, _ in average.contributions] == ["a", "b"]


def test_a_contribution_on_another_base_is_not_early(peer: Any) -> None:
    """Reaching one epoch by another commit than the sender did leaves its contribution out."""
    b = peer("b", group="ab")
    commit = Commit(0, b.held, b.version(2), 0, "a", (), Plan(("a", "b"), ("b",)))
    b.hear("a", b.contribution(Version(0, 20, 2, "other")))
    b.hear("a", commit)
    b.feed(Applied(0, commit.base, "d2"))
    assert b.contribute() == []


def test_a_contribution_goes_to_the_aggregator_once(peer: Any, life: int) -> None:
    """Sent when it is ready; again only when it wasn't delivered, at the next tick."""
    b = peer("b", group="ab")
    (send,) = b.contribute()
    assert send == Send("a", b.replica.logs[0].own.mine)
    assert (send.message.base, send.message.id, send.message.weight) == (b.held, ContributionId(life, 1), 2.0)
    assert (send.message.samples, send.message.payload) == (5, "Δ")
    assert b.pass_time(2.0) == []
    assert b.feed(SendFailed("a", send.message, gone=False)) == []
    assert b.pass_time(1.0) == [send]
    assert b.feed(Delivered("a", send.message)) == []
    assert b.pass_time(30.0) == []


def test_an_answer_about_an_older_contribution_is_no_answer(peer: Any) -> None:
    """A receipt for another contribution, or from another peer than it was sent to last, tells nothing."""
    b = peer("b", group="ab")
    (send,) = b.contribute()
    old = b.contribution(b.held, 9)
    b.feed(SendFailed("a", old, gone=False))
    b.feed(SendFailed("c", send.message, gone=False))
    assert b.pass_time(1.0) == []
    b.feed(Delivered("c", send.message))
    b.feed(SendFailed("a", send.message, gone=False))
    assert b.pass_time(1.0) == [send]


def test_an_aggregator_that_restarted_is_sent_the_contribution_again(peer: Any) -> None:
    """What it was handed died with its process, even when nobody noticed its death."""
    b = peer("b", group="ab")
    (send,) = b.contribute()
    b.feed(Delivered("a", send.message))
    assert b.meet("a", incarnation=2) == [send]


def test_missing_contributions_are_wanted(peer: Any) -> None:
    """Once a round has been open for a while, who is still waited for is asked, oneself never."""
    a = peer("a", group="abcd", round_timeout=50.0)
    a.hear("b", a.contribution(a.held))
    assert a.pass_time(1.9) == []
    want = Want(0, a.held)
    assert a.pass_time(1.0) == [Send("c", want), Send("d", want)]
    a.contribute()
    a.meet("d", idle=True)
    assert a.pass_time(5.0) == [Send("c", want)]


def test_missing_contributions_are_wanted_ever_more_rarely(peer: Any) -> None:
    """From the first, too: what was lost before the round began would else be waited for on and on. A round may take
    minutes, in which nobody has anything to give."""
    a = peer("a", group="ab")
    asked, began = [], a.now
    while a.now < began + 60.0:
        asked += [a.now - began for _ in a.pass_time(1.0)]
    assert asked == [2.0, 6.0, 14.0, 24.0, 34.0, 44.0, 54.0]
    a.contribute()
    assert a.pass_time(2.9) == [Send("b", Want(0, a.held))]


def test_all_that_work_are_wanted_where_too_few_are_named(peer: Any) -> None:
    """With the others of the plan gone, it takes one that it does not name."""
    a = peer("a", group="ab", live="acdx", min_peers=2)
    a.meet("c", idle=True)
    a.meet("d", role="aggregator")
    a.meet("z", **a.blank())
    for _ in range(2):
        a.refuse("b")
    a.contribute()
    assert a.pass_time(2.9) == [Send("x", Want(0, a.held))]


@pytest.mark.parametrize("why", ["ended", "not mine", "no state"])
def test_nobody_else_wants_contributions(peer: Any, why: str) -> None:
    """Whose run has ended, who doesn't aggregate, and who holds no state asks for nothing."""
    ends = 1 if why == "ended" else None
    b = peer("b" if why == "not mine" else "a", epoch=None if why == "no state" else 1, stop_after_epochs=ends)
    if why == "not mine":
        b.hear("c", b.contribution(b.held))
    assert b.pass_time(4.0) == []


def test_what_is_wanted_is_handed_over_again(peer: Any) -> None:
    """It came too early, or was lost with a lineage left behind. A wrong base is not answered."""
    b = peer("b")
    (send,) = b.contribute()
    assert b.hear("a", Want(0, b.held)) == []  # it is under way
    b.feed(Delivered("a", send.message))
    assert b.hear("a", Want(0, b.version(2))) == []
    assert b.hear("a", Want(0, b.held)) == [send]


def test_who_has_forgotten_its_claim_is_found_out(peer: Any) -> None:
    """b had claimed the term, and c handed its contribution over; then b took up another lineage and came back to this
    one, where the plan has a aggregate. a wants what c thinks it need not send; b, asked again, however often, says
    that it aggregates no more."""
    c, b = peer("c"), peer("b")
    c.hear("b", TakeOver(0, c.held, 1))
    (send,) = c.contribute()
    assert send.to == "b"
    c.feed(Delivered("b", send.message))
    assert c.hear("a", Want(0, c.held)) == [send]
    denial = Outdated(0, b.held, 0, "a")
    assert b.hear("c", send.message) == b.hear("c", send.message) == [Send("c", denial)]
    assert c.hear("b", denial) == [Send("a", send.message)]


def test_what_the_trainer_writes_over_is_not_counted_any_more(peer: Any) -> None:
    """A fork ends the exchange of what is still to be counted, the trainer goes on to something else, and comes back:
    from then on its memory holds the next contribution."""
    a = peer("a", fragments=((0,), (1,)))
    a.contribute(0)
    assert (a.replica.logs[0].own.mine is not None, list(a.replica.logs[0].round.inbox)) == (True, ["a"])
    a.replica.own.flight = None  # as after the fork
    assert a.feed(Merge())[0].due == (0,)
    assert (a.replica.logs[0].own.mine, a.replica.logs[0].round.inbox) == (None, {})


def test_a_contribution_of_a_lineage_that_wins_is_kept(peer: Any) -> None:
    """A forked sender is told so, but its contribution counts if its lineage is the greater."""
    b = peer("b", epoch=3, group="ab", succession="ba")
    theirs = Version(0, 99, 3, "other")
    b.hear("a", b.contribution(theirs))
    state = b.state(0, 3, version=theirs, plan=b.plan("ab", "ba"), history=((2, "d2"), (3, "other")))
    b.hear("a", Versions((theirs,), forked=True))
    b.hear("a", state)
    b.feed(Filled(0, theirs, "other"))
    assert b.averages(b.contribute()) == [["a", "b"]]


def test_who_is_asked_in_error_names_the_holder(peer: Any) -> None:
    """A contribution that reaches the wrong peer is kept, and answered with who should have it."""
    b = peer("b")
    assert b.hear("c", b.contribution(b.held)) == [Send("c", Outdated(0, b.held, 0, "a"))]
    assert "c" in b.replica.logs[0].round.inbox


def test_a_commit_overtaken_while_it_was_computed_is_not_made(peer: Any) -> None:
    """The mean comes back after somebody else holds the term: nothing is appended."""
    a = peer("a")
    a.contribute()
    a.hear("b", a.contribution(a.held))
    (average,) = a.hear("c", a.contribution(a.held))
    assert a.hear("c", TakeOver(0, a.held, 2))[0] == Send("c", Promise(0, a.held, 2))
    assert a.feed(Averaged(0, average.base, "new", "mean")) == []
    assert a.held == a.version(1)


def test_an_answer_for_another_base_is_void(peer: Any) -> None:
    """Answers of tensor work are told apart by the base that they started from."""
    a = peer("a", group="a", live="")
    (average,) = a.contribute()
    assert a.feed(Averaged(0, a.version(9), "new", "mean")) == []
    assert a.feed(Applied(0, average.base, "new")) == []
    assert a.held == a.version(1)
    a.averaged([average])
    assert a.held.epoch == 2
    assert a.feed(Averaged(0, average.base, "new", "mean")) == []


def test_one_outer_step_at_a_time(peer: Any) -> None:
    """While the mean is computed a further contribution starts no second computation."""
    a = peer("a", group="a", live="b")
    a.meet("b", idle=True)
    assert isinstance(a.contribute()[-1], Average)
    assert a.hear("b", a.contribution(a.held)) == []
    assert a.pass_time(30.0) == []


def test_no_outer_step_beyond_the_end(peer: Any) -> None:
    """When the last epoch is reached, a contribution on it is passed over in silence."""
    a = peer("a", group="a", live="b", stop_after_epochs=1)
    assert a.hear("b", a.contribution(a.held)) == []
    assert a.replica.logs[0].round.inbox == {}
    assert a.pass_time(10.0) == []


# -- how long who is waited for


def test_who_is_named_and_may_not_hold_the_base_is_waited_for_for_a_grace(peer: Any) -> None:
    """From the first contribution on, to the moment; it may be fetching what the others have."""
    a = peer("a", group="abd", live="b", epoch=5, round_timeout=60.0)
    a.meet("d", epochs=(3,), model=model_version([a.version(3)]))
    a.now += 0.3
    a.hear("b", a.contribution(a.held))
    assert a.contribute() == []
    assert a.replica.logs[0].closes_at() == a.now + a.rules.settle
    assert a.averages(a.pass_time(1.95)) == []
    assert a.averages(a.pass_time(0.1)) == [["a", "b"]]


def round_with(a: Any, *others: str) -> float:
    """The next round, in which others contribute at once; how long it was held open for the rest."""
    began, effects = a.now, list[Any]()
    for name in others:
        effects += a.hear(name, a.contribution(a.held, a.replica.epoch + 1))
    effects += a.contribute()
    while not a.averages(effects):
        assert a.now < began + 100.0
        effects += a.pass_time(0.5)
    assert a.averages(effects) == [["a", *others]]
    held = a.now - began
    a.averaged([e for e in effects if isinstance(e, Average)], a.version(a.replica.epoch + 1).digest)
    return round(held, 1)  # type: ignore[no-any-return]


def test_who_misses_its_grace_is_left_out_until_it_shows_a_later_epoch_and_has_a_longer_one_then(peer: Any) -> None:
    """So a peer that fetches for long costs the others one grace each time, and less and less often."""
    a = peer("a", group="abd", succession="a", live="", epoch=5, round_timeout=600.0)
    a.meet("b", eligible=False)
    shown, waited, group = 3, list[float](), a.replica.logs[0]
    for _ in range(3):
        a.meet("d", epochs=(shown,), eligible=False, model=model_version([a.version(shown)]))
        if shown > 3:
            waited.append(round_with(a, "b"))  # its word came after the plan
        assert group.state.plan.group == ("a", "b", "d")
        waited.append(round_with(a, "b"))
        assert group.state.plan.group == ("a", "b")
        waited.append(round_with(a, "b"))
        assert group.state.plan.group == ("a", "b")
        shown = a.held.epoch - 1
    assert waited == [2.0, 0.0, 0.0, 4.0, 0.0, 0.0, 8.0, 0.0]


def test_who_is_named_and_not_met_yet_is_waited_for_like_any_other(peer: Any) -> None:
    """Whoever named it knows it; until it is found dead, for longer than a grace."""
    a = peer("a", group="abx", live="b", round_timeout=60.0)
    a.hear("b", a.contribution(a.held))
    a.contribute()
    assert a.averages(a.pass_time(9.0)) == []
    assert a.averages(a.pass_time(3.0)) == [["a", "b"]]


def test_who_is_left_out_of_one_shard_has_only_a_grace_in_the_others(peer: Any) -> None:
    """Not another round_timeout: the shards of a fragment share what they know."""
    a = peer("a", group="abc", fragments=((0, 1),), round_timeout=20.0)
    a.hear("b", a.contribution(a.held), after=0.3)
    a.pass_time(19.0)
    a.feed(Progress(0.5))
    a.contribute(0, 1)
    a.hear("b", a.contribution(a.held, shard=1))
    effects = a.pass_time(1.1)
    assert a.averages(effects) == [["a", "b"]]
    a.averaged([e for e in effects if isinstance(e, Average)])
    log = a.replica.logs[1]
    assert log.waited_for() == ["c"]
    assert log.closes_at() == a.now + 2 * a.rules.settle
    assert a.averages(a.pass_time(3.9)) == []
    assert a.averages(a.pass_time(0.2)) == [["a", "b"]]


def test_who_is_named_in_one_shard_is_waited_for_in_the_others(peer: Any) -> None:
    """A peer that was counted in one shard is expected in all: no shard goes on without it alone."""
    a = peer("a", epoch=None, group="", live="", fragments=((0, 1), (2,)), round_timeout=60.0)
    plans = ("abd", "ab", "ab")
    a.feed(Restore(tuple(a.state(s, 5, plan=a.plan(group, "a")) for s, group in enumerate(plans))))
    a.meet("b")
    a.meet("d", epochs=(4, 4), model=ModelVersion())
    assert [log.waited_for() for log in a.replica.logs] == [["a", "b", "d"], ["a", "b", "d"], ["a", "b"]]


def test_who_contributes_to_one_shard_is_sure_to_come_to_the_others(peer: Any) -> None:
    """It holds the base, whatever it said last: no grace of theirs ends without it."""
    a = peer("a", group="ab", live="", fragments=((0, 1),), epoch=5, round_timeout=60.0)
    a.meet("b", epochs=(3,), model=model_version([a.version(3)] * 2))
    a.contribute(0, 1)
    a.hear("b", a.contribution(a.held))
    assert a.replica.logs[1].closes_at() is None
    assert a.averages(a.pass_time(9.0)) == []


def test_who_comes_late_is_waited_for_in_the_next_round(peer: Any) -> None:
    """It is about to stand where the others do, so it is named again; its next heartbeat need not come before."""
    a = peer("a", group="abc", succession="a", live="", round_timeout=5.0)
    for name in "bc":
        a.meet(name, eligible=False)
    assert round_with(a, "b") == 5.0
    log = a.replica.logs[0]
    assert "c" not in {*log.state.plan.group, *log.waited_for()}
    a.hear("c", a.contribution(a.version(1)))
    assert round_with(a, "b") == 5.0
    a.hear("c", a.contribution(a.version(2)))
    assert round_with(a, "b", "c") == 0.0
    assert "c" in log.state.plan.group


def test_a_peer_that_began_anew_is_not_sure_to_come(peer: Any) -> None:
    """What its earlier life has sent proves nothing."""
    a = peer("a", group="ab", live="")
    a.hear("b", a.contribution(a.held))
    a.meet("b")
    assert a.replica.logs[0].attendance.sure("b", 1)
    a.meet("b", incarnation=2, **a.blank())
    assert not a.replica.logs[0].attendance.sure("b", 1)


def test_of_another_lineage_that_is_adopted_nobody_is_known(peer: Any) -> None:
    """Its epochs are others. A state that descends from what is held is of the same, and says nothing of anybody."""
    b = peer("b", group="abc", epoch=5)
    b.hear("a", b.contribution(b.version(9)))
    b.replica.logs[0].attendance.shows("a", 8)
    b.feed(Restore((b.state(0, 7),)))
    assert b.replica.logs[0].attendance.sure("a", 8)
    b.feed(Restore((b.state(0, 7, version=b.version(7, "x"), history=((7, "x"),)),)))
    assert not b.replica.logs[0].attendance.sure("a", 8)


# -- how many it takes


@pytest.mark.parametrize(("names", "least"), [("a", 1), ("ab", 2), ("abc", 2), ("abcd", 2), ("abcde", 3)])
def test_a_quorum_is_half_of_those_that_take_part_and_two(peer: Any, names: str, least: int) -> None:
    """With less no outer step is taken, however late it is: it would follow one peer. Who is alone may."""
    for came in range(1, len(names) + 1):
        a = peer("a", group=names, round_timeout=5.0)
        assert a.replica.logs[0].waits.quorum(a.now) == least
        effects = []
        for name in names[1:came]:
            effects += a.hear(name, a.contribution(a.held))
        effects += a.contribute()
        effects += a.pass_time(9.0)
        assert a.averages(effects) == ([sorted(names[:came])] if came >= least else [])


@pytest.mark.parametrize("gone", ["dead", "left", "idle"])
def test_who_is_gone_counts_for_no_quorum(peer: Any, gone: str) -> None:
    """Of five two have come, too few; of four they are half, and of two the one that remains is alone."""
    for names, came, left in (("abcde", "ab", "c"), ("ab", "a", "b")):
        a = peer("a", group=names, round_timeout=5.0)
        effects = a.contribute()
        for name in came[1:]:
            effects += a.hear(name, a.contribution(a.held))
        effects += a.pass_time(6.0)
        assert a.averages(effects) == []
        match gone:
            case "dead":
                effects = a.lose(left)
            case "left":
                effects = a.hear(left, Leave(1))
            case _:
                effects = a.meet(left, idle=True)
        assert a.averages(effects) == [[*came]]


def test_who_has_had_its_grace_counts_for_no_quorum(peer: Any) -> None:
    """Four are named, but three of them hold no base: then one is alone."""
    a = peer("a", group="abcd", live="", epoch=5, round_timeout=60.0)
    for name in "bcd":
        a.meet(name, epochs=(3,), model=model_version([a.version(3)]))
    a.contribute()
    assert a.averages(a.pass_time(1.9)) == []
    assert a.averages(a.pass_time(0.2)) == [["a"]]


def test_a_quorum_is_no_less_than_min_peers(peer: Any) -> None:
    """Whoever takes part."""
    assert peer("a", group="ab", min_peers=3).replica.logs[0].waits.quorum(100.0) == 3
    assert peer("a", group="abcdefgh", min_peers=3).replica.logs[0].waits.quorum(100.0) == 4


def test_with_a_quorum_the_others_are_waited_for_until_the_time_is_up(peer: Any) -> None:
    """It ends no round by itself."""
    a = peer("a", group="abc", round_timeout=5.0)
    a.hear("b", a.contribution(a.held))
    a.contribute()
    assert a.averages(a.pass_time(4.9)) == []
    assert a.averages(a.pass_time(0.2)) == [["a", "b"]]


def test_a_round_waits_for_an_aggregator_that_pauses(peer: Any) -> None:
    """For as long as for anybody else that pauses: back in time it is counted, later the others are half without it."""
    for pause, who in ((6.5, ["a", "b", "c"]), (7.5, ["b", "c"])):
        a = peer("a", group="abc", round_timeout=60.0, pause_timeout=7.0)
        a.feed(Pause(True))
        effects = [*a.hear("b", a.contribution(a.held)), *a.hear("c", a.contribution(a.held)), *a.pass_time(pause)]
        a.feed(Pause(False))
        effects += a.contribute()
        assert a.averages(effects) == [who]


# -- the plan that a commit names


def next_plan(a: Any, *contributors: str) -> Plan:
    """The plan of the commit that ``a`` writes with these contributions beside its own."""
    effects = a.contribute()
    for name in contributors:
        effects = a.hear(name, a.contribution(a.held, a.replica.epoch + 1))
    effects = a.averaged(effects, f"n{a.replica.epoch}")
    return a.replica.logs[0].state.plan


def test_a_newcomer_is_named_and_may_aggregate_one_epoch_later(peer: Any) -> None:
    """Once it holds a state it is named, be it far behind still; it succeeds when it has taken part."""
    a = peer("a", group="ab", epoch=100)
    a.meet("d", epochs=(3,), model=model_version([a.version(3)]))
    plan = next_plan(a, "b")
    assert plan.group == ("a", "b", "d")
    assert sorted(plan.succession) == ["a", "b"]
    a.replica.logs[0].lead.holder = "a"  # whoever was elected: this test is about who is named next
    plan = next_plan(a, "b", "d")
    assert plan.group == ("a", "b", "d")
    assert sorted(plan.succession) == ["a", "b", "d"]


def test_who_was_never_counted_is_not_elected(peer: Any) -> None:
    """A plan names a newcomer that may still be behind; it aggregates nothing before a commit counts it, and then
    also when it pauses."""
    a = peer("a", group="abz", succession="ab")
    a.meet("z", idle=True)
    assert sorted(next_plan(a, "b").succession) == ["a", "b"]
    for contributors in ("zb", "b"):
        a.replica.logs[0].lead.holder = "a"  # whoever was elected: this test is about who is elected next
        a.meet("z", idle=True)
        assert sorted(next_plan(a, *contributors).succession) == ["a", "b", "z"]


def test_a_newcomer_that_holds_the_base_is_waited_for_in_its_round(peer: Any) -> None:
    """No plan names it yet; it is counted all the same, and succeeds then."""
    a = peer("a", group="ab")
    a.meet("d")
    a.contribute()
    assert a.averages(a.hear("b", a.contribution(a.held))) == []
    effects = a.hear("d", a.contribution(a.held))
    assert a.averages(effects) == [["a", "b", "d"]]
    a.averaged(effects)
    plan = a.replica.logs[0].state.plan
    assert (plan.group, sorted(plan.succession)) == (("a", "b", "d"), ["a", "b", "d"])


@pytest.mark.parametrize(
    ("says", "waited_for", "succeeds"),
    [
        ({}, True, True),
        ({"epochs": (10,)}, True, True),
        ({"eligible": False}, True, False),
        ({"role": "aggregator"}, False, True),
        ({"role": "aggregator", "epochs": (7,)}, False, False),
        ({"idle": True}, False, True),
        ({"epochs": (8,)}, False, True),
        ({"epochs": (7,)}, False, False),
        ({"epochs": ()}, False, False),
    ],
)
def test_who_is_named(peer: Any, says: dict[str, Any], waited_for: bool, succeeds: bool) -> None:
    """Waited for is who works and makes progress; to aggregate one must be reachable, and at most an epoch behind by
    its own word."""
    a = peer("a", group="abz", epoch=9)
    a.meet("z", idle=says.pop("idle", True), **says)
    if says == {} and waited_for:
        a.meet("z")
        a.hear("z", a.contribution(a.held))
    elif waited_for:
        a.meet("z", **says)
        a.hear("z", a.contribution(a.held))
    plan = next_plan(a, "b")
    assert ("z" in plan.group, "z" in plan.succession) == (waited_for, succeeds)


def test_a_contributor_is_up_to_date_whatever_it_said_last(peer: Any) -> None:
    """Its contribution on the base is fresher than its last summary, which may be an epoch old."""
    a = peer("a", group="abc")
    a.meet("c", epochs=(0,))
    plan = next_plan(a, "b", "c")
    assert plan.group == ("a", "b", "c")
    assert sorted(plan.succession) == ["a", "b", "c"]


@pytest.mark.parametrize(("samples", "named"), [(10, True), (9, False)])
def test_who_is_on_another_lineage_is_not_waited_for_nor_named(peer: Any, samples: int, named: bool) -> None:
    """Ahead in epochs with fewer samples: nobody waits for it here."""
    a = peer("a", group="ab", live="b")
    a.meet("z", epochs=(5,), model=ModelVersion(0, samples, 5, "other"))
    a.contribute()
    effects = a.hear("b", a.contribution(a.held))
    assert a.averages(effects) == ([] if named else [["a", "b"]])
    a.averaged(effects or a.pass_time(a.rules.round_timeout))
    assert ("z" in a.replica.logs[0].state.plan.group) == named


@pytest.mark.parametrize("gone", ["dead", "left"])
def test_who_is_gone_is_not_named(peer: Any, gone: str) -> None:
    """Not even when its contribution, sent before, is counted."""
    a = peer("a", group="abc")
    a.hear("c", a.contribution(a.held))
    a.lose("c") if gone == "dead" else a.hear("c", Leave(1))
    plan = next_plan(a, "b")
    assert plan.group == ("a", "b")
    assert sorted(plan.succession) == ["a", "b"]
    assert "c" in a.replica.logs[0].state.counted


def test_bandwidth_weighs_in_the_succession(peer: Any) -> None:
    """The election is held with what the peers say of their bandwidth, and this one has measured."""
    a = peer("a", group="abc")
    a.feed(Measured(10.0))
    a.meet("b", bandwidth=50.0)
    a.meet("c", bandwidth=0.5)
    plan = next_plan(a, "b", "c")
    assert plan.succession == assign("run", 2, (0,), {"a": 10.0, "b": 50.0, "c": 0.5})[0]


def test_who_may_not_aggregate_weighs_in_the_shares(peer: Any) -> None:
    """While a contributor that nobody can reach keeps all waiting, one on a slow link has time to aggregate, too."""
    links, elected = {"a": 10.0, "b": 10.0, "c": 0.25, "d": 2.0}, {}
    for group in ("abd", "abcd"):
        a = peer("a", group=group, succession="abd", live="", epoch=3)
        a.feed(Measured(links["a"]))
        for name in group[1:]:
            a.meet(name, bandwidth=links[name], eligible=name != "c")
        elected[group] = next_plan(a, *group[1:]).succession
    members = {name: links[name] for name in "abd"}
    assert elected == {"abd": assign("run", 4, (0,), members)[0], "abcd": assign("run", 4, (0,), members, links)[0]}
    assert [order[0] for order in elected.values()] == ["b", "d"]


def test_the_shards_of_a_fragment_share_the_burden(peer: Any) -> None:
    """One election for all the shards of a fragment at an epoch, so that nobody gets them all."""
    a = peer("a", group="a", live="", fragments=((0, 1), (2,)))
    for effect in a.contribute(0, 1):
        a.averaged([effect], f"n{effect.shard}")
    orders = assign("run", 2, (0, 1), {"a": 1.0})
    assert [log.state.plan.succession for log in a.replica.logs[:2]] == [orders[0], orders[1]]


def test_an_unreachable_aggregator_names_itself_when_nobody_else_can(peer: Any) -> None:
    """A commit always names somebody."""
    a = peer("a", group="a", live="", eligible=False)
    assert next_plan(a) == Plan(("a",), ("a",))


# -- takeover


def test_the_successor_asks_all_that_hold_state(peer: Any) -> None:
    """When the aggregator is dead the next in the succession claims the next term, and asks every live holder."""
    b = peer("b", live="acd")
    b.meet("e", **b.blank())
    b.contribute()
    effects = b.lose("a")
    request = TakeOver(0, b.held, 1)
    assert [e.kind for e in effects if isinstance(e, Note)] == ["died", "takeover"]
    assert effects[2:] == [Send("c", request), Send("d", request)]


def test_the_successor_waits_for_every_promise(peer: Any) -> None:
    """It writes nothing before all have promised: one of them may hold the commit already."""
    b = peer("b", live="acd")
    b.meet("d", idle=True)
    b.contribute()
    b.lose("a")
    b.hear("c", b.contribution(b.held))
    assert b.hear("c", Promise(0, b.held, 1)) == []
    effects = b.hear("d", Promise(0, b.held, 1))
    assert [who for who, _ in effects[-1].contributions] == ["b", "c"]
    effects = b.averaged(effects)
    (commit,) = {m for m in b.said(effects) if isinstance(m, Commit)}
    assert (commit.term, commit.aggregator) == (1, "b")


def test_a_claim_is_announced_until_its_commit_is_made(peer: Any) -> None:
    """At every tick, to all that hold state: whoever adopts the version only now knows of no claim yet."""
    b = peer("b", live="acd")
    b.contribute()
    b.lose("a")
    request = TakeOver(0, b.held, 1)
    b.hear("c", Promise(0, b.held, 1))
    assert b.pass_time(1.0) == [Send("c", request), Send("d", request)]
    b.lose("d")
    assert [e for e in b.pass_time(1.0) if e.message == request] == [Send("c", request)]
    effects = b.hear("c", b.contribution(b.held))
    b.averaged(effects)
    assert b.pass_time(1.0) == []


def test_a_claim_needs_no_promise_of_the_dead(peer: Any) -> None:
    """Who dies before it has promised holds nobody up."""
    b = peer("b", group="ab", live="ad", succession="ab")
    b.contribute()
    assert not b.averages(b.lose("a"))
    assert b.averages(b.lose("d")) == [["b"]]


@pytest.mark.parametrize("promise", [(1, 2), (1, 0), (0, 1), (2, 1)])
def test_a_promise_for_something_else_is_none(peer: Any, promise: tuple[int, int]) -> None:
    """It counts for exactly this base and this term."""
    epoch, term = promise
    b = peer("b", group="abc")
    b.contribute()
    b.lose("a")
    b.hear("c", b.contribution(b.held))
    assert b.hear("c", Promise(0, b.version(epoch), term)) == []
    assert isinstance(b.hear("c", Promise(0, b.held, 1))[-1], Average)


def test_a_promise_that_nobody_asked_for_is_ignored(peer: Any) -> None:
    """Who aggregates by the plan asks nobody."""
    a = peer("a")
    a.contribute()
    assert a.hear("b", Promise(0, a.held, 0)) == []
    assert a.replica.logs[0].lead.promised_by is None


def test_a_survivors_commit_is_adopted_not_redone(peer: Any, life: int) -> None:
    """A commit that only one survivor got before the aggregator died is the commit: it answers the question."""
    b = peer("b")
    base = b.held
    (send,) = b.contribute()
    b.feed(Delivered("a", send.message))
    b.lose("a")
    mine = Counted("b", ContributionId(life, 1), 2.0, 5)
    commit = Commit(0, base, b.version(2), 0, "a", (mine,), Plan(("b", "c"), ("b", "c")))
    (apply,) = b.hear("c", commit)
    assert apply == Apply(commit, meta(commit.version, 0, commit.plan, {"b": mine.id}))
    assert b.hear("c", Promise(0, base, 1)) == []
    effects = b.feed(Applied(0, base, "d2"))
    assert effects == [Accept(((0, "d2"),)), Changed(), Release(sent=True)]
    assert b.held == commit.version


def test_who_holds_the_commit_answers_the_question_with_it(peer: Any) -> None:
    """Asked for a promise on a base that it has left behind, a survivor sends what came after."""
    c = peer("c", group="abc")
    base = c.held
    commit = Commit(0, base, c.version(2), 0, "a", (), Plan(("b", "c"), ("b", "c")))
    c.hear("a", commit)
    c.feed(Applied(0, base, "d2"))
    assert c.hear("b", TakeOver(0, base, 1)) == [Send("b", commit)]


def test_who_holds_the_base_promises_and_hands_over_its_contribution(peer: Any) -> None:
    """The promise and the contribution go to the successor together."""
    c = peer("c")
    (send,) = c.contribute()
    c.feed(Delivered("a", send.message))
    assert c.hear("b", TakeOver(0, c.held, 1)) == [Send("b", Promise(0, c.held, 1)), Send("b", send.message)]


@pytest.mark.parametrize(("term", "sender", "wins"), [(2, "a", True), (1, "c", True), (1, "a", False), (0, "c", False)])
def test_of_two_claims_the_higher_wins(peer: Any, term: int, sender: str, wins: bool) -> None:
    """By term, then by id: the lower claim is refused and told of the higher, the higher is conceded to."""
    b = peer("b", group="abc")
    b.contribute()
    b.lose("a")
    b.meet("a")
    effects = b.hear(sender, TakeOver(0, b.held, term))
    log = b.replica.logs[0]
    if wins:
        assert effects == [Send(sender, Promise(0, b.held, term)), Send(sender, log.own.mine)]
        assert (log.lead.term, log.lead.holder, log.lead.promised_by) == (term, sender, None)
    else:
        assert effects == [Send(sender, Outdated(0, b.held, 1, "b"))]
        assert (log.lead.term, log.lead.holder) == (1, "b")


def test_a_refused_claim_is_given_up(peer: Any) -> None:
    """Told of a higher claim, a successor concedes and hands its contribution to its holder."""
    b = peer("b")
    b.contribute()
    b.lose("a")
    mine = b.replica.logs[0].own.mine
    assert b.hear("c", Outdated(0, b.held, 2, "c")) == [Send("c", mine)]
    assert b.hear("c", Promise(0, b.held, 1)) == []
    assert b.replica.logs[0].lead.holder == "c"


@pytest.mark.parametrize("refusal", [(1, 1, "a"), (1, 1, "b"), (1, 0, "c"), (2, 9, "c"), (0, 9, "c")])
def test_a_refusal_that_names_no_higher_claim_is_ignored(peer: Any, refusal: tuple[int, int, str]) -> None:
    """One's own claim, a lower one, or one on another base."""
    epoch, term, holder = refusal
    b = peer("b")
    b.contribute()
    b.lose("a")
    assert b.hear("c", Outdated(0, b.version(epoch), term, holder)) == []
    log = b.replica.logs[0]
    assert (log.lead.term, log.lead.holder, log.lead.promised_by) == (1, "b", set())


def test_a_commit_of_a_lower_term_is_refused(peer: Any) -> None:
    """After a promise to a living successor, the old aggregator's commit is answered with the higher claim."""
    c = peer("c")
    c.hear("b", TakeOver(0, c.held, 1))
    commit = Commit(0, c.held, c.version(2), 0, "a", (), Plan(("a", "c"), ("a", "c")))
    assert c.hear("a", commit) == [Send("a", Outdated(0, c.held, 1, "b"))]
    assert c.replica.logs[0].round.working is None


def test_a_commit_of_a_lower_term_stands_when_the_claimant_is_gone(peer: Any) -> None:
    """Promises are for the sake of one lineage: with the claimant dead there is no other."""
    c = peer("c")
    c.hear("b", TakeOver(0, c.held, 1))
    c.lose("b")
    log = c.replica.logs[0]
    log.lead.holder, log.lead.term = "b", 1  # as before its death was noticed and c made a claim of its own
    commit = Commit(0, c.held, c.version(2), 0, "a", (), Plan(("a", "c"), ("a", "c")))
    assert isinstance(c.hear("a", commit)[-1], Apply)


def test_a_commit_passed_on_by_another_stands(peer: Any) -> None:
    """Somebody holds it already, so it is in the log: terms decide who may write, not what was written."""
    c = peer("c", group="abcd")
    c.hear("b", TakeOver(0, c.held, 1))
    commit = Commit(0, c.held, c.version(2), 0, "a", (), Plan(("a", "c"), ("a", "c")))
    assert isinstance(c.hear("d", commit)[-1], Apply)


def test_the_claimants_own_commit_is_welcome(peer: Any) -> None:
    """Who was promised the term writes under it."""
    c = peer("c")
    c.hear("b", TakeOver(0, c.held, 1))
    commit = Commit(0, c.held, c.version(2), 1, "b", (), Plan(("b", "c"), ("b", "c")))
    assert c.hear("b", commit) == [Apply(commit, meta(commit.version, 1, commit.plan, {}))]


def test_a_promiser_that_restarted_is_asked_again(peer: Any) -> None:
    """Its promise died with its process."""
    b = peer("b", live="acd")
    b.meet("d", idle=True)
    b.contribute()
    b.lose("a")
    b.hear("c", b.contribution(b.held))
    b.hear("c", Promise(0, b.held, 1))
    b.meet("c", incarnation=2)
    assert b.hear("d", Promise(0, b.held, 1)) == []
    assert Send("c", TakeOver(0, b.held, 1)) in b.pass_time(1.0)
    assert isinstance(b.hear("c", Promise(0, b.held, 1))[-1], Average)


def test_predecessors_are_passed_over_in_order(peer: Any) -> None:
    """With the first two dead the third claims a term that is higher than the second's would have been."""
    c = peer("c", group="abcd")
    c.contribute()
    first = c.lose("a")
    assert [m for m in c.said(first) if isinstance(m, TakeOver)] == []
    assert Send("b", c.replica.logs[0].own.mine) in first  # handed to the one that should take over
    effects = c.lose("b")
    assert Send("d", TakeOver(0, c.held, 2)) in effects


def test_a_successor_without_state_is_passed_over(peer: Any) -> None:
    """Who restarted with nothing can't continue the log."""
    c = peer("c", group="abc")
    c.contribute()
    c.meet("b", incarnation=2, **c.blank())
    assert "takeover" in [e.kind for e in c.lose("a") if isinstance(e, Note)]


def test_an_aggregator_that_lost_its_state_is_replaced(peer: Any) -> None:
    """It is there, but can't continue the log: the successor does, without waiting for a timeout."""
    b = peer("b")
    b.contribute()
    effects = b.meet("a", incarnation=2, **b.blank())
    assert Send("c", TakeOver(0, b.held, 1)) in effects


def test_the_rest_of_the_group_follows_the_succession(peer: Any) -> None:
    """When all named successors are gone, the group's other members continue, in its order."""
    c = peer("c", group="abc", succession="a")
    c.contribute()
    c.lose("a")
    effects = c.lose("b")
    assert "takeover" in [e.kind for e in effects if isinstance(e, Note)]
    assert c.replica.logs[0].lead.candidates() == ["a", "b", "c"]
    assert c.replica.logs[0].lead.term == 2


def test_with_the_whole_line_gone_the_lowest_of_the_others_continues(peer: Any) -> None:
    """Whoever holds the state and can be reached may: a run doesn't end with the peers that a commit named."""
    e = peer("e", group="ab", succession="a", live="abdf")
    e.meet("c", eligible=False)
    e.lose("a")
    effects = e.lose("b")
    assert e.replica.logs[0].lead.target() == (3, "d")
    assert not [n for n in effects if isinstance(n, Note) and n.kind == "takeover"]
    effects = e.lose("d")
    assert "takeover" in [n.kind for n in effects if isinstance(n, Note)]
    assert e.replica.logs[0].lead.term == 3


def test_who_can_not_be_reached_does_not_take_over(peer: Any) -> None:
    """A peer in client mode may be waited for, but is passed over in the succession."""
    c = peer("c", group="abc", succession="a")
    c.meet("b", eligible=False)
    c.contribute()
    assert "takeover" in [e.kind for e in c.lose("a") if isinstance(e, Note)]


def test_nobody_left_to_continue(peer: Any) -> None:
    """An unreachable peer outside the plan waits for the holder to come back, and claims nothing."""
    e = peer("e", group="a", live="a", eligible=False)
    e.lose("a")
    assert e.replica.logs[0].lead.target() == (0, "a")
    assert e.pass_time(20.0) == []


def test_a_takeover_starts_the_rounds_clock(peer: Any) -> None:
    """The survivors have round_timeout from the takeover on to hand their contributions over."""
    b = peer("b", live="acd", round_timeout=5.5)
    b.contribute()
    b.pass_time(4.0)
    b.lose("a")
    b.hear("c", b.contribution(b.held))
    for name in "cd":
        b.hear(name, Promise(0, b.held, 1))
    assert b.averages(b.pass_time(5.4)) == []
    assert b.averages(b.pass_time(0.2)) == [["b", "c"]]


def test_a_new_epoch_forgets_the_claims_of_the_last(peer: Any) -> None:
    """Terms count within one epoch: the next begins at 0 with whoever the commit names."""
    b = peer("b")
    b.contribute()
    b.lose("a")
    commit = Commit(0, b.held, b.version(2), 0, "a", (), Plan(("b", "c"), ("c", "b")))
    b.hear("c", commit)
    b.feed(Applied(0, commit.base, "d2"))
    log = b.replica.logs[0]
    assert (log.lead.term, log.lead.holder, log.lead.promised_by, log.round.inbox) == (0, "c", None, {})


def test_those_whom_a_commit_names_are_looked_for(peer: Any) -> None:
    """A plan may name peers that this one has never met: they are probed from then on."""
    b = peer("b", group="ab")
    commit = Commit(0, b.held, b.version(2), 0, "a", (), Plan(("b", "x"), ("a", "b", "y")))
    b.hear("a", commit)
    b.feed(Applied(0, commit.base, "d2"))
    probed = {e.to for e in b.feed_tick() if isinstance(e, Send) and isinstance(e.message, Probe)}
    assert {"x", "y"} <= probed


# -- what is kept


def test_the_state_holds_what_the_commits_said(peer: Any, life: int) -> None:
    """Version, term of its commit, plan, the table of the last counted, the ancestors."""
    a = peer("a", group="a", live="b", counted=(("z", ContributionId(3, 3)),))
    a.hear("b", a.contribution(a.held))
    a.averaged(a.contribute(), "new")
    counted = {"a": ContributionId(life, 1), "b": ContributionId(1, 1), "z": ContributionId(3, 3)}
    plan = a.replica.logs[0].state.plan
    history = {0: "d0", 1: "d1", 2: "new"}
    assert a.replica.state(0) == State(0, Version(0, 20, 2, "new"), 0, plan, counted, history)


def test_ancestors_are_remembered_up_to_a_limit(peer: Any) -> None:
    """The newest ``history`` of them, so that a state's size doesn't grow with the run."""
    a = peer("a", group="a", live="", history=3)
    for n in range(5):
        a.averaged(a.contribute(), f"n{n}")
        assert len(a.replica.logs[0].state.history) <= 3
    assert a.replica.state(0).history == {4: "n2", 5: "n3", 6: "n4"}


def test_a_state_carries_no_more_ancestors_than_the_limit(peer: Any) -> None:
    """Not even one that was fetched from a peer that remembers more."""
    a = peer("a", epoch=9, group="a", live="", history=3)
    assert a.replica.state(0).history == {7: "d7", 8: "d8", 9: "d9"}


def test_relations(peer: Any) -> None:
    """Equal, ancestor, fork, or ahead: told by generation, epoch, and the remembered digests."""
    log = peer("a", epoch=5).replica.logs[0]
    version = peer.version
    assert log.relation(version(5)) == "equal"
    assert log.relation(version(3)) == "ancestor"
    assert log.relation(version(3, "other")) == "fork"
    assert log.relation(version(5, "other")) == "fork"
    assert log.relation(version(6, "other")) == "ahead"
    assert log.relation(version(6, samples=50)) == "ahead"  # an empty step
    assert log.relation(version(6, samples=49)) == "fork"
    assert log.relation(version(3, generation=1)) == "fork"
    assert log.relation(version(7, generation=1)) == "fork"
    assert peer("a", epoch=None).replica.logs[0].relation(version(0)) == "ahead"


def test_older_than_memory_counts_as_an_ancestor(peer: Any) -> None:
    """What came before the remembered ancestors is told by its samples only; what is missing among them is a fork."""
    a = peer("a", epoch=None, group="")
    a.feed(Restore((a.state(0, 9, history=((5, "d5"), (7, "d7"), (9, "d9"))),)))
    log = a.replica.logs[0]
    assert log.relation(a.version(4, "any")) == "ancestor"
    assert log.relation(a.version(4, samples=91)) == "fork"
    assert log.relation(a.version(6, "any")) == "fork"
    assert log.relation(a.version(5, "any")) == "fork"


def test_probes_pass_while_a_round_waits(peer: Any) -> None:
    """Whoever is waited for is probed at every tick; a peer that answers is not suspected."""
    a = peer("a")
    a.contribute()
    for _ in range(3):
        asked = [e.to for e in a.feed_tick() if isinstance(e, Send) and isinstance(e.message, Probe)]
        assert {"b", "c"} <= set(asked)
        for name in asked:
            a.hear(name, ProbeAck(a.about()))


def test_a_claimant_that_has_moved_on_claims_nothing(peer: Any) -> None:
    """When the one that was promised the term stands beyond that epoch itself, the commit it adopted is taken."""
    c = peer("c")
    c.hear("b", TakeOver(0, c.held, 1))
    c.meet("b", epochs=(2,), model=model_version([c.version(2)]))
    commit = Commit(0, c.held, c.version(2), 0, "a", (), Plan(("a", "c"), ("a", "c")))
    assert isinstance(c.hear("a", commit)[-1], Apply)


def test_a_commit_goes_to_everybody(peer: Any) -> None:
    """Also to a newcomer that still fetches: it comes to apply it once the state is there."""
    a = peer("a", group="ab", live="bd")
    a.meet("d", idle=True)
    a.meet("n", **a.blank())
    a.meet("x", **a.blank())
    a.hear("x", a.contribution(a.held))
    a.hear("b", a.contribution(a.held))
    effects = a.averaged(a.contribute())
    assert [e.to for e in effects if isinstance(e, Send)] == ["b", "d", "n", "x"]


def commits(p: Any, first: int, last: int) -> list[Commit]:
    plan = p.plan("abc")
    return [Commit(0, p.version(e), p.version(e + 1), 0, "a", (), plan) for e in range(first, last)]


def applied(p: Any, effects: list[Any]) -> list[Any]:
    """Carry out the one Apply among the effects, with the digest that its commit names."""
    (work,) = [e for e in effects if isinstance(e, Apply)]
    commit = work.commit
    return p.feed(Applied(commit.shard, commit.base, commit.version.digest))  # type: ignore[no-any-return]


def test_commits_that_come_during_a_fetch_are_applied_after_it(peer: Any) -> None:
    """In whatever order they came, one after another, from the state that was fetched on."""
    n = peer("n", epoch=None, group="")
    n.meet("a", model=model_version([n.version(1)]), epochs=(1,))
    first, second, third = commits(n, 1, 4)
    for commit in (third, first, second):
        assert n.hear("a", commit) == []
    n.hear("a", n.state(0, 1))
    effects = n.feed(Filled(0, n.version(1), "d1"))
    for epoch in (2, 3, 4):
        effects = applied(n, effects)
        assert n.held == n.version(epoch)
    assert not any(isinstance(e, Apply) for e in effects)
    assert n.replica.logs[0].incoming.commits == {}


def test_so_many_commits_are_kept_and_the_newest(peer: Any) -> None:
    """A fetch that takes very long must not fill the memory; commits that a state has overtaken are dropped."""
    n = peer("n", epoch=None, group="", commits_kept=2)
    n.meet("a", model=model_version([n.version(1)]), epochs=(1,))
    for commit in commits(n, 1, 5):
        n.hear("a", commit)
    assert sorted(n.replica.logs[0].incoming.commits) == [n.version(3), n.version(4)]
    n.hear("a", n.state(0, 4))
    effects = n.feed(Filled(0, n.version(4), "d4"))
    assert n.replica.logs[0].incoming.commits == {}
    applied(n, effects)
    assert n.held == n.version(5)


def test_what_did_not_arrive_is_sent_again(peer: Any) -> None:
    """A commit or a state that a living peer has not got goes out with the next ticks, so often and no more."""
    a = peer("a", resends=2)
    for name in "bc":
        a.hear(name, a.contribution(a.held))
    effects = a.averaged(a.contribute())
    (commit,) = [e.message for e in effects if isinstance(e, Send) and e.to == "b"]
    for _ in range(2):
        assert a.feed(SendFailed("b", commit, gone=False)) == []
        assert [e for e in a.pass_time(1.0) if isinstance(e, Send)] == [Send("b", commit)]
        assert not any(isinstance(e, Send) for e in a.pass_time(1.0))
    a.feed(SendFailed("b", commit, gone=False))
    assert not any(isinstance(e, Send) for e in a.pass_time(3.0))
    a.feed(SendFailed("c", a.replica.state(0), gone=False))
    assert [e for e in a.pass_time(1.0) if isinstance(e, Send)] == [Send("c", a.replica.state(0))]


def test_what_is_outdated_or_for_the_dead_is_not_sent_again(peer: Any) -> None:
    """Only what makes the present version, and only to the living."""
    a = peer("a")
    old = commits(a, 0, 1)[0]
    a.feed(SendFailed("b", replace(old, version=a.version(0)), gone=False))
    assert not any(isinstance(e, Send) for e in a.pass_time(1.0))
    a.feed(SendFailed("b", old, gone=False))
    a.lose("b")
    assert not any(isinstance(e, Send) and e.message is old for e in a.pass_time(2.0))


def test_the_one_behind_hides_nobody(peer: Any) -> None:
    """Who isn't up to date is left out of the next plan, whoever comes after it in order isn't."""
    b = peer("b", group="abc", succession="bac")
    b.meet("a", epochs=(0,))
    b.meet("a", epochs=(0,), idle=True)
    effects = [*b.contribute(), *b.hear("c", b.contribution(b.held))]
    b.averaged(effects)
    assert b.replica.logs[0].state.plan.group == ("b", "c")


def test_a_contributor_from_outside_the_plan_may_succeed(peer: Any) -> None:
    """It has taken part, so it is up to date: that it wasn't named doesn't matter."""
    a = peer("a", group="a", live="d")
    a.hear("d", a.contribution(a.held))
    a.averaged(a.contribute())
    assert sorted(a.replica.logs[0].state.plan.succession) == ["a", "d"]


def test_after_a_claim_that_came_to_nothing_the_round_is_closed(peer: Any) -> None:
    """A mean that came back after a promise is thrown away, but when the claimant dies it is computed again."""
    a = peer("a")
    a.contribute()
    a.hear("b", a.contribution(a.held))
    effects = a.hear("c", a.contribution(a.held))
    a.hear("c", TakeOver(0, a.held, 2))
    assert a.averaged(effects) == []
    a.lose("c")
    assert a.averages(a.hear("b", Promise(0, a.held, a.replica.logs[0].lead.term))) == [["a", "b", "c"]]


def test_everyone_who_came_early_to_the_wrong_peer_is_told(peer: Any) -> None:
    """When the base is reached, each early contributor learns who aggregates."""
    b = peer("b", group="abcd")
    for name in "cd":
        b.hear(name, b.contribution(b.version(2)))
    commit = Commit(0, b.held, b.version(2), 0, "a", (), Plan(tuple("abcd"), tuple("abcd")))
    b.hear("a", commit)
    effects = b.feed(Applied(0, commit.base, "d2"))
    assert [e.to for e in effects if isinstance(e, Send) and isinstance(e.message, Outdated)] == ["c", "d"]


def test_a_claim_that_its_holder_denies_is_none(peer: Any) -> None:
    """When the claimant itself names another, or that one asks, the contribution is handed on."""
    c = peer("c")
    c.hear("b", TakeOver(0, c.held, 1))
    (send,) = c.contribute()
    c.feed(Delivered("b", send.message))
    told = [*c.hear("b", Outdated(0, c.held, 0, "a")), *c.hear("a", Want(0, c.held))]
    assert Send("a", send.message) in told


# -- those whom a commit names, before they are met


def test_a_named_aggregator_that_is_not_met_yet_is_not_replaced(peer: Any) -> None:
    """A commit names it: it is there until a dial is refused or a probe stays unanswered, and gets its contribution."""
    c = peer("c", group="abc", succession="bca", live="a")
    (sent,) = [e for e in c.contribute() if isinstance(e, Send)]
    assert sent.to == "b"
    assert not [e for e in c.pass_time(9.0) if isinstance(e, Note)]
    assert "takeover" in [e.kind for e in c.pass_time(3.0) if isinstance(e, Note)]


def test_a_named_contributor_that_is_not_met_yet_is_waited_for(peer: Any) -> None:
    """The round does not end without it, unless it is found dead."""
    a = peer("a", group="abc", live="b", round_timeout=60.0)
    a.contribute()
    assert not [e for e in a.hear("b", a.contribution(a.held)) if isinstance(e, Average)]
    assert a.replica.logs[0].waited_for() == ["c"]
    assert [e for e in a.lose("c") if isinstance(e, Average)]


def test_who_only_aggregates_comes_into_the_succession(peer: Any) -> None:
    """It never contributes, so being up to date is enough."""
    a = peer("a", group="a")
    a.meet("h", role="aggregator")
    (average,) = [e for e in a.contribute() if isinstance(e, Average)]
    commit = a.replica.logs[0].round.draft
    assert average.base == commit.base
    assert set(commit.plan.succession) == {"a", "h"}
    assert commit.plan.group == ("a",)


def test_what_came_early_on_a_base_passed_by_is_forgotten(peer: Any) -> None:
    """So that no more is kept than may still count: contributions of another lineage's present, and of the future."""
    b = peer("b", group="ab", live="acd")
    other, future = Version(0, 30, 3, "other"), b.version(5)
    for name, base in (("a", b.version(2, "passed")), ("c", other), ("d", future)):
        b.hear(name, b.contribution(base))
    assert set(b.replica.logs[0].incoming.early) == {"a", "c", "d"}
    b.hear("a", b.state(0, 3))
    b.feed(Filled(0, b.version(3), "d3"))
    assert set(b.replica.logs[0].incoming.early) == {"c", "d"}


def test_what_came_early_from_a_stranger_is_kept_until_it_is_met(peer: Any) -> None:
    """It was told that its contribution is here. A stranger that is found dead leaves nothing behind."""
    b = peer("b", group="ab", succession="ba", live="a")
    early = b.replica.logs[0].incoming.early
    for name in "xyz":
        b.hear(name, b.contribution(b.version(2)))
    assert set(early) == {"x", "y", "z"}
    b.meet("x")
    b.hear("y", Leave(1))
    assert set(early) == {"x", "z"}
    b.hear("y", b.contribution(b.version(2)))
    b.pass_time(12.0)
    assert set(early) == {"x"}
    b.lose("x")
    b.hear("a", b.state(0, 2, plan=b.plan("bx")))
    b.feed(Filled(0, b.version(2), "d2"))
    assert set(b.replica.logs[0].round.inbox) == {"x"}


def test_the_claimant_takes_the_old_aggregators_commit(peer: Any) -> None:
    """It was written after all: that is what the claimant asks for."""
    b = peer("b")
    b.contribute()
    b.lose("a")
    commit = Commit(0, b.held, b.version(2), 0, "a", (), Plan(("a", "b"), ("a", "b")))
    assert isinstance(b.hear("a", commit)[-1], Apply)


def test_nobody_is_refused_for_the_sake_of_its_own_claim(peer: Any) -> None:
    """The holder of the highest claim may write under whichever it has."""
    c = peer("c")
    c.hear("b", TakeOver(0, c.held, 2))
    commit = Commit(0, c.held, c.version(2), 1, "b", (), Plan(("b", "c"), ("b", "c")))
    assert isinstance(c.hear("b", commit)[-1], Apply)


def test_a_plan_names_who_takes_part() -> None:
    """Whoever contributes, and whoever may aggregate."""
    plan = Plan(("a", "b"), ("b", "c"))
    assert [plan.names(peer) for peer in "abcd"] == [True, True, True, False]


def test_a_refusal_tells_whose_claim_is_the_highest(peer: Any) -> None:
    """Its term and its holder are taken over, and a lower claim is refused with them from then on."""
    b = peer("b", group="abc")
    b.hear("a", Outdated(0, b.held, 3, "c"))
    log = b.replica.logs[0]
    assert (log.lead.term, log.lead.holder) == (3, "c")
    assert b.said(b.hear("a", TakeOver(0, b.held, 2))) == [Outdated(0, b.held, 3, "c")]
