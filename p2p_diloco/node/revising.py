"""Revisions change settings of a run while it goes on. This file checks the founder's signature on them, and keeps the
newest revision in the DHT.

Law: a revision is valid if the run's founder, or the run key of a private run, has signed it for this founding; any
peer may pass it on. The highest valid revision wins. In an open run anyone may store records of revisions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache

from p2p_diloco.core.revision import FOUNDED, Revision
from p2p_diloco.net.interface import Records
from p2p_diloco.net.signing import from_text, pack, signed
from p2p_diloco.node.board import Board, newest
from p2p_diloco.node.board import pack as pack_record
from p2p_diloco.node.run_record import RunRecord

KIND = b"revision"
"""The kind of statement that a founder signs."""
BOARD = Board("revisions", ttl_s=600.0)

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
        return dht.signed_by(self.founder, revision.proof, KIND, said) or self._by_the_run_key(revision.proof, said)

    def _by_the_run_key(self, proof: str, said: bytes) -> bool:
        try:
            return bool(self.key) and signed(self.key, from_text(proof), KIND, said)
        except ValueError:
            return False


async def read(dht: Records, founding: Founding) -> Revision:
    """Read the highest revision in the DHT that the founder has signed; FOUNDED if there is none. If strangers store
    many, one call may miss it, and a later call finds it.

    Raises:
        Unreachable: the DHT doesn't answer.
    """
    return _highest(dht, founding, (await BOARD.fetch(dht, founding.run_id)).values())


def _highest(dht: Records, founding: Founding, found: Collection[bytes]) -> Revision:
    def valid(revision: Revision) -> bool:
        if right := founding.proven(dht, revision):
            return True
        if revision.sound:
            _refuse(founding, revision)
        return right

    return max(newest(found, Revision, valid, lambda revision: not revision.sound), default=FOUNDED)


async def store(dht: Records, founding: Founding, revision: Revision) -> bool:
    """Store a revision in the DHT, or renew it. Returns False if it wasn't stored."""
    return await BOARD.store(dht, founding.run_id, pack_record(revision))


async def watch(
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

    await BOARD.watch(dht, founding.run_id, take, mine)


@lru_cache(maxsize=2048)  # each is logged once, though many looks find it; there are 1,024 under a key at most
def _refuse(founding: Founding, revision: Revision) -> None:
    log.warning("refused the revision %s of the run %s: the founder has not signed it", revision, founding.run_id)
