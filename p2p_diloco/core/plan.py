"""Who leads the next round of a fragment, who follows if it can't, and who owns which slice; and in asynchronous mode
which peer should lead which fragment, and which ones hold it with that one: balanced rendezvous hashing.

Law: pure. The plan follows from the roll, so every peer computes the same, and no leader chooses the next one. Leading
goes round: a member that has had its turn comes last. Reachable members come before private ones.

In asynchronous mode the election proposes the next plan to the author of a commit, and the commit decides. A leader
stays while it lives and no other peer is elected. An elected peer is made a successor first, so that it holds the state
when it takes over. A private peer is elected, or made a successor, only where there are too few reachable ones.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b

from .rules import Rules
from .version import ContributionId


def rank(key: str, members: Iterable[str]) -> list[str]:
    """Return the members by their score for ``key``, highest first. Removing a member never reorders the others (Thaler
    and Ravishankar 1998)."""
    return sorted(members, key=lambda peer: (-_score(key, peer), peer))


@lru_cache(maxsize=32)  # each fragment asks with the same arguments
def assign(run: str, fragments: tuple[int, ...], members: tuple[str, ...]) -> Mapping[int, Sequence[str]]:
    """Return, for each fragment, the members in their order of succession. No member is first in more fragments than
    its equal part of all, rounded up."""
    room = dict.fromkeys(members, math.ceil(len(fragments) / max(1, len(members))))
    plan = {}
    for fragment in fragments:
        order = rank(f"{run}/0/{fragment}", members)
        first = [peer for peer in order if room[peer] > 0][:1]
        room |= {peer: room[peer] - 1 for peer in first}
        plan[fragment] = [*first, *(peer for peer in order if peer not in first)]
    return plan


def without(peers: Iterable[str], left_out: str) -> list[str]:
    """Return the peers without ``left_out``, in the same order."""
    return [peer for peer in peers if peer != left_out]


def elected(
    run: str, fragments: tuple[int, ...], reachable: Sequence[str], private: Sequence[str] = ()
) -> Mapping[int, tuple[str, ...]]:
    """Return, for each fragment, the peers that should hold it, whatever its epoch: ``reachable`` peers first. The
    first one leads. All peers have equal parts: with measured links, each new measurement would move whole
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
    """Return the succession that the next commit should name. First comes the leader: ``me``, unless the fragment
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


def _score(key: str, peer: str) -> int:
    """Return a pseudo-random score that depends only on key and peer."""
    return int.from_bytes(blake2b(f"{key}\0{peer}".encode(), digest_size=8).digest(), "big")


SPARE_EPOCHS = 8
"""A member that was not counted for this many epochs more than there were candidates is no candidate any more."""
SLOW = 4
"""A link below the median by more than this factor owns nothing."""


STEP = 2**0.5
"""The ratio of each bandwidth to the median is rounded to a power of this number, because measurements vary and equal
peers should share equally."""
STEPS_MAX = 40
"""Ratios are limited to the range from STEP**-STEPS_MAX to STEP**STEPS_MAX."""


@dataclass(frozen=True, slots=True)
class Member:
    """What the roll says of a peer that a commit has counted. ``epoch``: when it was last counted. ``led``: when it
    last had its turn to lead; at first when it came. ``gone``: a leader found it dead since. ``demoted``: (who named it
    late, when, until which epoch it comes last). ``samples``: asynchronous mode, how many it told last."""

    id: ContributionId
    epoch: int
    led: int
    link: float = 0.0
    reachable: bool = True
    grant: str = ""
    gone: bool = False
    demoted: tuple[str, int, int] = ("", 0, 0)
    samples: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """``succession``: the candidates for leading, in order. ``owners``: of each slice, in the fragment's order.
    ``named``: asynchronous mode, how many of the succession must hold each commit."""

    succession: tuple[str, ...]
    owners: tuple[str, ...]
    named: int = 0


Roll = Mapping[str, Member]


def plan_after(
    rules: Rules,
    fragment: int,
    epoch: int,
    roll: Roll,
    entries: Collection[str],
    before: int,
    successors: Sequence[str],
) -> Plan:
    """Return the plan of the round after a commit. ``epoch``: of its version. ``entries``: whom it counts. ``before``:
    how many candidates the plan before had. ``successors``: asynchronous mode, whom the leader chose."""
    slices = len(rules.fragments[fragment])
    if rules.asynchronous:
        rest = rank(f"{rules.run}/{fragment}", roll)
        line = tuple(dict.fromkeys((*successors, *rest)))
        return Plan(line, line[:1] * slices, len(successors))
    recent = {
        peer: member
        for peer, member in roll.items()
        if peer in entries or (epoch - member.epoch <= before + SPARE_EPOCHS and not member.gone)
    }
    key = f"{rules.run}/{fragment}/{epoch}"
    score = {peer: place for place, peer in enumerate(rank(key, recent))}

    late = demoted(roll, epoch)

    def place(peer: str) -> tuple[bool, bool, int, int]:
        member = recent[peer]
        return peer in late, not member.reachable, member.led, score[peer]

    return Plan(tuple(sorted(recent, key=place)), _owners(key, slices, recent, epoch))


def demoted(roll: Roll, epoch: int) -> set[str]:
    """Return the members that come last in the order: those named late by two leaders, and all of a grant of which two
    are. So one invitation costs two turns, however many peers it makes."""
    late = {peer: member.grant for peer, member in roll.items() if member.demoted[2] > epoch}
    grants = Counter(late.values())
    return {peer for peer, member in roll.items() if peer in late or (member.grant and grants[member.grant] > 1)}


def may_own(roll: Roll, members: Collection[str], epoch: int) -> list[str]:
    """Return which of these members may own slices: reachable ones that are not demoted and not on a slow link, as far
    as there are any."""
    able = list(members)
    able = [peer for peer in able if roll[peer].reachable] or able
    late = demoted(roll, epoch)
    able = [peer for peer in able if peer not in late] or able
    return sorted(fast_enough(filled({peer: roll[peer].link for peer in able})))


def fast_enough(links: Mapping[str, float]) -> list[str]:
    """Return the peers whose link is not far below the median."""
    usual = statistics.median_low(links.values()) if links else 0.0
    return [peer for peer, link in links.items() if link * SLOW >= usual]


def rooms(slices: int, links: Mapping[str, float], able: Collection[str]) -> dict[str, int]:
    """Return how many slices each of those that are able may own: its share by its link. ``links``: of all that take
    part. Nobody owns more than half where three may own, so that no single peer computes what it likes."""
    parts, bound = shares(links, able), most_owned(slices, able)
    return {peer: min(math.ceil(slices * parts[peer]), bound) for peer in able}


def most_owned(slices: int, able: Collection[str]) -> int:
    """Return how many slices one peer may own."""
    return max(1, math.floor(slices * (Fraction(1, 2) if len(able) >= 3 else Fraction(1))))


def owner_order(key: str, number: int, members: Collection[str]) -> Sequence[str]:
    """Return the order in which these members own a slice, if those before them can't."""
    return _ranked(f"{key}/{number}", tuple(sorted(members)))


@lru_cache(maxsize=4096)
def _ranked(key: str, members: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(rank(key, members))


def _owners(key: str, slices: int, recent: Roll, epoch: int) -> tuple[str, ...]:
    """Return the owner of each slice."""
    able = may_own(recent, recent, epoch)
    bound = most_owned(slices, able)
    room = rooms(slices, filled({peer: member.link for peer, member in recent.items()}), able)
    owners: list[str] = []
    for number in range(slices):
        order = owner_order(key, number, able)
        spare = next((peer for peer in order if owners.count(peer) < bound), order[0])
        owner = next((peer for peer in order if room[peer] > 0), spare)
        room[owner] -= 1
        owners.append(owner)
    return tuple(owners)


def shares(links: Mapping[str, float], members: Collection[str]) -> dict[str, Fraction]:
    """Return each member's share of the aggregation, so that the round ends as soon as the links allow. ``members``
    are the peers that may aggregate; their shares add up to 1. Exact arithmetic, so every peer gets the same result.

    The formula and its reasons are in docs/math.md. links: peer → bandwidth > 0, in any unit, of all peers that take
    part, the members among them.
    """
    steps, beside = rounded(links), len(links) - 2
    if beside <= 0:
        return dict.fromkeys(members, Fraction(1, len(members)))
    alone = 1 / min(steps.values())
    together = (beside + len(members)) / sum((steps[peer] for peer in members), Fraction(0))
    longest = max(alone, together)
    return _levelled({peer: (longest * steps[peer] - 1) / beside for peer in members})


def rounded(bandwidths: Mapping[str, float]) -> dict[str, Fraction]:
    """Return each bandwidth as a ratio to the median, rounded to a power of STEP and limited to STEPS_MAX steps up or
    down. A member may tell a number so small that ratios would be 0 or infinite."""
    median, most = statistics.median_low(bandwidths.values()), 2.0**STEPS_MAX
    ratios = {peer: min(max(each / median, 1 / most), most) for peer, each in bandwidths.items()}
    return {peer: _step(round(2 * math.log2(ratio))) for peer, ratio in ratios.items()}


def filled(bandwidths: Mapping[str, float]) -> dict[str, float]:
    """Return the bandwidths with each unknown one (0) replaced by the median of the known ones, or by 1 if none is
    known."""
    known = [each for each in bandwidths.values() if each > 0]
    usual = statistics.median_low(known) if known else 1.0
    return {peer: each or usual for peer, each in bandwidths.items()}


def _step(number: int) -> Fraction:
    """Return STEP raised to the power ``number``. The power is limited to the range from -STEPS_MAX to STEPS_MAX."""
    number = max(-STEPS_MAX, min(STEPS_MAX, number))
    whole, half = divmod(number, 2)
    return Fraction(2.0**whole * (STEP if half else 1))


def _levelled(most: Mapping[str, Fraction]) -> dict[str, Fraction]:
    """Divide 1 among the peers as equally as their limits allow. ``most`` gives each peer's limit; the limits must add
    up to 1 or more."""
    left, found = Fraction(1), dict[str, Fraction]()
    waiting = sorted(most, key=lambda peer: (most[peer], peer))
    for number, peer in enumerate(waiting):
        found[peer] = min(most[peer], left / (len(waiting) - number))
        left -= found[peer]
    assert left == 0, "the limits of all peers must add up to 1 or more"
    return found
