"""Which shard is asked of whom: few at a time of each, again of others, and none twice."""

from __future__ import annotations

from p2p_diloco.core.gather import Gathering
from p2p_diloco.core.rules import Rules
from p2p_diloco.core.version import ModelVersion, Version

RULES = Rules(run="run", fragments=((0, 1, 2, 3, 4),))
OLD, NEW = Version(0, 10, 1, "d1"), Version(0, 20, 2, "d2")


def begun(shards: int = 5) -> Gathering:
    """One whose first donor has told what it holds."""
    gathering = Gathering(RULES, "b", ModelVersion(), 0.0)
    gathering.begin((NEW,) * shards)
    return gathering


def test_each_donor_is_asked_for_a_few() -> None:
    """No more than the window at a time; what comes makes room for the next ones."""
    gathering = begun()
    assert gathering.ask(["b", "c"], [None] * 5, 0.0) == [("b", (0, 1)), ("c", (2, 3))]
    assert gathering.ask(["b", "c"], [None] * 5, 1.0) == []
    gathering.came([1])
    assert gathering.ask(["b", "c"], [None] * 5, 2.0) == [("b", (4,))]
    assert (gathering.of("b"), gathering.of("c")) == ([0, 4], [2, 3])


def test_what_has_moved_since_it_was_asked_for_has_come() -> None:
    """Also for one that held an older state before; a shard that was never asked for may come without harm."""
    gathering = begun(2)
    gathering.ask(["b"], [OLD, OLD], 0.0)
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
    gathering.ask(["b", "c"], [None] * 3, 5.0)
    assert gathering.overdue(5.0 + RULES.fetch_again - 0.1) == []
    assert gathering.overdue(5.0 + RULES.fetch_again) == [0, 1, 2]
    gathering.again([1, 0])
    assert gathering.of("b") == []
    assert gathering.ask(["c"], [None] * 3, 50.0) == [("c", (0,))]


def test_nothing_is_done_before_the_first_donor_has_told() -> None:
    """Nor is anything asked for."""
    gathering = Gathering(RULES, "b", ModelVersion(), 0.0)
    assert gathering.ask(["b"], [], 0.0) == []
    assert not gathering.done
