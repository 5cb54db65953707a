"""Revisions: settings of a run, changed while the run goes on.

Law: a revision is plain data, and revisions are ordered. Each commit names the revision of its outer step; along a
lineage the revision never falls. A peer tells other peers the highest revision that it knows, and writes no commit at a
lower one. The founder's signature is checked before a revision reaches the core.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import total_ordering
from math import isfinite

NEVER = 0
"""The value by which a revision removes a stop, so that the run does not end by itself."""


@total_ordering
@dataclass(frozen=True, slots=True)
class Revision:
    """The number of a revision and the settings that it changes, by their names in `RunConfig`. A setting that is None
    stays as founded. Revision 0 changes nothing.

    If two revisions have the same number, the one with greater values wins, so that all peers agree. proof: the
    founder's signature, ignored in comparisons. saves: how often all peers were asked for a checkpoint.
    """

    number: int = 0
    outer_lr: float | None = None
    outer_momentum: float | None = None
    proof: str = field(compare=False, repr=False, default="")
    sync_every: int | None = None
    min_peers: int | None = None
    stop_after_epochs: int | None = None  # NEVER: no stop, whatever the run was founded with
    stop_after_samples: int | None = None
    saves: int = 0

    @property
    def changed(self) -> dict[str, float | None]:
        """The settings that this revision changes, with their values. None: no stop."""
        values = {name: getattr(self, name) for name in CHANGEABLE}
        return {
            name: None if name in STOPS and value == NEVER else value
            for name, value in values.items()
            if value is not None
        }

    @property
    def rates(self) -> tuple[float | None, float | None] | None:
        """The changed rates (outer_lr, outer_momentum); None if neither is changed."""
        return None if self.outer_lr is None and self.outer_momentum is None else (self.outer_lr, self.outer_momentum)

    @property
    def covered(self) -> tuple[float | None, ...]:
        """The values that signatures and digests cover. For a revision that changes only outer_lr or outer_momentum,
        they are the same as in older versions of this package, in which nothing else could change."""
        rates, later = (self.number, self.outer_lr, self.outer_momentum), [getattr(self, name) for name in _LATER]
        return (*rates, *later) if any(value for value in later) or NEVER in later[:-1] else rates

    @property
    def sound(self) -> bool:
        """Whether the number and the values are valid."""
        if not self.number:
            return self == FOUNDED
        lr, momentum, least = self.outer_lr, self.outer_momentum, (self.sync_every, self.min_peers)
        rates = (lr is None or (lr >= 0 and isfinite(lr))) and (momentum is None or 0 <= momentum < 1)
        counts = all(value is None or value >= 1 for value in least) and self.saves >= 0
        stops = all(value is None or value >= NEVER for value in (self.stop_after_epochs, self.stop_after_samples))
        return self.number > 0 and rates and counts and stops

    @property
    def _rank(self) -> tuple[float, ...]:
        values = (getattr(self, name) for name in (*CHANGEABLE, "saves"))
        return tuple(-1 if value is None else value for value in values)

    def __lt__(self, other: Revision) -> bool:
        if self.number != other.number:
            return self.number < other.number
        return self is not other and self._rank < other._rank

    def __str__(self) -> str:
        if not self.number:
            return "revision 0 (as founded)"
        values = [f"{name}={_shown(value)}" for name, value in self.changed.items()]
        values += [f"saves={self.saves}"] if self.saves else []
        return f"revision {self.number} ({', '.join(values) or 'as founded'})"


CHANGEABLE = (
    "outer_lr",
    "outer_momentum",
    "sync_every",
    "min_peers",
    "stop_after_epochs",
    "stop_after_samples",
)
"""The settings that a revision may change."""
STOPS = frozenset({"stop_after_epochs", "stop_after_samples"})
_LATER = (*CHANGEABLE[2:], "saves")

FOUNDED = Revision()
"""The revision with which a run begins: all settings are as founded."""


def in_force(founded: int | None, revised: int | None) -> int | None:
    """The value of a count or a stop at a revision: the revised one or, where the revision does not change it, the
    founded one. None: no stop."""
    return founded if revised is None else revised or None


def _shown(value: float | None) -> str:
    if value is None:
        return "none"
    return str(value) if isinstance(value, int) else f"{value:g}"
