"""What `status` tells Prometheus of a run as a whole, beside the metrics of its peers: its loss beside a baseline.

Law: reads a `Snapshot` alone. Without a baseline there is nothing to tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from p2p_diloco.node.metrics import PREFIX
from p2p_diloco.observe.snapshot import Compared, Snapshot

RUN_METRICS: tuple[tuple[str, str, Callable[[Compared], float]], ...] = (
    ("baseline_loss", "The baseline's loss at the run's samples.", lambda one: one.baseline),
    ("baseline_excess_ratio", "The share by which the loss is above the baseline: 0.06 = 6 %.", lambda one: one.excess),
    ("baseline_exceeded", "1 while that share is more than --baseline-bound, else 0.", lambda one: float(one.above)),
)


class RunCollector(Collector):
    """Makes metrics of the newest snapshot at each scrape."""

    def __init__(self, seen: Callable[[], Snapshot | None]) -> None:
        """`seen` returns the newest snapshot. It is called in the HTTP server's thread."""
        self._seen = seen

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the comparison with the baseline, if there is one."""
        seen = self._seen()
        if seen is None or seen.run.compared is None:
            return
        for name, meaning, of in RUN_METRICS:
            family = GaugeMetricFamily(PREFIX + name, meaning, labels=["run"])
            family.add_metric([seen.run.run_id], of(seen.run.compared))
            yield family
