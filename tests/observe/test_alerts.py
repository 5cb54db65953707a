"""The alert rules in a real Prometheus, which scrapes what `status --metrics-port` serves."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from p2p_diloco.node.metrics import PeersCollector, served
from p2p_diloco.node.status import PeerStatus
from p2p_diloco.observe.baseline import Baseline
from p2p_diloco.observe.run_metrics import RunCollector
from p2p_diloco.observe.snapshot import Snapshot, snapshot

RULES = Path(__file__).parents[2] / "bootstrap" / "prometheus" / "alerts.yml"
MINUTE_MS = 150
"""The length of a minute in the rules of this test, so that half an hour is over soon."""


def faster(rules: str) -> str:
    """The rules with a shorter minute."""
    minutes = {"m": 1, "h": 60}
    return re.sub(r"\b(\d+)([mh])\b", lambda found: f"{int(found[1]) * minutes[found[2]] * MINUTE_MS}ms", rules)


@contextlib.contextmanager
def prometheus(folder: Path, scraped: int) -> Iterator[str]:
    """Within the block, the address of a Prometheus with our rules that scrapes this port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (folder / "alerts.yml").write_text(faster(RULES.read_text()))
    every = {"scrape_interval": f"{MINUTE_MS}ms", "scrape_timeout": f"{MINUTE_MS}ms", "evaluation_interval": "100ms"}
    jobs = [{"job_name": "p2p-diloco", "static_configs": [{"targets": [f"127.0.0.1:{scraped}"]}]}]
    settings = {"global": every, "scrape_configs": jobs, "rule_files": ["alerts.yml"]}
    (folder / "prometheus.yml").write_text(json.dumps(settings))  # JSON is YAML
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb",
               f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(20.0)


def firing(address: str) -> set[str]:
    """The alerts that fire now."""
    try:
        with urllib.request.urlopen(f"{address}/api/v1/alerts", timeout=5.0) as answer:
            alerts = json.load(answer)["data"]["alerts"]
    except (urllib.error.URLError, ConnectionError):  # it has not begun to listen
        return set()
    return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed (Debian: prometheus)")
def test_a_real_prometheus_raises_the_alerts(tmp_path: Path) -> None:
    """None while a run goes well; then for a dead peer, a run that stands still, and a loss 6 % above its baseline."""
    (tmp_path / "baseline.csv").write_text("samples,loss\n0,2.0\n1000000,2.0\n")
    baseline = Baseline.read(tmp_path / "baseline.csv")
    alice = PeerStatus(name="alice", peer_id="a", state="training", loss=2.0, waiting_s=0.0)
    began, newest = time.monotonic(), list[Snapshot]()

    def look(*, well: bool, epoch: int) -> None:
        peers = [replace(alice, peer_id=id, time=time.time(), epoch=epoch, counted_samples=1000 * epoch,
                         loss=2.0 if well else 2.12) for id in ("abc" if well else "ab")]  # fmt: skip
        newest[:] = [baseline.beside(snapshot("main", None, peers, time.time()))]

    def epoch() -> int:
        return int((time.monotonic() - began) / 0.3)

    def watch(*, well: bool, within_s: float, wanted: set[str]) -> set[str]:
        """The alerts that have fired until all wanted ones have, or the time is over."""
        told, until, stands_at = set[str](), time.monotonic() + within_s, epoch()
        while time.monotonic() < until and not (wanted and wanted <= told):
            look(well=well, epoch=epoch() if well else stands_at)
            told |= firing(address)
            time.sleep(0.05)
        return told

    look(well=True, epoch=0)
    peers = PeersCollector("main", lambda: newest[0].peers)
    run = RunCollector(lambda: newest[0])
    with served("127.0.0.1", 0, peers, run) as port, prometheus(tmp_path, port) as address:
        assert watch(well=True, within_s=40 * MINUTE_MS / 1000 + 4.0, wanted=set()) == set()
        wanted = {"PeerGone", "RunStalled", "LossAboveBaseline"}
        assert watch(well=False, within_s=60.0, wanted=wanted) >= wanted
