"""The record of a run's end: its content, its signature, and its copies in the DHT and on disk.

Law: a record states that its signer has held the named state as the run's last one. Several peers may sign the same
end. `ending` decides whether a record binds this peer. A record names its run's founding, so a newcomer can check it
when nothing else of the run is left.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from p2p_diloco.core.revision import FOUNDED, Revision
from p2p_diloco.core.rules import Rules
from p2p_diloco.core.version import ModelVersion
from p2p_diloco.errors import Refused
from p2p_diloco.net.interface import Transport
from p2p_diloco.net.signing import pack
from p2p_diloco.node.board import Board
from p2p_diloco.node.board import pack as pack_record
from p2p_diloco.node.revising import Founding

KIND = b"end of a run"
"""The kind of statement that a peer signs."""
BOARD = Board("end", ttl_s=24 * 3600.0)
"""Absent peers find an end for a day when they return."""
COUNT_MAX = 2**62
"""Messages hold no greater numbers of samples and epochs."""
FILE = "ended.json"
"""The name of the record's file in the folder of checkpoints."""

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


async def read_any(transport: Transport, run_id: str) -> End | None:
    """Read the highest end of any run with this name from the DHT, on behalf of a peer that finds no such run; None if
    there is none.

    Raises:
        Unreachable: the DHT doesn't answer.
    """
    return next(iter(await BOARD.read(transport, run_id, End, lambda end: _proven(end, transport, run_id))), None)


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


async def store(transport: Transport, founding: Founding, end: End) -> bool:
    """Store the record of an end in the DHT, or renew it. Returns False if it wasn't stored."""
    return await BOARD.store(transport, founding.run_id, pack_record(end))


def load(folder: Path, transport: Transport, founding: Founding, rules: Rules) -> End | None:
    """Read the record of the run's end from this disk; None if there is no valid one. The signature of a
    changed file is wrong."""
    try:
        end = msgspec.json.decode((folder / FILE).read_bytes(), type=End)
        return end if holds(end, transport, founding, rules) else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        log.warning("ignored the file %s: it can't be read as the record of a run's end (%s)", folder / FILE, error)
        return None


def save(folder: Path, end: End) -> None:
    """Write the record of an end to this disk, completely or not at all. A failure is only logged, because a checkpoint
    shows the end too."""
    unfinished = folder / f".{FILE}-unfinished"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as file:
            file.write(msgspec.json.encode(end))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(folder / FILE)
    except OSError as error:
        log.error("the record of the run's end can't be written to %s: %s", folder / FILE, error.strerror or error)
