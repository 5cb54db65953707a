"""The public surface where no process is needed: what is refused at once, and the peer of no run."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from p2p_diloco import ConfigError, PeerConfig, RunConfig, UsageError
from p2p_diloco.peer.absent import AbsentPeer
from p2p_diloco.peer.peer import Peer, _unwrapped, seed_of
from p2p_diloco.peer.reported import number, samples_of
from p2p_diloco.standard_streams import JOINED_FILE


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


MODEL, OPTIMIZER = parts()
WATCHES = {"role": "observer"}


@pytest.mark.parametrize(
    ("given", "settings", "sentence"),
    [
        ((MODEL, None), {}, "or neither"),
        ((None, OPTIMIZER), {}, "or neither"),
        ((MODEL, OPTIMIZER), {"local": {"role": "aggregator"}}, "role=aggregator"),
        ((MODEL, OPTIMIZER), {"local": WATCHES}, "role=observer needs a model, and trains nothing"),
        ((None, None), {"local": WATCHES}, "role=observer needs a model, and trains nothing"),
        ((MODEL, None), {"local": WATCHES}, "initial_peers=unset an observer needs a run to read"),
        (
            (MODEL, None),
            {"local": {**WATCHES, "checkpoint_dir": "x"}},
            "checkpoint_dir=.*x has no meaning for role=obser",
        ),
        ((MODEL, MODEL), {}, "optimizer=Linear"),
        ((parts, OPTIMIZER), {}, r"model=function is no torch\.nn\.Module"),
        ((MODEL, OPTIMIZER), {"config": {"sync_evry": 1}}, "sync_evry"),
        ((MODEL, OPTIMIZER), {"local": {"checkpoint_dri": "x"}}, "checkpoint_dri=x is not a setting; did you mean"),
    ],
)
def test_what_makes_no_peer_is_refused(given: tuple[Any, Any], settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises((UsageError, ConfigError), match=sentence):
        Peer(*given, **settings)


def test_a_peer_belongs_to_its_run_and_process() -> None:
    # A peer outside its run says so. Before entering, what needs the run is an error with the mend, not a crash.
    model, optimizer = parts()
    peer = Peer(model, optimizer, run_id="x", config=RunConfig(sync_every=3))
    for what in ("epoch", "digest", "global_step", "finished", "peers", "plan", "config", "metrics"):
        with pytest.raises(UsageError, match="with Peer"):
            getattr(peer, what)
    peer.close()
    optimizer.step()

    # The seed is the peer's own. It follows from the identity: different on two peers, the same after a restart,
    # and fit for torch and NumPy.
    assert seed_of("a") == seed_of("a") != seed_of("b")
    assert all(0 <= seed_of(str(number)) < 2**32 for number in range(99))

    # A peer is not copied and does not leave its process. A model that holds it can be copied, as callbacks do
    # that keep an average; what is pickled must not hold it.
    model, optimizer = parts()
    model.peer = Peer(model, optimizer)
    assert copy.deepcopy(model).peer is model.peer
    for act in (pickle.dumps, copy.copy):
        with pytest.raises(UsageError, match="from this process alone; keep it out of what is pickled"):
            act(model.peer)

    # The innermost optimizer of the last counts. Of several optimizers the last one's step is an inner step;
    # wrappers are opened.
    _, first = parts()
    _, last = parts()

    class Wrapper:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

    wrapped = Wrapper(Wrapper(last))
    assert _unwrapped([first, wrapped]) == [[first], [wrapped, wrapped.optimizer, last]]
    with pytest.raises(UsageError):
        _unwrapped([])


def test_without_a_run_the_script_trains_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """`from_env` outside a run gives the same surface, which does nothing but count steps."""
    for name in ("P2P_DILOCO_RUN_ID", "P2P_DILOCO_INITIAL_PEERS"):
        monkeypatch.delenv(name, raising=False)
    model, optimizer = parts()
    before = model.weight.detach().clone()
    with Peer.from_env(model, optimizer) as peer:
        assert isinstance(peer, AbsentPeer)
        with peer.pause():
            peer.report(loss=1.0, samples=2)
        optimizer.step()
        peer.force_sync()
        assert (peer.global_step, peer.finished, peer.metrics.local_step) == (1, False, 1)
        assert torch.equal(peer.global_state_dict()["weight"], before)
        peer.load_state_dict(peer.state_dict())
    optimizer.step()
    assert peer.global_step == 1
    surface = {name for name in dir(Peer) if not name.startswith("_")} - {"from_env"}
    assert surface <= set(dir(peer)) | {"addresses"}


def test_under_join_single_arguments_override_single_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that gives one setting of its own takes part in the run that `join` was given, with all other settings
    of `join`. If it names another run, it is told."""
    for name, value in (("JOINED_FILE", "x"), ("RUN_ID", "named"), ("SYNC_EVERY", "9"), ("NAME", "alice")):
        monkeypatch.setenv(f"P2P_DILOCO_{name}", value)
    assert JOINED_FILE in os.environ
    peer = Peer.from_env(*parts())
    assert isinstance(peer, Peer)
    assert (peer._local_config.run_id, peer._asked.given) == ("named", {"sync_every": 9})
    peer = Peer(*parts(), config={"num_fragments": 3}, local={"keep": 5})
    assert peer._asked.given == {"sync_every": 9, "num_fragments": 3}
    assert peer._local_config.given == {"run_id": "named", "name": "alice", "keep": 5, "role": "worker"}
    peer = Peer(*parts(), config=RunConfig(sync_every=4), local=PeerConfig(name="bob"))
    assert (peer._asked.sync_every, peer._local_config.name) == (4, "bob")
    with pytest.raises(UsageError, match=r"run_id=other is another run than named, .* start this program without join"):
        Peer(*parts(), run_id="other")
    monkeypatch.delenv(JOINED_FILE)
    assert Peer(*parts(), run_id="other")._local_config.given == {"run_id": "other", "role": "worker"}


# -- a model and an optimizer are in one run at most


@pytest.mark.usefixtures("no_node")
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


def status_of_fork(work: Callable[[], int]) -> int:
    """Have a forked process do this, and return what it gives."""
    if not (child := os.fork()):
        try:
            os._exit(work())
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_process_sees_the_end_of_the_run(no_node: SimpleNamespace) -> None:
    """A data set that a worker of a DataLoader reads may end with the run. The worker's copy of the standing stays as
    it was; the memory is shared, and the node is no child of the worker."""
    no_node.memory = SimpleNamespace(finished=0)
    no_node.node = SimpleNamespace(alive=True)
    peer = Peer(*parts()).__enter__()
    no_node.node.alive = False
    assert status_of_fork(lambda: int(peer.finished)) == 0
    no_node.memory.finished = 1
    assert status_of_fork(lambda: int(peer.finished)) == 1
    no_node.node = None
    peer.close()


@pytest.mark.usefixtures("no_node")
def test_a_forked_process_is_in_no_run_and_counts_its_own_steps() -> None:
    """A script may make the peer first, and then fork."""
    model, optimizer = parts()
    with Peer(model, optimizer):
        assert status_of_fork(lambda: Peer(model, optimizer) is None) == 0
    peer = AbsentPeer(model, optimizer)
    optimizer.step()

    def steps() -> int:
        optimizer.step()
        optimizer.step()
        return peer.global_step

    assert status_of_fork(steps) == 3
    assert peer.global_step == 1


# -- what a script reports


@pytest.mark.filterwarnings("error")
def test_numbers_of_any_library_are_pythons_own() -> None:
    """Also a loss that still has its graph; torch warns of nothing. Samples are whole."""
    graph, narrow = torch.tensor(2.5, requires_grad=True), torch.tensor([2.5], dtype=torch.bfloat16)
    for loss in (2.5, np.float32(2.5), graph, narrow):
        assert (number("loss", loss), type(number("loss", loss))) == (2.5, float)
    for samples in (32, 32.0, np.int64(32), torch.tensor(32), torch.tensor(32.0)):
        assert (samples_of(samples), type(samples_of(samples))) == (32, int)
    assert number("loss", None) is samples_of(None) is None


@pytest.mark.parametrize("loss", [torch.ones(3), torch.tensor(1j), np.ones(2), 1j, "x", [1.0], 10**400])
def test_what_is_no_loss_is_refused_in_one_sentence(loss: Any) -> None:
    with pytest.raises(ConfigError, match=r"held_out_loss=.* is not one number; report e\.g\. loss\.item\(\)"):
        number("held_out_loss", loss)


@pytest.mark.parametrize("samples", [-1, 0.5, float("nan"), float("inf"), 2**70, [3]])
def test_what_can_be_no_samples_is_refused_in_one_sentence(samples: Any) -> None:
    """Without a run, too, so that a mistake is found before the script takes part in one."""
    said = r"samples=.* must be a whole number, 0 or more|samples=\[3\] is not one number; report how many samples"
    for refuse in (samples_of, lambda given: AbsentPeer(None, None).report(samples=given)):
        with pytest.raises(ConfigError, match=said):
            refuse(samples)
