"""Metrics over OTLP: what OpenTelemetry's exporter is given to send."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from typing import Any

import pytest

from tests.node.conftest import entered

pytest.importorskip("opentelemetry.proto", reason="the extra otlp is not installed")

from opentelemetry.sdk.metrics.export import MetricExportResult, Sum

from p2p_diloco.config import PeerConfig
from p2p_diloco.errors import ConfigError
from p2p_diloco.node import otlp
from p2p_diloco.node.metrics import LABELS, PREFIX, PeersCollector, told
from tests.net.patience import awaited
from tests.node.test_metrics import FULL, scraped, values


class Sent:
    """What goes to a collector, and where."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.endpoints, self.batches = list[str](), list[Any]()

        def export(exporter: Any, batch: Any, **_: Any) -> MetricExportResult:
            self.endpoints.append(exporter._endpoint)
            self.batches.append(batch)
            return MetricExportResult.SUCCESS

        monkeypatch.setattr(otlp.OTLPMetricExporter, "export", export)

    def values(self) -> dict[tuple[str, str], float]:
        """The newest values, by name and the further label's value."""
        (resource,) = self.batches[-1].resource_metrics
        assert resource.resource.attributes["service.name"] == "p2p_diloco"
        found = {}
        for metric in resource.scope_metrics[0].metrics:
            assert isinstance(metric.data, Sum) == metric.name.endswith("_total")
            assert getattr(metric.data, "is_monotonic", True)
            for point in metric.data.data_points:
                (further,) = [value for label, value in point.attributes.items() if label not in LABELS] or [""]
                found[metric.name.removeprefix(PREFIX), further] = point.value
        return found


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    return Sent(monkeypatch)


@pytest.mark.parametrize(("given", "path"), [("", "/v1/metrics"), ("/", "/v1/metrics"), ("/own/path", "/own/path")])
def test_a_collector_gets_what_prometheus_gets(sent: Sent, given: str, path: str) -> None:
    """The same names, labels and values; at the end of a short program, too. An endpoint without a path gets OTLP's."""
    with told(None, f"http://127.0.0.1:1{given}", PeersCollector("main", lambda: [FULL])):
        pass
    assert sent.endpoints == [f"http://127.0.0.1:1{path}"]
    assert sent.values() == values(scraped(FULL))


def test_a_mute_collector_delays_nobody(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end comes soon. The log has one line with the reason, however often it fails, and one when it works again."""
    monkeypatch.setattr(otlp, "EVERY_S", 0.05)
    results = [MetricExportResult.FAILURE, MetricExportResult.FAILURE, MetricExportResult.SUCCESS]
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    began = time.monotonic()
    caplog.set_level(logging.INFO)
    with otlp.exported(f"http://127.0.0.1:{port}", PeersCollector("main", lambda: [FULL])):
        time.sleep(0.2)
    assert time.monotonic() - began < 2 * otlp.LAST_S + 3.0
    (why,) = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert why.startswith(f"http://127.0.0.1:{port}/v1/metrics takes no metrics now; this peer will try again: ")
    assert "Connection refused" in why
    caplog.clear()
    monkeypatch.setattr(
        otlp.OTLPMetricExporter, "export", lambda *_: results.pop(0) if len(results) > 1 else results[0]
    )
    with otlp.exported(f"http://127.0.0.1:{port}"):
        while len(results) > 1:
            time.sleep(0.02)
    assert sum("takes no metrics" in record.message for record in caplog.records) == 1
    assert sum("takes metrics again" in record.message for record in caplog.records) == 1


def test_without_the_extra_the_mend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "p2p_diloco.node.otlp")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.metric_exporter", None)
    wanted = pytest.raises(ConfigError, match=r"otlp_endpoint.*pip install 'p2p-diloco\[otlp\]'")
    with wanted, told(None, "http://127.0.0.1:1"):
        pass


@pytest.mark.parametrize("wrong", ["127.0.0.1:4318", "grpc://x", "http://"])
def test_an_endpoint_is_a_url(wrong: str) -> None:
    with pytest.raises(ConfigError, match="otlp_endpoint"):
        PeerConfig(otlp_endpoint=wrong)


@awaited
async def test_a_peer_sends_while_it_lives(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own status, again and again, if `otlp_endpoint` names a collector."""
    monkeypatch.setattr(otlp, "EVERY_S", 0.05)
    (peer,) = await entered("a", otlp_endpoint="http://127.0.0.1:1")
    await peer.exchange(1.0)
    while not sent.batches or sent.values().get(("epoch", "")) != 1.0:
        await asyncio.sleep(0.05)
    await peer.stop()
