"""The record of a run's end: its content, its signature, and where it is kept.

Law: a record says that a peer has held this very state as the run's last one. It is `unowned`, and several peers may
sign the same end. `ending` decides whether it binds this peer.
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
"""How long an end waits in the DHT for a peer that was away, once no peer keeps it there any more."""
FILE = "ended.json"
"""In the folder of checkpoints."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, order=True)
class End:
    """The version of the whole model that a run ended with, and the peer that says so."""

    model: ModelVersion
    time: float
    """When it was signed, in seconds since 1970."""
    signer: str
    proof: str


def statement(founding: Founding, model: ModelVersion, time: float) -> bytes:
    """What the signer signs. It means nothing in another founding of a run of that name."""
    said = [model.generation, model.samples, model.epochs, model.digest, time]
    return bytes(msgpack.packb(["p2p-diloco end", founding.run_id, founding.founder, float(founding.time), *said]))


def signed(transport: Transport, founding: Founding, model: ModelVersion, time: float) -> End:
    """This peer's word that the run has ended with this version."""
    return End(model, time, transport.peer_id, transport.sign(statement(founding, model, time)))


def holds(end: End, transport: Transport, founding: Founding, rules: Rules) -> bool:
    """Whether it is of this founding, is an end by the rules that the run has now, and bears its signer's signature.

    Rules may differ from those that the run ended with: started anew with a greater `stop_after_epochs` it goes on.
    """
    held = end.model.generation >= 0
    return (
        held
        and rules.ended(end.model)
        and transport.signed_by(end.signer, statement(founding, end.model, end.time), end.proof)
    )


async def read(transport: Transport, founding: Founding, rules: Rules) -> End | None:
    """The highest end that the DHT holds; junk and unsigned records are left out.

    Raises:
        Unreachable: the DHT doesn't answer.
    """
    found = await unowned.read(transport, _key(founding.run_id), End)
    ends = sorted((end for end in found if rules.ended(end.model)), reverse=True)
    return next((end for end in ends[:TRIED_MAX] if holds(end, transport, founding, rules)), None)


async def store(transport: Transport, founding: Founding, end: End) -> bool:
    """Leave an end in the DHT, or keep it there. False if it wasn't taken."""
    return await unowned.store(transport, _key(founding.run_id), unowned.pack(end), RECORD_TTL_S)


def load(folder: Path, transport: Transport, founding: Founding, rules: Rules) -> End | None:
    """The end that is kept on this disk; None: none that holds in this run. The signature seals it."""
    try:
        end = from_plain(End, json.loads((folder / FILE).read_bytes()))
        return end if holds(end, transport, founding, rules) else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("%s is passed over: it can't be read as the record of an end (%s)", folder / FILE, error)
        return None


def save(folder: Path, end: End) -> None:
    """Keep an end on this disk, whole or not at all. What can't be written is logged: a checkpoint tells it too."""
    unfinished = folder / f".{FILE}-unfinished"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as file:
            file.write(json.dumps(to_plain(end)).encode())
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(folder / FILE)
    except OSError as error:
        log.error("%s can't be written: %s", folder / FILE, error.strerror or error)


def _key(run_id: str) -> str:
    return f"{run_id}/end"
