"""The ends of peers in processes of their own: what becomes of their steps, and of their processes.

H is far above the number of steps, so that only the last exchange counts them. With delta = H each step takes 1 off.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from swarm import until

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

LONG = {"sync_every": 1000, "outer_momentum": 0.0}
"""η=1, μ=0: an exchange subtracts the mean pseudo-gradient."""


def after(trainee: Any) -> dict[str, Any]:
    """What the script reads from its peer after the `with` block; it must end without an error."""
    line: dict[str, Any] = trainee.wait_for("after")
    assert trainee.status() == 0
    return line


def test_those_who_stay_go_on_with_the_steps_of_the_one_that_left(swarm: Any, run_config: dict[str, Any]) -> None:
    """A peer that leaves in the middle of a round has the others exchange at their next step. The last of the two,
    held up by `min_peers`, gives its last exchange up, names the lost steps, and ends normally."""
    config = {**run_config, **LONG, "start_peers": 2, "min_peers": 2}
    a = swarm.start("a", 1000.0, config=config, step_s=0.02, steps=500, local={"exit_timeout": 2.0})
    b = swarm.start("b", 3000.0, config={}, step_s=0.02, steps=30)
    line = after(b)
    assert line["epoch"] == 1
    first = a.wait_for("epoch", epoch=1)
    assert first["digest"] == line["digest"]
    assert first["value"] < -45.0  # of b's 90 half
    a.tell("")  # it makes its other steps without pauses
    assert after(a)["epoch"] == 1
    assert "of this peer's inner steps are in no commit" in a.log()
    assert "exit_timeout=2 has passed" in a.log()


def test_a_peer_that_trained_alone_leaves_its_state_to_the_next(swarm: Any, run_config: dict[str, Any]) -> None:
    """The script of the first peer is over before the second one starts. The node of the first keeps the state and says
    so; the second goes on from it. Both end normally, and neither result is from a model begun twice."""
    swarm.bootstrap()
    first = swarm.start("first", config=run_config, steps=6, local={"exit_timeout": 200.0})
    first.wait_for_log("has trained the run")
    second = swarm.start("second", config=run_config, steps=6)
    ends = [after(peer) for peer in (first, second)]
    assert [line["epoch"] for line in ends] == [3, 6]
    assert "founded the run" not in second.log()
    assert "has trained the run" not in second.log()


@pytest.mark.parametrize("after_s", [0.2, pytest.param(1.2, marks=pytest.mark.chaos)])
def test_nothing_is_left_by_a_trainer_killed_early(swarm: Any, run_config: dict[str, Any], after_s: float) -> None:
    """Whenever during its start a trainer is killed with SIGKILL, its node and the libp2p daemon end with it."""
    swarm.addresses = ["unused"]  # it is not waited for
    trainee = swarm.start("a", config=run_config, initial_peers=[], fresh=True)
    until(lambda: len(trainee.family()) > 1, 180.0, "a node that was started")
    time.sleep(after_s)
    assert len(trainee.family()) > 1
    trainee.signal(signal.SIGKILL)
    trainee.status()
    swarm.gone()


def test_a_worker_that_imports_the_script_starts_no_second_peer(tmp_path: Path) -> None:
    """The script lacks the guard that a spawned process needs. That process says so, and joins nothing."""
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing\n"
        "from p2p_diloco import Peer\n"
        "Peer(None, None)\n"
        "if __name__ == '__main__':\n"
        "    worker = multiprocessing.get_context('spawn').Process(target=print)\n"
        "    worker.start(), worker.join()\n"
    )
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=True)
    assert 'put what the script does below `if __name__ == "__main__":`' in ended.stderr
