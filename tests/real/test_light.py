"""A bootstrap and the commands of a founder, installed without torch, beside a run whose peers have it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from http.cookiejar import CookieJar
from pathlib import Path

import pytest
from swarm import ROOT, Swarm, until

from p2p_diloco.net.certificates import RunKey
from p2p_diloco.net.invited import write_files
from p2p_diloco.node.curves import LOOK_EVERY_S

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(400)]

CONFIG = {"sync_every": 4, "heartbeat_interval": 0.5, "heartbeat_timeout": 30.0, "start_peers": 2}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tests.light", *arguments]


def told(*arguments: str, folder: Path = ROOT) -> str:
    """What a command prints, which must end well."""
    environment = {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(folder)}
    done = subprocess.run(command(*arguments), cwd=folder, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def pages(link: str) -> Callable[[], str]:
    """Follow the dashboard's link as a browser does. Returns the function that gets its page anew."""
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))

    def page(at: str) -> str:
        with browser.open(at, timeout=20.0) as answer:
            return str(answer.read().decode())

    page(link)
    return lambda: page(link.partition("?")[0])


def test_a_run_is_served_watched_changed_and_stopped_without_torch(
    swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its peers meet through the small bootstrap. Every command works in an install that has no torch."""
    seed = swarm.launch("bootstrap", command("bootstrap", "--json")[1:], fresh=True)
    until(lambda: bool(seed.said), 60.0, lambda: f"its addresses: {seed.log()}")
    swarm.addresses = seed.said[0]["maddrs"]
    to = ("--initial-peers", *swarm.addresses)
    identity = str(tmp_path / "identity")
    kept = {"identity_path": identity, "checkpoint_dir": str(tmp_path / "kept")}
    training = {"step_s": 0.05, "samples": 8, "loss": 2.125}
    peers = [swarm.start("alice", config=CONFIG, local=kept, **training), swarm.start("bob", **training)]
    for peer in peers:
        peer.epoch(2)
    second = peers[0].epoch(2)["time"]
    peers[0].wait_for("epoch", that=lambda line: line["time"] > second + 2 * LOOK_EVERY_S)

    seen = json.loads(told("status", "--once", "--json", "--run-id", "test", *to))
    assert {peer["name"] for peer in seen["peers"]} == {"alice", "bob"}
    assert "alice" in told("status", "--once", "--run-id", "test", *to)
    assert told("status", "--check", "--run-id", "test", *to) == ""

    began = time.time()
    (tmp_path / "out").touch()
    with (tmp_path / "out").open("w") as out:
        dashboard = subprocess.Popen(
            command("dashboard", "--port", "0", "--run-id", "test", *to), cwd=ROOT, stdout=out, stderr=out
        )
    try:
        links = lambda: [word for word in (tmp_path / "out").read_text().split() if "?token=" in word]  # noqa: E731
        until(lambda: bool(links()), 60.0, lambda: (tmp_path / "out").read_text())
        page = pages(links()[0])
        until(lambda: "alice" in page(), 60.0, "a page that shows alice")
        (known,) = re.findall(r'<script type="application/json" id="known"[^>]*>(.*)</script>', page())
        earlier = [list for list in json.loads(known)["curves"]["points"].values() if list[0][0] < began - LOOK_EVERY_S]
        assert earlier, "no losses of the time before the dashboard was opened"
        assert {point[3] for list in earlier for point in list} == {2.125}
    finally:
        dashboard.terminate()
        dashboard.wait(20.0)

    asking = ("--run-id", "test", "--identity-path", identity, "--json", *to)
    assert json.loads(told("set", "--outer-lr", "0.5", *asking))["outer_lr"] == 0.5
    assert json.loads(told("save", *asking))["saved_by"] == ["alice"]

    monkeypatch.chdir(tmp_path)
    write_files("private", RunKey.create(), swarm.addresses)
    assert "--invite carol.invite" in told("invite", "--name", "carol", folder=tmp_path)
    told("revoke", "carol", *to, folder=tmp_path)

    assert json.loads(told("stop", *asking))["stop_after_epochs"] > 2
    assert [peer.status(120.0) for peer in peers] == [0, 0]
