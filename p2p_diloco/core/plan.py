"""Who leads the next round of a fragment, who follows if it can't, and who owns which slice.

Law: pure. The plan follows from the roll, so every peer computes the same, and no leader chooses the next one. Leading
goes round: a member that has had its turn comes last. Reachable members come before private ones.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import ceil, floor

from .election import rank
from .rules import Rules
from .shares import filled, shares
from .version import ContributionId

SPARE_EPOCHS = 8
"""A member that was not counted for this many epochs more than there were candidates is no candidate any more."""
SLOW = 4
"""A link below the median by more than this factor owns nothing."""


@dataclass(frozen=True, slots=True)
class Member:
    """What the roll says of a peer that a commit has counted. ``epoch``: when it was last counted. ``led``: when it
    last had its turn to lead; at first when it came. ``gone``: a leader found it dead since. ``behind``: (who named it
    late, when, until which epoch it comes last). ``samples``: asynchronous mode, how many it told last."""

    id: ContributionId
    epoch: int
    led: int
    link: float = 0.0
    reachable: bool = True
    grant: str = ""
    gone: bool = False
    behind: tuple[str, int, int] = ("", 0, 0)
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

    late = is_behind(roll, epoch)

    def place(peer: str) -> tuple[bool, bool, int, int]:
        member = recent[peer]
        return peer in late, not member.reachable, member.led, score[peer]

    return Plan(tuple(sorted(recent, key=place)), _owners(key, slices, recent, epoch))


def is_behind(roll: Roll, epoch: int) -> set[str]:
    """Return the members that come last in the order: those named late by two leaders, and all of a grant of which two
    are. So one invitation costs two turns, however many peers it makes."""
    late = {peer: member.grant for peer, member in roll.items() if member.behind[2] > epoch}
    grants = Counter(late.values())
    return {peer for peer, member in roll.items() if peer in late or (member.grant and grants[member.grant] > 1)}


def may_own(roll: Roll, members: Collection[str], epoch: int) -> list[str]:
    """Return which of these members may own slices: reachable ones that are not behind and not on a slow link, as far
    as there are any."""
    able = list(members)
    able = [peer for peer in able if roll[peer].reachable] or able
    late = is_behind(roll, epoch)
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
    return {peer: min(ceil(slices * parts[peer]), bound) for peer in able}


def most_owned(slices: int, able: Collection[str]) -> int:
    """Return how many slices one peer may own."""
    return max(1, floor(slices * (Fraction(1, 2) if len(able) >= 3 else Fraction(1))))


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
