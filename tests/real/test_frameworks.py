"""The examples for other libraries' training loops, as peers of real runs: one peer is killed, another joins late."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import pytest
from swarm import PROGRAMS, ROOT, Member, Swarm, agree

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(480)]

HELD_AT = 3
"""The founder's epoch when the late joiner comes and the second peer dies."""
STEPS, EVERY = 240, 20
CONFIG = {
    "sync_every": EVERY, "start_peers": 2, "outer_lr": 0.7, "outer_momentum": 0.6, "heartbeat_interval": 0.2,
    "heartbeat_timeout": 6.0, "pause_timeout": 200.0,
}  # fmt: skip
LOADS = {
    "lora": ["transformers", "peft", "p2p_diloco.integrations.transformers"],
    "causal_lm": ["transformers", "accelerate"],
    "image_classifier": ["lightning", "p2p_diloco.integrations.lightning"],
}


def installed(example: str) -> None:
    """Skip the test where a library of the example is missing."""
    for module in LOADS[example]:
        if find_spec(module.split(".")[0]) is None:
            pytest.skip(f"{module} isn't installed: pip install 'p2p-diloco[hf,lightning]'")


def options_of(swarm: Swarm, name: str, example: str) -> dict[str, Any]:
    folder = swarm.folder / name
    folder.mkdir()
    return {"path": str(ROOT / "examples" / f"{example}.py"), "loads": LOADS[example], "folder": str(folder)}


def start(swarm: Swarm, name: str, example: str, **options: Any) -> Member:
    return swarm.start(name, "example.py", **options_of(swarm, name, example), **options)


def chaos(example: str) -> Any:
    return pytest.param(example, marks=pytest.mark.chaos)


@pytest.mark.parametrize("example", ["lora", chaos("causal_lm"), chaos("image_classifier")])
def test_a_founder_and_a_late_joiner_end_with_one_result(swarm: Swarm, example: str) -> None:
    """At `HELD_AT` a late peer joins, then the second dies. The others end the run with the same parameters, buffers,
    held-out loss and learning rates.

    The founder is held until the late one begins its last step of the round: that round need not wait for it."""
    installed(example)
    swarm.bootstrap()
    founder = start(swarm, "founder", example, config=CONFIG, holds_at=HELD_AT)
    second = start(swarm, "second", example, waits=True)
    late = start(swarm, "late", example, waits=True, tells_at=EVERY)
    founder.wait_for("in")
    second.tell("go")
    founder.wait_for("holds")
    late.wait_for("ready")
    late.tell("go")
    assert late.wait_for("in")["epoch"] == HELD_AT
    late.wait_for("begins")
    second.die()
    founder.tell("go")
    for member in (founder, late):
        member.wait_for("result", 240.0)
        assert member.status() == 0, member.log()
    agree([founder, late], HELD_AT)
    first, last = founder.last("result"), late.last("result")
    for key in ("digest", "step", "epoch", "model", "loss"):
        assert first[key] == last[key]
    assert (first["epoch"], first["local"], last["local"]) == (STEPS // EVERY, STEPS, STEPS - HELD_AT * EVERY)
    rates, others = dict(map(tuple, first["rates"])), dict(map(tuple, last["rates"]))
    assert others.keys() == set(range(HELD_AT * EVERY, STEPS))
    assert {step: rates[step] for step in others} == pytest.approx(others, rel=1e-9)
    assert len(set(rates.values())) > STEPS // 2
    if example == "lora":
        assert "lora-adapter/adapter_model.safetensors" in last["files"]


@pytest.mark.chaos
@pytest.mark.parametrize("example", ["lora", "causal_lm", "image_classifier"])
def test_two_ranks_under_torchrun_are_one_peer(swarm: Swarm, example: str) -> None:
    """They found a run as one peer, make its exchanges together, and end with the same parameters; both have the
    learning rates of a peer alone. Of DistributedDataParallel Trainer shows callbacks only the model inside."""
    installed(example)
    config = {"sync_every": 80, "outer_momentum": 0.0, "heartbeat_timeout": 10.0}
    options = {"name": "group", "run_id": "group", "initial_peers": [], "config": config}
    options |= options_of(swarm, "group", example)
    if example == "image_classifier":  # Lightning's strategy `ddp`
        script, text = swarm.folder / "with_ddp.py", (ROOT / "examples" / "image_classifier.py").read_text()
        script.write_text(text.replace('accelerator="auto"', 'accelerator="cpu", strategy="ddp", devices=2'))
        assert script.read_text() != text
        options["path"] = str(script)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(PROGRAMS / "example.py")]
    group = swarm.launch("group", [*command, json.dumps(options)], fresh=True)
    group.wait_for("in", rank=0)  # until then the ranks mostly import their libraries
    first, other = (group.wait_for("result", 150.0, rank=rank) for rank in (0, 1))
    assert group.status() == 0, group.log()
    for key in ("rates", "step", "epoch", "model"):
        assert first[key] == other[key]
    assert (first["step"], first["epoch"], first["local"]) == (STEPS, STEPS // 80, STEPS)
    assert [step for step, _ in first["rates"]] == list(range(STEPS))
    assert group.lines("in", rank=0)[0]["seed"] == group.lines("in", rank=1)[0]["seed"]
