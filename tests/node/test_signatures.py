"""Signatures: what they cover, and that no other peer can make them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from p2p_diloco.core import messages as m
from p2p_diloco.core.state import commit_of, key_of
from p2p_diloco.core.version import ContributionId, Version
from p2p_diloco.net.interface import Refusal
from p2p_diloco.net.records import SIGNATURE_BYTES
from p2p_diloco.node.signatures import Signatures, hash_of
from tests.net.memory import MemoryNetwork
from tests.node.headers_world import RULES, SLICES, Run, hashed, ready

RUN = Run(4)
BASE, LEADER = RUN.state.version, RUN.me


class Nothing:
    """An inbox that is never used."""


def signatures_of(peer: str, token: bytes = b"token") -> Signatures:
    return Signatures(peer, MemoryNetwork().join(peer, Nothing()), token)  # type: ignore[arg-type]


def contribution(peer: str, **changes: Any) -> m.Ready:
    signed = signatures_of(peer).signed(ready(peer, BASE, seal=b"", **changes))
    assert isinstance(signed, m.Ready)
    return signed


def close() -> m.Close:
    """A Close as its leader sends it: its own contribution is signed only then."""
    entries = tuple((peer, contribution(peer) if peer != LEADER else ready(peer, BASE, seal=b"")) for peer in RUN.names)
    choice = m.Choice(LEADER, 0, entries)
    made = replace(RUN.close, choice=choice, key=key_of(0, BASE, choice), seal=b"")
    signed = signatures_of(LEADER).signed(made)
    assert isinstance(signed, m.Close)
    return signed


def commit() -> m.Commit:
    signed = signatures_of(LEADER).signed(commit_of(RUN.state, close(), RUN.hashes, RUN.state.plan.owners, RULES))
    assert isinstance(signed, m.Commit)
    return signed


def refused(sender: str, message: m.Message, token: bytes = b"token") -> str:
    """Why a judge refuses the message; empty if it doesn't."""
    try:
        signatures_of("judge", token).check(sender, message)
    except Refusal as refusal:
        return refusal.reason
    return ""


def test_all_signed_messages_are_accepted_of_their_signers_alone() -> None:
    other = RUN.names[1]
    vote = m.Vote(0, BASE, 0, LEADER, close(), commit())
    for sender, message in ((LEADER, contribution(LEADER)), (other, close()), (other, commit()), (other, vote)):
        assert refused(sender, message) == ""
        assert refused(sender, message, b"another run") != ""
    assert refused(other, contribution(LEADER)) == f"{other} has not signed its ready"
    assert refused(LEADER, replace(close(), leader=other)) == f"{other} has not signed its close"
    assert refused(LEADER, replace(commit(), leader=other)) == f"{other} has not signed its commit"
    for message in (m.Claim(0, BASE, 1), m.Want(0, BASE, m.What.READY), m.Ask()):
        assert refused(other, message) == ""


@pytest.mark.parametrize(
    "change",
    [
        {"weight": 5.0}, {"samples": 9}, {"id": ContributionId(7, 3)}, {"oldest": ContributionId(7, 3)},
        {"fragment": 1}, {"base": replace(BASE, samples=1)}, {"root": hashed("x")}, {"link": 1.0},
        {"reachable": False}, {"grant": "g"}, {"seal": b""}, {"seal": bytes(SIGNATURE_BYTES)},
    ],
    ids=lambda change: ", ".join(change),
)  # fmt: skip
def test_a_contribution_is_signed_whole(change: dict[str, Any]) -> None:
    """All but the hashes of its slices, which its root covers; so the bare one can be checked too."""
    peer = RUN.names[1]
    assert refused(peer, replace(contribution(peer), **change)) == f"{peer} has not signed its ready"
    assert refused(peer, replace(contribution(peer).bare(), seal=contribution(peer).seal)) == ""


@pytest.mark.parametrize(
    "change",
    [{"term": 1}, {"attempt": 1}, {"key": hashed("x")}, {"owners": (LEADER,) * SLICES}, {"base": RUN.before.version}],
    ids=lambda change: ", ".join(change),
)
def test_a_close_is_signed_with_its_owners_and_key(change: dict[str, Any]) -> None:
    assert refused(LEADER, replace(close(), **change)) == f"{LEADER} has not signed its close"
    without = replace(close(), choice=None)
    assert refused(LEADER, without) == ""
    assert refused(LEADER, replace(without, **change)) == f"{LEADER} has not signed its close"


@pytest.mark.parametrize(
    "change",
    [{"term": 1}, {"key": hashed("x")}, {"hashes": RUN.hashes[::-1]}, {"owners": (LEADER,) * SLICES},
     {"version": Version(0, 1, 102, hashed("x"))}],
    ids=lambda change: ", ".join(change),
)  # fmt: skip
def test_a_commit_is_signed_with_its_means(change: dict[str, Any]) -> None:
    assert refused(LEADER, replace(commit(), **change)) == f"{LEADER} has not signed its commit"


def test_each_author_signs_its_own_part() -> None:
    # a close names no contribution that its author did not sign
    made, other = close(), RUN.names[2]
    assert made.choice is not None
    entries = tuple((peer, replace(one, seal=b"") if peer == other else one) for peer, one in made.choice.entries)
    assert refused(LEADER, replace(made, choice=replace(made.choice, entries=entries))) == (
        f"{other} has not signed its ready"
    )

    # A choice is signed by whoever chose it. Who completes it as the leader of a later term can't sign it for its
    # author.
    made, second = close(), RUN.names[1]
    taken = signatures_of(second).signed(replace(made, term=1, leader=second, seal=b""))
    assert refused(second, taken) == ""
    forged = replace(made, term=1, leader=second, seal=b"", choice=replace(made.choice, term=1, seal=b""))
    assert refused(second, signatures_of(second).signed(forged)) == f"{LEADER} has not signed its choice"

    # a mean is signed by its owner for its payload
    owner, payload = RUN.names[1], memoryview(b"mean")
    of = 0, BASE, RUN.key, 3, hash_of(payload)
    mean = m.Mean(*of, owner, payload, signatures_of(owner).of_mean(*of))
    assert refused(LEADER, mean) == ""
    for change in ({"hash": hash_of(b"else")}, {"number": 4}, {"key": hashed("x")}, {"base": RUN.before.version},
                   {"owner": LEADER}, {"fragment": 1}, {"seal": b""}):  # fmt: skip
        wrong = replace(mean, **change)
        assert refused(LEADER, wrong) == f"{wrong.owner} has not signed its mean"

    # Others' messages are passed on as they are. A peer signs nothing for another one, and nothing twice.
    other = signatures_of(RUN.names[1])
    for message in (close(), commit(), m.Vote(0, BASE, 0, LEADER, close(), commit())):
        assert other.signed(message) == message
    unsigned = replace(commit(), seal=b"")
    assert other.signed(unsigned).seal == b""  # type: ignore[union-attr]
    vote = other.signed(m.Vote(0, BASE, 0, LEADER, None, unsigned))
    assert isinstance(vote, m.Vote)
    assert vote.commit is not None
    assert vote.commit.seal == b""
    own = signatures_of(LEADER).signed(vote)
    assert refused(RUN.names[1], own) == ""
