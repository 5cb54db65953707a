"""Which steps each outer step counted, computed from the lines of `programs/counted.py`.

Law: pure functions of the peers' lines; no process, no clock. Lists of θ and of steps are by shard, then by slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Line = dict[str, Any]

LEAST_MOVE = 0.01
"""A slot that a commit counts changes by at least one step divided by the number of peers; θ is fp32."""


@dataclass(frozen=True, slots=True)
class Commit:
    """One outer step, to `epoch`, or all outer steps between two epochs that no peer saw separately; the steps it
    counted."""

    after: int
    epoch: int
    steps: list[list[int]]


@dataclass(frozen=True, slots=True)
class Attendance:
    """How a peer's exchanges were counted; exchanges are numbered from 1."""

    exchanges: int
    missed: tuple[int, ...]
    """Exchanges that no commit counted in some shard."""
    in_part: int
    """How many of these a commit counted in another shard."""
    rounds_at_once: float
    """The most steps of the peer that one commit counted, in rounds."""
    lost: int
    """The steps that the peer made, less those counted in the shard that lacks most."""
    said: int
    """Its own `sync_count`."""
    counted: tuple[int, int]
    """The number of outer steps that counted the peer: in the shard with the fewest, and with the most."""

    @property
    def first(self) -> int | None:
        """The first exchange that was counted in all shards."""
        return next((number for number in range(1, self.exchanges + 1) if number not in self.missed), None)


def rounds(said: Iterable[Line]) -> list[Line]:
    """A peer's lines of its rounds."""
    return [line for line in said if line["what"] == "epoch"]


def looks(said: Iterable[Line]) -> list[Line]:
    """A peer's lines with an epoch, a digest and θ, if the epoch stayed the same while they were read."""
    return [line for line in said if line.get("whole")]


def unlike(witnesses: Mapping[str, Iterable[Line]]) -> list[str]:
    """The epochs at which digests or values of θ differ from the first one seen; a sentence each."""
    first: dict[int, tuple[str, Line]] = {}
    found: dict[int, str] = {}
    for name, said in witnesses.items():
        for line in looks(said):
            whose, other = first.setdefault(line["epoch"], (name, line))
            what = " and ".join(key for key in ("digest", "theta") if line[key] != other[key])
            if what:
                found.setdefault(line["epoch"], f"epoch {line['epoch']}: {what} of {name} and {whose} differ")
    return [found[epoch] for epoch in sorted(found)]


def shared(one: Iterable[Line], others: Iterable[Iterable[Line]]) -> tuple[int, int]:
    """At how many epochs this peer and another looked, and at how many of these all digests and θ were equal."""
    theirs: dict[int, list[Line]] = {}
    for said in others:
        for line in looks(said):
            theirs.setdefault(line["epoch"], []).append(line)
    mine = {line["epoch"]: line for line in looks(one) if line["epoch"] in theirs}
    same = [
        all(line[key] == other[key] for key in ("digest", "theta") for other in theirs[epoch])
        for epoch, line in mine.items()
    ]
    return len(same), sum(same)


def commits(witnesses: Iterable[Iterable[Line]]) -> list[Commit]:
    """What each outer step counted, as far as these peers saw θ."""
    known: dict[int, list[list[float]]] = {}
    for said in witnesses:
        for line in looks(said):
            known.setdefault(line["epoch"], line["theta"])
    return [
        Commit(a, b, [_counted(old, new) for old, new in zip(known[a], known[b], strict=True)])
        for a, b in pairwise(sorted(known))
    ]


def _counted(old: Sequence[float], new: Sequence[float]) -> list[int]:
    moves = [after - before for before, after in zip(old, new, strict=True)]
    contributions = sum(move > LEAST_MOVE for move in moves)
    return [round(move * contributions) for move in moves]


def attendance(said: Iterable[Line], slot: int, every: int, log: Sequence[Commit]) -> Attendance:
    """How a peer's exchanges were counted, as far as the log goes."""
    end = log[-1].epoch if log else 0
    lines = [line for line in rounds(said) if line["epoch"] <= end]
    sent = [line for line in lines if line["step"] % every == 0]
    ends = [later["before"] for later in sent[1:]] + [line["epoch"] for line in sent[-1:]]
    by_epoch = {epoch: commit for commit in log for epoch in range(commit.after + 1, commit.epoch + 1)}
    hits = [
        _shards({by_epoch[e].epoch: by_epoch[e] for e in range(line["before"] + 1, upto + 1) if e in by_epoch}, slot)
        for line, upto in zip(sent, ends, strict=True)
    ]
    shards = range(len(log[0].steps)) if log else range(0)
    missed = [number for number, hit in enumerate(hits, 1) if not all(hit.get(shard) for shard in shards)]
    last = lines[-1] if lines else {"epoch": 0, "step": 0, "sync_count": 0}
    mine = [commit for commit in log if commit.epoch <= last["epoch"]]
    steps = [[commit.steps[shard][slot] for commit in mine] for shard in shards]
    return Attendance(
        exchanges=len(sent),
        missed=tuple(missed),
        in_part=sum(any(hits[number - 1].values()) for number in missed),
        rounds_at_once=max((commit.steps[s][slot] for commit in mine if _one(commit) for s in shards), default=0)
        / every,
        lost=last["step"] - min(map(sum, steps), default=0),
        said=last["sync_count"],
        counted=(
            min((sum(count > 0 for count in column) for column in steps), default=0),
            max((_most(column, mine) for column in steps), default=0),
        ),
    )


def _shards(passed: Mapping[int, Commit], slot: int) -> dict[int, bool]:
    """By shard, whether one of these commits counted the slot."""
    hit: dict[int, bool] = {}
    for commit in passed.values():
        for shard, steps in enumerate(commit.steps):
            hit[shard] = hit.get(shard, False) or steps[slot] > 0
    return hit


def _one(commit: Commit) -> bool:
    return commit.epoch == commit.after + 1


def _most(column: Sequence[int], log: Sequence[Commit]) -> int:
    """At most how many outer steps counted this; some outer steps were seen only together."""
    return sum(commit.epoch - commit.after for count, commit in zip(column, log, strict=True) if count > 0)
