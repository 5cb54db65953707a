"""A baseline: the loss curve of another run, with which a run is compared at the same number of samples.

Law: reads its file once; changes no snapshot, but returns a copy with the comparison. A file is CSV with a header, or
JSON lines. Each row has `samples` or `tokens`, and `loss`, `held_out_loss` or both; other fields are ignored. The
output of `status --json` can be used, too: each line gives the samples and the losses of its run.
"""

from __future__ import annotations

import csv
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from p2p_diloco.errors import ConfigError, UsageError, reason
from p2p_diloco.node.metrics import PREFIX
from p2p_diloco.observe.plot import value_at
from p2p_diloco.observe.snapshot import Compared, RunEvent, RunStatus, Snapshot

BOUND = 0.05
"""The default bound: a loss that is above the baseline's by more than this share of it causes a warning."""
LOSSES = ("held_out_loss", "loss")
"""Which of a run's losses are compared: the first that the baseline and the run both have."""

Curve = Sequence[tuple[float, float]]
"""(samples, loss) points with rising samples; no two have the same samples."""

METRICS: tuple[tuple[str, str, Callable[[Compared], float]], ...] = (
    ("baseline_loss", "The baseline's loss at the run's samples.", lambda one: one.baseline),
    ("baseline_excess_ratio", "The share by which the loss is above the baseline: 0.06 = 6 %.", lambda one: one.excess),
    ("baseline_exceeded", "1 while that share is more than --baseline-bound, else 0.", lambda one: float(one.above)),
)

log = logging.getLogger(__name__)


class Baseline(Collector):
    """Compares snapshots of one run with a baseline, and tells Prometheus the newest comparison."""

    def __init__(self, curves: Mapping[str, Curve], bound: float = BOUND) -> None:
        """`curves`: by the name of the loss, each with at least one point. `bound`: as `BOUND`."""
        self._curves, self._bound = curves, bound
        self._above_since: float | None = None
        self._newest: RunStatus | None = None

    @classmethod
    def read(cls, path: Path, bound: float = BOUND, tokens_per_sample: float | None = None) -> Baseline:
        """Read the file `path`. `tokens_per_sample` is needed if the file has tokens instead of samples. Of several
        losses at the same samples the mean counts.

        Raises:
            ConfigError: the file can't be read, or has no baseline. UsageError: `bound` or `tokens_per_sample`
                can't be used.
        """
        if tokens_per_sample is not None and not 0 < tokens_per_sample < math.inf:
            mend = "give the tokens that your trainer reports as one sample"
            raise UsageError("must be more than 0", key="--tokens-per-sample", value=tokens_per_sample, mend=mend)
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            why = reason(error) if isinstance(error, OSError) else "it is no text"
            raise _unusable(path, f"can't be read: {why}") from error
        losses: dict[str, dict[float, list[float]]] = {name: {} for name in LOSSES}
        for line, row in _rows(path, text.splitlines()):
            keys = (key for key in ("samples", "tokens", *LOSSES) if row.get(key) not in (None, ""))
            told = {key: _number(path, line, key, row[key]) for key in keys}
            if "samples" not in told and "tokens" in told:
                if tokens_per_sample is None:
                    mend = "give --tokens-per-sample: the tokens of one sample"
                    raise ConfigError("has tokens, and a run counts samples", key="--baseline", value=path, mend=mend)
                told["samples"] = told["tokens"] / tokens_per_sample
            for name in LOSSES:
                if "samples" in told and name in told:
                    losses[name].setdefault(told["samples"], []).append(told[name])
        curves = {name: [(x, fmean(ys)) for x, ys in sorted(found.items())] for name, found in losses.items() if found}
        if not curves:
            raise _unusable(path, "has no line with samples or tokens and a loss")
        return cls(curves, bound)

    def beside(self, seen: Snapshot) -> Snapshot:
        """The snapshot with the comparison. While the loss exceeds the baseline's by more than the bound, one of its
        events tells since when."""
        compared = self._compared(seen.run)
        run = self._newest = replace(seen.run, compared=compared)
        if compared is None or not compared.above:
            self._above_since = None if compared else self._above_since  # without a comparison it may still be above
            return replace(seen, run=run)
        text = f"the {compared.told} is more than {self._bound * 100:.3g} % above the baseline's"
        if self._above_since is None:
            self._above_since = seen.time
            log.warning("run %s: %s: %.4f against %.4f", run.run_id, text, compared.loss, compared.baseline)
        event = RunEvent(self._above_since, "baseline", text)
        return replace(seen, run=replace(run, events=tuple(sorted((*run.events, event), key=lambda e: e.time))))

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the newest comparison, if there is one. Called in the HTTP server's thread."""
        if (run := self._newest) is None or run.compared is None:
            return
        for name, meaning, of in METRICS:
            family = GaugeMetricFamily(PREFIX + name, meaning, labels=["run"])
            family.add_metric([run.run_id], of(run.compared))
            yield family

    def _compared(self, run: RunStatus) -> Compared | None:
        for name in LOSSES:
            loss = getattr(run, name)
            if loss is None or run.samples is None or name not in self._curves:
                continue
            baseline = value_at(self._curves[name], run.samples)
            if baseline is not None:
                excess = round(loss / baseline - 1, 6)  # exactly 5 % is not more than 5 %
                return Compared(name, run.samples, loss, baseline, excess, self._bound, excess > self._bound)
        return None


def _rows(path: Path, lines: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield (line number, fields) for each row or object of the file; of a line of `status --json` its run's fields."""
    if not (lines and lines[0].lstrip().startswith("{")):
        yield from enumerate(csv.DictReader(lines, skipinitialspace=True), 2)
        return
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise _unusable(path, f"has no JSON object in line {number}")
        yield number, row["run"] if isinstance(row.get("run"), dict) else row


def _number(path: Path, line: int, key: str, value: object) -> float:
    """The value as a number. Samples and tokens must be 0 or more, a loss more than 0."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not (0 <= number < math.inf) or (number == 0 and key in LOSSES):
        raise _unusable(path, f"has {key}={value} in line {line}, which must be a finite number, a loss more than 0")
    return number


def _unusable(path: Path, wrong: str) -> ConfigError:
    mend = 'write a header `samples,loss` and a row for each point, or lines such as {"samples": 800, "loss": 2.5}'
    return ConfigError(wrong, key="--baseline", value=path, mend=mend)
