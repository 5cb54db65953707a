"""Seals: what they cover, and that no other peer can make them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from blake3 import blake3

from p2p_diloco.core.messages import Commit, Contribution, Counted, Plan
from p2p_diloco.core.version import ContributionId, Version
from p2p_diloco.node.seals import SEAL_BYTES, Seals, is_digest_of
from tests.net.memory import MemoryNetwork

BASE, NEXT = Version(0, 0, 3, "d3"), Version(0, 8, 4, "d4")
MEAN = memoryview(b"mean")


class Nothing:
    """An inbox that is never used."""


def seals_of(peer: str, token: bytes = b"token") -> Seals:
    """The seals of a peer in the run with this token."""
    return Seals(MemoryNetwork().join(peer, Nothing()), token)  # type: ignore[arg-type]


def contribution(author: str) -> Contribution:
    made = Contribution(1, BASE, ContributionId(7, 2), ContributionId(7, 1), 4.0, 8, memoryview(b"gradient"))
    return replace(made, seal=seals_of(author).of_contribution(made))


def commit() -> Commit:
    """A commit of b that counts a contribution of a."""
    c = contribution("a")
    counted = Counted("a", c.id, c.weight, c.samples)
    sealed = seals_of("b").of_commit(1, BASE, NEXT.digest, [(counted, c.seal)], MEAN)
    return Commit(1, BASE, NEXT, 0, "b", (counted,), Plan(("a",), ("b",)), MEAN, seal=sealed.pack())


def test_a_contribution_is_sealed_by_its_author_alone() -> None:
    made = contribution("a")
    assert len(made.seal) == SEAL_BYTES
    assert seals_of("c").sealed("a", made)
    assert not seals_of("c").sealed("b", made)
    assert not seals_of("c", b"another run").sealed("a", made)


@pytest.mark.parametrize(
    "change",
    [
        {"payload": memoryview(b"another!")},
        {"weight": 5.0},
        {"samples": 9},
        {"id": ContributionId(7, 3)},
        {"shard": 0},
        {"seal": b""},
        {"seal": bytes(SEAL_BYTES)},
    ],
    ids=lambda change: ", ".join(change),
)
def test_a_contribution_whose_seal_covers_something_else_is_not_sealed(change: dict[str, object]) -> None:
    assert not seals_of("c").sealed("a", replace(contribution("a"), **change))  # type: ignore[arg-type]


def test_the_seal_of_a_commit_gives_its_mean_and_the_seals_of_its_contributions() -> None:
    made = commit()
    sealed = seals_of("c").read(made)
    assert sealed is not None
    assert is_digest_of(sealed.mean, MEAN)
    assert sealed.mean == blake3(MEAN).digest()
    assert sealed.parts == (contribution("a").seal,)
    assert seals_of("c").fits(1, made.contributions[0], sealed.parts[0])
    assert not seals_of("c").fits(0, made.contributions[0], sealed.parts[0])


@pytest.mark.parametrize(
    "change",
    [
        {"aggregator": "c"},
        {"version": replace(NEXT, digest="d5")},
        {"base": replace(BASE, digest="d2")},
        {"shard": 0},
        {"contributions": (Counted("a", ContributionId(7, 2), 5.0, 8),)},
        {"contributions": ()},
        {"seal": b""},
        {"seal": bytes(2 * SEAL_BYTES)},
    ],
    ids=lambda change: ", ".join(change),
)
def test_a_commit_whose_seal_covers_something_else_is_not_sealed(change: dict[str, object]) -> None:
    assert seals_of("c").read(commit()) is not None
    assert seals_of("c").read(replace(commit(), **change)) is None  # type: ignore[arg-type]


def test_a_commit_without_contributions_has_a_seal_too() -> None:
    sealed = seals_of("b").of_commit(1, BASE, NEXT.digest, [], MEAN)
    made = Commit(1, BASE, NEXT, 0, "b", (), Plan(("a",), ("b",)), MEAN, seal=sealed.pack())
    assert seals_of("c").read(made) == sealed
