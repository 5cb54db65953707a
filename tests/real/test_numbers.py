"""The formulas' numbers on every peer of real runs, computed beforehand by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from swarm import Member, Swarm

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(500)]

BF16 = 2.0**-8
"""The largest relative error of one rounding to bf16."""

CASES: dict[str, dict[str, Any]] = {
    # name: outer settings, θ₀, the deltas of each element by peer, samples by peer, and θ after each round
    "means": {
        "outer": {"outer_lr": 1.0, "outer_momentum": 0.0},
        "deltas": {"a": [1.0, 0.1], "b": [3.0, 0.1]},
        "expected": [[-2.0, -0.1], [-4.0, -0.2], [-6.0, -0.3]],
    },
    "weights 1 and 3": {
        "outer": {"outer_lr": 1.0, "outer_momentum": 0.0, "weighting": "samples"},
        "deltas": {"a": [0.0, 4.0], "b": [4.0, 0.0]},
        "samples": {"a": 2, "b": 6},
        "expected": [[-3.0, -1.0]],
    },
    "Nesterov": {
        "outer": {"outer_lr": 1.0, "outer_momentum": 0.9},
        "deltas": {"a": [1.0, 0.0], "b": [1.0, 2.0]},
        "expected": [[-1.9] * 2, [-4.61] * 2, [-8.049] * 2, [-12.1441] * 2],
    },
    "plain momentum": {
        "outer": {"outer_lr": 1.0, "outer_momentum": 0.5, "nesterov": False},
        "deltas": {"a": [1.0], "b": [1.0]},
        "expected": [[-1.0], [-2.5], [-4.25]],
    },
    "a blend": {  # (1 - η) θ + η · mean of the local values
        "outer": {"outer_lr": 0.5, "outer_momentum": 0.0},
        "theta": 8.0,
        "deltas": {"a": [1.0], "b": [3.0]},
        "expected": [[7.0], [6.0]],
    },
    "standing still": {
        "outer": {"outer_lr": 0.0, "outer_momentum": 0.9},
        "theta": 1.0,
        "deltas": {"a": [1.0], "b": [3.0]},
        "expected": [[1.0], [1.0]],
    },
}
CASES["four bits"] = {  # 0.375 is sent as 0.5, then with the error as 0.25, then as 0.5 again; 0.75 of 2 as 1, 0.5, 1
    "outer": {"outer_lr": 1.0, "outer_momentum": 0.0},
    "deltas": {"a": [1.0, 0.375], "b": [2.0, 0.75]},
    "expected": [[-1.5, -0.75], [-3.0, -1.125], [-4.5, -1.875]],
}
CASES["fragments"] = {  # two fragments of one element each take turns: H = 6, so one of them is due at every third step
    "outer": {"outer_lr": 2.0, "outer_momentum": 0.0, "num_fragments": 2, "sync_every": 6, "stop_after_epochs": 3},
    "theta": 1.0,
    "deltas": {"a": [12.0, 12.0], "b": [12.0, 12.0]},
    "expected": [],
}
STREAMING: dict[str, tuple[dict[str, Any], list[list[float]], list[float]]] = {
    # the same with results merged later, in several ways: local values after each merge, committed values
    "mixed": ({"merge_alpha": 0.5}, [[-8, -5], [-14, -17], [-24.5, -23], [-30.5, -32], [-40.25, -38]],
              [-11, -23, -29, -35, -44]),
    "overwritten later": ({"overlap_steps": 1, "merge_alpha": 0.0}, [[-11, -7], [-17, -23], [-31, -29], [-37, -43],
                          [-51, -49]], [-11, -23, -31, -43, -51]),
    "mixed later": ({"overlap_steps": 1, "merge_alpha": 0.5}, [[-9, -7], [-15, -18], [-24, -24], [-30, -31.5],
                    [-38.5, -37.5]], [-11, -23, -27, -33, -41]),
    "rebased later": ({"overlap_steps": 1, "merge": "rebase"}, [[-13, -7], [-19, -25], [-37, -31], [-43, -49],
                      [-61, -55]], [-11, -23, -35, -47, -59]),
}  # fmt: skip
for streaming, (settings, _, _) in STREAMING.items():
    CASES[streaming] = {**CASES["fragments"], "outer": {**CASES["fragments"]["outer"], **settings}}
LOCALS = [[-11, -5], [-17, -23], [-35, -29], [-41, -47], [-59, -53], [-59, -71]]  # the run ends with the last one
GLOBALS = [[-11, 1], [-11, -23], [-35, -23], [-35, -47], [-59, -47], [-59, -71]]
CODECS = {"Nesterov": ("fp32", "bf16"), "four bits": ("e3m0",)}
RUNS = [(name, codec) for name in CASES for codec in CODECS.get(name, ("fp32",))]
PARAMETERS = [(name, codec) for name, codec in RUNS if name != "fragments" and name not in STREAMING]


def options_of(name: str, codec: str, peer: str) -> dict[str, Any]:
    case = CASES[name]
    config = {"sync_every": 2, "start_peers": 2, "codec": codec, "stop_after_epochs": len(case["expected"])}
    config["heartbeat_timeout"] = 30.0  # a machine that stands still for a while does not count as dead
    return {
        "run_id": f"{name}-{codec}".replace(" ", "-").replace(",", ""),
        "config": {**config, **case["outer"]},
        "theta": case.get("theta", 0.0),
        "deltas": case["deltas"][peer],
        "samples": case.get("samples", {}).get(peer),
    }


@pytest.fixture(scope="module")
def pair(shared_swarm: Swarm) -> Iterator[list[Member]]:
    """Two peers that play all cases together."""
    shared_swarm.bootstrap()
    return [
        shared_swarm.start(peer, "cases.py", cases=[options_of(name, codec, peer) for name, codec in RUNS])
        for peer in ("a", "b")
    ]


@pytest.mark.parametrize(("name", "codec"), PARAMETERS)
def test_two_peers_reach_the_numbers(pair: list[Member], name: str, codec: str) -> None:
    """Every epoch has the formula's value, in the model and as the global value, with one digest on both peers."""
    run_id = options_of(name, codec, "a")["run_id"]
    for peer in pair:
        peer.wait_for("done", run=run_id)
    rounds = [peer.lines("epoch", run=run_id) for peer in pair]
    for epoch, expected in enumerate(CASES[name]["expected"], start=1):
        here, there = (lines[epoch - 1] for lines in rounds)
        assert here["digest"] == there["digest"]
        for line in (here, there):
            assert line["epoch"] == epoch
            assert line["step"] == 2 * epoch
            assert line["values"] == line["known"] == here["known"]
            assert line["values"] == pytest.approx(expected, rel=1e-6 if codec == "fp32" else BF16, abs=1e-6)
    assert [len(lines) for lines in rounds] == [len(CASES[name]["expected"])] * 2


def test_fragments_take_turns(pair: list[Member]) -> None:
    """Each fragment is sent and merged at its own step, while the other one trains on."""
    run_id = options_of("fragments", "fp32", "a")["run_id"]
    for peer in pair:
        peer.wait_for("done", run=run_id)
        lines = peer.lines("epoch", run=run_id)
        assert [line["values"] for line in lines] == LOCALS
        assert [line["known"] for line in lines] == GLOBALS
        assert [line["step"] for line in lines] == [3, 6, 9, 12, 15, 18]
        assert [line["epoch"] for line in lines] == [0, 1, 1, 2, 2, 3]
    digests = [[line["digest"] for line in peer.lines("epoch", run=run_id)] for peer in pair]
    assert digests[0] == digests[1]


@pytest.mark.parametrize("name", STREAMING)
def test_training_goes_on_while_fragments_travel(pair: list[Member], name: str) -> None:
    """The tables of overlap: each peer's values after each merge, and the value of each commit."""
    run_id = options_of(name, "fp32", "a")["run_id"]
    settings, values, commits = STREAMING[name]
    for peer in pair:
        peer.wait_for("done", run=run_id)
        lines = peer.lines("epoch", run=run_id)
        assert [line["values"] for line in lines[: len(values)]] == values
        assert [line["known"][number % 2] for number, line in enumerate(lines[: len(commits)])] == commits
        steps = [3 * (number + 1) + settings.get("overlap_steps", 0) for number in range(len(values))]
        assert [line["step"] for line in lines[: len(steps)]] == steps
        assert len(lines) == 6


def test_one_peer_alone(swarm: Swarm) -> None:
    """θ = 1 and Δ = 0.5 make 0.5; and with η = 1, μ = 0 the outer step of one peer does not change its training."""
    config = {"sync_every": 2, "outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32", "stop_after_epochs": 3}
    case = {"run_id": "alone", "config": config, "theta": 1.0, "deltas": [0.5]}
    peer = swarm.start("alone", "cases.py", cases=[case])
    peer.wait_for("done")
    assert [line["values"] for line in peer.lines("epoch")] == [[0.5], [0.0], [-0.5]]
