"""What may not come in: a node over the in-memory swarm, and a stranger who sends it everything but what is right."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from p2p_diloco.core.messages import (
    Commit,
    Contribution,
    Counted,
    Fetch,
    Held,
    Outdated,
    Plan,
    Probe,
    ProbeAck,
    Promise,
    Stale,
    State,
    Summary,
    TakeOver,
    Versions,
)
from p2p_diloco.core.version import ContributionId, ModelVersion, Version
from p2p_diloco.net.interface import Refusal
from p2p_diloco.node import run_inbox, wire
from p2p_diloco.node.describing import DescriptionInbox
from p2p_diloco.node.inbox import Inbox
from p2p_diloco.node.misfit import misfit
from p2p_diloco.node.run_inbox import REMEMBERED_BYTES_MAX, RunInbox
from p2p_diloco.node.seals import Seals
from p2p_diloco.tensors.card import CARD_BYTES_MAX
from tests.net.memory import MemoryNetwork
from tests.net.patience import awaited

V, NEXT, PLAN = Version(0, 0, 0, "d"), Version(0, 1, 1, "e"), Plan(("a",), ("a",))
ID = ContributionId(1, 1)
A_FEW = (("a", 1), ("b", 1), ("c", 9))
"""Peers with the samples of their contributions."""


def contribution(shard: int = 0, weight: float = 1.0, samples: int = 1) -> Contribution:
    return Contribution(shard, V, ID, ID, weight, samples)


def summary(epochs: tuple[int, ...] = (), **values: float) -> Summary:
    return Summary(1, "worker", True, ModelVersion(), epochs, idle=False, **values)  # type: ignore[arg-type]


def token_of(peer: Any) -> bytes:
    token: bytes = peer.inbox.handler._token
    return token


def sealed(author: Any, peer: Any, contribution: Contribution) -> bytes:
    """The header of a contribution, sealed by the author, for this peer's run."""
    seal = Seals(author, token_of(peer)).of_contribution(contribution)
    return wire.pack(dataclasses.replace(contribution, seal=seal), token_of(peer))


def floats(*values: float) -> memoryview:
    return memoryview(torch.tensor(values, dtype=torch.float32).numpy().tobytes())


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (contribution(shard=3), "no shard 3"),
        (contribution(shard=-1), "no shard -1"),
        (contribution(weight=0.0), "weight"),
        (contribution(weight=-1.0), "weight"),
        (contribution(weight=1e30), "weight"),
        (contribution(samples=-1), "samples"),
        (contribution(samples=2**40 + 1), "samples"),
        (Contribution(0, Version(0, 2**48 + 1, 0, "d"), ID, ID, 1.0, 1), "samples of a Version"),
        (Contribution(0, V, ContributionId(2**62 + 1, 0), ID, 1.0, 1), "incarnation"),
        (TakeOver(0, V, 2**41), "term"),
        (TakeOver(0, V, -1), "term"),
        (Promise(0, Version(0, 0, -1, "d"), 1), "epoch"),
        (Held(7, V), "no shard 7"),
        (Held(0, Version(0, 0, -1, "d")), "epoch"),
        (Stale(-1, ID, V), "no shard -1"),
        (Stale(0, ContributionId(2**62 + 1, 0), V), "incarnation"),
        (State(0, V, 0, PLAN, {}, {0: "d"}, 2**41), "buffered"),
        (Fetch((None, None, Version(-1, 0, 0, "d"))), "generation"),
        (Probe(summary(epochs=(1, -1))), "epochs"),
        (
            Commit(0, V, Version(0, 2**41, 1, "e"), 0, "a", (Counted("a", ID, 1.0, 2**41),), PLAN),
            "samples of a Counted",
        ),
        (Commit(0, V, V, 0, "a", (Counted("a", ID, 1.0, 1),), PLAN), "next epoch"),
        (Commit(0, V, Version(1, 1, 1, "e"), 0, "a", (Counted("a", ID, 1.0, 1),), PLAN), "another generation"),
        (Commit(0, V, NEXT, 0, "a", (), PLAN), "samples aren't those of its base"),
        (Commit(0, V, NEXT, 0, "a", (Counted("a", ID, 1.0, 2),), PLAN), "samples aren't those of its base"),
        (  # of the third, four are counted
            Commit(0, V, Version(0, 11, 1, "e"), 0, "a", tuple(Counted(p, ID, 1.0, n) for p, n in A_FEW), PLAN),
            "samples aren't those of its base",
        ),
        (
            Commit(0, V, NEXT, 0, "a", (Counted("a", ID, 1.0, 2), Counted("b", ID, 1.0, -1)), PLAN),
            "samples of a Counted",
        ),
        (State(0, V, 0, PLAN, {}, {}), "history"),
        (State(0, V, 0, PLAN, {}, {0: "e"}), "history"),
        (State(0, V, 0, PLAN, {}, {0: "d", 1: "x"}), "history"),
        (State(0, NEXT, 0, PLAN, {"a": ContributionId(-1, 0)}, {0: "d", 1: "e"}), "incarnation"),
        (Fetch((None,)), "lists 1 shards"),
        (Versions((V, V, V, V), True), "lists 4 shards"),
        (Outdated(7, V, 1, "x"), "no shard 7"),
        (Probe(summary(epochs=(1,))), "lists 1 fragments"),
        (ProbeAck(summary(bandwidth=-1.0)), "bandwidth"),
        (ProbeAck(summary(bandwidth=1e-300)), "bandwidth"),
        (ProbeAck(summary(bandwidth=2.0**51)), "bandwidth"),
        (Probe(summary(speed=-1.0)), "speed"),
        (Probe(summary(speed=2.0**41)), "speed"),
        (State(0, V, 0, Plan(("a",), ()), {}, {0: "d"}), "no aggregator"),
        (Commit(0, V, NEXT, 0, "a", (Counted("a", ID, 1.0, 1),), Plan((), ())), "no aggregator"),
    ],
)
def test_messages_of_another_shape_than_the_run(message: Any, reason: str) -> None:
    """A message that names what a run of three shards in two fragments doesn't have is told so."""
    assert reason in misfit(message, 3, 2)


def test_messages_of_the_runs_shape_fit() -> None:
    states = State(0, NEXT, 3, PLAN, {"a": ID}, {0: "d", 1: "e"}), State(0, V, 0, PLAN, {}, {0: "d"})
    for message in (
        *states,
        contribution(),
        Commit(0, V, NEXT, 0, "a", (Counted("a", ID, 1.0, 1),), PLAN),
        Commit(0, V, Version(0, 3, 1, "e"), 2, "b", (Counted("a", ID, 1.0, 1), Counted("b", ID, 1.0, 2)), PLAN),
        Commit(0, V, Version(0, 0, 1, "e"), 0, "a", (), PLAN),
        Fetch((None, V, None)),
        Probe(summary((0, 0))),
        Probe(summary(bandwidth=1e6, speed=1e6)),
    ):
        assert misfit(message, 3, 2) == ""


@awaited
async def test_before_the_run_is_known_everything_is_refused() -> None:
    """While a description of its model is waited for, that alone is let in, from the peer that was asked."""
    inbox, token = Inbox(), b"t" * 16
    with pytest.raises(Refusal, match="not in a run yet"):
        inbox.admit("stranger", wire.pack(Probe(summary()), token))
    inbox.handler = DescriptionInbox(token, "friend", 10)
    with pytest.raises(Refusal, match="still waits for the description"):
        inbox.admit("friend", wire.pack(Probe(summary()), token))
    with pytest.raises(Refusal, match="the description is empty, or longer than allowed"):
        inbox.admit("friend", wire.pack(wire.Description(CARD_BYTES_MAX + 2**17), token))  # far more than ten need
    header = wire.pack(wire.Description(1), token)
    with pytest.raises(Refusal, match="did not ask for a description"):
        await inbox.deliver("stranger", header, memoryview(b"\x80"))
    with pytest.raises(Refusal, match="the description of the model can't be read"):
        await inbox.deliver("friend", header, memoryview(b"\x80"))


@awaited
async def test_a_header_is_read_once(memory_peer: Any, quick: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """When it comes; with its payload it is known. What it was judged by is looked at again: another token, another
    verdict."""
    seen, unpack = list[bytes](), wire.unpack

    def counting(header: bytes, token: bytes) -> wire.AnyMessage:
        seen.append(header)
        return unpack(header, token)

    network = MemoryNetwork()
    peer = memory_peer(network, "a", quick)
    await peer.enter()
    stranger = network.join("stranger", Inbox())
    base = Version(*(await peer.ask("ask", "told"))["versions"][0])
    ids = [ContributionId(1, n) for n in range(5)]
    headers = [sealed(stranger, peer, Contribution(0, base, id, id, 7.25, 1, floats(1, 2, 3, 4))) for id in ids]
    monkeypatch.setattr(wire, "unpack", counting)
    await asyncio.gather(*(stranger.send("a", header, floats(1, 2, 3, 4)) for header in headers))
    assert sorted(seen) == sorted(headers)
    peer.inbox.handler._token = b"x" * 16
    with pytest.raises(Refusal, match="wrong run token"):
        await stranger.send("a", headers[0], floats(1, 2, 3, 4))
    await peer.stop()


def test_a_long_header_is_not_remembered() -> None:
    """What strangers send takes no memory for longer than it is looked at."""
    inbox, handler = Inbox(), RunInbox.__new__(RunInbox)
    handler._token, handler._shape, inbox.handler = b"t" * 16, (1, 1), handler
    for header, asked in ((b"x" * REMEMBERED_BYTES_MAX, 1), (b"x" * (REMEMBERED_BYTES_MAX + 1), 0)):
        before = run_inbox._read_once.cache_info().misses
        with pytest.raises(Refusal):
            inbox.admit("stranger", header)
        assert run_inbox._read_once.cache_info().misses - before == asked


@awaited
async def test_payloads_of_strangers(memory_peer: Any, quick: dict[str, Any]) -> None:
    """Payloads too short, too long, absent, not finite or huge are refused, and the run goes on unharmed."""
    network = MemoryNetwork()
    peer = memory_peer(network, "a", quick)
    await peer.enter()
    stranger = network.join("stranger", Inbox())
    base = Version(*(await peer.ask("ask", "told"))["versions"][0])
    header = wire.pack(Contribution(0, base, ID, ID, 1.0, 1), token_of(peer))
    for payload, reason in [
        (floats(1, 2, 3), "must have 16 bytes, but 12 came"),
        (floats(1, 2, 3, 4, 5), "at most 16"),
        (None, "must have 16 bytes, but 0 came"),
        (floats(1, 2, 3, float("nan")), "not finite"),
        (floats(1, 2, 3, float("inf")), "not finite"),
        (floats(1, 2, 3, 1e30), "too large"),
    ]:
        with pytest.raises(Refusal, match=reason):
            await stranger.send("a", header, payload)
    with pytest.raises(Refusal, match="wrong run token"):
        await stranger.send("a", wire.pack(Probe(summary()), b"x" * 16))
    assert peer.transport.traffic.refused == 7
    before = peer.memory.theta.clone()
    assert (await peer.exchange(1.0))["sent"]
    assert peer.memory.theta.tolist() == pytest.approx((before - 1.9).tolist())
    await peer.stop()


@awaited
async def test_an_honest_strangers_contribution_counts(memory_peer: Any, quick: dict[str, Any]) -> None:
    """The same message with a right payload is averaged: refusals above are not for another reason."""
    network = MemoryNetwork()
    peer = memory_peer(network, "a", {**quick, "start_peers": 2, "outer_momentum": 0.0})
    await peer.enter()
    stranger = network.join("stranger", Inbox())
    base = Version(*(await peer.ask("ask", "told"))["versions"][0])
    header = sealed(stranger, peer, Contribution(0, base, ID, ID, 3.0, 1, floats(1, 2, 3, 4)))
    await stranger.send("a", header, floats(1, 2, 3, 4))
    await peer.exchange(0.0, weight=1.0)
    assert peer.memory.theta.tolist() == [-0.75, -1.5, -2.25, -3.0]
    await peer.stop()


@awaited
async def test_progress_is_told_ten_times_a_second(memory_peer: Any, quick: dict[str, Any]) -> None:
    """However many payloads to and from a peer are under way: each peer's progress is told at once, and then again
    when `MOVING_EVERY_S` is over."""
    peer = memory_peer(MemoryNetwork(), "a", quick)
    await peer.enter()
    inbox, told, loop = peer.inbox.handler, list[str](), asyncio.get_running_loop()
    inbox._node = SimpleNamespace(moving=told.append)
    now = loop.time()
    for seconds, sender in ((0.0, "b"), (0.0, "c"), (0.01, "b"), (0.09, "c"), (0.11, "b"), (0.12, "b")):
        with mock.patch.object(loop, "time", lambda seconds=seconds: now + seconds):
            inbox.moving(sender)
    assert told == ["b", "c", "b"]
    await peer.stop()
