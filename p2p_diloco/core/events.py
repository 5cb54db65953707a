"""Events that a replica takes, and effects that it returns. Frozen data, no behaviour.

The node carries out all effects of an event, in order, before it feeds the next event.
Average, Apply, Fill and Roll start tensor work; a later event reports its result. Apply changes the
present tensors in place; what Fill and Roll make is staged until an Accept puts it in their place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .carry import Outcome
from .leases import Use
from .messages import Choice, Commit, Mean, Message, Slice
from .revision import Revision
from .state import State
from .version import ContributionId, Version

# -- events: other peers, the network, and time


@dataclass(frozen=True, slots=True)
class Broke:
    """A connection to the peer broke. This is a reason to suspect the peer and to probe it at once, but no proof of its
    death."""

    peer: str


@dataclass(frozen=True, slots=True)
class Moving:
    """A transfer from or to the peer makes progress. So the peer is alive, though its answers to probes may wait behind
    the transfer."""

    peer: str


@dataclass(frozen=True, slots=True)
class Discovered:
    """The DHT lists this peer."""

    peer: str


@dataclass(frozen=True, slots=True)
class Expelled:
    """The node has a proof that the peer has lied, and accepts no more messages from that peer. ``reason``: the lie."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Granted:
    """The peer has shown by which grant it is in a private run. The holder of a grant can start any number of peers."""

    peer: str
    grant: str


@dataclass(frozen=True, slots=True)
class Measured:
    """The bandwidth of this peer's link, in bytes a second, was measured for the first time or has changed clearly."""

    bandwidth: float


@dataclass(frozen=True, slots=True)
class Reachable:
    """This peer has found out whether other peers can dial it. If they can't (``reachable`` is False), this peer is
    private. The node may report the same result several times."""

    reachable: bool


@dataclass(frozen=True, slots=True)
class Revised:
    """The node reports a revision that the run's founder has signed. It may report the same revision several times."""

    revision: Revision


@dataclass(frozen=True, slots=True)
class Depart:
    """This peer is to leave the run: on purpose, or because its trainer ``died``."""

    died: bool = False


@dataclass(frozen=True, slots=True)
class Wakeup:
    """The time that ``next_wakeup()`` returned has come."""


# -- events: the trainer


@dataclass(frozen=True, slots=True)
class Merge:
    """The trainer is between two inner steps and asks for a Load of all fragments that changed since its last merge."""


@dataclass(frozen=True, slots=True)
class Pause:
    """The trainer announces that it will make no inner steps for a while (``paused``), or that it trains again."""

    paused: bool


@dataclass(frozen=True, slots=True)
class Stepped:
    """The trainer has made inner steps. ``step_time_s``: the usual time of an inner step, in seconds."""

    step_time_s: float


# -- effects for the node and the trainer


@dataclass(frozen=True, slots=True)
class Changed:
    """Tell the trainer that a fragment's present state has changed, so that it asks for a merge at its next inner
    step."""


@dataclass(frozen=True, slots=True)
class Complaint:
    """A message of ``peer`` is ignored. ``why`` names the message and the reason."""

    peer: str
    why: str


@dataclass(frozen=True, slots=True)
class Died:
    """A peer has died that has sent this peer a Summary. ``incarnation``: the one that died. ``cause``: what died,
    ``trainer`` or ``node``; ``silent``: it is not known, because no answer comes."""

    peer: str
    incarnation: int
    cause: str


@dataclass(frozen=True, slots=True)
class Finished:
    """Tell the trainer that every fragment has reached the end of the run."""


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the event log. ``kind`` is one of a fixed set of words, ``text`` is one sentence."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Release:
    """Tell the trainer that its exchange is over. If ``sent`` is False, nothing was sent, because newer versions had
    come: the trainer should merge them and contribute again. In asynchronous mode ``refused`` says why the submission
    was not counted, or it was counted ``staleness`` epochs after its base."""

    sent: bool
    refused: str = ""
    staleness: int = 0


@dataclass(frozen=True, slots=True)
class Start:
    """Tell the trainer that it may start, because this peer holds all fragments."""


# -- messages and rounds


@dataclass(frozen=True, slots=True)
class Received:
    """A message from another peer has arrived."""

    sender: str
    message: Message


@dataclass(frozen=True, slots=True)
class Delivered:
    """The peer ``to`` has received the message."""

    to: str
    message: Message


@dataclass(frozen=True, slots=True)
class SendFailed:
    """A message could not be delivered. ``gone``: the dial was refused, or a relay knows that the peer is gone; and the
    peer has given no sign of life since the message was sent."""

    to: str
    message: Message
    gone: bool


@dataclass(frozen=True, slots=True)
class Contribute:
    """The trainer's pseudo-gradient for the fragment that a Load named as due, by slice, with the hash of each."""

    fragment: int
    weight: float
    samples: int
    hashes: tuple[str, ...]
    payloads: tuple[Any, ...] = field(compare=False, repr=False)
    uses: tuple[Use, ...] = ()


@dataclass(frozen=True, slots=True)
class Averaged:
    """The answer to Average: the mean of one slice, its hash, and this peer's signature of these."""

    fragment: int
    base: Version
    key: str
    number: int
    hash: str
    payload: Any = field(compare=False, repr=False, default=None)
    seal: bytes = field(repr=False, default=b"")


@dataclass(frozen=True, slots=True)
class Applied:
    """The answer to Apply: the outer step of this commit is computed."""

    fragment: int
    base: Version
    version: Version


@dataclass(frozen=True, slots=True)
class Filled:
    """The answer to Fill: a fetched slice is staged; ``digest``: of its tensors."""

    fragment: int
    version: Version
    number: int
    digest: str


@dataclass(frozen=True, slots=True)
class Rolled:
    """The answer to Roll: a staged slice is now at ``version``."""

    fragment: int
    version: Version
    number: int


@dataclass(frozen=True, slots=True)
class Digested:
    """The digests of this version's tensors as they are here, by slice, computed beside all else."""

    fragment: int
    version: Version
    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Damaged:
    """Slices in memory no longer have the digest that was computed after their last step."""

    fragment: int
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """This peer is to found the run. ``hashes``: by fragment, of the founding's record and of θ₀."""

    generation: int
    hashes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Restore:
    """This peer is to start from a checkpoint: the states of all fragments; their tensors are in place."""

    states: tuple[State, ...]


Event = (
    Received | Delivered | SendFailed | Broke | Moving | Discovered | Measured | Reachable | Stepped | Pause | Merge
    | Contribute | Averaged | Applied | Filled | Rolled | Digested | Damaged | Found | Restore | Revised | Expelled
    | Granted | Depart | Wakeup
)  # fmt: skip

# -- effects


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message. The answer is Delivered or SendFailed. A Part gets its tensors when it is sent."""

    to: str
    message: Message


@dataclass(frozen=True, slots=True)
class Average:
    """Compute the mean of one slice: of ``slices``, one for each entry that has a weight, sorted by peer and summed in
    this order. ``choice``: the one with this key, as its leader has told it. The answer is Averaged."""

    fragment: int
    base: Version
    key: str
    number: int
    slices: tuple[tuple[float, Slice], ...]  # with the weight of each
    choice: Choice | None = field(compare=False, repr=False, default=None)


@dataclass(frozen=True, slots=True)
class Apply:
    """Take the outer step of a commit from its means, one for each slice (none: tensors stay), in place.
    ``buffered``: submissions in the Delayed Nesterov buffer before. ``peers``: how many candidates the base's plan has.
    The answer is Applied."""

    commit: Commit
    means: tuple[Mean, ...]
    buffered: int = 0
    peers: int = 1


@dataclass(frozen=True, slots=True)
class Fill:
    """Stage the tensors of a fetched slice. The answer is Filled."""

    fragment: int
    version: Version
    number: int
    payload: Any = field(compare=False, repr=False, default=None)


@dataclass(frozen=True, slots=True)
class Roll:
    """Take the outer step of a commit in one staged slice; the rest as in Apply. The answer is Rolled."""

    commit: Commit
    mean: Mean
    buffered: int = 0
    peers: int = 1


@dataclass(frozen=True, slots=True)
class Accept:
    """These are the present states from now on, all at once, each given as (fragment, version). ``staged``: put the
    staged slices in place; else Apply has changed the tensors already. ``numbers``: only these slices are replaced;
    None: all."""

    versions: tuple[tuple[int, Version], ...]
    numbers: tuple[int, ...] | None = None
    staged: bool = False


@dataclass(frozen=True, slots=True)
class Keep:
    """Take these damaged slices as they are: no other peer has them."""

    fragment: int
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """One fragment of a Load. ``counted``: this peer's last contribution that the version counts."""

    fragment: int
    version: Version
    counted: ContributionId | None
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Load:
    """The answer to the trainer's Merge: the fragments to merge, and the one to contribute to next; None at the end."""

    fragments: tuple[Loaded, ...]
    due: int | None


Effect = (
    Send | Average | Apply | Fill | Roll | Accept | Keep | Load | Release | Start | Changed | Finished | Note
    | Died | Complaint
)  # fmt: skip
