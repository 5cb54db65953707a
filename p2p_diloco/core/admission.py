"""What a contribution and a commit may say. Law: pure; every peer judges a commit alike, by the state before it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from .leases import objection as misuse
from .messages import Choice, Commit, Ready
from .plan import Member
from .rules import Rules
from .state import State, append, is_empty, key_of
from .version import SALT_BITS, life_of

MEMBERS_MAX = 12_000
"""The most members of a roll."""
NEWCOMERS_MAX, NEWCOMERS_LEAST, OF_ONE_GRANT = 64, 8, 8
"""A commit counts at most NEWCOMERS_MAX peers that no commit has counted; not more than others, but NEWCOMERS_LEAST in
any case; and at most OF_ONE_GRANT of one grant. So a member that is many takes a run over slowly, if at all."""
AHEAD_MAX = 366 * 24 * 3600 * 1000 << SALT_BITS
"""How far an incarnation may be ahead of all known ones: a year. Else one peer could use up all numbers. It is the time
at which a peer started: in a long run all others may have started months ago, and a run may have been off for as
long."""


def unfit(peer: str, ready: Ready, state: State, rules: Rules, own_incarnation: int = 0) -> str:
    """Return why no commit on this state may count a contribution; empty if one may. ``own_incarnation``: 0 where a
    commit is judged, because clocks differ and all must judge it alike."""
    known = latest(state.roll, own_incarnation)  # 0: no peer was counted in this run yet
    if known and ready.id.incarnation > known + AHEAD_MAX:
        return "its incarnation is too far ahead"
    if rules.asynchronous and not is_empty(ready) and ready.weight != 1.0:
        return "the weight of a submission must be 1"
    if not ready.oldest <= ready.id:  # no roll would ever count it
        return "a number is out of range"
    if ready.weight == 0:
        return "it has samples, and no weight" if ready.samples or ready.uses else ""
    if not rules.fits(ready.weight, ready.samples, state.revision):
        return "a number is out of range"
    if state.fragment and any(use.used or use.wants for use in ready.uses):
        return "only a contribution to the first fragment says which data was used"
    if not state.fragment and (why := misuse(state.tables, peer, life_of(ready.id.incarnation), ready.uses)):
        return why
    return "the run is full" if peer not in state.roll and len(state.roll) >= MEMBERS_MAX else ""


def latest(roll: Mapping[str, Member], own: int = 0) -> int:
    """Return the highest incarnation in the roll, or this peer's ``own``."""
    return max([own, *(member.id.incarnation for member in roll.values())])


def is_counted(state: State, peer: str, ready: Ready) -> bool:
    """Whether the roll has this contribution, or a part of it, or a later one of its author."""
    member = state.roll.get(peer)
    if member is None or member.id < ready.oldest:
        return False
    return member.id.incarnation in (ready.oldest.incarnation, ready.id.incarnation) or member.id >= ready.id


def countable(readys: Mapping[str, Ready], state: State) -> tuple[tuple[str, Ready], ...]:
    """Return the contributions that a commit may count, sorted by peer. Newcomers above the bounds wait: the last by
    id."""
    fresh = sorted(peer for peer in readys if peer not in state.roll)
    taken, grants = list[str](), Counter[str]()
    for peer in fresh:
        grants[readys[peer].grant or peer] += 1
        if not state.version.epoch or grants[readys[peer].grant or peer] <= OF_ONE_GRANT:
            taken.append(peer)
    left = set(fresh) - set(taken[: _room(state, len(readys) - len(fresh))])
    return tuple((peer, ready) for peer, ready in sorted(readys.items()) if peer not in left)


def _room(state: State, others: int) -> int:
    """Return how many newcomers a commit may count; in a run's first commit all are new."""
    free = MEMBERS_MAX - len(state.roll)
    return min(free, NEWCOMERS_MAX, max(NEWCOMERS_LEAST, others)) if state.version.epoch else free


def objection(commit: Commit, state: State, rules: Rules, mine: Ready | None, me: str) -> str:
    """Return why this commit can't follow this state; empty if it can. ``mine``: what this peer ``me`` has signed."""
    choice = commit.choice
    slices = len(rules.fragments[state.fragment])
    weighted = sum(ready.weight > 0 for _, ready in choice.entries)
    if len(commit.owners) != slices or len(commit.hashes) != (slices if weighted else 0):
        return "it has another number of slices"
    if commit.key != key_of(state.fragment, state.version, choice):
        return "its key is not that of its choice"
    if why := unsound(choice, state, rules):
        return why
    listed = dict(choice.entries).get(me)
    if listed is not None and mine is not None and mine.id == listed.id and mine.bare() != listed.bare():
        return "it counts what this peer did not sign"
    if append(state, choice, commit.key, commit.hashes, rules).version != commit.version:
        return "its version does not follow from what it says"
    return ""


def unsound(choice: Choice, state: State, rules: Rules) -> str:
    """Return why no leader may choose this; empty if one may."""
    names = [peer for peer, _ in choice.entries]
    if names != sorted(set(names)):
        return "its entries are not sorted"
    if choice.revision < state.revision:
        return "it would set the run back to an earlier revision"
    for peer, ready in choice.entries:
        if why := unfit(peer, ready, state, rules):
            return f"the entry of {peer}: {why}"
        if is_counted(state, peer, ready):
            return f"it counts a contribution of {peer} twice"
        if not rules.asynchronous and ready.base != state.version:
            return f"the contribution of {peer} was made on another version"
    if why := _too_few(choice, state, rules):
        return why
    if dict(choice.entries).keys() - dict(countable(dict(choice.entries), state)).keys():
        return "it counts too many newcomers"
    if not may_be_gone(state, names) >= set(choice.gone) or not state.roll.keys() >= set(choice.late):
        return "it names a peer gone or late that can't be"
    return ""


def may_be_gone(state: State, entries: list[str]) -> set[str]:
    """Return the members that a leader may name gone: none that this commit or its base's counts, so that nobody can
    remove those that take part."""
    return {peer for peer, member in state.roll.items() if member.epoch < state.version.epoch and peer not in entries}


def _too_few(choice: Choice, state: State, rules: Rules) -> str:
    weighted = sum(ready.weight > 0 for _, ready in choice.entries)
    if rules.asynchronous:
        return "" if weighted or choice.successors else "it counts nothing"
    least = rules.needed(choice.revision, first=not state.version.epoch)
    return "" if weighted >= least else f"it counts {weighted} contributions, and needs {least}"
