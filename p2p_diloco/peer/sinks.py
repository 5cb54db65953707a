"""Hands what a trainer reports to sinks: W&B, a file, or anything else that has `write`.

Law: a sink never stops training. `p2p_diloco.integrations.sinks` has some.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

log = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes what one `peer.report` call reported."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """`step`: the run's step. `values`: `loss` and `held_out_loss`, each only if it was reported; `epoch`; and
        `samples`, the sum of all samples that this trainer has reported since its start."""


class Sinks:
    """The sinks of one peer."""

    def __init__(self) -> None:
        self.all: list[Sink] = []
        self._samples = 0

    def write(
        self, step: int, epoch: int, *, loss: float | None, samples: int | None, held_out_loss: float | None
    ) -> None:
        """Hand on one report. A sink that fails is taken out, with a warning in the log."""
        self._samples += samples or 0
        values = {"loss": loss, "held_out_loss": held_out_loss, "epoch": epoch, "samples": self._samples}
        known = {name: float(value) for name, value in values.items() if value is not None}
        for sink in tuple(self.all):
            try:
                sink.write(step, known)
            except Exception:
                log.warning("%s failed, so it gets no more reports", type(sink).__name__, exc_info=True)
                self.all.remove(sink)
