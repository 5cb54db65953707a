"""Nodes on the log of fragments: three real ones in one loop, over the in-memory swarm."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace

import pytest
import torch

from p2p_diloco.core import messages as m
from p2p_diloco.core.revision import Revision
from p2p_diloco.core.state import key_of, rooted
from p2p_diloco.core.version import ContributionId
from p2p_diloco.net.interface import Refusal
from p2p_diloco.node.forms import About
from p2p_diloco.node.headers import pack
from p2p_diloco.node.inbox import FETCHES_AT_ONCE
from p2p_diloco.node.run import Run
from p2p_diloco.node.signatures import hash_of
from tests.net.memory import MemoryNetwork
from tests.net.patience import awaited, until
from tests.node.round_peers import UNIT, Peer, reference, run_of


@asynccontextmanager
async def swarm(of: Run, names: str = "abc") -> AsyncIterator[list[Peer]]:
    """These peers, who know each other; the first one founds the run. More may be appended."""
    network = MemoryNetwork()
    peers = [Peer(network, name, of) for name in names]
    try:
        peers[0].founds()
        for peer in peers:
            peer.meets(*(other for other in peers if other is not peer))
        yield peers
    finally:
        for peer in peers:
            await peer.end()


async def reach(peers: list[Peer], epoch: int) -> None:
    """Let all trainers go on to this epoch, and wait until all peers are there."""
    for peer in peers:
        peer.limit = epoch

    def there() -> bool:
        for peer in peers:
            peer.fails()
        return all(peer.epochs == [epoch] * len(peer.epochs) for peer in peers)

    await until(there, 60.0)


def agree(peers: list[Peer], known: list[Peer] | None = None) -> None:
    """All hold the same bits, and these are those of the reference. `known`: all peers that were counted ever."""
    for peer in peers:
        assert torch.equal(peer.theta, peers[0].theta)
        assert [held.digest() for held in peer.work.state.slices] == [
            held.digest() for held in peers[0].work.state.slices
        ]
        assert peer.dropped == 0
    for fragment in range(len(peers[0].replica.logs)):
        *_, theta = reference(known or peers, fragment)
        assert torch.equal(peers[0].theta[peers[0].part(fragment)].double(), theta)


@awaited
async def test_three_nodes_make_the_same_steps_to_the_bit() -> None:
    """Those of the reference, in each fragment; all count all from the second commit on, and nobody is refused."""
    async with swarm(run_of(2, start_peers=3)) as peers:
        await reach(peers, 6)
        agree(peers)
        for commit in peers[0].work.commits:
            assert [peer for peer, _ in commit.choice.entries] == ["a", "b", "c"]
        assert [peer.refusals.newest(9) for peer in peers] == [[], [], []]


@awaited
async def test_the_others_go_on_without_a_leader_that_is_killed() -> None:
    """In the middle of a round, whose slices it may own: the survivors close it, and hold the same bits."""
    async with swarm(run_of(start_peers=3)) as peers:
        await reach(peers, 2)
        leader = peers[0].replica.logs[0].held.plan.succession[0]
        dead = next(peer for peer in peers if peer.name == leader)
        left = [peer for peer in peers if peer is not dead]
        for peer in peers:
            peer.limit = 6
        await until(lambda: any(peer.replica.own.sent() == (2,) for peer in left))
        await dead.end(killed=True)
        await reach(left, 6)
        agree(left, peers)
        assert [peer for peer, _ in left[0].work.commits[-1].choice.entries] == [peer.name for peer in left]


@awaited
async def test_what_is_fetched_follows_the_rounds_that_go_on_meanwhile() -> None:
    """Donors keep no past. What came early is rolled forward by the means of the rounds since, and isn't sent again."""
    async with swarm(run_of(start_peers=3)) as peers:
        await reach(peers, 3)
        held, sent = asyncio.Event(), list[int]()
        for peer in peers:
            delay_parts(peer, held, sent)
        late = Peer(peers[0].network, "d", peers[0].run)
        late.meets(*peers)
        peers.append(late)
        await until(lambda: any(fetch.staged for fetch in late.replica.fetching.fetches.values()))
        await reach(peers[:3], 5)
        fetch = late.replica.fetching.fetches[0]
        await until(lambda: 0 in fetch.staged and fetch.staged[0][0].epoch == 5)
        assert late.work.rolls == 2
        held.set()
        await reach(peers, 7)
        agree(peers)
        assert sent.count(0) == 1


def delay_parts(peer: Peer, until_set: asyncio.Event, sent: list[int]) -> None:
    """Let a donor send the first slice at once, and the others only then."""
    plain = peer.node._part

    async def part(fragment: int, number: int) -> tuple[bytes, memoryview]:
        sent.append(number)
        if number:
            await until_set.wait()
        return await plain(fragment, number)

    peer.node._part = part  # type: ignore[method-assign]


@awaited
async def test_a_message_that_names_peers_by_places_waits_for_its_roll() -> None:
    """Once it can be read it is checked as any other, and a forged one is counted as its sender's."""
    async with swarm(run_of(start_peers=2), "ab") as (first, other):
        await reach([first, other], 2)
        late = Peer(first.network, "x", first.run)
        state = first.replica.logs[0].held
        vote = m.Vote(0, state.version, 1, "b")
        commit = replace(first.replica.logs[0].last[-1][0], base=state.version, seal=bytes(72))
        for message in (vote, commit):
            await late.transport._inbox.deliver("a", first.node._packed(message)[0], None)
        assert late.replica.logs[0].early == {}
        late.node.rolls.know(state)
        for settled in late.node.settled:
            settled()
        await until(lambda: late.replica.logs[0].early)
        assert list(late.replica.logs[0].early.values()) == [vote]
        assert "has not signed its commit" in late.refusals.newest(1)[0][1].why
        await late.end()


@pytest.mark.usefixtures("memory_is_always_looked_at")
@awaited
async def test_damaged_memory_is_fetched_again() -> None:
    """It is noticed before the next step, and repaired after it."""
    async with swarm(run_of(start_peers=3)) as peers:
        await reach(peers, 2)
        await until(lambda: all(2 in peer.replica.logs[0].digests for peer in peers))
        peers[1].work.state.slices[3].theta[1] += 1.0
        await reach(peers, 4)
        await until(lambda: torch.equal(peers[1].theta, peers[0].theta))
        agree(peers)
        notes = [text for kind, text in peers[1].notes if kind == "repair"]
        assert notes == ["1 slices of fragment 0 are fetched again"]
        await reach(peers, 5)
        agree(peers)


@awaited
async def test_damaged_memory_is_not_sent() -> None:
    """The slice is refused, and repaired; then it is sent as all hold it."""
    async with swarm(run_of(start_peers=3)) as peers:
        await reach(peers, 2)
        await until(lambda: all(2 in peer.replica.logs[0].digests for peer in peers))
        donor, intact = peers[1], peers[0].work.part(0, 1).payload
        donor.work.state.slices[1].theta[1] += 1.0
        with pytest.raises(Refusal, match="slice 1 of fragment 0 is corrupted in the sender's memory"):
            await donor.node._part(0, 1)
        await until(lambda: torch.equal(donor.theta, peers[0].theta))
        assert (await donor.node._part(0, 1))[1] == intact


@awaited
async def test_what_cannot_be_used_is_refused_before_the_replica_sees_it(caplog: pytest.LogCaptureFixture) -> None:
    """Values that are not finite, a payload of another length, a signature of another peer, a revision that nobody
    signed; of a probe all but the revision is believed."""
    async with swarm(run_of(start_peers=2), "ab") as (first, other):
        await reach([first, other], 1)
        node, inbox, base = first.node, other.transport._inbox, first.replica.logs[0].held.version
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
        assert "no slice 6" in other.refusals.newest(1)[0][1].why
        inbox.handler._common.founding.proven = lambda dht, revision: not revision.number
        revised = m.Probe(replace(first.replica.roster.mine, revision=Revision(1, 0.5), bandwidth=7.0))
        await inbox.deliver("a", node._packed(revised)[0], None)
        known = other.replica.roster.summary("a")
        assert (known.bandwidth, known.revision.number, other.replica.roster.mine.revision.number) == (7.0, 0, 0)
        await inbox.deliver("a", node._packed(revised)[0], None)
        assert caplog.text.count("not signed by the run's founder") == 1
        for proven, revision in (
            (False, Revision(1, 0.5)),
            (True, Revision(1, -0.1)),
            (True, Revision(1, 0.5, 1.0)),
        ):
            inbox.handler._common.founding.proven = lambda dht, revision, proven=proven: proven
            head = m.Head(0, replace(first.replica.logs[0].held, revision=revision))
            with pytest.raises(Refusal, match=r"founder has not signed its revision|can't be read"):
                await inbox.deliver("a", node._packed(head)[0], None)


@awaited
async def test_an_exchange_that_is_taken_up_again_sends_what_it_sent() -> None:
    """Other peers may have some of its slices already, so a part could be counted, whatever was trained since."""
    async with swarm(run_of(start_peers=2), "ab") as (first, other):
        first.limit = 1
        await until(lambda: first.given)
        before = dict(first.given)
        first.progress += UNIT
        await first.contribute(0)
        assert first.given.keys() == before.keys()
        assert all(torch.equal(first.given[id], delta) for id, delta in before.items())
        await reach([first, other], 1)
        agree([first, other])


@awaited
async def test_asynchronous_submissions_make_the_same_steps_to_the_bit() -> None:
    """Each is a commit of its own, in the order of the log, on whichever base it was made. A late peer follows. A peer
    that no commit names, and that submits nothing, may stay behind."""
    async with swarm(run_of(mode="async", outer_momentum=0.0)) as peers:
        await submit(peers, 6)
        late = Peer(peers[0].network, "d", peers[0].run)
        peers.append(late)
        late.meets(*peers[:3])
        await submit(peers, 12)
        steps = list(reference(peers, momentum=0.0))
        assert len(steps) >= 12
        for peer in peers:
            assert torch.equal(peer.theta.double(), steps[peer.epochs[0] - 1])
        counted = {one for peer in peers for commit in peer.work.commits for one, _ in commit.choice.entries}
        assert counted == {"a", "b", "c", "d"}


async def submit(peers: list[Peer], epoch: int) -> None:
    """Let all trainers begin exchanges until all peers have reached this epoch and contributed, however late one came,
    and wait until the last exchange is over."""
    for peer in peers:
        peer.limit = 10**9

    def reached() -> bool:
        for peer in peers:
            peer.fails()
        return all(peer.replica.has_state and peer.given and peer.epochs[0] >= epoch for peer in peers)

    await until(reached, 60.0)
    for peer in peers:
        peer.limit = 0
    await until(lambda: not any(peer.replica.own.flying for peer in peers), 60.0)


@awaited
async def test_roles_and_grants_of_a_private_run_are_checked() -> None:
    """A contribution names its author's grant, also in a Close; an author that this peer has never met is not judged.
    An aggregator's invitation allows contributions without a weight alone, also where they come as payloads."""
    async with swarm(run_of(start_peers=2), "ab") as (first, other):
        await reach([first, other], 1)
        node, inbox, state = first.node, other.transport._inbox, first.replica.logs[0].held
        inbox.role_of = {"a": "aggregator"}.get
        id, hashes = ContributionId(1, 99), ("00" * 32,) * 6
        ready = rooted(m.Ready(0, state.version, id, id, 1.0, 1, hashes, grant="00ff"))
        with pytest.raises(Refusal, match="an aggregator's invitation allows no Ready"):
            await inbox.deliver("a", node._packed(ready)[0], None)
        header, body = pack(node._signatures.signed(ready), About("a", first.run.rules), first.run.token, long=0)
        with pytest.raises(Refusal, match="an aggregator's invitation allows no Ready"):
            await inbox.deliver("a", header, memoryview(body or b""))
        inbox.role_of = lambda peer: "worker"
        for grant, fits in ((b"\x00\xff", True), (b"\x01", False), ("a", True)):
            inbox.grant_of = {"a": grant, "b": b"\x02"}.get
            served = first.replica.logs[0].last[-1][0].choice
            choice = replace(served, entries=(("a", ready),), seal=b"")
            key = key_of(0, state.version, choice)
            close = m.Close(0, state.version, 1, "a", 0, key, choice, state.plan.owners)
            for message in (ready, close):
                header = node._packed(message)[0]
                with nullcontext() if fits else pytest.raises(Refusal, match="not here by the grant"):
                    await inbox.deliver("a", header, None)


@awaited
async def test_requests_for_states_are_limited_for_each_peer() -> None:
    """One that asks for the whole state again and again is refused after a while; the others are not."""
    async with swarm(run_of(start_peers=2), "ab") as (first, other):
        await reach([first, other], 1)
        header, inbox = first.node._packed(m.Ask(0, tuple(range(6))))[0], other.transport._inbox
        asked = (inbox.deliver("a", header, None) for _ in range(40))
        refused = [one for one in await asyncio.gather(*asked, return_exceptions=True) if isinstance(one, Refusal)]
        assert 20 <= len(refused) <= 40 - FETCHES_AT_ONCE
        assert all("too many states" in str(one) for one in refused)
        await inbox.deliver("c", header, None)
