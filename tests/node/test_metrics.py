"""Metrics for Prometheus: every field that has a value, under documented names, at an address of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import socket
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from p2p_diloco.errors import ConfigError
from p2p_diloco.node.metrics import LABELS, METRICS, PREFIX, STATES, PeersCollector, served
from p2p_diloco.node.status import Deaths, LastRound, PeerStatus, Submissions, Ways
from p2p_diloco.observe.baseline import METRICS as RUN_METRICS
from tests.net.patience import awaited
from tests.node.conftest import entered

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "bootstrap" / "prometheus"
FULL = PeerStatus(
    name="alice", peer_id="id-alice", state="training", time=1000.0, epoch=12, step=6100, steps_per_second=3.5,
    loss=2.25, held_out_loss=2.75, samples=48800, counted_samples=97600, bytes_sent=1000,
    bytes_received=2000, revision=1, outer_lr=0.5,
    outer_momentum=0.8, waiting_s=12.5, memory_bytes=810_000_000,
    last_round=LastRound(9.0, 0.2, 0.4, 0.3, 0.08, 0.02, 0.3333, 90.0),
    bandwidth=11_900_000, ways=Ways(2, 1, 0), aggregates=(0, 2), aggregates_count=2, sync_every=500,
    submissions=Submissions(9, 1, (4, 0, 5)), deaths=Deaths(2, 1, 0),
)  # fmt: skip


def scraped(*peers: PeerStatus) -> str:
    with served("127.0.0.1", 0, PeersCollector("main", lambda: peers)) as port:
        return at(port)


def at(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10.0) as answer:
        return str(answer.read().decode())


def values(text: str) -> dict[tuple[str, str], float]:
    """By name and the further label's value."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert [sample.labels[label] for label in ("run", "peer", "peer_id")] == ["main", "alice", "id-alice"]
            (further,) = [value for label, value in sample.labels.items() if label not in LABELS] or [""]
            found[sample.name.removeprefix(PREFIX), further] = sample.value
    return found


def test_each_value_of_the_status_is_told() -> None:
    found = values(scraped(FULL))
    assert {name for name, _ in found} == {told.name for told in METRICS}
    assert found["epoch", ""] == 12
    assert found["inner_steps_total", ""] == 6100
    assert found["waiting_seconds_total", ""] == 12.5
    assert found["last_round_seconds", "transfer"] == 0.3
    assert found["reached_peers", "libp2p"] == 1
    assert found["submissions_total", "counted"] == 9
    assert [found["deaths_total", cause] for cause in ("trainer", "node", "silent")] == [2, 1, 0]
    assert {state: found["state", state] for state in STATES} == {state: float(state == "training") for state in STATES}


def test_what_is_unknown_is_left_out() -> None:
    """A peer that has just started has no loss and no epoch; 0 would be wrong."""
    found = values(scraped(PeerStatus(name="alice", peer_id="id-alice", state="joining", time=1.0)))
    assert {name for name, _ in found} == {"state", "aggregated_slices", "record_timestamp_seconds"}


def test_every_metric_is_documented() -> None:
    """By its name, type and label, as they are served."""
    rows = re.findall(
        r"^\| `(\w+)` \| (\w+) \| `?(\w*)`? \| (.*) \|$", (ROOT / "docs" / "metrics.md").read_text(), re.M
    )
    kinds = {True: "counter", False: "gauge"}
    told = [(PREFIX + t.name, kinds[t.name.endswith("_total")], t.by or "", t.help) for t in METRICS]
    told += [(PREFIX + name, "gauge", "", meaning) for name, meaning, _ in RUN_METRICS]
    assert rows == told


@pytest.mark.parametrize("name", ["alerts.yml", "board.json"])
def test_rules_and_board_use_metrics_that_exist(name: str) -> None:
    used = set(re.findall(rf"{PREFIX}\w+", (PROMETHEUS / name).read_text()))
    assert used
    assert used <= {PREFIX + name for name in (*(told.name for told in METRICS), *(name for name, *_ in RUN_METRICS))}
    if name.endswith("json"):
        assert json.loads((PROMETHEUS / name).read_text())["panels"]


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="metrics_port") as raised, served("127.0.0.1", port):
            pass
    assert str(port) in str(raised.value)


@pytest.mark.parametrize(
    ("host", "named", "status"),
    [
        ("127.0.0.1", "127.0.0.1:9464", 200),
        ("127.0.0.1", "localhost:9464", 200),
        ("127.0.0.1", socket.gethostname(), 200),
        ("127.0.0.1", "evil.example", 403),
        ("127.0.0.1", "", 403),
        ("0.0.0.0", "gpu-7.example:9464", 200),  # other machines may name this one as their DNS does
    ],
)
def test_another_site_s_name_for_this_machine_gets_no_answer(host: str, named: str, status: int) -> None:
    """A page in the user's browser, whose name's DNS points here, would read the metrics."""
    with served(host, 0, PeersCollector("main", lambda: [FULL])) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10.0)
        with contextlib.closing(connection):
            connection.request("GET", "/metrics", headers={"Host": named})
            assert connection.getresponse().status == status


@awaited
async def test_a_peer_answers_while_it_lives() -> None:
    """With the values of its own status; after it has left, the port is free again."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (peer,) = await entered("a", metrics_port=port)
    await peer.exchange(1.0)
    while f'{PREFIX}epoch{{peer="a",peer_id="a",run="r"}} 1.0' not in await asyncio.to_thread(at, port):
        await asyncio.sleep(0.05)
    await peer.stop()
    socket.create_server(("127.0.0.1", port)).close()
