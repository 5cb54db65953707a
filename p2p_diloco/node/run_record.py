"""What a run's founder says of it in the DHT: the run's record, which has its settings and identifies its model, and
revisions, which change settings while the run goes on.

Law: bytes and values only. It loads no torch, so that a run can be looked at and changed without it. A revision is
valid if the run's founder, or the run key of a private run, has signed it for this founding; any peer may pass it on.
The highest valid revision wins. In an open run anyone may store records of revisions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgpack

from p2p_diloco.core.revision import FOUNDED, Revision
from p2p_diloco.errors import ConfigError
from p2p_diloco.net.interface import CONTENT_BYTES_MAX, Records
from p2p_diloco.net.signing import from_text, pack, signed
from p2p_diloco.node.board import Board, Count, Measure, newest, packed, read
from p2p_diloco.node.board import pack as pack_record
from p2p_diloco.node.board import unpack as unpack_record

if TYPE_CHECKING:
    from p2p_diloco.node.run import Run
    from p2p_diloco.tensors.layout import Layout

Config = Mapping[str, Any]
"""The run's settings, as `RunConfig.to_wire` encodes them."""
BOARD = Board("config", ttl_s=60.0)
LEVELS_MAX = 8
"""The most lists and maps in each other that a run's settings may have."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run's DHT record, `cut` is the hash of the layout with its fragments and slices, and
    `model` the hash of the parameters alone. `time` is the time of the run's founding, in seconds since 1970."""

    config: Config
    model: str
    cut: str
    slices: Count
    numel: Count
    params: Count
    founder: str
    time: Measure
    frozen: str = ""
    """The fingerprint of the founder's frozen values; empty if it has none."""

    def __post_init__(self) -> None:
        if not _is_shallow(self.config, LEVELS_MAX):
            raise ValueError("its settings are nested too deeply")

    @classmethod
    def founding(cls, run: Run, founder: str, time: float, frozen: str = "") -> RunRecord:
        """Make the record of a run that is being founded."""
        layout = run.layout
        slices, params = len(layout.slices), len(layout.params)
        return cls(
            run.config.to_wire(),
            layout.fingerprint(),
            cut_of(layout),
            slices,
            layout.numel,
            params,
            founder,
            time,
            frozen,
        )

    def pack(self, sign: Callable[[bytes], bytes] | None = None) -> bytes:
        """Encode the record. The hash of these bytes is the record's name. `sign`: signs them; None in an open run.

        Raises:
            ConfigError: the settings don't fit into a record.
        """
        value = pack_record(self)
        if len(value) > CONTENT_BYTES_MAX:
            options = self.config.get("outer_options")
            raise ConfigError("is too long for a run's record", key="outer_options", value=options, mend="shorten it")
        return packed([value, b"" if sign is None else sign(value)])

    @classmethod
    def unpack(cls, value: bytes) -> RunRecord:
        """Decode a record that `pack` encoded. Raises ValueError for anything else."""
        try:
            return unpack_record(cls, signature_of(value)[0])
        except ValueError as error:
            raise ValueError(f"these bytes are not a run's record: {error}") from None


def signature_of(value: bytes) -> tuple[bytes, bytes]:
    """Split a run's record into its content and the signature of that; empty if the record has none.

    Raises:
        ValueError: the bytes are no record.
    """
    return read(tuple[bytes, bytes], value)


def cut_of(layout: Layout) -> str:
    """Hash a layout to 32 hex digits. Layouts with the same parameters, buffers, fragments and slices have the same
    hash, even if their dtypes differ."""
    bare = {
        "params": [[spec.name, list(spec.shape)] for spec in layout.params],
        "buffers": [[spec.name, list(spec.shape)] for spec in layout.buffers],
    }
    cut = {**layout.to_wire(), **bare}
    return blake2b(msgpack.packb(cut), digest_size=16).hexdigest()


def _is_shallow(value: object, levels: int) -> bool:
    """Whether a value has at most so many lists and maps in each other. Python can't print a thousand of them."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return inner is None or (levels > 0 and all(_is_shallow(one, levels - 1) for one in inner))


# -- revisions

REVISION = b"revision"
"""The kind of statement that a founder signs."""
REVISIONS = Board("revisions", ttl_s=600.0)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Founding:
    """Identifies one founding of a run. A founder's signature is made for it, so the signature is invalid in another
    run of the same name."""

    run_id: str
    founder: str
    time: float
    key: bytes = b""
    """A private run's identity: the public half of the run key. Empty in an open run."""

    @classmethod
    def of(cls, run_id: str, record: RunRecord, key: bytes = b"") -> Founding:
        """Read the founding from the run's record."""
        return cls(run_id, record.founder, record.time, key)

    def statement(self, revision: Revision) -> bytes:
        """The bytes that the founder signs for a revision."""
        return pack(self.run_id, float(self.time), *revision.covered)

    def proven(self, dht: Records, revision: Revision) -> bool:
        """Whether the founder or the run key has signed the revision. The settings that a run began with need no
        signature."""
        if not revision.number:
            return True
        if not revision.sound:
            return False
        said = self.statement(revision)
        return dht.signed_by(self.founder, revision.proof, REVISION, said) or self._by_the_run_key(revision.proof, said)

    def _by_the_run_key(self, proof: str, said: bytes) -> bool:
        try:
            return bool(self.key) and signed(self.key, from_text(proof), REVISION, said)
        except ValueError:
            return False


async def read_revision(dht: Records, founding: Founding) -> Revision:
    """Read the highest revision in the DHT that the founder has signed; FOUNDED if there is none. If strangers store
    many, one call may miss it, and a later call finds it.

    Raises:
        Unreachable: the DHT doesn't answer.
    """
    return _highest(dht, founding, (await REVISIONS.fetch(dht, founding.run_id)).values())


def _highest(dht: Records, founding: Founding, found: Collection[bytes]) -> Revision:
    def valid(revision: Revision) -> bool:
        if right := founding.proven(dht, revision):
            return True
        if revision.sound:
            _refuse_once(founding, revision)
        return right

    return max(newest(found, Revision, valid, lambda revision: not revision.sound), default=FOUNDED)


async def store_revision(dht: Records, founding: Founding, revision: Revision) -> bool:
    """Store a revision in the DHT, or renew it. Returns False if it wasn't stored."""
    return await REVISIONS.store(dht, founding.run_id, pack_record(revision))


async def watch_revisions(
    dht: Records, founding: Founding, known: Callable[[], Revision], heard: Callable[[Revision], None]
) -> None:
    """Until cancelled, look for revisions in the DHT. Pass each that is higher than the `known` one to `heard`, and
    keep the known one stored in the DHT."""
    told = FOUNDED

    def take(found: Collection[bytes]) -> None:
        nonlocal told
        if (there := _highest(dht, founding, found)) > max(known(), told):
            told = there
            heard(there)

    def mine() -> bytes | None:
        revision = known()
        own = revision.number and revision >= told and founding.proven(dht, revision)
        return pack_record(revision) if own else None

    await REVISIONS.watch(dht, founding.run_id, take, mine)


@lru_cache(maxsize=2048)  # each is logged once, though many looks find it; there are 1,024 under a key at most
def _refuse_once(founding: Founding, revision: Revision) -> None:
    log.warning("refused the revision %s of the run %s: the founder has not signed it", revision, founding.run_id)
