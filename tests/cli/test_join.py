"""`join` as a user starts it: a run from its founding to its end, and a script of one's own."""

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

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts commands; those after a bootstrap join through it."""
    processes: list[subprocess.Popen[str]] = []
    clean = {name: value for name, value in os.environ.items() if not name.startswith("P2P_DILOCO_")}
    addresses: list[str] = []

    def begin(command: str, *flags: str) -> subprocess.Popen[str]:
        through = ["--initial-peers", *addresses] if addresses else []
        process = subprocess.Popen(
            [sys.executable, "-m", "p2p_diloco", command, *through, *flags],
            env=clean, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        processes.append(process)
        return process

    seed = begin("bootstrap", "--json")
    assert seed.stdout is not None
    addresses += json.loads(seed.stdout.readline())["maddrs"]
    yield begin
    for process in reversed(processes):
        process.kill()
        process.communicate()


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


def ended(process: subprocess.Popen[str], code: int) -> str:
    """What a command said that ends with this exit code."""
    _, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    assert "Traceback" not in err
    return err


def test_a_run_from_its_founding_to_its_end(start: Start) -> None:
    """A founder, an aggregator without a model and a trainer that needs one flag; status shows the run. Interrupts end
    an aggregator and a look with 130 and 143, and the run goes on; its end ends the others together, with code 0."""
    founder = start(
        "join", "--name", "founder", "--sync-every", "5", "--stop-after-epochs", "12", "--pause-s", "0.2",
        "--eval-batches", "0", "--start-peers", "2",
    )  # fmt: skip
    looks = start("status", "--json", "--interval", "0.5")
    aggregator = start("join", "--role", "aggregator", "--name", "broad-shoulders")
    seen_until(looks, lambda seen: ready(seen) == {"founder", "broad-shoulders"})  # no round is made without a trainer
    trainer = start("join", "--name", "one-flag", "--pause-s", "0.2", "--eval-batches", "0")
    everyone = {"founder", "broad-shoulders", "one-flag"}
    seen = seen_until(looks, lambda seen: seen["run"]["epoch"] >= 1 and ready(seen) == everyone)
    assert seen["run"]["config"]["sync_every"] == 5
    assert {peer["name"]: peer["role"] for peer in seen["peers"]}["broad-shoulders"] == "aggregator"
    seen_until(looks, lambda seen: any(peer["ways"] and peer["ways"]["direct"] for peer in seen["peers"]))
    for process, number, code in ((aggregator, 2, 130), (looks, 15, 143)):
        process.send_signal(number)
        ended(process, code)
    for process in (founder, trainer):
        ended(process, 0)


def test_a_command_that_sets_up_no_logging_shows_ours(start: Start) -> None:
    """`join -- python examples/minimal.py` logs from INFO on to stderr, and nothing says that it didn't join. It ends
    before its second exchange is due, and its last steps are exchanged."""
    example = str(Path(__file__).parents[2] / "examples" / "minimal.py")
    peer = start("join", "--sync-every", "400", "--exit-timeout", "5", "--", sys.executable, example)
    err = ended(peer, 0)
    assert "INFO p2p_diloco.node.joining: founded the run" in err
    assert "INFO p2p_diloco: leaving: a last exchange for this peer's 200 uncounted inner steps" in err
    assert "never joined" not in err
    assert "in no commit" not in err
