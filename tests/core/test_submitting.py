"""A peer's own submission: when it is settled, what becomes of a refused one, and when its exchange ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from p2p_diloco.core.carry import Carried as Carried
from p2p_diloco.core.events import (
    Applied,
    Carry,
    Delivered,
    Effect,
    Filled,
    Load,
    Merge,
    Note,
    Release,
    Send,
)
from p2p_diloco.core.messages import Contribution, Counted, Outdated, Plan, Stale, State
from p2p_diloco.core.passing import awaited
from p2p_diloco.core.submitting import ENDED, LEFT, MISUSED, TOO_OLD, Submitting, settled
from p2p_diloco.core.version import ContributionId, Version
from tests.core.conftest import PLAIN, Peer, fetched, next_commit, running, to


@pytest.mark.parametrize(
    ("counted", "oldest", "id", "is_settled"),
    [
        (None, (1, 1), (1, 1), False),
        ((1, 1), (1, 1), (1, 1), True),
        ((1, 1), (1, 2), (1, 2), False),
        ((1, 1), (1, 1), (1, 3), True),
        ((1, 9), (2, 1), (2, 1), False),
        ((3, 1), (2, 1), (2, 1), True),
        ((3, 1), (2, 1), (4, 1), False),
    ],
)
def test_a_submission_is_settled_once_a_part_of_it_is_counted(
    counted: tuple[int, int] | None, oldest: tuple[int, int], id: tuple[int, int], is_settled: bool
) -> None:
    """The numbers of another life don't count unless they are greater."""
    contribution = Contribution(0, Version(0, 0, 0, ""), ContributionId(*id), ContributionId(*oldest), 1.0, 1)
    assert settled(contribution, None if counted is None else ContributionId(*counted)) is is_settled


def refused(one: Any, sequence: int, epoch: int) -> list[Effect]:
    """The aggregator refuses the replica's submission at an epoch, and sends its state."""
    held = one.version(epoch)
    one.hear("c", one.state(0, epoch, plan=Plan(tuple("abc"), tuple("cb"))))
    effects = one.feed(Filled(0, held, held.digest))
    id = ContributionId(one.replica.own.incarnation, sequence)
    return [*effects, *one.hear("c", Stale(0, id, held))]


# -- the exchange


def test_an_exchange_ends_when_the_submission_is_counted(peer: Any) -> None:
    """Newer states that do not count it don't end the exchange, and the trainer merges nothing meanwhile."""
    a = running(peer, "a")
    a.contribute()
    other = replace(next_commit(a), contributions=(Counted("b", ContributionId(1, 1), 1.0, 10),))
    a.hear("c", other)
    assert Release(sent=True) not in a.feed(Applied(0, other.base, other.version.digest))
    id = ContributionId(a.replica.own.incarnation, 1)
    mine = replace(next_commit(a, epoch=2), contributions=(Counted("a", id, 1.0, 10),))
    a.hear("c", mine)
    assert Release(sent=True) in a.feed(Applied(0, mine.base, mine.version.digest))
    [load] = a.feed(Merge())
    assert [(one.version, one.carry) for one in load.shards] == [(mine.version, Carry.SUBTRACT)]


def test_the_trainers_base_stays_between_exchanges(peer: Any) -> None:
    """A successor's replica advances with every commit. Its trainer does not; otherwise its next submission would seem
    less stale than it is."""
    b = running(peer, "b")
    b.feed(Merge())
    commit = next_commit(b)
    b.take(commit)
    assert b.feed(Merge()) == [Load((), (0,))]
    [contribution] = to(b.contribute(), "c", Contribution)
    assert contribution.base == b.version(1)


def test_another_lineage_ends_the_exchange_and_is_merged(peer: Any) -> None:
    """The submission can't be counted any more, and its progress is dropped with its lineage."""
    a = running(peer, "a")
    a.contribute()
    log = a.replica.logs[0]
    other = Version(0, 70, 6, "x6")
    log.adopt(State(0, other, 0, Plan(tuple("abc"), tuple("cb")), {}, {0: "d0", 6: "x6"}), a.now)
    assert Release(sent=True) in a.feed(Merge())
    [load] = a.feed(Merge())
    assert [(one.version, one.carry) for one in load.shards] == [(other, Carry.LEFT)]


def test_a_submission_without_answer_is_sent_again_ever_more_rarely(peer: Any) -> None:
    """It counts once."""
    a = running(peer, "a")
    [contribution] = to(a.contribute(), "c", Contribution)
    a.feed(Delivered("c", contribution))
    assert to(a.pass_time(9.0), "c", Contribution) == []
    assert to(a.pass_time(2.0), "c", Contribution) == [contribution]
    a.feed(Delivered("c", contribution))
    assert to(a.pass_time(18.0), "c", Contribution) == []
    assert to(a.pass_time(3.0), "c", Contribution) == [contribution]


def test_a_submission_is_sent_again_though_its_shard_moves_on(peer: Any) -> None:
    """The answer to it was lost, and others' commits come more often than it would be sent again. The time counts from
    when it arrived: while it is on its way, it is not sent twice."""
    a = running(peer, "a")
    [contribution] = to(a.contribute(), "c", Contribution)
    assert to(a.pass_time(11.0), "c", Contribution) == []
    a.feed(Delivered("c", contribution))
    sent = []
    for epoch in range(1, 12):
        commit = next_commit(a, epoch=epoch)
        a.hear("c", commit)
        a.feed(Applied(0, commit.base, commit.version.digest))
        sent += to(a.pass_time(1.0), "c", Contribution)
    assert sent == [contribution]


def sent(effects: list[Effect]) -> list[str]:
    """The peers to which a contribution is sent."""
    return [effect.to for effect in effects if isinstance(effect, Send) and isinstance(effect.message, Contribution)]


def refer(a: Any, sender: str, named: str, version: Version | None = None) -> list[str]:
    """A refusal names the aggregator of epoch 5, or of another version; returns the peers to which a sends its
    submission until the next heartbeat."""
    assert sent(a.hear(sender, Outdated(0, version or a.version(5), 0, named))) == []
    return sent(a.pass_time(1.0))


def arrives(a: Any, epoch: int, succession: str) -> list[str]:
    """A state arrives from c; returns the peers to which a then sends its submission."""
    a.hear("c", a.state(0, epoch, plan=Plan(tuple("abc"), tuple(succession))))
    return sent(a.feed(Filled(0, a.version(epoch), f"d{epoch}")))


def handed_to_c(peer: type[Peer]) -> tuple[Any, Contribution]:
    """a's submission has reached c, the aggregator that a knows."""
    a = running(peer, "a")
    a.meet("d")
    [contribution] = to(a.contribute(), "c", Contribution)
    a.feed(Delivered("c", contribution))
    return a, contribution


def test_a_copy_follows_a_refusal_to_the_aggregator_of_a_newer_version(peer: Any) -> None:
    """That version's state may take so long that its aggregator changes again."""
    a, _ = handed_to_c(peer)
    assert refer(a, "c", "b") == ["b"]
    assert sent(a.pass_time(3.0)) == []


def test_no_copy_follows_if_the_newer_version_comes_soon(peer: Any) -> None:
    """The submission itself goes to the aggregator that this version names."""
    a, _ = handed_to_c(peer)
    a.hear("c", Outdated(0, a.version(5), 0, "b"))
    assert arrives(a, 5, "dc") == ["d"]
    assert sent(a.pass_time(3.0)) == []


def test_no_copy_follows_to_the_peer_that_gets_the_submission_itself(peer: Any) -> None:
    a, _ = handed_to_c(peer)
    a.hear("c", Outdated(0, a.version(5), 0, "b"))
    assert sent(a.lose("c")) == ["b"]
    assert sent(a.pass_time(3.0)) == []


def test_the_submission_is_sent_as_without_the_copy(peer: Any) -> None:
    """A hostile aggregator may name any peer, and any epoch. The known one gets the submission again, or is passed
    over, and each other peer that aggregates then gets it."""
    a, contribution = handed_to_c(peer)
    assert refer(a, "c", "b", a.version(10**9)) == ["b"]
    assert awaited(a.replica.logs[0]) == {"c": a.rules.commits_within}
    assert sent(a.pass_time(10.0)) == ["c"]
    a.feed(Delivered("c", contribution))
    assert arrives(a, 2, "bc") == ["b"]


def test_each_peer_gets_one_copy_and_is_followed_once(peer: Any) -> None:
    """Two peers that name each other could otherwise demand copies without end. Only the last receiver's refusal
    counts, and only one that names another live peer and a version of this lineage."""
    a, contribution = handed_to_c(peer)
    assert refer(a, "b", "d") == []  # it does not have the submission
    assert [refer(a, "c", named) for named in "acx"] == [[], [], []]
    assert refer(a, "c", "b", a.version(5, generation=1)) == []
    assert refer(a, "c", "b", a.version(0)) == []
    assert refer(a, "c", "b") == ["b"]
    assert refer(a, "c", "d") == []
    a.hear("c", Stale(0, contribution.id, a.version(1000)))
    assert arrives(a, 2, "dc") == ["d"]
    assert refer(a, "d", "b") == []  # it got a copy before
    assert arrives(a, 3, "bc") == ["b"]
    assert refer(a, "b", "d") == []  # it was named before


def test_a_new_submission_may_follow_refusals_again(peer: Any) -> None:
    a, _ = handed_to_c(peer)
    assert refer(a, "c", "b") == ["b"]
    own = a.replica.logs[0].own
    own.begin(own.mine)
    own.handed = "c"
    assert refer(a, "c", "b") == ["b"]


def test_the_last_peer_counts_its_own_submission_though_it_is_private(peer: Any) -> None:
    """Its aggregator is dead, so it has taken over."""
    a = running(peer, "a", eligible=False)
    for one in "bc":
        a.lose(one)
    assert a.averages(a.contribute()) == [["a"]]


def test_a_final_state_is_merged_once(peer: Any) -> None:
    """No exchange follows it."""
    a = peer("a", epoch=5, mode="async", stop_after_epochs=5)
    [load] = a.feed(Merge())
    assert [one.version for one in load.shards] == [a.held]
    assert a.feed(Merge()) == [Load((), ())]


# -- a refused submission


def test_a_refused_submission_is_carried_once_with_its_oldest_base(peer: Any) -> None:
    """The next submission contains it and names its base. Refused again, it is dropped, and a new submission carries
    nothing."""
    a = running(peer, "a", max_staleness=2)
    [first] = to(a.contribute(), "c", Contribution)
    assert first.base == a.version(1)
    assert Release(sent=True) in refused(a, 1, 5)
    [load] = a.feed(Merge())
    assert [one.carry for one in load.shards] == [Carry.KEEP]
    [second] = to(a.contribute(), "c", Contribution)
    assert (second.base, second.oldest) == (a.version(1), first.id)
    refused(a, 2, 9)
    [load] = a.feed(Merge())
    assert [one.carry for one in load.shards] == [Carry.OLD]
    [third] = to(a.contribute(), "c", Contribution)
    assert (third.base, third.oldest) == (a.version(9), third.id)


def test_a_refused_submission_keeps_the_base_that_it_was_sent_with(peer: Any) -> None:
    """Stepped made on a lineage that was left counts from the base with which it was first sent on this one."""
    a = running(peer, "a", max_staleness=2)
    a.contribute()
    other = Version(0, 70, 6, "x6")
    a.replica.logs[0].adopt(State(0, other, 0, Plan(tuple("abc"), tuple("cb")), {}, {0: "d0", 6: "x6"}), a.now)
    a.feed(Merge())
    [second] = to(a.contribute(), "c", Contribution)
    assert second.base == other
    later = Version(0, 99, 9, "x9")
    state = State(0, later, 0, Plan(tuple("abc"), tuple("cb")), {}, {0: "d0", 6: "x6", 9: "x9"})
    a.hear("c", state)
    a.feed(Filled(0, later, "x9"))
    a.hear("c", Stale(0, second.id, later))
    [third] = to(a.contribute(), "c", Contribution)
    assert (third.base, third.id > second.id) == (other, True)


def test_a_submission_that_is_refused_twice_is_dropped_though_no_commit_came(peer: Any) -> None:
    """Otherwise it would be refused for ever; and if all submissions are refused, no commit comes any more."""
    a = running(peer, "a", max_staleness=2)
    a.contribute()
    refused(a, 1, 5)
    a.feed(Merge())
    [second] = to(a.contribute(), "c", Contribution)
    assert Release(sent=True) in a.hear("c", Stale(0, second.id, a.held))
    [load] = a.feed(Merge())
    assert [(one.version, one.carry) for one in load.shards] == [(a.held, Carry.OLD)]
    [third] = to(a.contribute(), "c", Contribution)
    assert (third.base, third.oldest) == (a.held, third.id)


def test_a_refusal_is_forgotten_once_its_submission_is_counted(peer: Any) -> None:
    """The next submission is carried once, too, if it is refused."""
    a = running(peer, "a", max_staleness=2)
    a.contribute()
    refused(a, 1, 5)
    a.feed(Merge())
    a.contribute()
    mine = Counted("a", ContributionId(a.replica.own.incarnation, 2), 1.0, 10)
    assert Release(sent=True) in a.take(a.commit(by="c", counted=(mine,)))
    [load] = a.feed(Merge())
    assert [one.carry for one in load.shards] == [Carry.SUBTRACT]
    a.contribute()
    refused(a, 3, 9)
    [load] = a.feed(Merge())
    assert [one.carry for one in load.shards] == [Carry.KEEP]


def test_a_refusal_of_an_earlier_submission_ends_nothing(peer: Any) -> None:
    """Such a refusal came late, or twice."""
    a = running(peer, "a", max_staleness=2)
    a.contribute()
    refused(a, 1, 5)
    a.feed(Merge())
    a.contribute()
    earlier = ContributionId(a.replica.own.incarnation, 1)
    assert Release(sent=True) not in a.hear("c", Stale(0, earlier, a.held))


def test_a_refusal_ends_the_exchange_once_newer_state_has_come(peer: Any) -> None:
    """Otherwise the next submission would be as stale."""
    a = running(peer, "a", max_staleness=2)
    a.contribute()
    id = ContributionId(a.replica.own.incarnation, 1)
    assert a.hear("c", Stale(0, id, a.version(5))) == []
    a.hear("c", a.state(0, 5, plan=Plan(tuple("abc"), tuple("cb"))))
    assert Release(sent=True) in a.feed(Filled(0, a.version(5), "d5"))


def test_a_submission_that_is_too_stale_for_the_newer_state_needs_no_refusal(peer: Any) -> None:
    """No aggregator of this lineage can count it any more. It may be one that is never refused, because it always goes
    to a peer that no longer aggregates when the state that named that peer has come."""
    a = running(peer, "a", max_staleness=2)
    a.contribute()
    fetched(a, 3)
    assert a.replica.logs[0].own.mine is not None
    effects = fetched(a, 4)
    assert Release(sent=True) in effects
    text = "shard 0: this peer's submission counts as refused, because its base is 3 epochs behind"
    assert [e for e in effects if isinstance(e, Note)] == [Note("stale", text)]
    [load] = a.feed(Merge())
    assert [one.carry for one in load.shards] == [Carry.KEEP]


def test_a_submission_that_is_old_at_the_runs_end_was_not_refused(peer: Any) -> None:
    """Its progress stays at the trainer, as that of any other submission that the end overtakes."""
    a = running(peer, "a", max_staleness=2, stop_after_epochs=9)
    a.contribute()
    assert not [e for e in fetched(a, 9) if isinstance(e, Note) and e.kind == "stale"]
    assert a.replica.logs[0].own.refusals == 0
    assert a.replica.logs[0].own.uncounted == ENDED


def test_a_submission_that_is_counted_was_not_refused_however_old_it_is(peer: Any) -> None:
    """The state that counts it comes many commits later. The next submission is carried, if it is refused."""
    a = running(peer, "a", max_staleness=2)
    a.contribute()
    fetched(a, 9, counted=(("a", ContributionId(a.replica.own.incarnation, 1)),))
    assert a.replica.logs[0].own.refusals == 0
    [load] = a.feed(Merge())
    assert [one.carry for one in load.shards] == [Carry.SUBTRACT]


# -- the record of one submission, by itself

COUNTS_B = (("b", ContributionId(1, 1)),)


def submitting(**rules: int) -> Submitting:
    """The record of b's first submission, on epoch 1."""
    own = Submitting("b", replace(PLAIN, mode="async", **rules))
    own.begin(Peer.contribution(Peer.version(1)))
    return own


@pytest.mark.parametrize(
    ("state", "refused_at", "behind", "why"),
    [
        (Peer.state(0, 2, counted=COUNTS_B), None, 0, ""),
        (Peer.state(0, 5, counted=COUNTS_B), 9, 3, ""),
        (Peer.state(0, 6), 6, None, TOO_OLD),
        (Peer.state(0, 5), 5, None, MISUSED),
        (Peer.state(0, 3, version=Version(0, 70, 3, "x"), history=((3, "x"), (0, "x0"))), None, None, LEFT),
        (Peer.state(0, 8), None, None, ENDED),
        (Peer.state(0, 8), 8, None, ENDED),
    ],
)
def test_an_exchange_is_over_when_its_submission_is_settled(
    state: State, refused_at: int | None, behind: int | None, why: str
) -> None:
    """It is counted, refused with the newer state received, made on a left lineage, or the run has ended. ``uncounted``
    has the reason if it is not counted, ``behind`` the staleness if it is."""
    own = submitting(stop_after_epochs=8, max_staleness=4)
    if refused_at is not None:
        own.stale(Stale(0, ContributionId(1, 1), Peer.version(refused_at)), None)
    own.settle(state)
    assert (own.mine, own.over, own.behind, own.uncounted) == (None, True, behind, why)
    assert own.refusals == (refused_at is not None and state.version.epoch >= refused_at)


def test_a_submission_that_is_not_settled_stays() -> None:
    """Newer states do not count it, or it was refused at an epoch that this peer has not reached."""
    own = submitting()
    own.settle(Peer.state(0, 4))
    own.stale(Stale(0, ContributionId(1, 1), Peer.version(6)), Peer.state(0, 5))
    own.stale(Stale(0, ContributionId(1, 9), Peer.version(4)), Peer.state(0, 5))  # of another submission
    assert own.goes_on(None, Peer.version(1), due=False)
    assert not own.over
    own.settle(Peer.state(0, 6))
    assert own.over


def test_a_new_submission_begins_an_exchange_that_is_not_over() -> None:
    """Though the trainer has merged nothing since the last one."""
    own, state = submitting(), Peer.state(0, 2, counted=COUNTS_B)
    own.settle(state)
    own.begin(Peer.contribution(state.version, 2))
    assert not own.loads(state, Peer.version(1))


def test_a_new_submission_knows_nothing_of_the_last_ones_refusal() -> None:
    own = submitting()
    own.stale(Stale(0, ContributionId(1, 1), Peer.version(6)), None)
    own.begin(Peer.contribution(Peer.version(1), 2))
    own.settle(Peer.state(0, 7))
    assert not own.over


def test_the_trainer_merges_once_after_an_exchange_and_whenever_it_must() -> None:
    """It must when its base is of a left lineage, when it has none, and when the run has ended."""
    own, state, base = submitting(stop_after_epochs=5), Peer.state(0, 2, counted=COUNTS_B), Peer.version(1)
    own.settle(state)
    assert [own.loads(state, base), own.loads(state, base)] == [True, False]
    assert own.loads(state, None)
    assert own.loads(state, Peer.version(1, "other"))
    assert own.loads(Peer.state(0, 5), base)


def test_a_submission_is_as_old_as_the_oldest_progress_in_it() -> None:
    """It has no base if it can't be counted."""
    own, state = submitting(stop_after_epochs=5), Peer.state(0, 4)
    assert own.base_of(state, Peer.version(3), Peer.version(1)) == Peer.version(1)
    assert own.base_of(state, Peer.version(3, "other"), Peer.version(1)) is None
    assert own.base_of(Peer.state(0, 5), Peer.version(3), Peer.version(3)) is None
    assert own.base_of(None, Peer.version(3), Peer.version(3)) is own.base_of(state, None, None) is None


def test_a_refused_submission_is_carried_over_once() -> None:
    assert [submitting().gives_up(Carried(sends=sends)) for sends in (1, 2)] == [False, True]


def test_refusals_are_counted_until_the_trainer_merges() -> None:
    """Each is a sending in vain of the progress that is carried."""
    own = submitting()
    for sequence in (1, 2):
        own.begin(Peer.contribution(Peer.version(1), sequence))
        own.stale(Stale(0, ContributionId(1, sequence), Peer.version(4)), Peer.state(0, 4))
    assert own.refusals == 2


def test_before_the_first_submission_nothing_is_told_of_one(peer: Any) -> None:
    """It is neither behind nor uncounted."""
    own = peer("a", mode="async", fragments=((0, 1),)).replica.own
    assert (own.behind((0, 1)), own.uncounted((0, 1))) == ([0, 0], [])
