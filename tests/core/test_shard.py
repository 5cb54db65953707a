"""One shard's log, for both modes: a commit is drafted, computed and appended; damaged or outdated work is dropped."""

from __future__ import annotations

from typing import Any

from p2p_diloco.core.events import Applied, Average, Averaged, Send
from p2p_diloco.core.messages import Probe, Promise, TakeOver


def test_a_mean_is_dropped_if_another_peer_took_the_term_meanwhile(peer: Any) -> None:
    """Nothing is appended."""
    a = peer("a")
    a.contribute()
    a.hear("b", a.contribution(a.held))
    (average,) = a.hear("c", a.contribution(a.held))
    assert a.hear("c", TakeOver(0, a.held, 2))[0] == Send("c", Promise(0, a.held, 2))
    assert a.feed(Averaged(0, average.base, average.number, "new", "mean")) == []
    assert a.held == a.version(1)


def test_the_result_of_work_on_another_base_is_ignored(peer: Any) -> None:
    """Each answer of tensor work names the base that it started from."""
    a = peer("a", group="a", live="")
    (average,) = a.contribute()
    assert a.feed(Averaged(0, a.version(9), 9, "new", "mean")) == []
    assert a.feed(Applied(0, average.base, "new")) == []
    assert a.held == a.version(1)
    a.averaged([average])
    assert a.held.epoch == 2
    assert a.feed(Averaged(0, average.base, average.number, "new", "mean")) == []


def test_only_one_outer_step_is_computed_at_a_time(peer: Any) -> None:
    """A contribution that comes while the mean is computed starts no second computation."""
    a = peer("a", group="a", live="b")
    a.meet("b", idle=True)
    assert isinstance(a.contribute()[-1], Average)
    assert a.hear("b", a.contribution(a.held)) == []
    assert a.pass_time(30.0) == []


def test_no_outer_step_follows_the_last_epoch(peer: Any) -> None:
    """A contribution on the last epoch is ignored."""
    a = peer("a", group="a", live="b", stop_after_epochs=1)
    assert a.hear("b", a.contribution(a.held)) == []
    assert a.replica.logs[0].round.inbox == {}
    assert a.pass_time(10.0) == []


def test_peers_that_a_commit_names_are_probed(peer: Any) -> None:
    """Also peers that this one has never met."""
    b = peer("b", group="ab")
    b.take(b.commit(plan=b.plan("bx", "aby")))
    probed = {e.to for e in b.feed_tick() if isinstance(e, Send) and isinstance(e.message, Probe)}
    assert {"x", "y"} <= probed
