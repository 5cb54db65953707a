"""Runs of real processes on loopback, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import warm
from swarm import Member, Swarm

from p2p_diloco.peer import peer as peers

RUN = {
    "sync_every": 2,
    "outer_lr": 1.0,
    "outer_momentum": 0.9,
    "codec": "fp32",
    "heartbeat_interval": 0.5,
    "heartbeat_timeout": 30.0,  # a machine that stands still for a while is not dead
}


class Trainees(Swarm):
    """Processes of `train.py` in one run. The others join through the first."""

    def start(self, name: str, delta: float = 1.0, *, config: dict[str, Any] | None = None, **options: Any) -> Member:
        """Start a peer; the first one's addresses are waited for."""
        member = super().start(name, delta=delta, config=RUN if config is None else config, **options)
        self.addresses = self.addresses or member.wait_for("in")["addresses"]
        return member


@pytest.fixture
def swarm(tmp_path: Path, nursery: warm.Nursery | None) -> Iterator[Trainees]:
    """A run that leaves no process behind."""
    made = Trainees(tmp_path, nursery)
    try:
        yield made
    finally:
        made.end()


@pytest.fixture
def run_config() -> dict[str, Any]:
    """Settings of a quick run without rounding."""
    return dict(RUN)


@pytest.fixture(scope="module")
def short_merges() -> Iterator[None]:
    """Merges in pieces of a few elements, so that small parameters take several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("p2p_diloco.tensors.flat.undivided", lambda: 3)
        yield


@pytest.fixture
def no_node(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What a peer that enters gets, though nothing is started."""
    session = SimpleNamespace(peer_id="me", addresses=(), hook=None, following=None, node=None, parameters=None)
    session.watch, session.standing = None, SimpleNamespace(finished=False)
    monkeypatch.setattr(peers, "enter_with_node", lambda *_: session)
    return session
