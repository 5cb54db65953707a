"""The messages of nodes that their replicas don't know, and what marks all messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from p2p_diloco.core import messages
from p2p_diloco.core.version import Version

PROTOCOL = 17
"""The version of the protocol. Peers of another version are refused with both numbers."""

TOKEN_BYTES = 16
"""Length of the token that identifies a run, its settings and its model."""


@dataclass(frozen=True, slots=True)
class Describe:
    """A request for the description of the run's model. A peer sends it if its own model differs from the run's, or if
    it has no model."""


@dataclass(frozen=True, slots=True)
class Description:
    """The answer to `Describe`. `payload` is the layout in its wire form, encoded by msgpack."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Nudge:
    """A request to contribute after every inner step from now on, until the run has made `goal` commits, summed over
    fragments."""

    goal: int


@dataclass(frozen=True, slots=True)
class OfMean:
    """Names a mean: that of one slice of a fragment, over the entries of the choice with this key, as its owner has
    signed it. `hash`: of its payload."""

    fragment: int
    key: str
    number: int
    owner: str
    hash: str


@dataclass(frozen=True, slots=True)
class Audit:
    """A request for the contributions from which a mean was computed."""

    mean: OfMean


@dataclass(frozen=True, slots=True)
class Copy:
    """An answer to `Audit`: the contribution of one author. `seal`: the author's signature of its `Ready`. `payload`:
    the hashes of all its slices, as the `Ready` has them, and then the slice."""

    mean: OfMean
    author: str
    seal: bytes
    payload: Any = field(compare=False, repr=False, default=None)


@dataclass(frozen=True, slots=True)
class Accusation:
    """The news that the sender's audit of a mean found a lie, with what the owner has signed (`seal`). The receiver
    audits the mean itself. `payload`, of `nbytes` bytes: the choice with the mean's key, if the sender can hand over
    the contributions that prove the lie; none if the lie is that the owner showed no contributions."""

    mean: OfMean
    base: Version
    seal: bytes
    nbytes: int = 0
    payload: Any = field(compare=False, repr=False, default=None)


@dataclass(frozen=True, slots=True)
class Contradicts:
    """The proof that a peer lies: `payload` has two statements of this kind that it signed, each with its signature, of
    which an honest peer signs only one."""

    peer: str
    kind: bytes
    nbytes: int
    payload: Any = field(compare=False, repr=False, default=None)


@dataclass(frozen=True, slots=True)
class ListSlices:
    """A request to a data node for the manifest of the data set that it serves under this name."""

    name: str


@dataclass(frozen=True, slots=True)
class SliceList:
    """The answer to `ListSlices`. `payload`: the packed manifest."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class GetSlice:
    """A request to a data node for one slice of the data set with this identity."""

    data_set: str
    index: int


@dataclass(frozen=True, slots=True)
class SliceBytes:
    """The answer to `GetSlice`. `payload`: the slice."""

    data_set: str
    index: int
    nbytes: int


DataMessage = ListSlices | SliceList | GetSlice | SliceBytes
"""Messages to and from data nodes. They don't have the run's token, because a data node knows neither the settings nor
the model of its run. What they carry is checked by its hash."""
ANY_RUN = bytes(TOKEN_BYTES)
"""The token of a `DataMessage`."""

Question = Describe | ListSlices | GetSlice
Answer = Description | SliceList | SliceBytes
"""Answers to questions: their receivers have asked for them."""
NodeMessage = Describe | Description | Nudge | Audit | Copy | Accusation | Contradicts | DataMessage
"""Messages that nodes handle themselves, and do not pass to their replicas."""

AnyMessage = messages.Message | NodeMessage
