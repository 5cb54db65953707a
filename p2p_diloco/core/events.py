"""Events that a replica takes, and effects that it returns. Frozen data, no behaviour.

The node carries out all effects of an event, in order, before it feeds the next event. Average, Apply and Fill start
tensor work. Its result is a proposal: a later event reports it, and only Accept makes it the present state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .carry import Carry as Carry
from .leases import Use
from .messages import Commit, Contribution, Message, State
from .revision import FOUNDED, Revision
from .version import Version

# -- events: from the network


@dataclass(frozen=True, slots=True)
class Received:
    """A message from another peer has arrived."""

    sender: str
    message: Message


@dataclass(frozen=True, slots=True)
class Delivered:
    """The peer ``to`` has received and handled the message."""

    to: str
    message: Message


@dataclass(frozen=True, slots=True)
class SendFailed:
    """A message could not be delivered. ``gone`` is True if the dial was refused or a relay knows that the peer is
    gone. It is False if no path to the peer was found, a deadline passed, the receiver refused the message, or the peer
    gave a sign of life after the message had been sent."""

    to: str
    message: Message
    gone: bool


@dataclass(frozen=True, slots=True)
class Closed:
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


# -- events: from the trainer


@dataclass(frozen=True, slots=True)
class Stepped:
    """The trainer has made inner steps. ``step_time_s``: the usual time of an inner step, in seconds."""

    step_time_s: float


@dataclass(frozen=True, slots=True)
class Pause:
    """The trainer announces that it will make no inner steps for a while (``paused``), or that it trains again."""

    paused: bool


@dataclass(frozen=True, slots=True)
class Merge:
    """The trainer is between two inner steps and asks for a Load of all shards that changed since its last merge."""


@dataclass(frozen=True, slots=True)
class Contribute:
    """The trainer's pseudo-gradients are ready for the shards that a Load named as due. ``payloads`` are in the order
    of ``shards``. ``weight``, ``samples``: as in `Contribution`. ``uses``: what the trainer has used of each data set;
    only the contribution to the ledger tells it."""

    shards: tuple[int, ...]
    weight: float
    samples: int
    payloads: tuple[Any, ...] = field(compare=False, repr=False)
    uses: tuple[Use, ...] = ()


# -- events: answers of tensor work


@dataclass(frozen=True, slots=True)
class Averaged:
    """The answer to the Average with this number: the outer step, taken from ``base``, leads to ``digest``.
    ``payload``: the encoded mean. ``seal``: the commit's seal."""

    shard: int
    base: Version
    number: int
    digest: str
    payload: Any = field(compare=False, repr=False)
    seal: bytes = field(repr=False, default=b"")


@dataclass(frozen=True, slots=True)
class Damaged:
    """A shard's tensors no longer have the digest of their version ``base``: the tensors were corrupted in memory."""

    shard: int
    base: Version


@dataclass(frozen=True, slots=True)
class Applied:
    """The answer to Apply: another peer's commit, applied to ``base``, leads to ``digest``."""

    shard: int
    base: Version
    digest: str


@dataclass(frozen=True, slots=True)
class Filled:
    """The answer to Fill: the fetched state is loaded, and ``digest`` is the digest computed from it."""

    shard: int
    version: Version
    digest: str


# -- events: life of the run


@dataclass(frozen=True, slots=True)
class Found:
    """This peer is to found the run, with every shard at epoch 0. ``digests``: one for each shard, computed over θ₀ and
    ``founding_meta``."""

    generation: int
    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Restore:
    """This peer is to start from a checkpoint. ``states``: the replicated state of every shard; the tensors are already
    in place and verified."""

    states: tuple[State, ...]


@dataclass(frozen=True, slots=True)
class Revised:
    """The node reports a revision that the run's founder has signed. It may report the same revision several times."""

    revision: Revision


@dataclass(frozen=True, slots=True)
class Expelled:
    """The node has a proof that the peer has lied, and accepts no more messages from that peer. ``reason``: the lie."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Depart:
    """This peer is to leave the run: on purpose, or because its trainer ``died``."""

    died: bool = False


@dataclass(frozen=True, slots=True)
class Wakeup:
    """The time that ``next_wakeup()`` returned has come."""


Event = (
    Received
    | Delivered
    | SendFailed
    | Closed
    | Moving
    | Discovered
    | Granted
    | Measured
    | Reachable
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
    | Expelled
    | Depart
    | Wakeup
)

# -- effects


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message. The answer is Delivered or SendFailed.

    A State is sent with the shard's present tensors as payload. If these no longer have the version's digest, the
    answers are Damaged and SendFailed.
    """

    to: str
    message: Message


@dataclass(frozen=True, slots=True)
class Average:
    """Compute the weighted mean of the contributions, rounded as it will be sent, and the outer step with this mean.
    Keep the result as a proposal, until an Accept makes it the shard's state. The answer is Averaged.

    contributions: sorted by peer id, and summed in this order. meta: what the digest of the new state covers besides
    its tensors. held: the same for the base, whose tensors are first checked against the base's digest; if they do not
    match, the answer is Damaged instead. held None: no check. buffered: submissions in the Delayed Nesterov buffer
    before this step. revision: it sets the learning rate and the momentum of this step. number: distinguishes this
    Average from the shard's earlier ones, whose answers may still come. peers: how many peers the plan of the commit
    has in its group.
    """

    shard: int
    base: Version
    contributions: tuple[tuple[str, Contribution], ...]
    meta: bytes
    held: bytes | None
    buffered: int = 0
    revision: Revision = FOUNDED
    number: int = 0
    peers: int = 1


@dataclass(frozen=True, slots=True)
class Apply:
    """Compute the outer step of another peer's commit and propose the result. ``meta`` and ``buffered`` are as in
    Average. The answer is Applied."""

    commit: Commit
    meta: bytes
    buffered: int = 0


@dataclass(frozen=True, slots=True)
class Fill:
    """Load the tensors of a fetched state, and propose the state. ``meta``: what the state's digest covers besides the
    tensors. The answer is Filled."""

    state: State
    meta: bytes


@dataclass(frozen=True, slots=True)
class Accept:
    """Replace the present states of these shards with these proposals, all at once, and discard other proposals for
    these shards. Each proposal is given as (shard, digest)."""

    proposals: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """One shard of a Load: the version to merge, and what happens to the shard's local progress."""

    shard: int
    version: Version
    carry: Carry


@dataclass(frozen=True, slots=True)
class Load:
    """The answer to the trainer's Merge: the trainer merges ``shards`` (there may be none), and next contributes to the
    shards in ``due``.

    Shards that are due belong to one fragment. In synchronous mode: the fragment with the lowest epoch (if several
    have it, the first of these). Its shards at that epoch are due, so peers with the same logs choose the same shards.
    In asynchronous mode the fragments take turns. ``due`` is empty when the run has ended.
    """

    shards: tuple[Loaded, ...]
    due: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Tell the trainer that its exchange is over. If ``sent`` is False, nothing was sent, because newer versions had
    come: the trainer should merge them and contribute again."""

    sent: bool


@dataclass(frozen=True, slots=True)
class Ready:
    """Tell the trainer that it may start, because this peer holds all shards."""


@dataclass(frozen=True, slots=True)
class Changed:
    """Tell the trainer that a shard's present state has changed, so that it asks for a merge at its next inner step."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Tell the trainer that every shard has reached the end of the run."""


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the event log. ``kind`` is one of a fixed set of words, ``text`` is one sentence."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Died:
    """A peer has died that has sent this peer a Summary. ``incarnation``: the one that died. ``cause``: what died,
    ``trainer`` or ``node``; ``silent``: it is not known, because no answer comes."""

    peer: str
    incarnation: int
    cause: str


@dataclass(frozen=True, slots=True)
class Complaint:
    """A message of ``peer`` is ignored. ``why`` names the message and the reason."""

    peer: str
    why: str


Effect = (
    Send | Average | Apply | Fill | Accept | Load | Release | Ready | Changed | Finished | Note | Died | Complaint
)  # fmt: skip
