"""Two peers that contribute the same bytes are told of, once."""

from __future__ import annotations

from typing import Any

import pytest
from blake3 import blake3

from p2p_diloco.core.events import Average
from p2p_diloco.core.messages import Contribution
from p2p_diloco.core.version import ContributionId, Version
from p2p_diloco.node import alike as alike_module
from p2p_diloco.node.alike import Alike
from p2p_diloco.tensors.mean import WEIGHT_MIN


def average(**payloads: Any) -> Average:
    """A mean of contributions with these payloads; a pair is (payload, weight)."""
    made = []
    for peer, given in payloads.items():
        payload, weight = given if isinstance(given, tuple) else (given, 1.0)
        id = ContributionId(1, 1)
        made.append((peer, Contribution(0, Version(0, 0, 0, ""), id, id, weight, 1, memoryview(payload))))
    return Average(0, Version(0, 0, 0, ""), tuple(made), b"", None)


def test_equal_contributions_cause_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """It names the two peers, the cause and the mend."""
    alike = Alike(lambda text: text.upper())
    alike.look(average(a=b"12", b=b"13", c=b"1"))
    assert caplog.messages == []
    for _ in range(2):
        alike.look(average(a=b"12", b=b"13", c=b"13"))
    (message,) = caplog.messages
    assert message.startswith("B AND C contribute the same bytes")
    assert "peer.seed" in message


def test_contributions_without_progress_may_be_equal(caplog: pytest.LogCaptureFixture) -> None:
    """A peer that made no step, or whose progress is zero, trains on no other's data."""
    Alike(str).look(average(a=(b"12", WEIGHT_MIN), b=(b"12", WEIGHT_MIN)))
    Alike(str).look(average(a=bytes(4), b=bytes(4)))
    assert caplog.messages == []


def test_each_contribution_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers that send zeros, or bytes that differ in the last one only, cost the node no comparison of each pair."""
    read: list[int] = []
    monkeypatch.setattr(alike_module, "blake3", lambda payload: read.append(len(payload)) or blake3(payload))
    long = bytes(range(1, 251)) * 40
    look = Alike(str).look
    look(average(**{f"z{n}": bytes(10_000) for n in range(5)}, **{f"n{n}": long + bytes([n]) for n in range(5)}))
    assert read == [len(long) + 1] * 5
    look(average(a=b"1" + long, b=b"2" + long))
    assert len(read) == 5
