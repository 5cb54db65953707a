"""Checks whether a well-formed message can belong to this run: its fragment, its slices, and numbers that must agree.

Law: pure: uses the message and the run's rules, and no earlier messages. Each number by itself has been checked when
the message was decoded.
"""

from __future__ import annotations

from collections.abc import Sequence

from p2p_diloco.core.leases import WEIGHT_MIN, fault
from p2p_diloco.core.rules import Rules
from p2p_diloco.core.version import Version
from p2p_diloco.fragments import messages as m
from p2p_diloco.fragments.state import State, key_of


def misplaced(message: m.Message, rules: Rules) -> str:
    """Why a message can't belong to the run; empty if it can."""
    fragments, fragment = len(rules.fragments), getattr(message, "fragment", None)
    if fragment is not None and not 0 <= fragment < fragments:
        return f"the run has no fragment {fragment}"
    slices = 0 if fragment is None else len(rules.fragments[fragment])
    match message:
        case m.Probe(summary) | m.ProbeAck(summary):
            return _summary(summary, fragments)
        case m.Ready():
            return _ready(message, slices)
        case m.Slice(number=number) | m.Mean(number=number) | m.Part(number=number):
            return _numbers([number], slices)
        case m.Want(numbers=numbers) | m.Ask(fragment=int(), numbers=numbers):
            return _numbers(numbers, slices)
        case m.Ask(numbers=numbers) if numbers:
            return "it asks for slices of no fragment"
        case m.Lack(missing=missing):
            return _numbers([number for number, _ in missing], slices)
        case m.Close():
            return _close(message, slices)
        case m.Commit():
            return _commit(message, slices)
        case m.Vote(served=served, commit=commit):
            for part in (served, commit):
                if part is not None and (part.fragment, part.base) != (fragment, message.base):
                    return "it tells of another round than its own"
            if served is not None and (served.choice is None or (why := _close(served, slices))):
                return "it tells of a Close without a choice" if served.choice is None else why
            return "" if commit is None else _commit(commit, slices)
        case m.Told(versions=versions, links=links):
            if len(versions) != fragments or len(links) != fragments:
                return f"it lists {len(versions)} fragments, the run has {fragments}"
            return next(filter(None, map(_links, versions, links)), "")
        case m.Head(state=state, digests=digests):
            if len(digests) not in (0, slices):
                return f"it lists {len(digests)} slices, the fragment has {slices}"
            return _state(state, slices)
    return ""


def _numbers(numbers: Sequence[int], slices: int) -> str:
    wrong = next((number for number in numbers if not 0 <= number < slices), None)
    return "" if wrong is None else f"the fragment has no slice {wrong}"


def _summary(summary: m.Summary, fragments: int) -> str:
    for listed in (summary.heads, summary.sent, summary.digests):
        if len(listed) not in (0, fragments):
            return f"it lists {len(listed)} fragments, the run has {fragments}"
    if any(fragment >= fragments for fragment, _ in summary.awaits):
        return "it awaits peers for a fragment that the run doesn't have"
    if summary.role not in ("worker", "aggregator"):
        return f"the role {summary.role!r} is unknown"
    return "" if summary.revision.sound else "its revision has values that can't be used"


def _ready(ready: m.Ready, slices: int) -> str:
    if len(ready.hashes) != (slices if ready.weight else 0):
        return f"it has the hashes of {len(ready.hashes)} slices, the fragment has {slices}"
    return "" if not ready.weight or ready.weight >= WEIGHT_MIN else "its weight is out of range"


def _close(close: m.Close, slices: int) -> str:
    if len(close.owners) != slices:
        return f"it lists the owners of {len(close.owners)} slices, the fragment has {slices}"
    if close.choice is None:
        return ""
    faults = (_ready(ready, slices) for _, ready in close.choice.entries)
    return next(filter(None, faults), "") or _choice(close.choice, close)


def _commit(commit: m.Commit, slices: int) -> str:
    base, version = commit.base, commit.version
    if len(commit.owners) != slices or len(commit.hashes) not in (0, slices):
        return f"it lists {len(commit.owners)} owners and {len(commit.hashes)} means, the fragment has {slices} slices"
    if version.epoch != base.epoch + 1 or version.generation != base.generation or version.samples < base.samples:
        return "it doesn't lead to the next version"
    if any(ready.weight and (ready.weight < WEIGHT_MIN or ready.hashes) for _, ready in commit.choice.entries):
        return "its contributions have a weight that is out of range, or the hashes of their slices"
    return _choice(commit.choice, commit)


def _choice(choice: m.Choice, of: m.Close | m.Commit) -> str:
    names = [peer for peer, _ in choice.entries]
    if names != sorted(set(names)):
        return "its contributions are not sorted, or one peer has two"
    if not choice.revision.sound:
        return "its revision has values that can't be used"
    return "" if key_of(of.fragment, of.base, choice) == of.key else "its key is not that of its choice"


def _links(version: Version, links: m.Links) -> str:
    epochs = [epoch for epoch, _ in links]
    if not links or epochs != sorted(set(epochs)) or links[-1] != (version.epoch, version.digest):
        return "its links don't lead to its version"
    return ""


def _state(state: State, slices: int) -> str:
    if len(state.hashes) not in (0, slices):
        return f"its last commit has {len(state.hashes)} means, the fragment has {slices} slices"
    if not state.revision.sound or not 0 <= state.paced[0] <= state.version.epoch:
        return "its revision or its count of inner steps has values that can't be used"
    return _links(state.version, state.links) or fault(state.tables)
