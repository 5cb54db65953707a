"""Messages between replicas: frozen data.

``payload`` is an opaque reference to bytes; ``seal`` is a signature that the node has checked. The core reads neither.
Nor does it see what can't belong to the run (`node/fields.py`): numbers below 0 or too great, fragments and slices that
there are not, lists of another length, Closes without the key of their choice, contributions without their slices.
``base``: the version that a message is about. ``key``: the hash of a `Choice`, see `state.key_of`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from .leases import Use
from .revision import FOUNDED, Revision
from .version import ContributionId, ModelVersion, Version

if TYPE_CHECKING:
    from .state import State

NO_MODEL = ModelVersion()
Links = tuple[tuple[int, str], ...]
"""(epoch, chain) of a state's version and of its newest ancestors, in order."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What a peer tells other peers about itself with every probe.

    ``heads``: (epoch, chain) of each fragment; empty while the peer lacks one. ``sent``: by fragment, the epoch for
    which its contribution is out; -1: none. ``awaits``: of each fragment that it leads, peers that it waits for.
    ``digests``: by fragment, (epoch, digest of the tensors) of its last versions. ``number``: how often it changed in
    this process; messages overtake each other, and an older Summary replaces no newer one.
    """

    incarnation: int
    role: str  # "worker" contributes and leads, "aggregator" only leads and owns
    eligible: bool = True  # other peers can dial it
    model: ModelVersion = NO_MODEL
    heads: Links = ()
    idle: bool = False  # it makes no inner steps
    bandwidth: float = 0.0
    revision: Revision = FOUNDED
    speed: float = 0.0
    paused: bool = False
    sent: tuple[int, ...] = ()
    awaits: tuple[tuple[int, tuple[str, ...]], ...] = ()
    digests: tuple[Links, ...] = ()
    number: int = 0

    @property
    def epochs(self) -> tuple[int, ...]:
        """The epoch of each fragment."""
        return tuple(epoch for epoch, _ in self.heads)


# -- liveness


@dataclass(frozen=True, slots=True)
class Probe:
    """Asks the receiver to answer with a ProbeAck."""

    summary: Summary


@dataclass(frozen=True, slots=True)
class ProbeAck:
    """The answer to a Probe."""

    summary: Summary


@dataclass(frozen=True, slots=True)
class Leave:
    """The sender leaves the run; ``died``: not on purpose, its trainer has ended."""

    incarnation: int
    died: bool = False


# -- a round of one fragment


@dataclass(frozen=True, slots=True)
class Ready:
    """A contribution, without its slices: what its author signs and the leader counts.

    ``oldest``: the first contribution whose uncounted progress it contains. ``hashes``: of its slices, in order; a peer
    that only aggregates sends none, and weight 0. ``link``: its bandwidth. ``grant``: by which right it is here.
    """

    fragment: int
    base: Version
    id: ContributionId
    oldest: ContributionId
    weight: float
    samples: int
    hashes: tuple[str, ...]
    link: float = 0.0
    reachable: bool = True
    grant: str = ""
    uses: tuple[Use, ...] = ()
    root: str = ""  # the hash of all hashes; filled in by `state.rooted`
    seal: bytes = field(repr=False, default=b"")

    def bare(self) -> Ready:
        """Return it as a commit lists it: without the hashes of the slices."""
        return replace(self, hashes=(), seal=b"")


@dataclass(frozen=True, slots=True)
class Slice:
    """One slice of a contribution, for the owner of the slice."""

    fragment: int
    base: Version
    author: str
    id: ContributionId
    number: int
    hash: str
    payload: Any = field(compare=False, repr=False, default=None)


@dataclass(frozen=True, slots=True)
class Choice:
    """All that a leader chooses for a commit. ``by``, ``term``: the leader that chose, and under which term. ``gone``:
    members that it finds dead. ``late``: members that did not do their part. ``successors``: asynchronous mode, who
    holds the next version: the first one leads."""

    by: str
    term: int
    entries: tuple[tuple[str, Ready], ...]  # sorted by peer
    gone: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    revision: Revision = FOUNDED
    successors: tuple[str, ...] = ()
    seal: bytes = field(repr=False, compare=False, default=b"")

    def bare(self) -> Choice:
        """Return it as a commit names it."""
        return replace(self, entries=tuple((peer, ready.bare()) for peer, ready in self.entries))


@dataclass(frozen=True, slots=True)
class Close:
    """The leader of the term says which choice the round closes with, and who computes the mean of each slice.
    ``choice`` is None for an author that only needs to know the owners."""

    fragment: int
    base: Version
    term: int
    leader: str
    attempt: int
    key: str
    choice: Choice | None
    owners: tuple[str, ...]
    seal: bytes = field(repr=False, default=b"")

    @property
    def rank(self) -> tuple[int, int]:
        """Of two Closes, owners serve the one of the greater rank."""
        return self.term, self.attempt


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean of one slice over the entries of the choice with this key, signed by the slice's owner."""

    fragment: int
    base: Version
    key: str
    number: int
    hash: str
    owner: str
    payload: Any = field(compare=False, repr=False, default=None)
    seal: bytes = field(repr=False, default=b"")


@dataclass(frozen=True, slots=True)
class Lack:
    """An owner's answer to a Want: by number, the authors whose slices it lacks for the choice with this key."""

    fragment: int
    base: Version
    key: str
    missing: tuple[tuple[int, tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """One outer step of a fragment. ``leader``, ``term``: who made it, by which right. ``choice``: without hashes of
    slices. ``hashes``: of the means. ``owners``: who computed each mean."""

    fragment: int
    base: Version
    version: Version
    term: int
    leader: str
    key: str
    choice: Choice
    hashes: tuple[str, ...]
    owners: tuple[str, ...]
    seal: bytes = field(repr=False, default=b"")


class What(Enum):
    """What a Want asks for."""

    READY = "ready"
    SLICES = "slices"
    LACKS = "lacks"
    MEANS = "means"
    COMMIT = "commit"
    NEWS = "newer commits"  # in asynchronous mode, with their means
    NEXT = "next commit"  # of one that fetches: it is sent once it is applied


@dataclass(frozen=True, slots=True)
class Want:
    """Asks for what the sender lacks of the round on ``base``: slices or means by their numbers."""

    fragment: int
    base: Version
    what: What
    numbers: tuple[int, ...] = ()
    key: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """The sender claims the right to write the commit on ``base``. It is repeated while the sender holds the term.
    ``turn``: a later claim or vote of this process has no lower one."""

    fragment: int
    base: Version
    term: int
    turn: int = 0


@dataclass(frozen=True, slots=True)
class Vote:
    """Whom the sender takes for the acting leader: if that is the receiver, this is a promise. ``served``: the
    greatest Close for which the sender has made a mean. ``commit``: the commit on this base that it knows. ``turn``:
    as in a Claim."""

    fragment: int
    base: Version
    term: int
    leader: str
    served: Close | None = None
    commit: Commit | None = None
    turn: int = 0


# -- asynchronous mode


@dataclass(frozen=True, slots=True)
class Held:
    """The sender holds this version."""

    fragment: int
    version: Version


@dataclass(frozen=True, slots=True)
class Stale:
    """Refusal of a submission: its base is too far behind ``version``, or its data belongs to another peer."""

    fragment: int
    id: ContributionId
    version: Version


# -- newer states


@dataclass(frozen=True, slots=True)
class Ask:
    """Asks what the receiver holds (``fragment`` is None), or for slices of a fragment; without numbers: its Head."""

    fragment: int | None = None
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Told:
    """What the sender holds of each fragment. ``fresh``: it has restored that from disk and has seen nothing since, so
    it does not know whether the run went on."""

    versions: tuple[Version, ...]
    links: tuple[Links, ...]
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Head:
    """A fragment's state without tensors. ``digests``: of its slices' tensors; empty if they are not computed yet."""

    fragment: int
    state: State
    digests: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """The tensors of one slice at this version. The node adds them when it sends this."""

    fragment: int
    version: Version
    number: int
    payload: Any = field(compare=False, repr=False, default=None)


OfRound = Ready | Slice | Close | Mean | Lack | Commit | Want | Claim | Vote
"""Messages about the round on their ``base``."""
Message = Probe | ProbeAck | Leave | OfRound | Held | Stale | Ask | Told | Head | Part
