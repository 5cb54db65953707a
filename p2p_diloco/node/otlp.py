"""Sends this peer's metrics to an OpenTelemetry endpoint, over OTLP and HTTP: the same ones that Prometheus can fetch.

Law: sends what the Prometheus collectors of `node.metrics` make, under the same names, and nothing else. Only this
module imports OpenTelemetry, which is an extra. An endpoint that doesn't answer is logged, and harms nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

from prometheus_client.registry import Collector

from p2p_diloco import __version__
from p2p_diloco.errors import ConfigError

try:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import export as sdk
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
except ImportError as error:
    mend = "run `pip install 'p2p-diloco[otlp]'`"
    raise ConfigError(f"needs OpenTelemetry: {error}", key="otlp_endpoint", mend=mend) from error

EVERY_S = 10.0
"""Seconds between two exports."""
LAST_S = 1.0
"""Seconds that the end of the block waits for the last export, and again for the thread after the exporter was shut
down: an endpoint that doesn't answer delays a leaving peer by no more."""
WHY_LETTERS_MAX = 300
PATH = "/v1/metrics"
"""The path to which metrics are sent if the endpoint's URL has none."""

log = logging.getLogger(__name__)


@contextlib.contextmanager
def exported(endpoint: str, *collectors: Collector) -> Iterator[None]:
    """Within the block, export every `EVERY_S` seconds what `collectors` make, and once more at the block's end.
    `endpoint`: a URL such as http://collector:4318."""
    url = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + PATH
    exporter, over, began = OTLPMetricExporter(endpoint=url), threading.Event(), time.time_ns()
    whys: list[str] = []

    def export() -> None:
        ended, failed = False, False
        while not ended:
            ended = over.wait(EVERY_S)
            whys[:] = []
            done = exporter.export(metrics_data(collectors, began, time.time_ns())) is sdk.MetricExportResult.SUCCESS
            if not done and not failed:
                log.warning(
                    "%s takes no metrics now; this peer will try again: %s", url, " ".join(whys)[:WHY_LETTERS_MAX]
                )
            elif done and failed:
                log.info("%s takes metrics again", url)
            failed = not done

    def note(record: logging.LogRecord) -> bool:
        """Keep the exporter's messages as the reason why an export failed, and keep them out of the log."""
        whys.append(record.getMessage())
        return False

    thread = threading.Thread(target=export, name="otlp", daemon=True)
    thread.start()
    log.info("metrics go to %s", url)
    theirs = logging.getLogger(OTLPMetricExporter.__module__)
    theirs.addFilter(note)
    try:
        yield
    finally:
        over.set()
        thread.join(LAST_S)
        exporter.shutdown()
        thread.join(LAST_S)
        theirs.removeFilter(note)


def metrics_data(collectors: tuple[Collector, ...], began_ns: int, now_ns: int) -> sdk.MetricsData:
    """What the collectors make now, in OpenTelemetry's form: gauges stay gauges, counters become cumulative sums."""
    metrics = []
    for family in (family for collector in collectors for family in collector.collect()):
        points = [
            sdk.NumberDataPoint(dict(sample.labels), began_ns, now_ns, float(sample.value)) for sample in family.samples
        ]
        data = (
            sdk.Sum(points, sdk.AggregationTemporality.CUMULATIVE, True)
            if family.type == "counter"
            else sdk.Gauge(points)
        )
        metrics.append(sdk.Metric(family.samples[0].name, family.documentation, "", data))
    scope = InstrumentationScope("p2p_diloco", __version__)
    resource = Resource.create({"service.name": "p2p_diloco"})
    return sdk.MetricsData([sdk.ResourceMetrics(resource, [sdk.ScopeMetrics(scope, metrics, "")], "")])
