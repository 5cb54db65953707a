"""Seals: the signature of a peer for its contribution, and the signature of an aggregator for its commit.

Law: makes and judges bytes; sends and stores nothing. A seal can't be made by any other peer, and can be passed on. A
contribution's seal covers its payload, its weight, its samples, and the data that its author says it used. A commit's
seal covers the mean, the version that the commit leads to, and the seals of the contributions that the commit counts.

    seal of a contribution   BLAKE3 of the payload (32 bytes), signature of its author (64 bytes)
    seal of a commit         BLAKE3 of the mean, signature of the aggregator, the seals of its contributions in order
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from blake3 import blake3

from p2p_diloco.core.messages import Commit, Contribution, Counted
from p2p_diloco.core.version import Version
from p2p_diloco.net.interface import Records
from p2p_diloco.net.signing import SIGNATURE_BYTES
from p2p_diloco.net.statements import as_text, from_text, pack
from p2p_diloco.node.plain import to_plain

DIGEST_BYTES = 32
SEAL_BYTES = DIGEST_BYTES + SIGNATURE_BYTES
_CONTRIBUTION, _COMMIT = b"contribution", b"commit"


@dataclass(frozen=True, slots=True)
class Sealed:
    """The content of a commit's seal. `mean`: BLAKE3 of the encoded mean. `parts`: the seals of the contributions, in
    the order of the commit."""

    mean: bytes
    signature: bytes
    parts: tuple[bytes, ...]

    def pack(self) -> bytes:
        """The seal's bytes."""
        return b"".join((self.mean, self.signature, *self.parts))


class Seals:
    """Makes the seals of one peer, and checks those of the other peers of a run."""

    def __init__(self, records: Records, token: bytes) -> None:
        """`records` signs as this peer. `token`: the run's, so that no seal is valid in another run."""
        self._records, self._token = records, token

    # -- contributions

    def of_contribution(self, contribution: Contribution) -> bytes:
        """The seal of this peer's own contribution."""
        digest = _digest(contribution.payload)
        return digest + from_text(
            self._records.sign(_CONTRIBUTION, self._contributed(contribution.shard, contribution, digest))
        )

    def sealed(self, author: str, contribution: Contribution) -> bool:
        """Whether the author sealed this contribution with this payload."""
        seal = contribution.seal
        return self._fits(author, contribution.shard, contribution, seal) and is_digest_of(seal, contribution.payload)

    def _fits(self, author: str, shard: int, what: Contribution | Counted, seal: bytes) -> bool:
        if len(seal) != SEAL_BYTES:
            return False
        statement = self._contributed(shard, what, seal[:DIGEST_BYTES])
        return self._records.signed_by(author, as_text(seal[DIGEST_BYTES:]), _CONTRIBUTION, statement)

    def _contributed(self, shard: int, what: Contribution | Counted, digest: bytes) -> bytes:
        """The statement that the author of a contribution to this shard signs."""
        id = what.id
        uses = [to_plain(what.uses)] if what.uses else []
        return pack(self._token, shard, id.incarnation, id.sequence, what.weight, what.samples, digest, *uses)

    # -- commits

    def of_commit(
        self, shard: int, base: Version, digest: str, contributions: Iterable[tuple[Counted, bytes]], mean: memoryview
    ) -> Sealed:
        """Seal this peer's own commit. The seal covers the contributions with their seals, the encoded mean, and the
        digest of the version that the commit leads to."""
        listed = list(contributions)
        parts, mean_digest = tuple(seal for _, seal in listed), _digest(mean)
        counted = [counted for counted, _ in listed]
        statement = self._committed(shard, base.epoch, base.digest, digest, counted, parts, mean_digest)
        return Sealed(mean_digest, from_text(self._records.sign(_COMMIT, statement)), parts)

    def read(self, commit: Commit) -> Sealed | None:
        """The content of a commit's seal; None if the commit's aggregator didn't make the seal."""
        base, digest = commit.base, commit.version.digest
        return self.opened(
            commit.shard, base.epoch, base.digest, digest, commit.aggregator, commit.contributions, commit.seal
        )

    def opened(
        self,
        shard: int,
        epoch: int,
        base: str,
        digest: str,
        aggregator: str,
        counted: tuple[Counted, ...],
        seal: bytes,
    ) -> Sealed | None:
        """The content of a commit's seal; None if the aggregator didn't make the seal. The commit leads from the
        version with the digest `base`, which is of this `epoch`, to the version with the digest `digest`."""
        if len(seal) != SEAL_BYTES * (1 + len(counted)):
            return None
        mean, signature, *parts = [seal[:DIGEST_BYTES], seal[DIGEST_BYTES:SEAL_BYTES]] + [
            seal[i : i + SEAL_BYTES] for i in range(SEAL_BYTES, len(seal), SEAL_BYTES)
        ]
        statement = self._committed(shard, epoch, base, digest, counted, parts, mean)
        signs = self._records.signed_by(aggregator, as_text(signature), _COMMIT, statement)
        return Sealed(mean, signature, tuple(parts)) if signs else None

    def fits(self, shard: int, counted: Counted, seal: bytes) -> bool:
        """Whether the author of a counted contribution to this shard made this seal for it."""
        return self._fits(counted.peer, shard, counted, seal)

    def _committed(
        self,
        shard: int,
        epoch: int,
        base: str,
        digest: str,
        counted: Iterable[Counted],
        parts: Iterable[bytes],
        mean: bytes,
    ) -> bytes:
        """The statement that the aggregator of a commit signs."""
        listed = [
            [c.peer, c.id.incarnation, c.id.sequence, c.weight, c.samples, *([to_plain(c.uses)] if c.uses else [])]
            for c in counted
        ]
        return pack(self._token, shard, epoch, base, digest, listed, list(parts), mean)


def _digest(payload: memoryview | bytes) -> bytes:
    # a third of SHA-256's time
    return blake3(payload).digest()


def is_digest_of(seal: bytes, payload: memoryview | bytes) -> bool:
    """Whether a seal, or a digest, begins with the BLAKE3 of this payload."""
    return seal[:DIGEST_BYTES] == _digest(payload)
