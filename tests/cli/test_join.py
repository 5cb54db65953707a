"""A run as its users start, watch, change and end it; and a script of one's own under `join`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

import pytest

from p2p_diloco.net.certificates import RunKey
from p2p_diloco.net.invited import write_files

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(360)]

ROOT = Path(__file__).parents[2]
WHOLE, LIGHT = "p2p_diloco", "tests.light"
"""The program, and the same in an install without torch."""


class Commands:
    """Commands on one swarm: a bootstrap runs, all others join through it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._processes = folder, list[subprocess.Popen[str]]()
        self.to: list[str] = []
        seed = self.start("bootstrap", "--json", by=LIGHT)
        assert seed.stdout is not None
        self.to = ["--initial-peers", *json.loads(seed.stdout.readline())["maddrs"]]

    def start(self, command: str, *flags: str, by: str = WHOLE) -> subprocess.Popen[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("P2P_DILOCO_")}
        process = subprocess.Popen(
            [sys.executable, "-m", by, command, *self.to, *flags],
            cwd=self.folder, env={**clean, "PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._processes.append(process)
        return process

    def told(self, command: str, *flags: str) -> str:
        """What a command without torch prints, which must end well."""
        process = self.start(command, *flags, by=LIGHT)
        out, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
        return out

    def end(self) -> None:
        for process in reversed(self._processes):
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    made = Commands(tmp_path_factory.mktemp("commands"))
    try:
        yield made
    finally:
        made.end()


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


def ended(process: subprocess.Popen[str], code: int) -> tuple[str, str]:
    """What a command printed and said that ends with this exit code."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    assert "Traceback" not in err
    return out, err


def shows(dashboard: subprocess.Popen[str], name: str) -> None:
    """Wait until the dashboard's page names a peer, for a browser that follows the link; without it there is nothing.
    While the browser is still connected, ^C ends the dashboard."""
    assert dashboard.stdout is not None
    link = dashboard.stdout.readline().strip()
    root = link.partition("?")[0]
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(root, timeout=20.0)
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
    page, give_up_at = "", time.monotonic() + 60.0
    while name not in page:
        assert time.monotonic() < give_up_at, page
        time.sleep(0.2)
        with browser.open(link, timeout=20.0) as answer:
            page = answer.read().decode()
        link = root
    with browser.open(f"{root}events", timeout=20.0) as events:
        assert events.readline() == b"event: all\n"
        dashboard.send_signal(2)
        ended(dashboard, 130)


def test_a_run_from_its_founding_to_its_end(commands: Commands) -> None:
    """A founder, an aggregator without a model and a trainer that needs one flag. An install without torch serves the
    bootstrap and shows, changes and stops the run. Interrupts end an aggregator and a look with 130 and 143, and the
    run goes on; its end ends the others together, with code 0."""
    identity = ("--identity-path", str(commands.folder / "identity"))
    founder = commands.start(
        "join", "--name", "founder", "--sync-every", "2", "--pause-s", "0.3", "--eval-batches", "0",
        "--start-peers", "2", *identity,
    )  # fmt: skip
    looks = commands.start("status", "--json", "--interval", "0.5", by=LIGHT)
    aggregator = commands.start("join", "--role", "aggregator", "--name", "broad-shoulders")
    trainer = commands.start("join", "--name", "one-flag", "--pause-s", "0.3", "--eval-batches", "0")
    everyone = {"founder", "broad-shoulders", "one-flag"}
    seen = seen_until(looks, lambda seen: seen["run"]["epoch"] >= 1 and ready(seen) == everyone)
    assert seen["run"]["config"]["sync_every"] == 2
    assert {peer["name"]: peer["role"] for peer in seen["peers"]}["broad-shoulders"] == "aggregator"
    seen_until(looks, lambda seen: any(peer["ways"] and peer["ways"]["direct"] for peer in seen["peers"]))
    for process, number, code in ((aggregator, 2, 130), (looks, 15, 143)):
        process.send_signal(number)
        ended(process, code)

    shows(commands.start("dashboard", "--port", "0", by=LIGHT), "one-flag")
    assert json.loads(commands.told("set", "--outer-lr", "0.5", "--json", *identity))["outer_lr"] == 0.5
    assert json.loads(commands.told("stop", "--json", *identity))["stop_after_epochs"] > 1
    for process in (founder, trainer):
        ended(process, 0)


def test_invitations_need_no_torch(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the run key, in an install without torch."""
    monkeypatch.chdir(commands.folder)
    _, *addresses = commands.to
    write_files("private", RunKey.create(), addresses)
    with monkeypatch.context() as alone:
        alone.setattr(commands, "to", [])
        assert "--invite carol.invite" in commands.told("invite", "--name", "carol")
        commands.told("revoke", "carol", "--initial-peers", *addresses)


def test_a_command_that_sets_up_no_logging_shows_ours(commands: Commands) -> None:
    """`join -- python examples/minimal.py` logs from INFO on to stderr, and nothing says that it didn't join. It
    learns, ends before its second exchange is due, and its last steps are exchanged."""
    example = str(ROOT / "examples" / "minimal.py")
    peer = commands.start(
        "join", "--run-id", "minimal", "--sync-every", "400", "--exit-timeout", "5", "--", sys.executable, example
    )
    out, err = ended(peer, 0)
    loss = float(out.removeprefix("loss of the global parameters: "))
    assert loss < 0.02, "the landscape's own variance is about 0.3"
    assert "INFO p2p_diloco.node.joining: founded the run" in err
    assert "INFO p2p_diloco: leaving: a last exchange for this peer's 200 uncounted inner steps" in err
    assert "never joined" not in err
    assert "in no commit" not in err
