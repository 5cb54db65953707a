"""Checks whether a well-formed message can belong to this run, by its shards, its fragments and the ranges of its
numbers.

Law: pure: uses the message and the run's shape, and no earlier messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType

from p2p_diloco.core.credit import credited
from p2p_diloco.core.leases import fault
from p2p_diloco.core.messages import (
    Commit,
    Contribution,
    Counted,
    Fetch,
    Held,
    Message,
    Outdated,
    Probe,
    ProbeAck,
    Promise,
    Stale,
    State,
    Summary,
    TakeOver,
    Versions,
    Want,
)
from p2p_diloco.core.revision import Revision
from p2p_diloco.core.version import ContributionId, ModelVersion, Version
from p2p_diloco.node.plain import names
from p2p_diloco.tensors.mean import WEIGHT_MAX, WEIGHT_MIN

BANDWIDTH_MAX = 2.0**50
"""Bytes a second; no link carries more."""

SPEED_MAX = 2.0**40
"""Inner steps a second; no peer makes more."""

_COUNT_MAX = 2**40
_LIMITS: dict[type, dict[str, int]] = {
    Version: {"generation": _COUNT_MAX, "samples": 2**48, "epoch": _COUNT_MAX},
    ModelVersion: {"samples": 2**62, "epochs": 2**62},
    ContributionId: {"incarnation": 2**62, "sequence": _COUNT_MAX},
    Contribution: {"samples": _COUNT_MAX},
    Counted: {"samples": _COUNT_MAX},
    Summary: {"incarnation": 2**62},
    Revision: {"number": _COUNT_MAX},
    **{kind: {"term": _COUNT_MAX} for kind in (Commit, TakeOver, Promise, Outdated)},
    State: {"term": _COUNT_MAX, "buffered": _COUNT_MAX},
}
"""The largest numbers in messages. What a replica computes from them, such as sums over shards, must still fit into a
message."""

_SIMPLE = {int, float, str, bytes, bool, NoneType}
"""Types of values that contain no other values, so there is nothing further to check in them."""


def misfit(message: Message, shards: int, fragments: int) -> str:
    """Check whether a well-formed message can belong to a run with this many shards and fragments. Returns the reason
    why it can't, or an empty text."""
    match message:
        case Contribution() | Commit() | State() | TakeOver() | Promise() | Outdated() | Want() | Held() | Stale():
            if not 0 <= message.shard < shards:
                return f"the run has no shard {message.shard}"
        case Fetch(have=versions) | Versions(versions=versions):
            if len(versions) != shards:
                return f"it lists {len(versions)} shards, the run has {shards}"
            if isinstance(message, Fetch) and any(not 0 <= shard < shards for shard in message.shards or ()):
                return "it asks for shards that the run doesn't have"
        case Probe(summary) | ProbeAck(summary):
            if len(summary.epochs) not in (0, fragments):
                return f"it lists {len(summary.epochs)} fragments, the run has {fragments}"
            if summary.bandwidth and not 1 <= summary.bandwidth <= BANDWIDTH_MAX:  # 0: not known yet
                return "its bandwidth is out of range"
            if not 0 <= summary.speed <= SPEED_MAX:
                return "its speed is out of range"
            if any(not 0 <= epoch <= _COUNT_MAX for epoch in summary.epochs):
                return "its epochs are out of range"
    match message:
        case Contribution(weight=weight) if not WEIGHT_MIN <= weight <= WEIGHT_MAX:
            return "its weight is out of range"
        case Commit(plan=plan) | State(plan=plan) if not plan.succession:
            return "its plan names no aggregator"
        case Commit(base=base, version=version) if version.epoch != base.epoch + 1:
            return "it doesn't lead to the next epoch"
        case Commit(base=base, version=version) if version.generation != base.generation:
            return "it leads to another generation"
        case Commit(base=base, version=version) if version.samples - base.samples != _samples_of(message):
            return "its samples aren't those of its base and what it counts of its contributions' samples"
        case State(version=version, history=history):
            if history.get(version.epoch) != version.digest or max(history) > version.epoch or min(history) < 0:
                return "its history doesn't lead to its version"
            if why := fault(message.tables):
                return why
            if not (0 <= message.paced[0] <= version.epoch and 0 <= message.paced[1] <= _COUNT_MAX):
                return "its count of inner steps is out of range"
    return _out_of_range(message)


def _samples_of(commit: Commit) -> int:
    """Return how many samples a commit adds to its base."""
    return sum(credited([counted.samples for counted in commit.contributions]))


def _out_of_range(value: object) -> str:
    """Look for a number that is negative or too large, in a message and in all values inside it. Returns the reason why
    the value can't be used; empty if there is none."""
    kind = type(value)
    if kind in _SIMPLE:
        return ""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, tuple):
        return next(filter(None, map(_out_of_range, value)), "")
    if isinstance(value, Revision) and not value.sound:
        return "its revision has values that can't be used"
    for name, most in _LIMITS.get(kind, {}).items():
        if not 0 <= getattr(value, name) <= most:
            return f"the {name} of a {kind.__name__} is out of range"
    return next(filter(None, (_out_of_range(getattr(value, name)) for name in names(kind))), "")
