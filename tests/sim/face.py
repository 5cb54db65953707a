"""What the simulator asks of the core that it plays: the face of its replicas.

Law: laws, faults, founder, membership, trainers, data and witness know a core only by this face, and speak of units. A
unit is what has a log, a version and a θ of its own: a shard in `p2p_diloco.core`. All that belongs to one core alone
comes with its face: its tensors, its hostile member, its own laws.

`Rules` and the events that the simulator makes are those of `p2p_diloco.core`; the face of another core translates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from p2p_diloco.core.events import Event
from p2p_diloco.core.leases import Tables
from p2p_diloco.core.revision import Revision
from p2p_diloco.core.rules import Rules
from p2p_diloco.core.version import ModelVersion, Version
from p2p_diloco.history.entry import Entry

from .model import Fate

if TYPE_CHECKING:
    from .hostile import Hostile
    from .process import Process

# -- what a replica has


class Plan(Protocol):
    """A plan of the next outer step. ``succession``: who may write its commit, the first one first."""

    @property
    def succession(self) -> tuple[str, ...]: ...


class State(Protocol):
    """The replicated state of a unit. ``tables``: which data is used and leased; only the ledger's state has them."""

    @property
    def version(self) -> Version: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def revision(self) -> Revision: ...
    @property
    def tables(self) -> Tables: ...


class Summary(Protocol):
    """What a peer says of itself. ``epochs``: empty while it holds no state. ``eligible``: whether it is reachable.
    ``revision``: the highest one that it knows."""

    @property
    def epochs(self) -> tuple[int, ...]: ...
    @property
    def eligible(self) -> bool: ...
    @property
    def revision(self) -> Revision: ...


class Roster(Protocol):
    """The peers that a replica knows. ``mine``: its own Summary."""

    @property
    def mine(self) -> Summary: ...
    def live(self, peer: str, /) -> bool: ...
    def summaries(self) -> Mapping[str, Summary]: ...
    def says(self, *, eligible: bool) -> None: ...


# -- what a face tells the laws


class Counted(NamedTuple):
    """One contribution that an outer step counts. base: the version that it names. steps: its inner steps. empty: in a
    run with data, its author had trained nothing."""

    peer: str
    base: Version
    steps: int
    empty: bool


@dataclass(frozen=True, slots=True)
class Step:
    """An outer step of which a peer makes a commit: from ``base`` to ``version``. buffered: submissions in the Delayed
    Nesterov buffer before it. line: the succession that the commit names. private, late: peers that are private, or
    that can't come first, by what the commit itself says; None: the author's own view decides."""

    unit: int
    base: Version
    version: Version
    counted: tuple[Counted, ...]
    revision: Revision
    buffered: int
    line: tuple[str, ...]
    private: frozenset[str] | None = None
    late: frozenset[str] = frozenset()


class Merged(NamedTuple):
    """One unit of a merge: the version that the trainer merges, and what becomes of its local progress."""

    unit: int
    version: Version
    fate: Fate


class Face(Protocol):
    """A replica that can be played, with its tensors. It is fed the events of `p2p_diloco.core`."""

    def __init__(self, me: str, rules: Rules, *, incarnation: int, now: float) -> None: ...

    hostile: ClassVar[type[Hostile]]  # a member that sends messages of this core
    many_win: ClassVar[bool]  # whether a peer goes over to a lesser lineage that most others hold, and says so

    @staticmethod
    def units(rules: Rules) -> Sequence[int]:
        """Return the units of a run, numbered from 0: of each one the fragment that it belongs to."""

    # -- the replica

    def handle(self, event: Any, now: float) -> list[Any]:
        """Handle an event, and return its effects."""

    def next_wakeup(self) -> float:
        """Return when it must be fed a Wakeup, by its own clock; inf once it has departed."""

    def carry_out(self, process: Process, effect: Any) -> None:
        """Carry out an effect that `World` leaves to the face: tensor work, which calls `drafted` for each outer step
        of which a commit is made, `World.accepted` for each new version, and the laws of this core alone; or a Load,
        which calls `Trainers.load`."""

    def entry(self, time: float, event: Any, effects: list[Any]) -> Entry:
        """Return what a trace holds of an event and its effects."""

    def dead(self) -> set[str]:
        """Return the peers that count as dead here."""

    @property
    def roster(self) -> Roster: ...
    @property
    def model(self) -> ModelVersion: ...
    @property
    def incarnation(self) -> int: ...
    @property
    def finished(self) -> bool: ...  # the run has ended here
    @property
    def departed(self) -> bool: ...
    @property
    def has_state(self) -> bool: ...  # of every unit
    @property
    def epoch(self) -> int: ...  # the lowest of any unit
    @property
    def interval(self) -> int: ...  # inner steps from one exchange to the next, by its state
    @property
    def merging(self) -> bool: ...  # its trainer waits for the answer to a Merge

    # -- units

    @property
    def versions(self) -> Sequence[Version | None]: ...
    def state(self, unit: int, /) -> State: ...

    def final(self, unit: int) -> bool:
        """Whether the run has ended for this unit."""

    def relation(self, unit: int, theirs: Version) -> str:
        """Return how a version relates to the present one: equal, ancestor, ahead or fork. An ancestor too old to be
        remembered is one as far as epochs and samples agree."""

    def remembers(self, unit: int, version: Version) -> bool:
        """Whether this version is the present one or an ancestor that the state still names."""

    def steps_made(self, unit: int) -> int:
        """Return how many inner steps of one trainer the unit's commits stand for, each by the H of its time."""

    # -- rounds

    def could_close(self, now: float) -> list[int]:
        """Return the units whose next commit this peer may make now, by the rules, and has not begun to."""

    def waits_for(self) -> set[str]:
        """Return the peers without which the rounds that it leads don't go on."""

    def misses_often(self, unit: int, peer: str) -> bool:
        """Whether rounds no longer wait for this peer, because it has missed several of them."""

    # -- tensors

    def founds(self) -> Event:
        """Put the founding tensors in place, and return the event that founds the run on them."""

    def saved(self) -> object:
        """Return all that a checkpoint holds."""

    def restored(self, saved: Any) -> Event:
        """Put the tensors of a checkpoint in place, and return the event that restores it."""

    def holds(self, unit: int) -> int:
        """Return the inner steps in this unit's θ."""

    def flip(self, unit: int, bits: bytes) -> None:
        """Damage the unit's tensors in memory: ``bits`` takes the place of a part of them."""

    def damaged(self, unit: int) -> bool:
        """Whether the unit's tensors are not those of its version."""

    def laden(self, process: Process, message: Any) -> tuple[Any, Event | None]:
        """Return the message with the tensors that travel in it; if these are damaged, also the event that says so."""
