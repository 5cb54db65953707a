"""Revisions change settings of a run while it goes on. This file checks the founder's signature on them, and keeps the
newest revision in the DHT.

Law: a revision is valid if the run's founder, or the run key of a private run, has signed it for this founding; any
peer may pass it on. No peer owns its
record (see `unowned`); the highest valid revision wins. In an open run anyone may store records of revisions. If there
are more than `TRIED_MAX`, each look tries a new random choice of them, so false ones can't hide the founder's for long.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from random import sample

from p2p_diloco.core.revision import FOUNDED, Revision
from p2p_diloco.net.interface import Records, Unreachable
from p2p_diloco.net.signing import from_text, pack, signed
from p2p_diloco.node import unowned
from p2p_diloco.node.run_record import RunRecord

KIND = b"revision"
"""The kind of statement that a founder signs."""
RECORD_TTL_S = 600.0
"""How long the DHT keeps a revision that no peer renews."""
LOOK_EVERY_S = 3.0
KEEP_EVERY_S = 60.0
TRIED_MAX = 64
"""The most records whose signatures are checked at one look, which takes 10 ms at most."""

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
    """Read the highest revision in the DHT that the founder has signed; FOUNDED if there is none. Among more than
    `TRIED_MAX` records one call may miss that revision, and a later call finds it.

    Raises:
        Unreachable: the DHT doesn't answer.
    """
    found = [r for r in await unowned.read(dht, _key(founding.run_id), Revision) if r.sound]
    highest = FOUNDED
    for revision in sample(found, min(len(found), TRIED_MAX)):
        if revision > highest:
            if founding.proven(dht, revision):
                highest = revision
            else:
                _refuse(founding, revision)
    return highest


async def store(dht: Records, founding: Founding, revision: Revision) -> bool:
    """Store a revision in the DHT, or renew it. Returns False if it wasn't stored."""
    return await unowned.store(dht, _key(founding.run_id), unowned.pack(revision), RECORD_TTL_S)


async def watch(
    dht: Records, founding: Founding, known: Callable[[], Revision], heard: Callable[[Revision], None]
) -> None:
    """Until cancelled, look for revisions in the DHT. Pass each that is higher than the `known` one to `heard`, and
    keep the known one stored in the DHT."""
    clock = asyncio.get_running_loop().time
    keep_at, told = 0.0, FOUNDED
    while True:
        try:
            there = await read(dht, founding)
            mine = known()
            if there > max(mine, told):
                told = there
                heard(there)
            elif mine > there or (mine > FOUNDED and clock() >= keep_at):
                keep_at = clock() + KEEP_EVERY_S
                if founding.proven(dht, mine):
                    await store(dht, founding, mine)
        except Unreachable as error:
            log.debug("the DHT gave no answer about revisions: %s", error)
        except Exception:  # the other peers look too
            log.warning("revisions in the DHT can't be read or renewed", exc_info=True)
        await asyncio.sleep(LOOK_EVERY_S)


@lru_cache(maxsize=2048)  # each is logged once, though many looks find it; there are 1,024 under a key at most
def _refuse(founding: Founding, revision: Revision) -> None:
    log.warning("refused the revision %s of the run %s: the founder has not signed it", revision, founding.run_id)


def _key(run_id: str) -> str:
    return f"{run_id}/revisions"
