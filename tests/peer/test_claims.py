"""A model and an optimizer are in one run at most."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from p2p_diloco import Peer, UsageError
from p2p_diloco.peer import peer as peers
from p2p_diloco.peer.absent import AbsentPeer


@pytest.fixture(autouse=True)
def no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entering starts nothing."""
    session = SimpleNamespace(peer_id="me", addresses=(), hook=None, following=None, node=None, parameters=None)
    session.watch = None
    monkeypatch.setattr(peers, "enter_with_node", lambda *_: session)


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_model_and_its_optimizer_enter_no_second_run() -> None:
    """A cell of a notebook that runs again: the second Peer is refused when it is made, so that the variable keeps the
    first one. One that was made before is refused when it enters. Once the first has left, both are free."""
    model, optimizer = parts()
    early = Peer(model, optimizer)
    with Peer(model, optimizer):
        again = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(UsageError, match=r"model=0.weight, 0.bias is in a run already.*close\(\)"):
            Peer(nn.Sequential(model), again)
        with pytest.raises(UsageError, match=r"optimizer=SGD is in a run already.*close\(\)"):
            Peer(nn.Linear(2, 2), optimizer)
        with pytest.raises(UsageError, match="is in a run already"):
            early.__enter__()
        with pytest.raises(UsageError, match="is in a run already"):  # the refused one has freed nothing
            Peer(model, optimizer)
    with Peer(model, optimizer):
        pass


def test_the_copy_in_a_forked_process_is_in_no_run() -> None:
    model, optimizer = parts()
    with Peer(model, optimizer):
        if not (child := os.fork()):
            try:
                Peer(model, optimizer)
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0


def test_without_a_run_a_forked_process_counts_its_own_steps() -> None:
    """As a script does that makes the peer first, and then forks."""
    model, optimizer = parts()
    peer = AbsentPeer(model, optimizer)
    optimizer.step()
    if not (child := os.fork()):
        try:
            optimizer.step()
            optimizer.step()
            os._exit(peer.global_step)
        finally:
            os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert peer.global_step == 1
