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
    """The round that makes a fragment's next version. Times are in seconds.

    began: when the version came. opened: since when missing peers are waited for; None: too few contributions have
    come. asks_at, patience: when to ask again for what is missing, and the interval before that.
    term, leader: the greatest claim that this peer has promised to. since: the number of that claim; inf: the leader
    itself has not told it; -1: it holds by the plan. led: this peer has held the term in this round, and yielded.
    promised: who promised this peer's own claim; None: it needs none. votes: the newest votes about this peer's claim
    or lead. refused: by peer, its claim that was not promised, (term, number); inf: another peer told it. heard: by
    peer, the number of its newest claim or vote.
    handed: who has this peer's own contribution, and since when.
    waited, passed: how long each peer was waited for, and whom the round goes on without. idle: (how often, until when
    it is promised nothing) of each that led and did nothing, or claimed again. moved_at: when a part last came.
    closed_at: when it was first closed. moving: when a transfer with each peer last made progress. half_at: when half
    of the means were there.
    readys, slices: contributions; arrived: asynchronous, when each came. owners: who computes each slice's mean.
    attempt, close: the newest Close, sent or received. served: the greatest one for which a mean was begun here.
    means: by key and number; computing: begun; delivered: (peer, key, number) of own ones that have reached a peer.
    lacks: (number, author) → since when an owner lacks this slice, and whether the leader has passed it on. asked: when
    each owner was asked what it lacks, or each peer for means. excluded: owners that the round goes on without.
    commits: by their authors, not accepted. void: chains of commits whose means nobody has. commit: accepted or own.
    working: the outer step under way. holding: who holds the own commit, in asynchronous mode; offered: when it is
    offered to each again.
    """

    phase: Phase = Phase.EMPTY
    began: float = 0.0
    opened: float | None = None
    asks_at: float = 0.0
    patience: float = 0.0
    term: int = 0
    leader: str = ""
    promised: set[str] | None = None
    votes: dict[str, Vote] = field(default_factory=dict)
    refused: dict[str, tuple[int, float]] = field(default_factory=dict)
    heard: dict[str, int] = field(default_factory=dict)
    since: float = -1
    led: bool = False
    waited: dict[str, float] = field(default_factory=dict)
    passed: set[str] = field(default_factory=set)
    idle: dict[str, tuple[int, float]] = field(default_factory=dict)
    handed: tuple[str, float] = ("", 0.0)
    moved_at: float = 0.0
    closed_at: float = math.inf
    moving: dict[str, float] = field(default_factory=dict)
    half_at: float | None = None
    readys: dict[str, Ready] = field(default_factory=dict)
    arrived: dict[str, float] = field(default_factory=dict)
    slices: dict[tuple[int, str], Slice] = field(default_factory=dict)
    owners: tuple[str, ...] = ()
    attempt: int = -1
    close: Close | None = None
    served: Close | None = None
    computing: set[tuple[str, int]] = field(default_factory=set)
    delivered: set[tuple[str, str, int]] = field(default_factory=set)
    means: dict[tuple[str, int], Mean] = field(default_factory=dict)
    lacks: dict[tuple[int, str], tuple[float, bool]] = field(default_factory=dict)
    asked: dict[str, float] = field(default_factory=dict)
    excluded: set[str] = field(default_factory=set)
    commits: dict[str, Commit] = field(default_factory=dict)
    commit: Commit | None = None
    void: set[str] = field(default_factory=set)
    working: Apply | None = None
    holding: set[str] = field(default_factory=set)
    offered: dict[str, float] = field(default_factory=dict)
