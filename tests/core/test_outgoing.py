"""What brings other peers to the present version: the last commit while a peer may lack it, and repeated messages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from p2p_diloco.core.events import Delivered, Send, SendFailed
from p2p_diloco.core.messages import Commit, State
from p2p_diloco.core.outgoing import Outgoing
from tests.core.conftest import PLAIN, Peer, commit_on, commits, dies, roster_of

# -- the last commit


def test_a_commit_is_kept_while_a_peer_may_lack_it(peer: Any) -> None:
    """Until all live peers hold the version; a newcomer takes the whole state."""
    a = peer("a", group="a", live="bcd")
    log, base = a.replica.logs[0], a.held
    for name in "bcd":
        a.meet(name, idle=True)
    a.averaged(a.contribute(), "new")
    commit = log.outgoing.last
    assert commit is not None
    a.feed(Delivered("b", commit))
    a.meet("d", epochs=(a.held.epoch - 1,))
    a.hear("c", a.contribution(a.held, 2))
    assert log.outgoing.last is commit
    a.feed(Delivered("d", replace(commit, version=base)))  # of an earlier one
    assert log.outgoing.last is commit
    a.meet("d", epochs=(a.held.epoch,))
    assert log.outgoing.last is None
    assert a.hear("b", a.contribution(base)) == [Send("b", a.replica.state(0))]


def test_a_commit_that_no_third_peer_can_lack_is_not_kept(peer: Any) -> None:
    """Of two peers, the one that applies the other's commit is the last to hold it. With a third one it may have to
    send it on."""
    for live, kept in (("a", False), ("ac", True)):
        b = peer("b", group="ab", live=live)
        commit = b.commit(plan=b.plan("ab"))
        b.take(commit)
        assert b.held == commit.version
        assert (b.replica.logs[0].outgoing.last is not None) is kept


def test_the_questions_of_live_peers_for_one_version_are_counted(peer: Any) -> None:
    """A new version begins the count anew. Strangers are not counted: they could be without number."""
    a = peer("a")
    outgoing, state, base = Outgoing(PLAIN, roster_of("a", "b")), a.replica.state(0), a.version(0)
    [last] = commits(a, 0, 1)
    for _ in range(2):
        outgoing.appended(last)
        outgoing.renew(state)
        outgoing.lacking.discard("b")
        for _ in range(PLAIN.resends):
            assert outgoing.answer(state, "b", base) == [Send("b", last)]
        assert outgoing.answer(state, "b", base) == [Send("b", state)]
    for _ in range(9):
        assert outgoing.answer(state, "stranger", base) == [Send("stranger", last)]


def test_a_question_is_answered_with_one_commit_or_the_state(peer: Any) -> None:
    """A peer that can't apply commits asks again for each."""
    a = peer("a", epoch=2)
    outgoing, state = Outgoing(PLAIN, roster_of("a", "b")), a.replica.state(0)
    outgoing.recent = commits(a, 0, 2)
    outgoing.appended(outgoing.recent[-1])
    assert outgoing.answer(state, "b", a.version(1)) == [Send("b", outgoing.recent[1])]
    assert outgoing.answer(state, "b", a.version(0)) == [Send("b", state)]


# -- what is sent again


def test_a_commit_or_state_that_did_not_arrive_is_sent_again(peer: Any) -> None:
    """With the next ticks, a bounded number of times."""
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


def test_an_outdated_commit_is_not_sent_again_nor_is_one_to_a_dead_peer(peer: Any) -> None:
    a = peer("a")
    old = commits(a, 0, 1)[0]
    a.feed(SendFailed("b", replace(old, version=a.version(0)), gone=False))
    assert not any(isinstance(e, Send) for e in a.pass_time(1.0))
    a.feed(SendFailed("b", old, gone=False))
    a.lose("b")
    assert not any(isinstance(e, Send) and e.message is old for e in a.pass_time(2.0))


# -- what is kept, by itself


def outgoing(others: str = "acd") -> tuple[Outgoing, Commit, State]:
    """The Outgoing of b, which has applied a's commit on epoch 1; with the commit and the state."""
    made, commit = Outgoing(PLAIN, roster_of("b", others)), commit_on(Peer.state(0, 1))
    made.appended(commit)
    return made, commit, Peer.state(0, 2)


def test_the_last_commit_brings_a_peer_that_is_one_behind_to_here() -> None:
    """Any other gets the state, and so does a peer that could not apply the commit."""
    out, commit, state = outgoing()
    assert out.news(state, "c", commit.base) == [Send("c", commit)]
    assert out.news(state, "c", Peer.version(0)) == out.news(state, "c", None) == [Send("c", state)]
    out.roster.summarized("c", replace(out.roster.mine, unlike=True))
    assert out.news(state, "c", commit.base) == [Send("c", state)]
    assert out.news(state, "d", commit.base) == [Send("d", commit)]


def test_the_last_commit_goes_when_no_live_peer_but_its_author_can_lack_it() -> None:
    out, commit, _ = outgoing()
    out.reached("c")
    assert out.last is commit
    out.reached("d")
    assert out.last is None
    assert outgoing("a")[0].last is None


def test_the_last_commit_is_given_up_only_while_its_author_is_sound() -> None:
    """Only then another peer can still send it."""
    out, commit, _ = outgoing()
    out.roster.suspected("a")
    out.let_go()
    assert out.last is commit
    out.roster.heard("a")
    out.let_go()
    assert (out.last, out.lacking) == (None, set())


def test_a_message_is_sent_again_to_living_peers_a_bounded_number_of_times() -> None:
    out, commit, _ = outgoing()
    for again in (True, True, False):
        out.undelivered("c", commit)
        assert out.send_again() == ([Send("c", commit)] if again else [])
        assert out.send_again() == []
    out.undelivered("d", commit)
    dies(out.roster, "d")
    assert out.send_again() == []


def test_at_a_new_version_a_state_is_sent_again_as_it_is_then_and_a_commit_is_not() -> None:
    """Each message may be sent again the full number of times."""
    out, commit, state = outgoing()
    for _ in range(PLAIN.resends):
        out.undelivered("c", commit)
    out.undelivered("d", state)
    newer = Peer.state(0, 3)
    out.renew(newer)
    assert out.send_again() == [Send("d", newer)]
    out.undelivered("c", newer)
    assert out.send_again() == [Send("c", newer)]
