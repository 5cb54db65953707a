"""The data of one round: everything that belongs to one version of a fragment, and is replaced with that version."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from .events import Apply
from .messages import Close, Commit, Mean, Ready, Slice, Vote


class Phase(Enum):
    """What a fragment's log does now. The table of phases and events is in docs/decisions/0085."""

    EMPTY = "empty"
    COLLECTING = "collecting"
    CLAIMING = "claiming"
    CLOSING = "closing"
    HOLDING = "holding"
    LACKING = "lacking"
    APPLYING = "applying"
    FETCHING = "fetching"
    FINAL = "final"


@dataclass(slots=True)
class Round:
    """The round that makes a fragment's next version. Times are in seconds."""

    phase: Phase = Phase.EMPTY

    # -- when it opens, and what is asked for
    began: float = 0.0  # when the version came
    opened: float | None = None  # since when missing peers are waited for; None: too few contributions have come
    asks_at: float = 0.0  # when to ask again for what is missing
    patience: float = 0.0  # the interval before that

    # -- who leads
    term: int = 0  # the greatest claim that this peer has promised to: its term and its leader
    leader: str = ""
    since: float = -1  # the number of that claim; inf: the leader itself has not told it; -1: it leads by the plan
    led: bool = False  # this peer has led in this round, and yielded
    promised: set[str] | None = None  # who promised this peer's own claim; None: it needs no promise
    votes: dict[str, Vote] = field(default_factory=dict)  # the newest votes about this peer's claim or lead
    refused: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By peer, its claim that was not promised, as (term, number); inf: another peer told it."""
    heard: dict[str, int] = field(default_factory=dict)  # by peer, the number of its newest claim or vote

    # -- who is waited for
    handed: tuple[str, float] = ("", 0.0)  # who has this peer's own contribution, and since when
    waited: dict[str, float] = field(default_factory=dict)  # how long each peer was waited for
    passed: set[str] = field(default_factory=set)  # whom the round goes on without
    idle: dict[str, tuple[int, float]] = field(default_factory=dict)
    """How often each peer led and did nothing, or claimed again, and until when it is promised nothing."""
    moved_at: float = 0.0  # when a part last came
    moving: dict[str, float] = field(default_factory=dict)  # when a transfer with each peer last made progress
    closed_at: float = math.inf  # when the round was first closed
    tried_at: float = 0.0  # when it was last closed
    in_vain: float = 0.0  # for how long nothing came before it was closed again
    half_at: float | None = None  # when half of the means were there

    # -- contributions
    readys: dict[str, Ready] = field(default_factory=dict)
    slices: dict[tuple[int, str], Slice] = field(default_factory=dict)
    arrived: dict[str, float] = field(default_factory=dict)  # asynchronous: when each Ready came

    # -- means
    owners: tuple[str, ...] = ()  # who computes each slice's mean
    attempt: int = -1  # of the newest Close of this peer
    close: Close | None = None  # the newest Close, sent or received
    served: Close | None = None  # the greatest one for which a mean was begun here
    computing: set[tuple[str, int]] = field(default_factory=set)  # by key and number: means that were begun
    means: dict[tuple[str, int], Mean] = field(default_factory=dict)  # by key and number
    delivered: set[tuple[str, str, int]] = field(default_factory=set)  # (peer, key, number) of own ones it has
    lacks: dict[tuple[int, str], tuple[float, bool]] = field(default_factory=dict)
    """(number, author) → since when an owner lacks this slice, and whether the leader has passed it on."""
    asked: dict[str, float] = field(default_factory=dict)
    """When each owner was asked what it lacks, or each peer for means."""
    excluded: set[str] = field(default_factory=set)  # owners that the round goes on without

    # -- commits
    commits: dict[str, Commit] = field(default_factory=dict)  # by their authors, not accepted
    void: set[str] = field(default_factory=set)  # chains of commits whose means nobody has
    commit: Commit | None = None  # accepted, or own
    working: Apply | None = None  # the outer step under way
    holding: set[str] = field(default_factory=set)  # asynchronous: who holds the own commit
    offered: dict[str, float] = field(default_factory=dict)  # asynchronous: when it is offered to each again

    def closes(self, now: float) -> None:
        """Record that the round is closed now. If it was before, nobody knows when what was waited for would have come:
        that time isn't usual. Else the next wait would be twice as long, and so on."""
        if self.closed_at <= now:
            self.in_vain += now - max(self.moved_at, *self.moving.values(), self.tried_at, self.opened or 0.0)
        self.closed_at, self.tried_at = min(self.closed_at, now), now
