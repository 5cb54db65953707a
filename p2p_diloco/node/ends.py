"""The record of a run's end: what it says, who has signed it, and where it is kept.

Law: a record says that a peer has held this very state as the run's last one. It is content-addressed and unowned in
the DHT, as the run's own is, so every peer can keep it alive, and several may sign the same end. Whether it binds
anybody is `ending`'s.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import msgpack

from p2p_diloco.core.rules import Rules
from p2p_diloco.core.version import ModelVersion
from p2p_diloco.net.interface import Transport
from p2p_diloco.node.revising import Founding
from p2p_diloco.node.run import name_of
from p2p_diloco.node.wire import PROTOCOL

RECORD_TTL_S = 24 * 3600.0
"""How long an end waits in the DHT, once nobody keeps it there any more, for a peer that was away."""
FILE = "ended.json"
"""In the folder of checkpoints."""
TRIED_MAX = 16
"""Records of one look whose signatures are checked, from the highest down: anybody may leave some."""
COUNT_MAX = 2**62

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, order=True)
class End:
    """The version of the whole model that a run ended with, and who says so since when."""

    model: ModelVersion
    time: float
    """When it was signed, in seconds since 1970."""
    signer: str
    proof: str

    def pack(self) -> bytes:
        """The record's bytes; their hash is its name."""
        model = self.model
        said = [PROTOCOL, model.generation, model.samples, model.epochs, model.digest]
        return bytes(msgpack.packb([*said, self.time, self.signer, self.proof]))


def statement(founding: Founding, model: ModelVersion, time: float) -> bytes:
    """What the signer signs. It means nothing in another founding of a run of that name."""
    said = [model.generation, model.samples, model.epochs, model.digest, time]
    return bytes(msgpack.packb(["p2p-diloco end", founding.run_id, founding.founder, float(founding.time), *said]))


def signed(transport: Transport, founding: Founding, model: ModelVersion, time: float) -> End:
    """This peer's word that the run has ended with this version."""
    return End(model, time, transport.peer_id, transport.sign(statement(founding, model, time)))


def holds(end: End, transport: Transport, founding: Founding, rules: Rules) -> bool:
    """Whether it is of this founding, is an end by the rules that the run has now, and bears its signer's signature.

    Rules may differ from those that the run ended with: whoever starts it anew with a greater `stop_after_epochs` goes
    on.
    """
    return rules.ended(end.model) and transport.signed_by(
        end.signer, statement(founding, end.model, end.time), end.proof
    )


async def read(transport: Transport, founding: Founding, rules: Rules) -> End | None:
    """The highest end that the DHT holds; junk, and what nobody has signed, is left out.

    Raises:
        Unreachable: the DHT doesn't answer.
    """
    found = (_unpack(name, value) for name, (value, _) in (await transport.fetch(_key(founding.run_id))).items())
    ends = sorted((end for end in found if end is not None and rules.ended(end.model)), reverse=True)
    return next((end for end in ends[:TRIED_MAX] if holds(end, transport, founding, rules)), None)


async def store(transport: Transport, founding: Founding, end: End) -> bool:
    """Leave an end in the DHT, or keep it there, whoever has signed it. False if it wasn't taken."""
    value = end.pack()
    return await transport.store(_key(founding.run_id), name_of(value), value, RECORD_TTL_S, owned=False)


def load(folder: Path, transport: Transport, founding: Founding, rules: Rules) -> End | None:
    """The end that is kept on this disk; None: none that holds in this run. The signature seals it."""
    try:
        content = json.loads((folder / FILE).read_bytes())
        end = End(ModelVersion(**content.pop("model")), **content)
        return end if _sound(end) and holds(end, transport, founding, rules) else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        log.warning("%s is passed over: it can't be read as the record of an end (%s)", folder / FILE, error)
        return None


def save(folder: Path, end: End) -> None:
    """Keep an end on this disk, whole or not at all. What can't be written is logged: a checkpoint tells it too."""
    unfinished = folder / f".{FILE}-unfinished"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as file:
            file.write(json.dumps(asdict(end), indent=1).encode())
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(folder / FILE)
    except OSError as error:
        log.error("%s can't be written: %s", folder / FILE, error.strerror or error)


def _key(run_id: str) -> str:
    return f"{run_id}/end"


def _unpack(name: str, value: bytes) -> End | None:
    """What `store` left; None for anything else."""
    try:
        content = msgpack.unpackb(value) if name == name_of(value) else None
    except (ValueError, msgpack.UnpackException):
        return None
    match content:
        case [int(protocol), generation, samples, epochs, digest, time, signer, proof] if protocol == PROTOCOL:
            end = End(ModelVersion(generation, samples, epochs, digest), time, signer, proof)
            return end if _sound(end) else None
    return None


def _sound(end: End) -> bool:
    """Whether each part is of its kind, and no larger than any that a run has."""
    model = end.model
    counts = (model.generation, model.samples, model.epochs)
    texts = (model.digest, end.signer, end.proof)
    return (
        all(type(count) is int and 0 <= count <= COUNT_MAX for count in counts)
        and type(end.time) is float
        and all(type(text) is str for text in texts)
    )
