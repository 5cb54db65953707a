"""The hook's work at a step, with a scripted node."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import Tensor, nn

from p2p_diloco.core.leases import DataSet, Lease, Table
from p2p_diloco.errors import GaveUpWaiting, UsageError
from p2p_diloco.peer.session import after_each_step
from p2p_diloco.peer.shard import Shard, data_set
from tests.peer.scripted import KEPT, hooked, step

TABLE: dict[tuple[int, str, float], tuple[list[tuple[float, float]], list[float]]] = {
    # overlap_steps, merge, merge_alpha: the local values after the step of each merge, the value that each commit made
    (0, "mix", 0.0): ([(-11, -5), (-17, -23), (-35, -29), (-41, -47), (-59, -53)], [-11, -23, -35, -47, -59]),
    (0, "mix", 0.5): ([(-8, -5), (-14, -17), (-24.5, -23), (-30.5, -32), (-40.25, -38)], [-11, -23, -29, -35, -44]),
    (1, "mix", 0.0): ([(-11, -7), (-17, -23), (-31, -29), (-37, -43), (-51, -49)], [-11, -23, -31, -43, -51]),
    (1, "mix", 0.5): ([(-9, -7), (-15, -18), (-24, -24), (-30, -31.5), (-38.5, -37.5)], [-11, -23, -27, -33, -41]),
    (1, "rebase", 0.0): ([(-13, -7), (-19, -25), (-37, -31), (-43, -49), (-61, -55)], [-11, -23, -35, -47, -59]),
}


@pytest.mark.parametrize(("overlap_steps", "merge", "merge_alpha"), TABLE)
def test_the_numbers_of_streaming(overlap_steps: int, merge: str, merge_alpha: float) -> None:
    """Two fragments, H = 6, every step takes 2 off, the outer step doubles it: the values after each merge."""
    settings = {"overlap_steps": overlap_steps, "merge": merge, "merge_alpha": merge_alpha}
    hook, node, model = hooked(fragments=2, theta=1.0, sync_every=6, **settings)
    node.lr = 2.0
    locals_, commits = TABLE[overlap_steps, merge, merge_alpha]
    for number, (u, v) in enumerate(locals_):
        step(hook, model, 3 if number else 3 + overlap_steps, by=-2.0)
        assert (model.u.tolist(), model.v.tolist()) == ([u] * 2, [v] * 2)
        assert node.memory.theta[2 * (number % 2)].item() == commits[number]
        assert hook.standing.metrics.sync_count == number + 1
        steps = 3 * (number + 1) + overlap_steps
        assert hook.standing.global_step == hook.standing.metrics.local_step == node.memory.steps == steps
    assert [c["weight"] for c in node.contributed()] == [3.0, 6.0, 6.0, 6.0, 6.0]
    assert [c["samples"] for c in node.contributed()] == [3, 6, 6, 6, 6]


def test_an_exchange_is_taken_up_again_with_what_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended early, and other peers may have some of it: Δ is not measured again. Once it is counted, all steps since
    it was sent stay."""
    hook, node, model = hooked()
    with monkeypatch.context() as early:
        early.setattr(node, "commit", lambda request: None)
        step(hook, model, 4)
    node.again = True
    step(hook, model, 4)
    node.again = False
    assert node.memory.delta.tolist() == [-4.0] * 4
    assert [(c["uses"], c["stands"]) for c in node.contributed()] == [([], True), ([], False)]
    assert (node.memory.theta[0].item(), model.u[0].item()) == (4.0, 8.0)
    step(hook, model, 4)
    assert node.contributed()[-1]["weight"] == 8.0
    assert node.memory.theta.tolist() == [12.0] * 4
    assert hook.standing.metrics.dropped_samples == 0


def test_the_next_fragment_waits_for_the_one_under_way() -> None:
    """An exchange that falls due during a flight lets the flight land first; so does one that a peer asks for, which
    is then made at once."""
    hook, node, model = hooked(fragments=2, overlap_steps=2, merge="rebase")
    step(hook, model, 4)
    assert hook.standing.global_step == 4
    assert [c["fragment"] for c in node.contributed()] == [0, 1]
    assert hook.standing.metrics.sync_count == 1
    node.memory.goal = 3
    step(hook, model)
    assert [c["fragment"] for c in node.contributed()] == [0, 1, 0]
    assert hook.standing.metrics.sync_count == 3
    step(hook, model)
    assert len(node.contributed()) == 3
    step(hook, model)
    hook.synchronise()
    assert [values for kind, values in node.log if kind == "nudge"] == [{"goal": 6}]
    assert [c["fragment"] for c in node.contributed()][3:] == [1, 0, 1]
    assert hook.standing.metrics.sync_count == 6
    assert model.u.tolist() == model.v.tolist() == node.memory.theta.tolist()[:2] == [7.0, 7.0]


def test_a_flight_that_never_began_is_sent_again_when_it_lands() -> None:
    """With all that was trained since; nothing is lost, and the weight is that of all these steps."""
    hook, node, model = hooked(overlap_steps=2, merge="rebase")
    node.releases = [False, True]
    step(hook, model, 8)
    assert [c["weight"] for c in node.contributed()] == [4.0, 6.0]
    assert hook.standing.metrics.sync_count == 1
    assert model.u.tolist() == [8.0, 8.0]
    assert node.memory.theta.tolist() == [6.0] * 4
    assert hook.standing.global_step == 6  # what the run counts: H for the commit, and two since


def test_asynchronously_the_answer_says_how_many_steps_come_next() -> None:
    """With dylu this peer's own number, of which each fragment has its share, and at least one; what the answer tells
    of staleness and refusals is in the standing."""
    hook, node, model = hooked(fragments=2, mode="async", dylu=True)
    node.next_every, node.asynchronous = 6, {"staleness": 3, "refused": 1}
    step(hook, model, 2)
    assert len(node.contributed()) == 1  # half of H = 4
    step(hook, model, 3)
    assert len(node.contributed()) == 2
    node.next_every, node.asynchronous = 1, {"staleness": 0, "refused": 1}
    step(hook, model, 3 + 2)
    assert len(node.contributed()) == 5
    metrics = hook.standing.metrics
    assert (metrics.sync_every, metrics.staleness, metrics.refused_submissions) == (1, 0, 1)


def test_asynchronously_the_runs_step_is_a_live_peers_share() -> None:
    """Samples counted, at this peer's samples a step, divided by the peers that train; and its own steps since."""
    hook, node, model = hooked(mode="async")
    node.asynchronous = {"staleness": 0, "refused": 0}
    node.counted = 24 * 5  # others'
    hook.merge()
    for _ in range(6):
        hook.report(None, 5)
        step(hook, model)
    assert hook.standing.global_step == (24 + 4) // 2 + 2
    node.workers = 4
    hook.merge()
    assert hook.standing.global_step == (24 + 4) // 4 + 2


def test_nothing_of_its_own_is_left_in_the_model_of_a_finished_run() -> None:
    """Progress that no commit counts is carried into the next contribution, but after the end there is none: neither
    what was trained since the last sending stays, nor what was trained in a part of the model that had ended before.
    Both are told as dropped. Training that goes on after all is the trainer's own affair."""
    hook, node, model = hooked(fragments=2, mode="async")
    node.asynchronous = {"staleness": 0, "refused": 0}
    step(hook, model, 4)  # both parts were sent, the first one two steps ago
    node.overwrite([7.0, 7.0, 8.0, 8.0])
    node.fresh = {1: KEPT}
    node.memory.changed = node.memory.changed + 1
    node.memory.finished = 1
    step(hook, model)
    assert hook.standing.finished
    assert (model.u.tolist(), model.v.tolist()) == ([7.0, 7.0], [8.0, 8.0])
    assert hook.standing.metrics.dropped_samples == 2  # of one half 3 steps, of the other 1
    step(hook, model, 9)
    assert (model.u.tolist(), hook.standing.metrics.dropped_samples) == ([16.0, 16.0], 2)


@pytest.mark.parametrize("merge_alpha", [None, 0.0, 0.25])
def test_the_end_of_the_run_merges_the_exchange_under_way(merge_alpha: float | None) -> None:
    """At the end the model has exactly the run's last state, with any overlap and any mixing before."""
    hook, node, model = hooked(overlap_steps=4, merge="mix", merge_alpha=merge_alpha)
    step(hook, model, 5)
    node.memory.finished = 1
    assert not hook.standing.finished
    step(hook, model)
    assert hook.standing.finished
    assert model.u.tolist() == [4.0, 4.0]
    assert hook.standing.metrics.dropped_samples == 2
    step(hook, model, 9)
    assert len(node.contributed()) == 1


def test_waiting_for_the_first_peers_has_an_end() -> None:
    """If `start_peers` don't come within `wait_timeout`, the hook raises; later rounds wait for as long as it takes."""
    hook, node, model = hooked(start_peers=2)
    node.releases = [None]
    with pytest.raises(GaveUpWaiting, match="start_peers=2"):
        step(hook, model, 4)


def test_progress_is_dropped_if_its_data_belongs_to_another_peer(caplog: pytest.LogCaptureFixture) -> None:
    """All of it, at once: no commit would count a contribution that names these positions."""
    hook, node, model = hooked()
    data = DataSet("train", 100, 1)
    shard = Shard(data, data_set(100, "train", 1, "")[1], "run/train", lambda _: False)
    ours, theirs = (msgspec.to_builtins((Table(data, 20, (Lease(peer, 7, 0, 20, 1),)),)) for peer in "ab")
    hook.supply.add(shard, {"me": "a", "life": 7, "tables": ours, "ended": False})
    batches = iter(shard.loader(4))
    next(batches)
    step(hook, model)
    node.tables = ours
    hook.merge()
    assert (model.u.tolist(), shard.stock) == ([1.0, 1.0], ((4, 20),))
    node.tables = theirs
    hook.merge()
    assert (model.u.tolist(), shard.stock) == ([0.0, 0.0], ())
    assert hook.standing.metrics.dropped_samples == 1
    assert "is dropped: other peers have got the data that it was made from" in caplog.text


def test_a_pause_lasts_as_long_as_the_outermost_block() -> None:
    """A script pauses around an evaluation of its own, in which a library's callback pauses, too."""
    hook, node, _ = hooked()
    with hook.pause():
        with hook.pause():
            pass
        assert [values["on"] for kind, values in node.log if kind == "pause"][-1]
    with pytest.raises(ZeroDivisionError), hook.pause():
        raise ZeroDivisionError
    assert [values["on"] for kind, values in node.log if kind == "pause"] == [True, True, True, False, True, False]


# -- untraced


class SteppedInBackward:
    """A model with an optimizer for each parameter, which is stepped as soon as the gradient is there."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        self.optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in self.model.parameters()}
        self.steps = 0
        for parameter in self.optimizers:
            parameter.register_post_accumulate_grad_hook(self._step)

    def _step(self, parameter: Tensor) -> None:
        self.optimizers[parameter].step()  # type: ignore[index]
        self.optimizers[parameter].zero_grad()  # type: ignore[index]
        self.steps += 1

    def backward(self) -> None:
        self.model(torch.ones(4, 2)).sum().backward()


def test_what_follows_a_step_comes_after_a_backward_pass() -> None:
    # A step within a backward pass is followed when the pass has ended. Whichever optimizer it is: an exchange
    # would change parameters that the pass still needs.
    for which in range(4):
        training, calls = SteppedInBackward(), list[int]()

        def exchange(training: SteppedInBackward = training, calls: list[int] = calls) -> None:
            calls.append(training.steps)
            with torch.no_grad():
                for parameter in training.model.parameters():
                    parameter.add_(1.0)

        stop = after_each_step(list(training.optimizers.values())[which], exchange)
        training.backward()
        training.backward()
        assert calls == [4, 8]
        list(training.optimizers.values())[which].step()
        assert calls == [4, 8, 8]
        stop()
        training.backward()
        assert len(calls) == 3

    # What follows a step may fail. Within a backward pass the error comes out of it.
    training = SteppedInBackward()

    def fail() -> None:
        raise UsageError("no")

    after_each_step(next(iter(training.optimizers.values())), fail)
    with pytest.raises(UsageError, match="no"):
        training.backward()

    # A wrapper that leaves out torch's init is followed. Torch itself calls no hook of it, or has no place to put
    # one.
    calls: list[int] = []
    wrapper = Wrapper(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))
    stop = after_each_step(wrapper, lambda: calls.append(1))
    wrapper.step()
    wrapper.step()
    stop()
    wrapper.step()
    assert calls == [1, 1]


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one, which makes no state of torch's own, as those of several packages don't."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.param_groups = base, base.param_groups

    def step(self, closure: object = None) -> None:
        self.base.step()
