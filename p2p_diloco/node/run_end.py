"""The end of a run: its record, in the DHT and in the checkpoint of the last state, and how that keeps an ended run
ended. A peer that starts after the end fetches the run's last state, and doesn't train.

Law: a record states that its signer has held the named state as the run's last one; several peers may sign the same
end. It names its run's founding, so a newcomer can check it when nothing else of the run is left. It binds a peer only
from its start until it trains. It never binds a peer that trains, so a false record can't end a run that goes on. It
binds a peer that has a state to go on from only if peers that this state knows have signed it (`Ending._confirmed`);
else it is a rumour, which is logged. A bound peer's trainer waits for the last state, and the peer ends with an error
if no other peer hands it over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from p2p_diloco.core import outlook
from p2p_diloco.core.replica import Replica
from p2p_diloco.core.revision import FOUNDED, Revision
from p2p_diloco.core.rules import Rules
from p2p_diloco.core.version import ModelVersion
from p2p_diloco.errors import GaveUpWaiting, Refused
from p2p_diloco.net.attempts import within
from p2p_diloco.net.interface import Transport, Unreachable
from p2p_diloco.net.signing import pack
from p2p_diloco.node.board import Board
from p2p_diloco.node.board import pack as pack_record
from p2p_diloco.node.board import unpack as unpack_record
from p2p_diloco.node.records import who_takes_part
from p2p_diloco.node.run_record import Founding

if TYPE_CHECKING:
    from p2p_diloco.node.common import Common  # which loads this module

KIND = b"end of a run"
"""The kind of statement that a peer signs."""
BOARD = Board("end", ttl_s=24 * 3600.0)
"""Absent peers find an end for a day when they return."""
COUNT_MAX = 2**62
"""Messages hold no greater numbers of samples and epochs."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, order=True)
class End:
    """The record of a run's end: the last version of the whole model, the signature of a peer that held it, and the
    revision whose stop it reached, with the founder's signature."""

    model: ModelVersion
    time: float
    """The time of the signature, in seconds since 1970."""
    signer: str
    proof: str
    founder: str
    founded: float
    """The time of the run's founding, in seconds since 1970."""
    fragments: int
    revision: Revision = FOUNDED

    @property
    def epoch(self) -> int:
        """The last epoch of the run."""
        return self.model.epochs // max(1, self.fragments)

    def __str__(self) -> str:
        return f"epoch {self.epoch} (digest {self.model.digest}, signed by {self.signer})"


def statement(founding: Founding, model: ModelVersion, fragments: int, time: float) -> bytes:
    """The bytes that the signer signs. They identify the run's founding, so a signature is invalid in another run with
    the same `run_id`."""
    said = [model.generation, model.samples, model.epochs, model.digest, fragments, time]
    return pack(founding.run_id, founding.founder, float(founding.time), *said)


def signed(
    transport: Transport,
    founding: Founding,
    model: ModelVersion,
    fragments: int,
    time: float,
    revision: Revision = FOUNDED,
) -> End:
    """Sign that the run, which has this many `fragments`, has ended with this version at this revision; returns the
    record."""
    proof = transport.sign(KIND, statement(founding, model, fragments, time))
    return End(model, time, transport.peer_id, proof, founding.founder, founding.time, fragments, revision)


def holds(end: End, transport: Transport, founding: Founding, rules: Rules) -> bool:
    """Whether the record of an end is valid. It must be for this founding, its version must end the run by the present
    rules and the record's revision, and the signatures of the record and of the revision must be right.

    The rules may have changed since the end: a run restarted with a greater `stop_after_epochs` goes on.
    """
    this_run = (end.founder, end.founded, end.fragments) == (founding.founder, founding.time, len(rules.fragments))
    ended = this_run and rules.ended(end.model, end.revision)
    return ended and founding.proven(transport, end.revision) and _proven(end, transport, founding.run_id)


def _proven(end: End, transport: Transport, run_id: str) -> bool:
    """Whether the signature of an end of some run with this name is right."""
    founding = Founding(run_id, end.founder, end.founded)
    said = statement(founding, end.model, end.fragments, end.time)
    sound = end.model.generation >= 0 and max(end.model.samples, end.model.epochs) <= COUNT_MAX
    return sound and transport.signed_by(end.signer, end.proof, KIND, said)


def ended(run_id: str, end: End, *, observes: bool = False) -> Refused:
    """The error for a peer without a state, or for an observer: the run has ended, and no other peer has its last
    state."""
    mend = "choose another run id, or start from one of its checkpoints (from_checkpoint)"
    if observes:
        mend = "export one of its checkpoints (--checkpoint), or start a peer whose checkpoint_dir has the last one"
    return Refused(f"has ended at {end}, and no peer here has its last state", key="run_id", value=run_id, mend=mend)


async def refuse_if_ended(transport: Transport, run_id: str, *, observes: bool) -> None:
    """Look for the end of a run of this name, on behalf of a peer that finds no such run.

    Raises:
        Refused: a run of this name has ended.
    """
    try:
        found = await BOARD.read(transport, run_id, End, lambda end: _proven(end, transport, run_id))
    except Unreachable as error:
        log.debug("the DHT gave no answer about the run's end: %s", error)
        return
    if found:
        raise ended(run_id, found[0], observes=observes)


async def read(transport: Transport, founding: Founding, rules: Rules, trusted: Collection[str] = ()) -> Sequence[End]:
    """Read the valid ends from the DHT, highest first. If there are too many to check, those of `trusted` signers are
    checked first.

    Raises:
        Unreachable: the DHT doesn't answer.
    """

    def valid(end: End) -> bool:
        return holds(end, transport, founding, rules)

    def order(end: End) -> tuple[bool, bool]:
        return not rules.ended(end.model, end.revision), end.signer not in trusted

    return await BOARD.read(transport, founding.run_id, End, valid, order)


def unpacked(record: bytes, transport: Transport, founding: Founding, rules: Rules) -> End | None:
    """Decode the record in a checkpoint; None if it has none, or none of this run."""
    with contextlib.suppress(ValueError):
        end = unpack_record(End, record)
        return end if holds(end, transport, founding, rules) else None
    return None


async def store(transport: Transport, founding: Founding, end: End) -> bool:
    """Store the record of an end in the DHT, or renew it. Returns False if it wasn't stored."""
    return await BOARD.store(transport, founding.run_id, pack_record(end))


KEEP_EVERY_S = 60.0
SIGNERS_MAX = 8
"""So many peers of the last round that have signed an end are enough, however many there were."""


class GoesOn:
    """Finds out whether the run is still going on, that is, whether a live peer trains according to its DHT record.

    `training` returns the peers that train according to their records, with the records' times. A record counts only
    once it has been renewed, because the first one found may be from before a power cut.
    """

    def __init__(self, replica: Replica, training: Callable[[], Awaitable[Mapping[str, float]]]) -> None:
        self._replica, self._training = replica, training
        self._first: dict[str, float] = {}

    async def look(self) -> bool:
        """Read the peers' DHT records again; returns whether a live peer trains."""
        told = (await self._training()).items()
        renewed = {peer for peer, when in told if self._first.setdefault(peer, when) != when}
        return bool(renewed & set(self._replica.roster.alive()))


class Ending:
    """Holds what this peer knows about the end of its run, and keeps a record of that end in the DHT."""

    def __init__(self, common: Common, group: Collection[str] = (), record: bytes = b"") -> None:
        """`group`: the peers that the checkpoint names from which this peer goes on; empty if there is none. `record`:
        of the end, in that checkpoint."""
        transport, founding, replica = common.transport, common.founding, common.replica
        self._group = frozenset(group)
        self._trusted = {transport.peer_id, founding.founder}
        self._transport, self._founding, self._replica = transport, founding, replica
        self.goes_on = GoesOn(replica, partial(who_takes_part, transport, founding.run_id))
        self.known = unpacked(record, transport, founding, replica.rules)
        """The highest end known; None: no end is known, or the run goes on."""
        self._stored: End | None = None
        self._ignored: End | None = None
        self._rumour: End | None = None
        """The highest end of which it was logged that it is a rumour."""
        self._something = asyncio.Event()
        """Set once there is an end to keep in the DHT."""

    # -- a peer that starts

    async def begin(self, within_s: float) -> None:
        """If this peer's checkpoint says that the run has ended, publish its record, which a peer of the last round has
        signed: after a restart this peer may have another identity."""
        if self.known is not None:
            await self._store(within_s)

    async def look(self) -> bool:
        """Look for the run's end in the DHT; returns whether the run has ended with a state that this peer lacks. If
        another peer is seen to go on with the run, the run has not ended."""
        if self._replica.finished:
            return False
        self.known = max(filter(None, (self.known, await self._read())), default=None)
        if self.known is None or self._overtaken(self.known):
            return False
        if await self.goes_on.look():
            if self._ignored != self.known:
                log.warning(
                    "ignored a record which says that the run has ended at %s, because another peer still trains in it",
                    self.known,
                )
            self._ignored, self.known = self.known, None  # this peer no longer renews it in the DHT
            return False
        self._something.set()
        return True

    def _overtaken(self, end: End) -> bool:
        """Whether this peer or another live peer holds a state that is higher than this end's and doesn't end the run.
        For example, the state may be of a newer generation."""
        models = (summary.model for summary in self._replica.roster.summaries().values())
        return any(model > end.model and not self._replica.rules.ended(model, end.revision) for model in models)

    async def _read(self) -> End | None:
        """Read the highest end in the DHT that binds this peer; None if there is none. Log a higher rumour, once."""
        of = self._transport, self._founding, self._replica.rules
        try:
            found = await read(*of, self._trusted | self._group)
        except Unreachable as error:
            log.debug("the DHT gave no answer about the run's end: %s", error)
            return None
        confirmed = next((end for end in found if self._confirmed(end, found)), None)
        if found and found[0] != confirmed and (self._rumour is None or found[0] > self._rumour):
            self._rumour = found[0]
            log.warning(
                "a rumour says that the run has ended at %s: neither the founder nor half of the last round's other "
                "peers have signed it, so this peer goes on from its checkpoint. If it is true, start a peer that has "
                "the last state",
                found[0],
            )
        return confirmed

    def _confirmed(self, end: End, found: Iterable[End]) -> bool:
        """Whether an end is more than a rumour: the founder or this peer itself has signed it, or at least half of the
        other peers of the last round that this peer knows. A peer without a checkpoint believes any end, because it
        can't go on by itself anyway."""
        signers, others = {one.signer for one in found if one.model == end.model}, self._group - self._trusted
        enough = max(1, min(len(others) - len(others) // 2, SIGNERS_MAX))
        return not self._group or bool(signers & self._trusted) or len(signers & others) >= enough

    def awaited(self, wait_s: float, *, late: bool, alone: bool) -> str:
        """The reason why a peer that knows of the run's end waits for its last state.

        Raises:
            GaveUpWaiting: the peer is `late`: it has waited for `wait_s`.
            Refused: the peer is `alone`: it has no state, and no other peer has been there for a while.
        """
        end = self.known
        assert end is not None, "it was looked at before"
        if late:
            mine = f"of epoch {self._replica.epoch}" if self._replica.has_state else "none"
            raise GaveUpWaiting(
                f"is over: the run {self._founding.run_id} has ended at {end}, this peer's state is {mine}, "
                "and no peer handed over the last state",
                key="wait_timeout",
                value=f"{wait_s:g}",
                mend=f"start a peer whose checkpoint_dir has checkpoint-{end.epoch}, or go on from another one with "
                "from_checkpoint and new_generation, or start the run with a greater stop_after_epochs",
            )
        if alone:
            raise ended(self._founding.run_id, end)
        return f"the run has ended at {end}: waiting for a peer that holds that state"

    # -- a peer that has the end

    def settled(self) -> None:
        """Check whether this peer's replica has reached the run's end. Call this after each event."""
        if self._replica.finished:
            self._something.set()

    async def keep(self) -> None:
        """Wait until an end of the run is known. Then keep its record alive in the DHT until cancelled. If this peer
        has reached the end itself, sign the record."""
        await self._something.wait()
        while True:
            await self._store(KEEP_EVERY_S)
            await asyncio.sleep(KEEP_EVERY_S)

    async def leave(self, within_s: float) -> None:
        """Publish the run's end before this peer leaves, if the peer has reached the end and not published it yet."""
        if self._replica.finished and (self._stored is None or self._stored.model != self._mine):
            await self._store(within_s)

    def record(self) -> bytes:
        """The record of the end that this peer has reached; empty if it has reached none."""
        if not self._replica.finished:
            return b""
        if self.known is None or self.known.model != self._mine:
            fragments, revision = len(self._replica.rules.fragments), outlook.ended_by(self._replica)
            self.known = signed(self._transport, self._founding, self._mine, fragments, time.time(), revision)
        return pack_record(self.known)

    async def _store(self, within_s: float) -> None:
        """Store the record of the end that is known, in bounded time. A failure is only logged, because other peers
        keep the record too."""
        self.record()
        if (end := self.known) is None:
            return
        try:
            if await within(within_s, store(self._transport, self._founding, end)):
                self._stored = end
        except Exception:
            log.warning("the record of the run's end can't be stored in the DHT", exc_info=True)

    @property
    def _mine(self) -> ModelVersion:
        return self._replica.roster.mine.model
