"""Messages on their way in: the header is judged before a payload is let through, that before the replica sees it.

Law: nothing reaches the replica that is not of this run, well-formed, of the right size and finite. What is
refused is answered with the reason, counted by the transport, and logged once for each peer.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import pairwise
from types import NoneType

from p2p_diloco.core.messages import (
    Commit,
    Contribution,
    Counted,
    Fetch,
    Held,
    Message,
    Outdated,
    Probe,
    ProbeAck,
    Promise,
    Stale,
    State,
    Summary,
    TakeOver,
    Versions,
    Want,
)
from p2p_diloco.core.revision import FOUNDED, Revision
from p2p_diloco.core.version import ContributionId, ModelVersion, Version
from p2p_diloco.net.interface import Refusal
from p2p_diloco.node import wire
from p2p_diloco.node.plain import names
from p2p_diloco.node.tensor_work import TensorWork
from p2p_diloco.node.wire import Describe, Description, Nudge
from p2p_diloco.tensors.mean import WEIGHT_MAX, WEIGHT_MIN

DESCRIPTION_BYTES_MAX = 16 * 2**20
"""A longer description of a model is not read."""

REMEMBERED_BYTES_MAX = 16 * 2**10
"""A longer header is judged twice: what strangers send must not stay here for long."""

BANDWIDTH_MAX = 2.0**50
"""Bytes a second that no link carries."""

SPEED_MAX = 2.0**40
"""Inner steps a second that nobody makes."""

_COUNT_MAX = 2**40
_LIMITS: dict[type, dict[str, int]] = {
    Version: {"generation": _COUNT_MAX, "samples": 2**48, "epoch": _COUNT_MAX},
    ModelVersion: {"samples": 2**62, "epochs": 2**62},
    ContributionId: {"incarnation": 2**62, "sequence": _COUNT_MAX},
    Contribution: {"samples": _COUNT_MAX},
    Counted: {"samples": _COUNT_MAX},
    Summary: {"incarnation": 2**62},
    Revision: {"number": _COUNT_MAX},
    **{kind: {"term": _COUNT_MAX} for kind in (Commit, TakeOver, Promise, Outdated)},
    State: {"term": _COUNT_MAX, "buffered": _COUNT_MAX},
}
"""The largest numbers in messages: what a replica makes of them, sums over shards included, still fits into one."""

_SIMPLE = {int, float, str, bool, NoneType}
"""What a number in a message is, or may stand beside."""

log = logging.getLogger(__name__)


class Inbox:
    """What the transport calls. Until `open` it takes no message of replicas."""

    def __init__(self) -> None:
        self.token = b""
        """The run's, once known; before that no message is taken."""
        self.on_describe: Callable[[str], None] = lambda sender: None
        """Somebody asks what model the run trains."""
        self.on_description: Callable[[str, memoryview], None] | None = None
        """An answer has come; None: nobody asked."""
        self.on_nudge: Callable[[int], None] = lambda goal: None
        """A peer's trainer asks for an exchange now."""
        self.on_closed: Callable[[str], None] = lambda peer: None
        """A link broke."""
        self.on_moving: Callable[[str], None] = lambda peer: None
        """A transfer with a peer goes on."""
        self.judging: Callable[[], AbstractContextManager[None]] = nullcontext
        """Entered while a payload is looked at, whether it can be used."""
        self.proven: Callable[[Revision], bool] = lambda revision: False
        """Whether the run's founder has asked for it."""
        self._work: TensorWork | None = None
        self._fragments = 0
        self._take: Callable[[str, Message], Awaitable[None]] | None = None
        self._complained: set[str] = set()

    def open(self, work: TensorWork, fragments: int, take: Callable[[str, Message], Awaitable[None]]) -> None:
        """Let messages of replicas in. `take` returns once the replica has handled one."""
        self._work, self._fragments, self._take = work, fragments, take

    # -- the transport's side

    def admit(self, sender: str, header: bytes) -> int:
        """As `net.interface.Inbox.admit`."""
        return self._judged(sender, header)[1]

    async def deliver(self, sender: str, header: bytes, payload: memoryview | None) -> None:
        """As `net.interface.Inbox.deliver`."""
        message, expected = self._judged(sender, header)
        found = 0 if payload is None else payload.nbytes
        if found != expected:
            raise self._refusal(sender, f"a {type(message).__name__} carries {expected} bytes, {found} came")
        match message:
            case Describe():
                self.on_describe(sender)
            case Description() if self.on_description is not None and payload is not None:
                self.on_description(sender, payload)
            case Description():
                raise self._refusal(sender, "nobody asked for a description")
            case Nudge(goal):
                self.on_nudge(goal)
            case _:
                await self._deliver(sender, message, payload)

    def closed(self, peer: str) -> None:
        """As `net.interface.Inbox.closed`."""
        self.on_closed(peer)

    def moving(self, peer: str) -> None:
        """As `net.interface.Inbox.moving`."""
        self.on_moving(peer)

    # -- inside

    async def _deliver(self, sender: str, message: Message, payload: memoryview | None) -> None:
        assert self._take is not None
        assert self._work is not None, "judged before"
        if payload is not None:
            with self.judging():
                objection = self._work.objection(message, payload)
            if objection:
                raise self._refusal(sender, f"the {type(message).__name__} is refused: {objection}")
            assert isinstance(message, (Contribution, Commit, State)), "only these have a size"
            message = dataclasses.replace(message, payload=payload)
        await self._take(sender, self._believed(sender, message))

    def _believed(self, sender: str, message: Message) -> Message:
        """Without a revision that the founder has not signed: all else in a probe may be true. Those in commits and
        states are part of what their digests cover, and are believed as that is."""
        match message:
            case Probe(summary) | ProbeAck(summary) if summary.revision.number and not self.proven(summary.revision):
                self._complain(sender, f"{summary.revision} in it is not signed by the run's founder, and is left out")
                return dataclasses.replace(message, summary=dataclasses.replace(summary, revision=FOUNDED))
        return message

    def _judged(self, sender: str, header: bytes) -> tuple[wire.AnyMessage, int]:
        """The message, and how many bytes of payload belong to it."""
        try:
            if not self.token:
                raise Refusal("this peer is not in a run yet")
            shape = None if self._work is None else (len(self._work.store.layout.shards), self._fragments)
            read = _read_once if len(header) <= REMEMBERED_BYTES_MAX else _read
            message = read(header, self.token, shape)
            match message:
                case Describe() | Nudge():
                    return message, 0
                case Description(nbytes=nbytes):
                    if self.on_description is None or not 0 < nbytes <= DESCRIPTION_BYTES_MAX:
                        raise Refusal("nobody asked for a description of that length")
                    return message, nbytes
            assert self._work is not None, "what is for replicas is not read before"
            return message, self._work.nbytes(message)
        except Refusal as refusal:
            raise self._refusal(sender, refusal.reason) from None

    def _refusal(self, sender: str, reason: str) -> Refusal:
        self._complain(sender, reason)
        return Refusal(reason)

    def _complain(self, sender: str, reason: str) -> None:
        if sender not in self._complained:
            self._complained.add(sender)
            log.warning("refused a message of %s: %s (said once for each peer)", sender, reason)


def _read(header: bytes, token: bytes, shape: tuple[int, int] | None) -> wire.AnyMessage:
    """The message of a header. ``shape``: how many shards and fragments the run has; None while that is not known.

    Raises:
        Refusal: it is none, or none of this run.
    """
    message = wire.unpack(header, token)
    if isinstance(message, (Describe, Description, Nudge)):
        return message
    if shape is None:
        raise Refusal("this peer is not ready yet")
    if reason := misfit(message, *shape):
        raise Refusal(f"the {type(message).__name__} is refused: {reason}")
    return message


_read_once = lru_cache(maxsize=64)(_read)
"""It is asked when a header comes, and again with its payload; there are few of these at a time."""


def misfit(message: Message, shards: int, fragments: int) -> str:
    """Why a well-formed message can't be of a run with so many shards and fragments, or nothing."""
    match message:
        case Contribution() | Commit() | State() | TakeOver() | Promise() | Outdated() | Want() | Held() | Stale():
            if not 0 <= message.shard < shards:
                return f"the run has no shard {message.shard}"
        case Fetch(have=versions) | Versions(versions=versions):
            if len(versions) != shards:
                return f"it lists {len(versions)} shards, the run has {shards}"
            if isinstance(message, Fetch) and any(not 0 <= shard < shards for shard in message.shards or ()):
                return "it asks for shards that the run has not"
        case Probe(summary) | ProbeAck(summary):
            if len(summary.epochs) not in (0, fragments):
                return f"it lists {len(summary.epochs)} fragments, the run has {fragments}"
            if summary.bandwidth and not 1 <= summary.bandwidth <= BANDWIDTH_MAX:  # 0: it knows none yet
                return "its bandwidth is out of range"
            if not 0 <= summary.speed <= SPEED_MAX:
                return "its speed is out of range"
            if any(not 0 <= epoch <= _COUNT_MAX for epoch in summary.epochs):
                return "its epochs are out of range"
    match message:
        case Contribution(weight=weight) if not WEIGHT_MIN <= weight <= WEIGHT_MAX:
            return "its weight is out of range"
        case Commit(plan=plan) | State(plan=plan) if not plan.succession:
            return "its plan names nobody to aggregate"
        case Commit(base=base, version=version) if version.epoch != base.epoch + 1:
            return "it doesn't lead to the next epoch"
        case State(version=version, history=history):
            epochs = [-1, *(epoch for epoch, _ in history)]
            if history[-1:] != ((version.epoch, version.digest),) or any(a >= b for a, b in pairwise(epochs)):
                return "its history doesn't lead to its version"
    return _out_of_range(message)


def _out_of_range(value: object) -> str:
    """Which number in a message, however deep, is negative or too large, or nothing."""
    kind = type(value)
    if kind in _SIMPLE:
        return ""
    if isinstance(value, tuple):
        return next(filter(None, map(_out_of_range, value)), "")
    if isinstance(value, Revision) and not value.sound:
        return "its revision has rates that nobody can use"
    for name, most in _LIMITS.get(kind, {}).items():
        if not 0 <= getattr(value, name) <= most:
            return f"the {name} of a {kind.__name__} is out of range"
    return next(filter(None, (_out_of_range(getattr(value, name)) for name in names(kind))), "")
