"""`join` against a real swarm: a peer that fits trains, one that doesn't is told why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(240)]

P2P_DILOCO = [sys.executable, "-m", "p2p_diloco"]


class Swarm:
    """A bootstrap and the peers that tests add, each test in a run of its own."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        self.run = ""
        self.addresses: list[str] = []
        seed = self.start("bootstrap", "--json")
        assert seed.stdout is not None
        self.addresses = json.loads(seed.stdout.readline())["maddrs"]

    def start(self, command: str, *flags: str) -> subprocess.Popen[str]:
        through = ["--initial-peers", *self.addresses, "--run-id", self.run] if self.addresses else []
        clean = {name: value for name, value in os.environ.items() if not name.startswith("P2P_DILOCO_")}
        process = subprocess.Popen(
            [*P2P_DILOCO, command, *through, *flags],
            env=clean, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def end(self) -> None:
        for process in reversed(self.processes):
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[Swarm]:
    swarm = Swarm()
    yield swarm
    swarm.end()


@pytest.fixture
def swarm(bootstrap: Swarm, request: pytest.FixtureRequest) -> Iterator[Swarm]:
    bootstrap.run = request.node.name
    yield bootstrap
    for process in bootstrap.processes[:0:-1]:
        process.kill()
        process.communicate()
    del bootstrap.processes[1:]


def seen_until(looks: subprocess.Popen[str], enough: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first look at the run that shows enough."""
    assert looks.stdout is not None
    for line in looks.stdout:
        seen: dict[str, Any] = json.loads(line)
        if enough(seen):
            return seen
    raise AssertionError(looks.communicate()[1])


def ready(seen: dict[str, Any]) -> set[str]:
    """The names of the peers that hold the run's state."""
    return {peer["name"] for peer in seen["peers"] if peer["epoch"] is not None}


def test_a_run_from_its_founding_to_its_end(swarm: Swarm) -> None:
    """A founder, an aggregator without a model and a trainer that needs one flag end together, with code 0;
    status shows the run."""
    founder = swarm.start(
        "join", "--name", "founder", "--sync-every", "5", "--stop-after-epochs", "10", "--pause-s", "0.3",
        "--eval-batches", "0", "--start-peers", "2",
    )  # fmt: skip
    looks = swarm.start("status", "--json", "--interval", "0.5")
    seen_until(looks, lambda seen: ready(seen) == {"founder"})
    aggregator = swarm.start("join", "--role", "aggregator", "--name", "broad-shoulders")
    seen_until(looks, lambda seen: ready(seen) == {"founder", "broad-shoulders"})  # no round is made without a trainer
    trainer = swarm.start("join", "--name", "one-flag", "--pause-s", "0.3", "--eval-batches", "0")
    everyone = {"founder", "broad-shoulders", "one-flag"}
    seen = seen_until(looks, lambda seen: seen["run"]["epoch"] >= 1 and ready(seen) == everyone)
    assert seen["run"]["config"]["sync_every"] == 5
    assert {peer["name"]: peer["role"] for peer in seen["peers"]}["broad-shoulders"] == "aggregator"
    seen_until(looks, lambda seen: any(peer["ways"] and peer["ways"]["direct"] for peer in seen["peers"]))
    for peer in (founder, aggregator, trainer):
        _, err = peer.communicate(timeout=120)
        assert peer.returncode == 0, err


def test_a_command_that_sets_up_no_logging_shows_ours(swarm: Swarm) -> None:
    """`join -- python examples/minimal.py` logs from INFO on to stderr, and nothing says that it didn't join. It ends
    before its second exchange is due, and its last steps are exchanged."""
    example = str(Path(__file__).parents[2] / "examples" / "minimal.py")
    peer = swarm.start("join", "--sync-every", "400", "--exit-timeout", "5", "--", sys.executable, example)
    _, err = peer.communicate(timeout=120)
    assert peer.returncode == 0, err
    assert "INFO p2p_diloco.node.joining: founded the run" in err
    assert "INFO p2p_diloco: leaving: a last exchange for this peer's 200 uncounted inner steps" in err
    assert "never joined" not in err
    assert "in no commit" not in err


def test_an_aggregator_gives_up_waiting_for_a_founder(swarm: Swarm) -> None:
    """An aggregator can't found a run; it gives up after `--wait-timeout`."""
    alone = swarm.start("join", "--role", "aggregator", "--wait-timeout", "2")
    _, err = alone.communicate(timeout=60)
    assert alone.returncode == 7, err
    assert "--wait-timeout=2.0" in err


def test_interrupts_leave_cleanly(swarm: Swarm) -> None:
    """^C and SIGTERM end a trainer, an aggregator and a look with 130 and 143, and without a traceback."""
    trainer = swarm.start("join", "--found", "--pause-s", "0.1", "--eval-batches", "0", "--name", "t")
    aggregator = swarm.start("join", "--role", "aggregator", "--name", "a")
    looks = swarm.start("status", "--json", "--interval", "0.5")
    seen_until(looks, lambda seen: ready(seen) == {"a", "t"})
    for process, number, code in ((aggregator, 2, 130), (trainer, 15, 143), (looks, 15, 143)):
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert process.returncode == code, err
        assert "Traceback" not in err
