"""What happens at a step, with a node that a script plays."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import astuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from p2p_diloco.config import RunConfig
from p2p_diloco.errors import ConfigError, GaveUpWaiting, P2PDilocoError
from p2p_diloco.node.bases import Bases
from p2p_diloco.node.shared import SharedMemory, create
from p2p_diloco.peer.hook import Hook
from p2p_diloco.peer.local import LocalModel
from p2p_diloco.tensors.layout import Layout, specs_of
from p2p_diloco.tensors.mean import weighted_mean


class ScriptedNode:
    """A node that commits at once what is contributed, alone: η=`lr`, μ=0. `releases` scripts what becomes of each."""

    lr = 1.0

    def __init__(self, numel: int) -> None:
        fd = create(numel)
        self.memory = SharedMemory(fd, numel)
        os.close(fd)
        self.log: list[tuple[str, dict[str, Any]]] = []
        self.releases: list[bool | None] = []
        self.stood: dict[str, float] = {}
        self.hidden = {"transfer": 0.2, "group": 0.3}
        self.asynchronous: dict[str, int] = {}
        self.trained, self.workers, self.samples = 0, 2, 0
        self.measures: list[bool] = []
        self.layout: Layout
        self.bases: Bases
        self.epochs: list[int] = []
        self.fresh: dict[int, str] = {}

    def begin(self, layout: Layout) -> None:
        self.layout, self.epochs = layout, [0] * len(layout.fragments)
        self.bases = Bases(layout, self.memory.theta, self.memory.base)

    def tell(self, kind: str, **values: Any) -> None:
        self.log.append((kind, values))
        if kind == "have read":
            self.bases.loaded(values["loaded"])

    def overwrite(self, theta: Any) -> None:
        """Have something else come as θ."""
        for shard in self.layout.shards:
            self.bases.before(shard.index, "old", "new", lambda: "old")
        self.memory.theta.copy_(torch.as_tensor(theta))

    def ask(self, kind: str, answer: str, *, measures: bool) -> dict[str, Any]:
        assert (kind, answer) == ("merge", "load")
        self.measures.append(measures)
        self.log.append((kind, {}))
        due = min(range(len(self.epochs)), key=lambda f: (self.epochs[f], f))
        shards = [] if self.memory.finished else [s.index for s in self.layout.shards_of(due)]
        loads, self.fresh = [[s, carry] for s, carry in self.fresh.items()], {}
        self.trained = self.samples
        counts = {"commits": sum(self.epochs), "epoch": min(self.epochs), "digest": f"d{sum(self.epochs)}"}
        counts |= {"trained": self.trained, "workers": self.workers}
        bases = {name: sorted(getattr(self.bases, name)) for name in ("kept", "gone", "lost")}
        return {"kind": "load", "shards": loads, "due": shards, **bases, **counts}

    def request(self, kind: str, **values: Any) -> int:
        self.log.append((kind, values))
        return len(self.log)

    def wait_for(self, kind: str, *, n: int | None = None, timeout_s: float) -> dict[str, Any] | None:
        assert kind == "release"
        assert n is not None
        assert self.log[n - 1][0] == "contribute"
        assert self.memory.stands
        sent = self.releases.pop(0) if self.releases else True
        if sent and self.log[n - 1][1]["stands"]:
            self.bases.stand(self.log[n - 1][1]["shards"])
        if sent:
            self.commit(self.log[n - 1][1])
            self.memory.changed = self.memory.changed + 1
        if sent is None:
            return None
        spent = {"stood": self.stood, "hidden": self.hidden}
        return {"kind": "release", "n": n, "sent": sent, **spent, **self.asynchronous}

    def commit(self, request: dict[str, Any]) -> None:
        for shard in request["shards"]:
            part = slice(self.layout.shards[shard].start, self.layout.shards[shard].stop)
            self.bases.before(shard, "old", "new", lambda: "old")
            self.memory.theta[part] -= self.lr * self.memory.delta[part]
            self.fresh[shard] = "subtract"
        self.epochs[self.layout.shards[request["shards"][0]].fragment] += 1
        self.samples += request["samples"]

    def contributed(self) -> list[dict[str, Any]]:
        return [values for kind, values in self.log if kind == "contribute"]


def hooked(
    fragments: int = 1, theta: float = 0.0, clock: Callable[[], float] = time.monotonic, **settings: Any
) -> tuple[Hook, ScriptedNode, nn.Module]:
    model = nn.Module()
    model.u, model.v = nn.Parameter(torch.full((2,), theta)), nn.Parameter(torch.full((2,), theta))
    config = RunConfig(**{"sync_every": 4, "num_fragments": fragments, **settings})
    layout = Layout.build(specs_of(model), fragments)
    node = ScriptedNode(layout.numel)
    node.begin(layout)
    memory = node.memory
    local = LocalModel(model, layout, memory.theta, memory.base, memory.delta, config.local_share)
    local.write_theta()
    node.bases.loaded(range(len(layout.shards)))
    return Hook(node, local, config, layout, 5.0, clock), node, model  # type: ignore[arg-type]


def step(hook: Hook, model: nn.Module, times: int = 1, by: float = 1.0) -> None:
    for _ in range(times):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(by)
        hook.step()


def test_an_exchange_every_h_steps() -> None:
    """The whole model is exchanged after each `sync_every` steps and never between; weights are the steps since."""
    hook, node, model = hooked()
    for steps in range(1, 13):
        step(hook, model)
        assert len(node.contributed()) == steps // 4
        assert hook.standing.global_step == steps
        assert node.memory.steps == steps
    assert [c["weight"] for c in node.contributed()] == [4.0] * 3
    assert [c["samples"] for c in node.contributed()] == [4] * 3
    assert model.u.tolist() == node.memory.theta[:2].tolist() == [12.0, 12.0]
    assert hook.standing.metrics.sync_count == 3


def test_fragments_take_turns() -> None:
    """With N fragments one is exchanged every H/N steps, in turn; its weight counts from its own last sending."""
    hook, node, model = hooked(fragments=2)
    step(hook, model, 10)
    assert [c["shards"] for c in node.contributed()] == [[0], [1], [0], [1], [0]]
    assert [c["weight"] for c in node.contributed()] == [2.0, 4.0, 4.0, 4.0, 4.0]
    assert node.memory.delta.tolist() == [-4.0] * 4
    assert model.v.tolist() == [10.0, 10.0]  # 8 of them global
    assert hook.standing.global_step == 10


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
        assert hook.standing.global_step == hook.standing.metrics.local_step == 3 * (number + 1) + overlap_steps


def test_training_goes_on_while_an_exchange_is_under_way() -> None:
    """The result is merged `overlap_steps` later, and not looked at before; the weight is that of the sending. What of
    the flight was not waited for is hidden time."""
    hook, node, model = hooked(overlap_steps=3, merge="rebase")
    step(hook, model, 4)
    (sent,) = node.contributed()
    assert (sent["weight"], hook.standing.metrics.sync_count) == (4.0, 0)
    node.memory.changed = 9
    said = list(node.log)
    step(hook, model, 2)
    assert node.log == said
    step(hook, model)
    metrics = hook.standing.metrics
    assert metrics.sync_count == 1
    assert metrics.hidden_time_s == pytest.approx(0.5, abs=0.1)
    assert metrics.last_sync_time_s == pytest.approx(metrics.hidden_time_s + metrics.waiting_time_s, abs=0.01)
    assert model.u.tolist() == [7.0, 7.0]
    step(hook, model)
    assert [c["weight"] for c in node.contributed()] == [4.0, 4.0]
    assert hook.standing.global_step == 8


def test_with_mix_the_steps_made_meanwhile_are_counted_as_dropped() -> None:
    """α of them stay in the local values; the rest is gone, by the run's rule, and shown."""
    hook, _, model = hooked(overlap_steps=4, merge_alpha=0.25)
    step(hook, model, 8)
    assert model.u.tolist() == [4.0 + 0.25 * 4.0] * 2
    assert hook.standing.metrics.dropped_samples == 3


def test_by_default_half_of_what_was_trained_meanwhile_stays() -> None:
    """With overlap; a result that is merged at once is taken as it is."""
    hook, _, model = hooked(overlap_steps=2)
    step(hook, model, 6)
    assert model.u.tolist() == [4.0 + 0.5 * 2.0] * 2
    hook, _, model = hooked()
    step(hook, model, 4)
    assert model.u.tolist() == [4.0, 4.0]


def test_the_next_fragment_waits_for_the_one_under_way() -> None:
    """An exchange that falls due during a flight lets the flight land first; so does one that a peer asks for, which
    is then made at once."""
    hook, node, model = hooked(fragments=2, overlap_steps=2, merge="rebase")
    step(hook, model, 4)
    assert [c["shards"] for c in node.contributed()] == [[0], [1]]
    assert hook.standing.metrics.sync_count == 1
    node.memory.goal = 3
    step(hook, model)
    assert [c["shards"] for c in node.contributed()] == [[0], [1], [0]]
    assert hook.standing.metrics.sync_count == 3
    step(hook, model)
    assert len(node.contributed()) == 3
    step(hook, model)
    hook.synchronise()
    assert [c["shards"] for c in node.contributed()][3:] == [[1], [0], [1]]
    assert hook.standing.metrics.sync_count == 6
    assert model.u.tolist() == model.v.tolist() == node.memory.theta.tolist()[:2] == [7.0, 7.0]


def test_what_the_result_does_not_count_is_carried_whatever_the_merge() -> None:
    """The rule of `merge` is for progress that is counted; a contribution that missed its commit rides in the next one,
    with all that was trained meanwhile."""
    hook, node, model = hooked(overlap_steps=2, merge_alpha=0.0)
    step(hook, model, 4)
    committed, node.commit = node.commit, lambda request: node.fresh.update({0: "keep"})
    node.overwrite(10.0)
    step(hook, model, 2)
    assert model.u.tolist() == [16.0, 16.0]
    assert hook.standing.metrics.dropped_samples == 0
    node.commit = committed
    step(hook, model, 4)
    assert node.memory.theta.tolist() == [18.0] * 4


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
    node.asynchronous = {"steps": 6, "staleness": 3, "refused": 1}
    step(hook, model, 2)
    assert len(node.contributed()) == 1  # half of H = 4
    step(hook, model, 3)
    assert len(node.contributed()) == 2
    node.asynchronous = {"steps": 1, "staleness": 0, "refused": 1}
    step(hook, model, 3 + 2)
    assert len(node.contributed()) == 5
    metrics = hook.standing.metrics
    assert (metrics.sync_every, metrics.staleness, metrics.refused_submissions) == (1, 0, 1)


def test_asynchronously_the_runs_step_is_a_live_peers_share() -> None:
    """Samples counted, at this peer's samples a step, divided by the peers that train; and its own steps since."""
    hook, node, model = hooked(mode="async")
    node.asynchronous = {"steps": 4, "staleness": 0, "refused": 0}
    node.samples = 24 * 5  # others'
    hook.merge()
    for _ in range(6):
        hook.report(None, 5)
        step(hook, model)
    assert hook.standing.global_step == (24 + 4) // 2 + 2
    node.workers = 4
    hook.merge()
    assert hook.standing.global_step == (24 + 4) // 4 + 2


def test_asynchronously_nobody_is_asked_to_exchange() -> None:
    """force_sync submits each fragment once; and where others ask, nothing is done."""
    hook, node, model = hooked(fragments=2, mode="async")
    node.asynchronous = {"steps": 4, "staleness": 0, "refused": 0}
    step(hook, model)
    hook.synchronise()
    assert len(node.contributed()) == 2
    assert "nudge" not in [kind for kind, _ in node.log]
    node.memory.goal = 100
    step(hook, model)
    assert len(node.contributed()) == 2


def test_a_run_that_another_peer_ended_is_merged_before_it_is_finished() -> None:
    """The end may come between two steps, with another peer's commit: the model has the last state after the next."""
    hook, node, model = hooked(mode="async")
    step(hook, model)
    node.overwrite(7.0)
    node.fresh[0] = "drop"
    node.memory.changed = node.memory.changed + 1
    node.memory.finished = 1
    assert not hook.standing.finished
    step(hook, model)
    assert hook.standing.finished
    assert model.u.tolist() == [7.0, 7.0]


def test_the_end_may_come_after_its_last_commit() -> None:
    """The last commit is in the model already when the run is told to have ended: what was trained since goes."""
    hook, node, model = hooked()
    step(hook, model, 4)
    assert model.u.tolist() == [4.0, 4.0]
    step(hook, model)
    node.memory.finished = 1
    assert not hook.standing.finished
    step(hook, model)
    assert hook.standing.finished
    assert (model.u.tolist(), hook.standing.metrics.dropped_samples) == ([4.0, 4.0], 2)


def test_nothing_of_its_own_is_left_in_the_model_of_a_finished_run() -> None:
    """Progress that no commit counts is carried into the next contribution, but after the end there is none: neither
    what was trained since the last sending stays, nor what was trained in a part of the model that had ended before.
    Both are told as dropped. Training that goes on after all is the trainer's own affair."""
    hook, node, model = hooked(fragments=2, mode="async")
    node.asynchronous = {"steps": 4, "staleness": 0, "refused": 0}
    step(hook, model, 4)  # both parts were sent, the first one two steps ago
    node.overwrite([7.0, 7.0, 8.0, 8.0])
    node.fresh = {1: "keep"}
    node.memory.changed = node.memory.changed + 1
    node.memory.finished = 1
    step(hook, model)
    assert hook.standing.finished
    assert (model.u.tolist(), model.v.tolist()) == ([7.0, 7.0], [8.0, 8.0])
    assert hook.standing.metrics.dropped_samples == 2  # of one half 3 steps, of the other 1
    step(hook, model, 9)
    assert (model.u.tolist(), hook.standing.metrics.dropped_samples) == ([16.0, 16.0], 2)


@pytest.mark.parametrize("merge_alpha", [None, 0.0, 0.25])
def test_the_end_of_the_run_lands_what_is_under_way(merge_alpha: float | None) -> None:
    """The model of a finished run is the run's, however long the overlap, and whatever is mixed before."""
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


def test_an_exchange_that_never_began_is_tried_again() -> None:
    """When the base had changed, newer state is merged and the same progress contributed at once, of full weight."""
    hook, node, model = hooked()
    hook.merge()
    node.log.clear()
    node.releases = [False, False, True]
    step(hook, model, 4)
    assert [c["weight"] for c in node.contributed()] == [4.0] * 3
    assert [kind for kind, _ in node.log if kind != "have read"] == ["merge", "contribute"] * 3 + ["merge"]
    assert hook.standing.metrics.sync_count == 1


def test_changes_are_merged_between_exchanges() -> None:
    """When the node's counter moves, the next step merges, and carries the progress; otherwise the node isn't asked."""
    hook, node, model = hooked()
    hook.merge()
    node.log.clear()
    step(hook, model, 2)
    assert node.log == []
    node.overwrite(100.0)
    node.fresh = {0: "keep"}
    node.memory.changed = 1
    step(hook, model)
    assert [kind for kind, _ in node.log] == ["merge", "have read"]
    assert model.u.tolist() == [103.0, 103.0]


def test_a_finished_run_is_left_alone() -> None:
    """After the end the last state is merged, and nothing is contributed any more."""
    hook, node, model = hooked()
    node.memory.finished = 1
    node.overwrite(7.0)
    node.fresh = {0: "drop"}
    node.memory.changed = 1
    step(hook, model, 9)
    assert node.contributed() == []
    assert model.u.tolist() == [15.0, 15.0]
    assert hook.standing.finished


def test_weights_by_samples() -> None:
    """A contribution weighs the samples reported since the last one; none reported is an error that names the mend."""
    hook, node, model = hooked(weighting="samples")
    for samples in (3, 5, 0, 2):
        hook.report(0.5, samples)
        step(hook, model)
    assert (node.contributed()[0]["weight"], node.contributed()[0]["samples"]) == (10.0, 10)
    assert node.memory.loss == 0.5
    assert node.memory.samples == 10
    step(hook, model, 3)
    with pytest.raises(ConfigError, match="report"):
        step(hook, model)


def test_uniform_weights() -> None:
    hook, node, model = hooked(weighting="uniform")
    step(hook, model, 8)
    assert [c["weight"] for c in node.contributed()] == [1.0, 1.0]


def test_a_nudge_brings_the_next_exchange_forward() -> None:
    """When a peer asks for an exchange up to so many commits, the next steps contribute until they are reached."""
    hook, node, model = hooked(fragments=2)
    node.memory.goal = 2
    step(hook, model, 3)
    assert [c["weight"] for c in node.contributed()] == [1.0, 2.0]
    hook.synchronise()
    assert ("nudge", {"goal": 4}) in node.log
    assert len(node.contributed()) == 4


def test_waiting_for_the_first_peers_has_an_end() -> None:
    """If `start_peers` don't come within `wait_timeout`, the hook raises; later rounds wait for as long as it takes."""
    hook, node, model = hooked(start_peers=2)
    node.releases = [None]
    with pytest.raises(GaveUpWaiting, match="start_peers=2"):
        step(hook, model, 4)


def test_what_is_dropped_is_counted() -> None:
    """Progress that was sent, not counted and given up shows as dropped samples, by its share of the model."""
    hook, node, model = hooked(fragments=2)
    step(hook, model, 2)
    node.fresh = {0: "keep"}
    hook.merge()
    assert hook.standing.metrics.dropped_samples == 0
    hook.report(None, 10)
    step(hook, model, 4)
    hook._tally._uncounted[0] = 20
    node.fresh = {0: "drop"}
    hook.merge()
    assert hook.standing.metrics.dropped_samples == 10


def taking(clock: SimpleNamespace, seconds: float, call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call, which takes so long."""

    def timed(*arguments: Any, **named: Any) -> Any:
        clock.now += seconds
        return call(*arguments, **named)

    return timed


def every_time(hook: Hook) -> dict[str, float]:
    return hook.standing.metrics.totals()


@pytest.mark.parametrize("overlap_steps", [0, 2])
def test_where_the_time_goes(overlap_steps: int) -> None:
    """Every second of training is one part's: what the trainer does is its own, the wait for the others is told apart
    by the node, and what the node doesn't tell is the group's. The hidden parts come beside. Steps take 1 s, pauses 99.
    """
    clock = SimpleNamespace(now=1000.0)
    hook, node, model = hooked(clock=lambda: clock.now, overlap_steps=overlap_steps, merge="rebase")
    node.stood = {"codec": 0.25, "transfer": 1.0, "outer_step": 0.5, "group": 0.25}
    node.hidden = {"codec": 0.125, "transfer": 1.5, "outer_step": 0.0, "group": 0.375} if overlap_steps else {}
    hook._local.write_delta = taking(clock, 0.5, hook._local.write_delta)  # type: ignore[method-assign]
    hook._local.merge = taking(clock, 0.25, hook._local.merge)  # type: ignore[method-assign]
    node.wait_for = taking(clock, 4.0, node.wait_for)  # type: ignore[method-assign]
    began = clock.now
    for _ in range(8 + overlap_steps):
        clock.now += 1.0
        step(hook, model)
        with hook.beside():
            clock.now += 99.0
    times, merges = every_time(hook), 5  # at the first step, before and after each exchange
    assert times["inner_time_s"] == 8 + overlap_steps
    assert times["paused_time_s"] == 99.0 * (8 + overlap_steps)
    assert (times["pseudo_gradient_time_s"], times["merge_time_s"]) == (2 * 0.5, merges * 0.25)
    assert (times["codec_time_s"], times["transfer_time_s"], times["outer_step_time_s"]) == (0.5, 2.0, 1.0)
    assert times["group_time_s"] == 2 * (4.0 - 1.75)
    assert times["waiting_time_s"] == clock.now - began - times["inner_time_s"] - times["paused_time_s"]
    assert times["hidden_time_s"] == (4.0 if overlap_steps else 0.0)
    assert times["hidden_transfer_time_s"] == (3.0 if overlap_steps else 0.0)
    assert times["total_sync_time_s"] == times["waiting_time_s"] - 0.25 + times["hidden_time_s"]
    assert node.memory.last_round is not None
    shares = astuple(node.memory.last_round)
    assert sum(shares[:-1]) == pytest.approx(1.0, abs=0.003)
    assert shares == pytest.approx(
        [4 / 9, 0.75 / 9, 2.25 / 9, 1 / 9, 0.5 / 9, 0.5 / 9, 2 / 7 if overlap_steps else 0.0], abs=0.0005
    )


def test_an_exchange_that_never_began_hides_nothing() -> None:
    """The wait for it is time that training stood still; what the node did meanwhile was no exchange."""
    clock = SimpleNamespace(now=0.0)
    hook, node, model = hooked(clock=lambda: clock.now)
    node.wait_for = taking(clock, 4.0, node.wait_for)  # type: ignore[method-assign]
    node.releases, node.stood = [False, True], {"codec": 1.0}
    step(hook, model, 4)
    assert every_time(hook)["hidden_time_s"] == 0.5  # of the second one
    assert (every_time(hook)["codec_time_s"], every_time(hook)["group_time_s"]) == (2.0, 6.0)
    assert every_time(hook)["total_sync_time_s"] == 4.5


def test_the_log_tells_now_and_then_where_the_time_went(caplog: pytest.LogCaptureFixture) -> None:
    """The first round, then one a minute at most."""
    clock = SimpleNamespace(now=0.0)
    hook, _, model = hooked(clock=lambda: clock.now, sync_every=1)
    with caplog.at_level("INFO", logger="p2p_diloco"):
        for _ in range(8):
            clock.now += 20.0
            step(hook, model)
    assert [message.split(":")[0] for message in caplog.messages] == [
        f"round {number} took 20.00 s" for number in (1, 4, 7)
    ]
    assert "inner 100.0%, encode 0.0%" in caplog.messages[0]


def test_pauses_are_no_step_time() -> None:
    """The time of an exchange or a pause is not taken for an inner step's."""
    hook, _, model = hooked()
    step(hook, model, 2)
    before = hook._rhythm.step_time_s
    with hook.pause():
        pass
    step(hook, model)
    assert hook._rhythm.step_time_s == before > 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e12])
def test_progress_that_is_not_finite_is_dropped_once(value: float, caplog: pytest.LogCaptureFixture) -> None:
    """What can't be averaged is not sent: the global model is loaded, a sentence says so, and the next step's progress
    goes out at once, weighed by that step alone. A later round of good progress forgives it.
    """
    hook, node, model = hooked(fragments=2)
    node.overwrite(5.0)
    for attempt in (1, 2):
        node.log.clear()
        hook.merge()
        dropped = hook.standing.metrics.dropped_samples
        step(hook, model)
        with torch.no_grad():
            model.u.fill_(value)
            model.v.fill_(value)
        step(hook, model)
        assert node.contributed() == []
        assert model.u.tolist() == node.memory.theta[:2].tolist()
        assert model.v.tolist() == node.memory.theta[2:].tolist()
        assert len([r for r in caplog.records if "not finite" in r.message]) == attempt
        assert hook.standing.metrics.dropped_samples > dropped
        step(hook, model)
        (sent,) = node.contributed()
        assert (sent["weight"], sent["samples"]) == (1.0, 1)
        assert node.memory.delta.abs().max() == 1.0
        step(hook, model, 2)
    assert torch.isfinite(node.memory.theta).all()


def test_training_that_diverges_again_ends_with_a_sentence() -> None:
    hook, node, model = hooked()
    step(hook, model, 3)
    with torch.no_grad():
        model.u.fill_(float("nan"))
    step(hook, model)
    with torch.no_grad():
        model.u.fill_(float("nan"))
    with pytest.raises(P2PDilocoError, match=r"diverged.*lower the learning rate"):
        step(hook, model)
    assert node.contributed() == []


def test_the_node_may_write_again_whatever_becomes_of_a_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    """A merge that fails lets go of θ, or the node would wait for its trainer for ever."""
    hook, node, _ = hooked()

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(LocalModel, "merge", fail)
    with pytest.raises(MemoryError):
        hook.merge()
    assert node.log[-1] == ("have read", {"loaded": []})


def test_theta_stays_until_the_pseudo_gradient_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is measured from θ itself; then it is let go of, whatever becomes of that."""
    hook, node, model = hooked()

    def look(*_: object) -> None:
        assert node.log[-1][0] == "merge"
        raise MemoryError

    monkeypatch.setattr(LocalModel, "write_delta", look)
    with pytest.raises(MemoryError):
        step(hook, model, 4)
    assert node.log[-1] == ("have read", {"loaded": []})


@pytest.mark.parametrize("overlap_steps", [0, 1])
def test_only_who_trains_meanwhile_needs_the_old_values(overlap_steps: int) -> None:
    """Of a trainer that stands still nothing is kept beside θ, of another what it was trained on."""
    hook, node, model = hooked(theta=3.0, overlap_steps=overlap_steps, merge="rebase")
    step(hook, model, 4 + overlap_steps)
    assert node.memory.base.tolist() == [3.0 * overlap_steps] * 4
    assert model.u.tolist() == [7.0 + overlap_steps] * 2


def test_what_no_commit_counts_is_carried_as_it_was_sent() -> None:
    """Though what it was trained on is nowhere any more; and the next pseudo-gradient has all of it."""
    hook, node, model = hooked()

    def another(_: dict[str, Any]) -> None:
        node.overwrite([100.0] * 4)
        node.fresh = {0: "keep"}

    node.commit = another  # type: ignore[method-assign]
    step(hook, model, 4)
    assert model.u.tolist() == [104.0, 104.0]
    assert not node.memory.base.any()
    step(hook, model, 4)
    assert node.memory.delta.tolist() == [-8.0] * 4


@pytest.mark.parametrize("listed", [True, False])
def test_what_was_trained_on_a_changed_base_is_given_up(listed: bool) -> None:
    """The global values are loaded, though the log may have nothing new for the trainer; nothing of others' progress
    is taken for its own, and what is lost is told."""
    hook, node, model = hooked(merge="rebase")
    step(hook, model, 4)
    node.memory.theta.fill_(9.0)
    node.bases.lost, node.fresh = {0}, {0: "keep"} if listed else {}
    node.commit = lambda _: None  # type: ignore[method-assign]
    step(hook, model, 4)
    assert model.u.tolist() == [9.0, 9.0]
    assert node.memory.delta.tolist() == [0.0] * 4
    assert hook.standing.metrics.dropped_samples == 4
    assert not node.bases.lost


def test_what_was_given_up_is_not_taken_away_again() -> None:
    """A commit that counts it after all changes nothing in a local value that no longer holds it."""
    hook, node, model = hooked(merge="rebase")
    step(hook, model, 4)
    for lost, carry, value in (({0}, "keep", 9.0), (set(), "subtract", 10.0)):
        node.memory.theta.fill_(9.0)
        node.bases.lost, node.fresh = lost, {0: carry}
        node.memory.changed = node.memory.changed + 1
        step(hook, model)
        assert model.u.tolist() == [value, value]


def test_after_a_merge_that_was_broken_off_all_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log takes it for merged; half of the model may be. Training begins again from the global values."""
    hook, node, model = hooked(overlap_steps=1, merge="rebase")
    step(hook, model, 5)
    merge = LocalModel.merge

    def interrupted(*_: object) -> None:
        monkeypatch.setattr(LocalModel, "merge", merge)
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalModel, "merge", interrupted)
    node.overwrite([20.0] * 4)
    node.fresh = {0: "keep"}
    node.memory.changed = node.memory.changed + 1
    with pytest.raises(KeyboardInterrupt):
        step(hook, model)
    assert node.log[-1] == ("have read", {"loaded": []})
    hook.merge()
    assert model.u.tolist() == [20.0, 20.0]
    assert not node.memory.delta.any()
    assert hook.standing.metrics.dropped_samples == 2
    step(hook, model)
    assert model.u.tolist() == [21.0, 21.0]


@pytest.mark.parametrize(
    ("merge", "carry", "value"), [("mix", "subtract", 4.0), ("rebase", "subtract", 4.0), ("rebase", "keep", 8.0)]
)
def test_a_wait_that_was_broken_off_leaves_what_was_sent(merge: str, carry: str, value: float) -> None:
    """What was trained since can't be told from the rest: it is dropped, and counted as such, once."""
    hook, node, model = hooked(merge=merge)
    wait_for = node.wait_for

    def interrupted(kind: str, *, n: int, timeout_s: float) -> Any:
        node.wait_for = lambda *_, n, **__: {"n": n, "sent": True, "stood": {}, "hidden": node.hidden}  # type: ignore
        wait_for(kind, n=n, timeout_s=timeout_s)
        node.fresh = {0: carry}
        raise KeyboardInterrupt

    node.wait_for = interrupted  # type: ignore[method-assign,assignment]
    with pytest.raises(KeyboardInterrupt):
        step(hook, model, 4)
    step(hook, model)
    assert node.memory.theta.tolist() == [4.0] * 4
    assert model.u.tolist() == [value, value]
    assert hook.standing.metrics.dropped_samples == 1


@pytest.mark.parametrize("weighting", ["steps", "samples", "uniform"])
def test_an_exchange_without_a_step_weighs_nothing(weighting: str) -> None:
    """`force_sync` right after an exchange has nothing to contribute: that is no error, and dilutes no mean."""
    hook, node, model = hooked(weighting=weighting)
    for _ in range(4):
        hook.report(None, 3)
        step(hook, model)
    hook.synchronise()
    sent = node.contributed()[-1]
    assert sent["samples"] == 0
    zeros, ones = (torch.full((3,), value).numpy().tobytes() for value in (0.0, 1.0))
    mean = weighted_mean([("a", sent["weight"], zeros), ("b", 1.0, ones)], "fp32", 3)
    assert mean.tolist() == [1.0] * 3


def test_progress_sent_again_keeps_its_weight() -> None:
    """Where no step was made since, but what was sent before is counted nowhere yet, that is what is weighed."""
    hook, node, model = hooked(weighting="samples")
    for _ in range(4):
        hook.report(None, 3)
        step(hook, model)
    hook._tally._uncounted[0] = 12
    node.fresh = {}
    hook.synchronise()
    assert node.contributed()[-1]["weight"] == 12.0
