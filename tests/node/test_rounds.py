"""Rounds of real nodes over the in-memory swarm: their steps to the bit, and what comes in that they refuse."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from p2p_diloco.core import messages as m
from p2p_diloco.core.revision import Revision
from p2p_diloco.core.state import key_of, rooted
from p2p_diloco.core.version import ContributionId
from p2p_diloco.net.interface import Refusal
from p2p_diloco.node.headers import pack
from p2p_diloco.node.inbox import FETCHES_AT_ONCE
from p2p_diloco.node.run_inbox import RunInbox
from p2p_diloco.node.run_record import Founding
from p2p_diloco.node.signatures import hash_of
from tests.net.memory import MemoryNetwork
from tests.net.patience import awaited, until
from tests.node.conftest import QUICK, MemoryPeer, entered, exchange

SIZES = (12, 12)
EXACT: dict[str, Any] = {
    **QUICK, "heartbeat_timeout": 10.0, "aggregation": "mean", "step_limit": 0.0, "audit_rate": 0.0,
    "slice_elements": 4, "outer": "fixed", "outer_momentum": 0.5,
}  # fmt: skip
"""Six slices, whose steps are exact in any arithmetic if the means are multiples of a power of two."""


async def pair(network: MemoryNetwork | None = None) -> tuple[MemoryPeer, MemoryPeer]:
    """Two peers that have made a round."""
    first, other = await entered("ab", {**EXACT, "start_peers": 2}, network, sizes=SIZES)
    await exchange(first, other)
    return first, other


@pytest.mark.parametrize("fragment_layout", ["contiguous", "strided"])
@awaited
async def test_three_nodes_make_the_same_steps_to_the_bit(fragment_layout: str) -> None:
    """The weighted mean of what all have sent, then the step of SGD with Nesterov momentum, in each of two fragments;
    nobody is refused."""
    config = {**EXACT, "num_fragments": 2, "sync_every": 2, "start_peers": 3, "fragment_layout": fragment_layout}
    peers = await entered("abc", config, sizes=SIZES)
    theta, moment, layout = torch.zeros(24), torch.zeros(24), peers[0].node._run.layout
    for number in range(6):
        deltas = [60.0 * ((7 * number + 3 * place) % 5 - 2) for place in range(3)]
        sends = (peers[place].exchange(deltas[place], weight) for place, weight in enumerate((1.0, 1.0, 2.0)))
        assert all(release["sent"] for release in await asyncio.gather(*sends))
        mean = (deltas[0] + deltas[1] + 2 * deltas[2]) / 4
        places = layout.slices_of(number % 2)
        part = slice(places[0].start, places[-1].stop)
        moment[part] = 0.5 * moment[part] + mean
        theta[part] -= mean + 0.5 * moment[part]
        assert [peer.memory.theta.tolist() for peer in peers] == [theta.tolist()] * 3
    digests = [[held.digest() for held in peer.node.work.state.slices] for peer in peers]
    assert digests[0] == digests[1] == digests[2]
    assert [peer.inbox.refusals.newest(9) for peer in peers] == [[], [], []]


@awaited
async def test_a_message_on_a_version_that_is_not_reached_is_checked_and_kept() -> None:
    """By a newcomer that holds no state yet."""
    network = MemoryNetwork()
    first, other = await pair(network)
    await exchange(first, other)
    late = MemoryPeer(network, "x", {}, SIZES)
    for known in "ab":
        network.cut("x", known)
    await late.start()
    await late.hear("run")
    late.tell("theta")
    await until(lambda: isinstance(late.inbox.handler, RunInbox))
    state, log = first.node.replica.logs[0].held, late.node.replica.logs[0]
    vote = m.Vote(0, state.version, 1, "b")
    commit = replace(first.node.replica.logs[0].last[-1][0], base=state.version, seal=bytes(72))
    await late.inbox.deliver("a", first.node._packed(vote)[0], None)
    with pytest.raises(Refusal, match="has not signed its commit"):
        await late.inbox.deliver("a", first.node._packed(commit)[0], None)
    assert list(log.early.values()) == [vote]


@awaited
async def test_damaged_memory_is_not_sent() -> None:
    """The slice is refused, and repaired; then it is sent as all hold it."""
    other, donor = await pair()
    work = donor.node.work
    await until(lambda: bool(work.known_digests(0)) and work.versions == other.node.work.versions)
    intact = other.node.work.part(0, 1).payload
    work.state.slices[1].theta[1] += 1.0
    with pytest.raises(Refusal, match="slice 1 of fragment 0 is corrupted in the sender's memory"):
        await donor.node._part(0, 1)
    await until(lambda: torch.equal(donor.memory.theta, other.memory.theta))
    assert (await donor.node._part(0, 1))[1] == intact


@awaited
async def test_what_cannot_be_used_is_refused_before_the_replica_sees_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values that are not finite, a payload of another length, a signature of another peer, a revision that nobody
    signed; of a probe all but the revision is believed."""
    first, other = await pair()
    node, inbox, base = first.node, other.inbox, first.node.replica.logs[0].held.version
    good, wrong = memoryview(bytes(16)), memoryview(torch.full((4,), float("nan")).numpy().tobytes())
    part = m.Slice(0, base, "a", ContributionId(1, 9), 0, "")
    mean = m.Mean(0, base, "00" * 16, 0, hash_of(good), "b", seal=bytes(64))
    asks: list[tuple[m.Message, memoryview | None, str]] = [
        (part, wrong, "not finite or too large"), (part, good[:8], "must have 16 bytes, but 8 came"),
        (m.Part(0, base, 0), memoryview(bytes(wrong) * 2), "not finite or too large"),
        (mean, good, "b has not signed its mean"),
        (m.Held(0, base), good, "must have 0 bytes"), (m.Want(0, base, m.What.MEANS, (6,)), None, "no slice 6"),
    ]  # fmt: skip
    for message, payload, why in asks:
        with pytest.raises(Refusal, match=why):
            await inbox.deliver("a", node._packed(message)[0], payload)
    assert "no slice 6" in inbox.refusals.newest(1)[0][1].why
    revised = m.Probe(replace(node.replica.roster.mine, revision=Revision(1, 0.5), bandwidth=7.0))
    for _ in range(2):
        await inbox.deliver("a", node._packed(revised)[0], None)
        known, mine = other.node.replica.roster.summary("a"), other.node.replica.roster.mine
        assert (known.bandwidth, known.revision.number, mine.revision.number) == (7.0, 0, 0)
    assert "not signed by the run's founder" in inbox.refusals.newest(1)[0][1].why
    for proven, revision in ((False, Revision(1, 0.5)), (True, Revision(1, -0.1)), (True, Revision(1, 0.5, 1.0))):
        monkeypatch.setattr(Founding, "proven", lambda *_, proven=proven: proven)
        head, last = m.Head(0, replace(node.replica.logs[0].held, revision=revision)), node.replica.logs[0].last[-1][0]
        choice = replace(last.choice, revision=revision, by="a", seal=b"")
        commit = replace(last, leader="a", key=key_of(0, last.base, choice), choice=choice, seal=b"")
        for told in (head, commit, m.Vote(0, last.base, 1, "b", commit=commit)):
            with pytest.raises(Refusal, match=r"founder has not signed its revision|can't be read"):
                await inbox.deliver("a", node._packed(told)[0], None)


@awaited
async def test_roles_and_grants_of_a_private_run_are_checked() -> None:
    """A contribution names its author's grant, also in a Close; an author that this peer has never met is not judged.
    An aggregator's invitation allows contributions without a weight alone, also where they come as payloads."""
    first, other = await pair()
    node, inbox, state = first.node, other.inbox, first.node.replica.logs[0].held
    inbox.role_of = {"a": "aggregator"}.get
    id, hashes = ContributionId(1, 99), ("00" * 32,) * 6
    ready = rooted(m.Ready(0, state.version, id, id, 1.0, 1, hashes, grant="00ff"))
    with pytest.raises(Refusal, match="an aggregator's invitation allows no Ready"):
        await inbox.deliver("a", node._packed(ready)[0], None)
    header, body = pack(node._signatures.signed(ready), node._run.token, long=0)
    with pytest.raises(Refusal, match="an aggregator's invitation allows no Ready"):
        await inbox.deliver("a", header, memoryview(body or b""))
    inbox.role_of = lambda peer: "worker"
    part = m.Slice(0, state.version, "a", id, 0, "")
    header, body = pack(part, node._run.token, long=0)
    with pytest.raises(Refusal, match="a Slice must come as a header"):
        await inbox.deliver("a", header, memoryview(body or b""))
    for grant, fits in ((b"\x00\xff", True), (b"\x01", False), ("a", True)):
        inbox.grant_of = {"a": grant, "b": b"\x02"}.get
        choice = replace(node.replica.logs[0].last[-1][0].choice, entries=(("a", ready),), seal=b"")
        key = key_of(0, state.version, choice)
        close = m.Close(0, state.version, 1, "a", 0, key, choice, state.plan.owners)
        for message in (ready, close):
            with nullcontext() if fits else pytest.raises(Refusal, match="not here by the grant"):
                await inbox.deliver("a", node._packed(message)[0], None)


@awaited
async def test_requests_for_states_are_limited_for_each_peer() -> None:
    """One that asks for the whole state again and again is refused after a while; the others are not."""
    first, other = await pair()
    header, inbox = first.node._packed(m.Ask(0, tuple(range(6))))[0], other.inbox
    asked = (inbox.deliver("a", header, None) for _ in range(40))
    refused = [one for one in await asyncio.gather(*asked, return_exceptions=True) if isinstance(one, Refusal)]
    assert 20 <= len(refused) <= 40 - FETCHES_AT_ONCE
    assert all("too many states" in str(one) for one in refused)
    await inbox.deliver("c", header, None)
