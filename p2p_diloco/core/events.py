"""Events that a replica takes and effects that it returns. Frozen data, no behaviour.

The node carries out effects in order before it feeds the next event. Tensor work (Average, Apply, Fill) is answered by
a later event and changes the present state only with Accept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from .messages import Commit, Contribution, Message, State
from .revision import FOUNDED, Revision
from .version import Version

# -- events: from the network


@dataclass(frozen=True, slots=True)
class Received:
    sender: str
    message: Message


@dataclass(frozen=True, slots=True)
class Delivered:
    """The remote replica has handled the message."""

    to: str
    message: Message


@dataclass(frozen=True, slots=True)
class SendFailed:
    """``gone``: the dial was refused or the stream broke; otherwise a deadline passed or the remote refused the
    message."""

    to: str
    message: Message
    gone: bool


@dataclass(frozen=True, slots=True)
class Closed:
    """A connection to the peer broke: reason to suspect the peer and to probe it at once, but no proof of its death."""

    peer: str


@dataclass(frozen=True, slots=True)
class Moving:
    """A transfer from or to the peer moves: it is alive, though its answers to probes may wait behind the transfer."""

    peer: str


@dataclass(frozen=True, slots=True)
class Discovered:
    """The DHT names this peer."""

    peer: str


@dataclass(frozen=True, slots=True)
class Measured:
    """The bandwidth of this peer's link, in bytes a second, became known or changed clearly."""

    bandwidth: float


# -- events: from the trainer


@dataclass(frozen=True, slots=True)
class Stepped:
    """The trainer has made inner steps; ``step_time_s`` is what one usually takes."""

    step_time_s: float


@dataclass(frozen=True, slots=True)
class Pause:
    """The trainer announces that it will make no inner steps for a while (``paused``), or that it is back."""

    paused: bool


@dataclass(frozen=True, slots=True)
class Merge:
    """The trainer is between two inner steps: answer with a Load of all that changed since its last one."""


@dataclass(frozen=True, slots=True)
class Contribute:
    """The trainer's pseudo-gradients are ready, for the shards that a Load named as due; payloads in the same order."""

    shards: tuple[int, ...]
    weight: float
    samples: int
    payloads: tuple[Any, ...] = field(compare=False, repr=False)


# -- events: answers of tensor work


@dataclass(frozen=True, slots=True)
class Averaged:
    shard: int
    base: Version
    digest: str
    payload: Any = field(compare=False, repr=False)  # the encoded mean


@dataclass(frozen=True, slots=True)
class Damaged:
    """The shard's present state no longer has the digest of its version: its tensors changed in memory."""

    shard: int
    base: Version


@dataclass(frozen=True, slots=True)
class Applied:
    shard: int
    base: Version
    digest: str


@dataclass(frozen=True, slots=True)
class Filled:
    shard: int
    version: Version
    digest: str


# -- events: life of the run


@dataclass(frozen=True, slots=True)
class Found:
    """Found the run: epoch 0 of every shard, with the digests of θ₀ under ``founding_meta``."""

    generation: int
    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Restore:
    """Start from a checkpoint: every shard's replicated state; its tensors are already in place and verified."""

    states: tuple[State, ...]


@dataclass(frozen=True, slots=True)
class Revised:
    """The run's founder has signed this revision; the same one may be reported again."""

    revision: Revision


@dataclass(frozen=True, slots=True)
class Depart:
    """Leave the run on purpose."""


@dataclass(frozen=True, slots=True)
class Wakeup:
    """Time has reached ``next_wakeup()``."""


Event = (
    Received
    | Delivered
    | SendFailed
    | Closed
    | Moving
    | Discovered
    | Measured
    | Stepped
    | Pause
    | Merge
    | Contribute
    | Averaged
    | Damaged
    | Applied
    | Filled
    | Found
    | Restore
    | Revised
    | Depart
    | Wakeup
)

# -- effects


@dataclass(frozen=True, slots=True)
class Send:
    """Send; answered by Delivered or SendFailed. A State goes out with the shard's present tensors as payload; if these
    no longer have its version's digest, the answers are Damaged and SendFailed."""

    to: str
    message: Message


@dataclass(frozen=True, slots=True)
class Average:
    """Weighted mean in the order given (sorted peer ids), rounded to the wire; propose the outer step. → Averaged

    meta: what the new digest covers besides the tensors; held: the same for the base. If the present state does not
    have the base's digest, the answer is Damaged instead, unless ``held`` is None: then its tensors are used as they
    are. buffered: submissions in the Delayed Nesterov buffer before this step. revision: the rates of the step.
    """

    shard: int
    base: Version
    contributions: tuple[tuple[str, Contribution], ...]
    meta: bytes
    held: bytes | None
    buffered: int = 0
    revision: Revision = FOUNDED


@dataclass(frozen=True, slots=True)
class Apply:
    """Propose the outer step of another peer's commit. → Applied"""

    commit: Commit
    meta: bytes
    buffered: int = 0


@dataclass(frozen=True, slots=True)
class Fill:
    """Propose a fetched state. → Filled"""

    state: State
    meta: bytes


@dataclass(frozen=True, slots=True)
class Accept:
    """Make these proposals, (shard, digest), the present state, all at once; other proposals for these shards are
    void."""

    proposals: tuple[tuple[int, str], ...]


class Carry(Enum):
    """What to do with local progress (local − base, per shard) when a newer global value is merged.

    Let Δ be the last contribution sent for the shard (pseudo-gradient: base at that time − local at sending).
    """

    KEEP = "keep"  # local ← new + (local − base)
    SUBTRACT = "subtract"  # local ← new + (local − base) + Δ: the contribution is counted in new
    RESTORE = "restore"  # local ← new + (local − base) − Δ: it was in base, but new doesn't count it
    DROP = "drop"  # local ← new: the uncounted progress can't be separated from the counted, or is too old


@dataclass(frozen=True, slots=True)
class Loaded:
    """One shard of a Load."""

    shard: int
    version: Version
    carry: Carry


@dataclass(frozen=True, slots=True)
class Load:
    """The answer to the trainer's Merge: merge these shards (perhaps none); ``due`` is to be contributed next.

    due: shards of one fragment, chosen by the log so that peers with the same log choose alike: the fragment of the
    lowest epoch, then of the lowest index, and its shards at that epoch. Empty when the run has ended.
    """

    shards: tuple[Loaded, ...]
    due: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """To the trainer: the exchange is over. ``sent`` False: it never began because a base had changed; merge and try
    again."""

    sent: bool


@dataclass(frozen=True, slots=True)
class Ready:
    """This peer holds all shards: training may start."""


@dataclass(frozen=True, slots=True)
class Changed:
    """Some shard's present state has changed: the trainer should merge at its next step."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Every shard has reached the end of the run."""


@dataclass(frozen=True, slots=True)
class Note:
    """A line of the event log. ``kind`` is one of a fixed vocabulary, ``text`` one sentence."""

    kind: str
    text: str


Effect = Send | Average | Apply | Fill | Accept | Load | Release | Ready | Changed | Finished | Note
