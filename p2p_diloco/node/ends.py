"""The record of a run's end: its content, its signature, and the copies of the record in the DHT and on disk.

Law: a record states that the signing peer has held this state as the run's last one. No peer owns the record (see
`unowned`), and several peers may sign the same end. `ending` decides whether a record binds this peer.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path

import msgpack

from p2p_diloco.core.rules import Rules
from p2p_diloco.core.version import ModelVersion
from p2p_diloco.net.interface import Transport
from p2p_diloco.node import unowned
from p2p_diloco.node.plain import from_plain, to_plain
from p2p_diloco.node.revising import Founding
from p2p_diloco.node.unowned import TRIED_MAX

RECORD_TTL_S = 24 * 3600.0
"""How long the DHT keeps an end for absent peers, once no peer renews it any more."""
FILE = "ended.json"
"""The name of the record's file in the folder of checkpoints."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, order=True)
class End:
    """The record of a run's end: the last version of the whole model, and the signature of a peer that held it."""

    model: ModelVersion
    time: float
    """The time of the signature, in seconds since 1970."""
    signer: str
    proof: str


def statement(founding: Founding, model: ModelVersion, time: float) -> bytes:
    """The bytes that the signer signs. They identify the run's founding, so a signature is invalid in another run with
    the same `run_id`."""
    said = [model.generation, model.samples, model.epochs, model.digest, time]
    return bytes(msgpack.packb(["p2p-diloco end", founding.run_id, founding.founder, float(founding.time), *said]))


def signed(transport: Transport, founding: Founding, model: ModelVersion, time: float) -> End:
    """Sign that the run has ended with this version; returns the record."""
    return End(model, time, transport.peer_id, transport.sign(statement(founding, model, time)))


def holds(end: End, transport: Transport, founding: Founding, rules: Rules) -> bool:
    """Whether the record of an end is valid. It must be for this founding, its version must end the run by the present
    rules, and its signature must be right.

    The rules may have changed since the end: a run restarted with a greater `stop_after_epochs` goes on.
    """
    held = end.model.generation >= 0
    return (
        held
        and rules.ended(end.model)
        and transport.signed_by(end.signer, statement(founding, end.model, end.time), end.proof)
    )


async def read(transport: Transport, founding: Founding, rules: Rules) -> End | None:
    """Read the highest valid end from the DHT; None if there is none. Records that can't be read, or whose signature is
    wrong, are left out.

    Raises:
        Unreachable: the DHT doesn't answer.
    """
    found = await unowned.read(transport, _key(founding.run_id), End)
    ends = sorted((end for end in found if rules.ended(end.model)), reverse=True)
    return next((end for end in ends[:TRIED_MAX] if holds(end, transport, founding, rules)), None)


async def store(transport: Transport, founding: Founding, end: End) -> bool:
    """Store the record of an end in the DHT, or renew it. Returns False if it wasn't stored."""
    return await unowned.store(transport, _key(founding.run_id), unowned.pack(end), RECORD_TTL_S)


def load(folder: Path, transport: Transport, founding: Founding, rules: Rules) -> End | None:
    """Read the record of the run's end from this disk; None if there is no valid one. The signature shows if the file
    was changed."""
    try:
        end = from_plain(End, json.loads((folder / FILE).read_bytes()))
        return end if holds(end, transport, founding, rules) else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("ignored the file %s: it can't be read as the record of a run's end (%s)", folder / FILE, error)
        return None


def save(folder: Path, end: End) -> None:
    """Write the record of an end to this disk, completely or not at all. A failure is only logged, because a checkpoint
    shows the end too."""
    unfinished = folder / f".{FILE}-unfinished"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as file:
            file.write(json.dumps(to_plain(end)).encode())
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(folder / FILE)
    except OSError as error:
        log.error("the record of the run's end can't be written to %s: %s", folder / FILE, error.strerror or error)


def _key(run_id: str) -> str:
    return f"{run_id}/end"
