"""Simulated tensors: sets of inner steps as bit masks, so that every single step can be accounted for.

A shard's θ is the set of inner steps that it contains. A pseudo-gradient is the set of steps that a peer adds.
Averaging is the union of disjoint sets, so a step that arrives twice is detected.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from hashlib import blake2b

from p2p_diloco.core.events import Carry, Loaded
from p2p_diloco.core.messages import Contribution
from p2p_diloco.core.revision import FOUNDED, Revision


class Violation(AssertionError):
    """An invariant was broken. Its letter is that of docs/testing.md."""


def require(holds: bool, law: str, what: str) -> None:
    """Raise Violation with the invariant's letter ``law`` and the text ``what``, unless the condition holds."""
    if not holds:
        raise Violation(f"({law}) {what}")


@dataclass(frozen=True, slots=True)
class Tensors:
    """One shard's outer state: its inner steps, and a hash chain over all commits in place of the momentum."""

    steps: int = 0
    chain: bytes = b""

    def digest(self, meta: bytes) -> str:
        """Return the digest of these tensors and ``meta``."""
        return blake2b(self.chain + meta, digest_size=8).hexdigest()

    def step(self, mean: tuple[tuple[str, int], ...]) -> Tensors:
        """Return the tensors after the outer step with ``mean``. A mean is a sequence of (peer, inner steps of this
        peer)."""
        steps, chain = self.steps, blake2b(self.chain, digest_size=8)
        for peer, added in mean:
            require(not steps & added, "c", f"{peer}'s steps {bin(steps & added)} are counted twice")
            steps |= added
            chain.update(f"{peer}:{added:x};".encode())
        return Tensors(steps, chain.digest())

    def rated(self, revision: Revision) -> Tensors:
        """Return the same tensors with the rates of ``revision`` added to the hash chain, so that an outer step with
        other rates leads to another digest."""
        if revision.rates is None:
            return self
        return replace(self, chain=blake2b(self.chain + repr(revision.rates).encode(), digest_size=8).digest())


@dataclass(slots=True)
class Store:
    """A node's present outer state, and its proposals by (shard, digest)."""

    present: list[Tensors]
    proposals: dict[tuple[int, str], Tensors] = field(default_factory=dict)

    def average(
        self,
        shard: int,
        contributions: tuple[tuple[str, Contribution], ...],
        meta: bytes,
        revision: Revision = FOUNDED,
    ) -> tuple[str, object]:
        """Propose the outer step with these contributions; return its digest and the mean."""
        mean = tuple((peer, c.payload) for peer, c in contributions)
        return self.propose(shard, self.present[shard].rated(revision).step(mean), meta), mean

    def propose(self, shard: int, tensors: Tensors, meta: bytes) -> str:
        """Store a proposal for a shard and return its digest."""
        digest = tensors.digest(meta)
        self.proposals[shard, digest] = tensors
        return digest

    def accept(self, shard: int, digest: str) -> None:
        """Replace the shard's present state with the proposal of this digest, and discard its other proposals."""
        self.present[shard] = self.proposals[shard, digest]
        self.proposals = {key: t for key, t in self.proposals.items() if key[0] != shard}


@dataclass(slots=True)
class Trainer:
    """One incarnation of a trainer: its local parameters, and which of its inner steps were sent, counted or
    dropped."""

    shards: int
    base: list[int] = field(default_factory=list)
    local: list[int] = field(default_factory=list)
    delta: list[int] = field(default_factory=list)  # the last contribution, per shard
    taken: int = 0  # all inner steps of this incarnation
    dropped: list[int] = field(default_factory=list)  # dropped by rule, per shard
    since_sending: int = 0
    since: dict[int, int] = field(default_factory=dict)  # steps since each fragment's last contribution
    loaded: bool = False

    def __post_init__(self) -> None:
        zeros = [0] * self.shards
        self.base, self.local, self.delta, self.dropped = zeros[:], zeros[:], zeros[:], zeros[:]

    def step(self, bit: int) -> None:
        """Make one inner step. ``bit`` is the bit that stands for this step in all bit masks."""
        self.taken |= bit
        self.local = [steps | bit for steps in self.local]
        self.since_sending += 1

    def merge(self, loaded: Loaded, new: int) -> None:
        """Merge a newer global value of a shard. ``loaded.carry`` says what happens to the local progress."""
        s = loaded.shard
        base, progress, delta = self.base[s], self.local[s] & ~self.base[s], self.delta[s]
        lost = base & self.taken & ~new  # this trainer's steps that the old lineage counted and the new one does not
        match loaded.carry:
            case Carry.SUBTRACT:
                require(delta & ~progress == 0, "f", "the subtracted contribution is not in the local progress")
                progress &= ~delta
            case Carry.RESTORE:
                require(delta & ~base == 0, "f", "the restored contribution was not in the base")
                progress |= delta
            case Carry.DROP:
                lost |= progress & ~new
                progress = 0
        require(not progress & new, "c", f"shard {s}: carried progress is counted already ({loaded.carry})")
        self.dropped[s] |= lost & ~progress
        self.dropped[s] &= ~new
        self.base[s], self.local[s] = new, new | progress

    def afresh(self) -> None:
        """Drop all local progress: replace the local values by the global ones that were merged last."""
        for s in range(self.shards):
            self.dropped[s] |= self.pending(s)
            self.local[s], self.delta[s] = self.base[s], 0

    def pending(self, shard: int) -> int:
        """Return the shard's local progress: the steps that its base does not contain."""
        return self.local[shard] & ~self.base[shard]
