"""Which shard is asked of whom: few at a time of each, again of others, and none twice."""

from __future__ import annotations

from p2p_diloco.core.gather import Gathering
from p2p_diloco.core.rules import Rules
from p2p_diloco.core.version import ModelVersion, Version

RULES = Rules(run="run", fragments=((0, 1, 2, 3, 4),))
OLD, NEW = Version(0, 10, 1, "d1"), Version(0, 20, 2, "d2")

ALL = range(5)
BOTH = {"b": ALL, "c": ALL}


def begun(shards: int = 5) -> Gathering:
    """One whose first donor has told what it holds."""
    gathering = Gathering(RULES, "b", ModelVersion(), 0.0)
    gathering.begin((NEW,) * shards)
    return gathering


def test_each_donor_is_asked_for_a_few() -> None:
    """No more than the window at a time; what comes makes room for the next ones."""
    gathering = begun()
    assert gathering.ask(BOTH, [None] * 5, 0.0) == [("b", (0, 1)), ("c", (2, 3))]
    assert gathering.ask(BOTH, [None] * 5, 1.0) == []
    gathering.came([1])
    assert gathering.ask(BOTH, [None] * 5, 2.0) == [("b", (4,))]
    assert (gathering.of("b"), gathering.of("c")) == ([0, 4], [2, 3])


def test_what_has_moved_since_it_was_asked_for_has_come() -> None:
    """Also for one that held an older state before; a shard that was never asked for may come without harm."""
    gathering = begun(2)
    gathering.ask({"b": ALL}, [OLD, OLD], 0.0)
    assert gathering.moved([OLD, OLD]) == []
    assert gathering.moved([NEW, OLD]) == [0]
    gathering.came([0, 4])
    assert gathering.moved([NEW, OLD]) == []
    assert not gathering.done
    gathering.came([1])
    assert gathering.done


def test_what_does_not_come_is_asked_again() -> None:
    """After the time for a fetch, not before; in the order of shards."""
    gathering = begun(3)
    gathering.ask(BOTH, [None] * 3, 5.0)
    assert gathering.overdue(5.0 + RULES.fetch_again - 0.1) == []
    assert gathering.overdue(5.0 + RULES.fetch_again) == [0, 1, 2]
    gathering.again([1, 0])
    assert gathering.of("b") == []
    assert gathering.ask({"c": ALL}, [None] * 3, 50.0) == [("c", (0,))]


def test_who_holds_what_was_told_is_asked_first() -> None:
    """Others are tried for what such donors have no room for."""
    donors = {"b": [], "c": [1, 2, 3]}
    assert begun(3).ask(donors, [None] * 3, 0.0) == [("b", (0,)), ("c", (1, 2))]
    assert begun().ask(donors, [None] * 5, 0.0) == [("b", (0, 3)), ("c", (1, 2))]


def test_who_was_found_behind_is_not_asked_for_it_again() -> None:
    """Unless it has come to hold what was told; for other shards it may be as good as any."""
    gathering = begun(3)
    gathering.ask({"b": []}, [None] * 3, 0.0)
    gathering.lacks("b", 0)
    assert gathering.ask({"b": []}, [None] * 3, 0.0) == [("b", (2,))]
    gathering.came([1, 2])
    assert gathering.ask({"b": []}, [None] * 3, 0.0) == []
    assert gathering.ask({"b": [0]}, [None] * 3, 0.0) == [("b", (0,))]


def test_it_is_hopeless_only_when_nobody_may_have_what_is_left() -> None:
    """Not while something is to come, somebody was not tried, or has come to hold it."""
    gathering = begun(2)
    assert gathering.hopeless({})
    assert not gathering.hopeless({"b": []})
    gathering.ask({"b": []}, [None] * 2, 0.0)
    gathering.lacks("b", 0)
    assert not gathering.hopeless({"b": []})
    gathering.lacks("b", 1)
    assert gathering.hopeless({"b": []})
    assert not gathering.hopeless({"b": [1]})
    assert not gathering.hopeless({"b": [], "c": []})


def test_nothing_is_done_before_the_first_donor_has_told() -> None:
    """Nor is anything asked for."""
    gathering = Gathering(RULES, "b", ModelVersion(), 0.0)
    assert gathering.ask({"b": ALL}, [], 0.0) == []
    assert not gathering.done
