"""Which peers hold a fragment from one asynchronous commit to the next: its aggregator and its successors.

Law: pure functions. This module proposes the next plan to the author of a commit. An aggregator stays while it lives
and no other peer is elected. An elected peer is made a successor first, so that it holds the state when it takes over.
A private peer is elected, or made a successor, only where there are too few reachable ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .election import assign, without


def elected(
    run: str, fragments: tuple[int, ...], reachable: Sequence[str], private: Sequence[str] = ()
) -> Mapping[int, tuple[str, ...]]:
    """Return, for each fragment, the peers that should hold it, whatever its epoch: ``reachable`` peers first. The
    first one aggregates. All peers have equal parts: with measured links, each new measurement would move whole
    fragments."""
    first, then = (assign(run, fragments, tuple(members)) for members in (reachable, private))
    return {fragment: (*first[fragment], *then[fragment]) for fragment in fragments}


def may_stay(
    me: str, line: Sequence[str], reachable: Sequence[str], private: Sequence[str], room: int
) -> tuple[str, ...]:
    """Return the peers that may stay successors: all reachable peers. If these are fewer than ``room``, present private
    successors make up the number. ``room``: how many successors there should be."""
    free = max(0, room - len(without(reachable, me)))
    return (*reachable, *[peer for peer in without(line, me) if peer in private][:free])


def hands_over(me: str, order: Sequence[str], assigned_for: float, least: float) -> bool:
    """Whether this peer should hand a fragment over: another peer is elected, and the fragment has been with this peer
    for ``least`` seconds or more."""
    return order[0] != me and assigned_for >= least


def succession(
    me: str, line: Sequence[str], order: Sequence[str], able: Sequence[str], room: int, *, hand_over: bool
) -> tuple[str, ...]:
    """Return the succession that the next commit should name. First comes the aggregator: ``me``, unless the fragment
    is handed over. Then come the present successors that are in ``able``, then other peers in the order of the election
    (``order``). ``room``: how many successors there should be."""
    others, first = without(line, me), order[0]
    successors = [p for p in others if p in able][:room]
    if hand_over and first not in successors:
        successors = [*successors[: max(0, room - 1)], first]
    spare = [p for p in (*order, *others) if p not in (me, *successors)]
    found = [me, *successors, *dict.fromkeys(spare)][: 1 + max(room, len(successors))]
    if hand_over and (first in line or not room):
        found = [first, *without(found, first)][: 1 + room]
    return tuple(found)


def worth_a_commit(me: str, line: Sequence[str], then: Sequence[str]) -> bool:
    """Whether a commit should be made only in order to change the succession to ``then``, because that hands the
    fragment over or names a new peer."""
    return then[0] != me or not {*then} <= {me, *line}
