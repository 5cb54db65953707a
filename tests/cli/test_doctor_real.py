"""`doctor` with real peers, on loopback."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from p2p_diloco.cli.doctor.examination import examine
from p2p_diloco.cli.doctor.report import Report
from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.net.certificates import RunKey
from p2p_diloco.net.invitation import Invitation
from tests.cli.test_bootstrap import running

pytestmark = pytest.mark.real
PATIENT = """
import sys
from p2p_diloco.cli import main
from p2p_diloco.cli.doctor import examination, machine
examination.LIMIT_S, examination.DAEMON_START_S, machine.START_S = 50.0, 20.0, 20.0
examination.SMALL_S = float(sys.argv[1])
main(sys.argv[2:])
"""
"""The command line with longer deadlines, because a busy machine is no fault here."""
LIMIT_S = 80.0


def doctor(*flags: str, small_s: float = 10.0) -> tuple[int, dict[str, Any], str]:
    """The exit code, report and stderr of a doctor with these flags. `small_s`: its patience with a small answer."""
    command = [sys.executable, "-c", PATIENT, str(small_s), "doctor", "--json", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.stdout, ended.stderr
    return ended.returncode, json.loads(ended.stdout), ended.stderr


def wrong(report: dict[str, Any]) -> dict[str, dict[str, str]]:
    """The findings that aren't ok, by name."""
    return {each["name"]: each for each in report["findings"] if each["verdict"] != "ok"}


@pytest.fixture(scope="module")
def seed() -> Iterator[str]:
    """The address of a bootstrap on loopback."""
    with running() as (_, printed):
        yield printed["maddrs"][0]


def test_all_is_well_on_loopback(seed: str, tmp_path: Path) -> None:
    """Every check is made, nothing is wrong, the link is measured, and stderr has one line of progress alone."""
    code, report, err = doctor("--initial-peers", seed, "--params", "1k", "--checkpoint-dir", str(tmp_path / "new"))
    assert (code, wrong(report), report["well"]) == (0, {}, True)
    names = [each["name"] for each in report["findings"]]
    assert names == [
        "versions", "p2pd", "memory", "disk", "port", "initial peer", "clock", "transfer", "reachable",
    ]  # fmt: skip
    (link,) = report["links"]
    assert (link["name"], link["rtt_s"] > 0, link["rate"] > 0) == ("initial peer", True, True)
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
    place, _, peer = seed.rpartition("/p2p/")
    _, report, _ = doctor("--initial-peers", f"{place}/p2p/12D3KooWGrk7pQsQ8dDR8yu8vUuL1tCiBGHBvCVbx8fyR3zdYpuv")
    assert f"use {place}/p2p/{peer}" in wrong(report)["initial peer"]["mend"], "another identity has its mend"


def test_a_bootstrap_that_hangs_is_told() -> None:
    """Its daemon still takes connections, but its process stands still: the report says so and ends."""
    with running() as (process, printed):
        process.send_signal(signal.SIGSTOP)
        try:
            code, report, _ = doctor("--initial-peers", printed["maddrs"][0], small_s=2.0)
        finally:
            process.send_signal(signal.SIGCONT)
    assert code == 1
    assert "its process hangs" in wrong(report)["initial peer"]["text"]
    assert "start the bootstrap again" in wrong(report)["initial peer"]["mend"]


@pytest.mark.parametrize("private", [False, True])
def test_a_peer_of_the_run_is_visited(private: bool) -> None:
    """It is in the run's records. Payloads go directly if it takes direct connections; members of a private run let
    doctor try none, so it says nothing of these."""
    from p2p_diloco.net.dht import DhtPeer
    from p2p_diloco.net.hivemind import HivemindTransport
    from p2p_diloco.node.records import BOARD
    from p2p_diloco.node.status import PeerStatus
    from tests.net.memory import DeafInbox

    key = RunKey.create()
    granted, own = key.grant("worker", "doctor", time.time() + 3600)
    invitation = Invitation("r", (), granted, own, key.secret) if private else None

    async def look() -> tuple[Report, str]:
        seed = await DhtPeer.create(PeerConfig())
        there = PeerConfig(run_id="r", initial_peers=seed.daemon.addresses)
        alice = await HivemindTransport.create(DeafInbox(), there, invitation=invitation)
        try:
            status = PeerStatus(
                name="alice", peer_id=alice.peer_id, time=time.time(), addresses=(alice.addresses()[0],)
            )
            assert await alice.store(BOARD.key("r", alice.peer_id), alice.peer_id, status.pack(), 30.0)
            invite = None if invitation is None else invitation.line()
            peer = PeerConfig(run_id="r", initial_peers=tuple(seed.daemon.addresses), invite=invite)
            return await examine(RunConfig(), peer, limit_s=40.0), alice.peer_id
        finally:
            await alice.close()
            await seed.close()

    report, alice = asyncio.run(asyncio.wait_for(look(), LIMIT_S))
    link = next(link for link in report.links if link.address.endswith(alice))
    assert (link.name, link.way) == ("alice", None if private else "direct")
    assert private or link.rate is not None
    verdicts = {name: found.verdict for name, found in report.findings}
    assert (verdicts["peers"], verdicts.get("direct")) == ("ok", None if private else "ok")
