"""What may not come in: a node over the in-memory swarm, and a stranger who sends it everything but what is right. What
was refused is counted by its sender, with the last reason, in a bounded table."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from unittest import mock

import pytest

from p2p_diloco.core import messages as m
from p2p_diloco.core.rules import Rules
from p2p_diloco.net.interface import Refusal
from p2p_diloco.node import wire
from p2p_diloco.node.headers import pack, packed
from p2p_diloco.node.inbox import PEERS_MAX, Handler, Inbox, Refusals, Tally
from p2p_diloco.node.joining import ask_to_describe
from p2p_diloco.tensors.card import CARD_BYTES_MAX
from tests.net.memory import MemoryNetwork
from tests.net.patience import awaited, until
from tests.node.conftest import QUICK, MemoryPeer

RULES = Rules(run="r", fragments=((0,),))


def probe(token: bytes) -> bytes:
    return pack(m.Probe(m.Summary(1, "worker")), token)[0]


@awaited
async def test_before_the_run_is_known_everything_is_refused() -> None:
    """While a description of its model is waited for, that alone is let in, from the peer that was asked."""
    inbox, token = Inbox(), b"t" * 16
    with pytest.raises(Refusal, match="not in a run yet"):
        inbox.admit("stranger", probe(token))
    network = MemoryNetwork()
    me, friend = network.join("me", inbox), Inbox()
    friend.handler = Handler(token)
    friend.handler.nbytes = lambda sender, message: 0  # type: ignore[method-assign]
    network.join("friend", friend)
    asked = asyncio.create_task(ask_to_describe(me, inbox, token, "friend", 10))
    await until(lambda: inbox.questions._open)
    with pytest.raises(Refusal, match="not in a run yet"):
        inbox.admit("friend", probe(token))
    with pytest.raises(Refusal, match="no message as long as this"):
        inbox.admit("friend", pack(m.Leave(1), token, long=0)[0])
    with pytest.raises(Refusal, match="longer than allowed"):
        inbox.admit("friend", packed(wire.Description(CARD_BYTES_MAX + 2**17), token))  # far more than ten need
    header = packed(wire.Description(1), token)
    with pytest.raises(Refusal, match="did not ask for it"):
        await inbox.deliver("stranger", header, memoryview(b"\x80"))
    with pytest.raises(Refusal, match="the description of the model can't be read"):
        await inbox.deliver("friend", header, memoryview(b"\x80"))
    assert await asked is None


@awaited
async def test_progress_is_told_ten_times_a_second() -> None:
    """However many payloads to and from a peer are under way: each peer's progress is told at once, and then again
    when `MOVING_EVERY_S` is over."""
    peer = MemoryPeer(MemoryNetwork(), "a", QUICK)
    await peer.enter()
    inbox, told, loop = peer.inbox.handler, list[str](), asyncio.get_running_loop()
    inbox._node = SimpleNamespace(moving=told.append)
    now = loop.time()
    for seconds, sender in ((0.0, "b"), (0.0, "c"), (0.01, "b"), (0.09, "c"), (0.11, "b"), (0.12, "b")):
        with mock.patch.object(loop, "time", lambda seconds=seconds: now + seconds):
            inbox.moving(sender)
    assert told == ["b", "c", "b"]


# -- the table of refusals


def test_refusals_are_counted_by_sender_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    # Each peer has a count and the last reason. The peer that was refused last comes last.
    refusals = Refusals()
    for peer, why in (("a", "too long"), ("b", "too short"), ("a", "too late")):
        refusals.count(peer, why)
    assert refusals.newest(2) == [("b", Tally(1, "too short")), ("a", Tally(2, "too late"))]
    assert refusals.newest(1) == [("a", Tally(2, "too late"))]

    # Only the first refusal of a peer is logged. As a warning, with the name in the peer's invitation; a flood of
    # messages doesn't fill the log.
    caplog.clear()
    refusals = Refusals()
    refusals.name_of = {"a": "alice"}.get  # type: ignore[assignment]
    for peer in "aaab":
        refusals.count(peer, "too long")
    logged = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [text.split(" (logged")[0] for text in logged] == [
        "refused a message of alice (a): too long",
        "refused a message of b: too long",
    ]

    # What a message says begins no line of the log. A reason may quote the message, for example the name of an
    # invented peer.
    caplog.clear()
    Refusals().count("a", "it counts x\n2026 ERROR invented\x1b[2J" + "!" * 5000)
    assert "it counts x 2026 ERROR invented [2J!!!" in caplog.messages[0]
    assert len(caplog.messages[0]) < 500

    # The table is bounded. Identities are free: the peer that was refused longest ago is forgotten.
    refusals = Refusals()
    for n in range(PEERS_MAX + 1):
        refusals.count(f"peer {n}", "too long")
    known = [peer for peer, _ in refusals.newest(PEERS_MAX + 1)]
    assert known == [f"peer {n}" for n in range(1, PEERS_MAX + 1)]
