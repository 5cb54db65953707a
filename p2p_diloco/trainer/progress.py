"""Reports the progress of training to the user: log lines, rows in a file, and a summary.

Law: reports, and decides nothing. The command sets up logging.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TextIO

from p2p_diloco.errors import ConfigError, reason
from p2p_diloco.observe.figures import figure
from p2p_diloco.peer import Peer
from p2p_diloco.peer.metrics import Metrics

LINE_EVERY_S, UNWATCHED_EVERY_S = 3.0, 10.0
"""Seconds between two log lines: on a terminal, and elsewhere, where fewer lines keep log files short."""
LOSS_MEMORY = 0.95
"""Weight of earlier losses in the running mean that is shown, because the losses of single batches vary too much."""

log = logging.getLogger("p2p_diloco.trainer")

Stopped = Literal["finished", "steps", "interrupted", "terminated"]
"""How training ended: with the run, after this peer's own `steps`, or by a signal (SIGINT or SIGTERM)."""


class Progress:
    """Keeps the latest figures of the training, and logs them every few seconds. It is a context manager, which closes
    the file of rows at its end.

    `rows_path` gets one JSON object per step, and one per evaluation.

    Raises:
        ConfigError: the file can't be written.
    """

    def __init__(self, rows_path: Path | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.steps = 0
        self.loss: float | None = None
        self.val_loss: float | None = None
        self.parameters = 0
        self.digest = ""
        self._at = (0, 0)  # global step, epoch
        self._traffic = Metrics()
        self._clock = clock
        self._started = self._shown_at = clock()
        self._steps_shown = 0
        self._rate: float | None = None  # steps a second, up to the last line
        self._line_every_s = LINE_EVERY_S if sys.stderr.isatty() else UNWATCHED_EVERY_S
        self._rows = _opened(rows_path)

    def stepped(self, peer: Peer, loss: float) -> None:
        self.steps += 1
        self.loss = loss if self.loss is None else LOSS_MEMORY * self.loss + (1 - LOSS_MEMORY) * loss
        self._note(peer, loss, None)
        if self._clock() - self._shown_at >= self._line_every_s:
            self._show(peer)

    def evaluated(self, peer: Peer, epoch: int, val_loss: float) -> None:
        """Record the held-out loss of the global parameters at this epoch."""
        self.val_loss = val_loss
        self._note(peer, None, val_loss, epoch)
        self._show(peer)

    def summary(self, stopped: Stopped) -> dict[str, Any]:
        """Return the summary of the training, as `--summary-json` prints it. Losses are in nats a byte."""
        return {
            "stopped": stopped,
            "steps": self.steps,  # this peer's own
            "global_step": self._at[0],
            "epoch": self._at[1],
            "loss": self.loss,  # a running mean
            "val_loss": self.val_loss,  # of the global parameters when last evaluated
            "seconds": round(self._clock() - self._started, 3),
            "parameters": self.parameters,  # tied ones once
            "rounds": self._traffic.sync_count,  # that this peer contributed to
            "waiting_s": round(self._traffic.waiting_time_s, 3),
            "bytes_sent": self._traffic.bytes_sent,
            "bytes_received": self._traffic.bytes_received,
            "digest": self.digest,  # the run's; empty after an interrupt, and without a run
        }

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._rows is not None:
            self._rows.close()

    def _note(self, peer: Peer, loss: float | None, val_loss: float | None, epoch: int | None = None) -> None:
        self._at, self._traffic = (peer.global_step, peer.epoch if epoch is None else epoch), peer.metrics
        if self._rows is not None:
            row = {"time": time.time(), "step": self.steps, "global_step": self._at[0], "epoch": self._at[1]}
            self._rows.write(json.dumps({**row, "loss": loss, "val_loss": val_loss}) + "\n")

    def _show(self, peer: Peer) -> None:
        now = self._clock()
        if self.steps > self._steps_shown:  # an evaluation may follow the last line at once
            self._rate = (self.steps - self._steps_shown) / max(now - self._shown_at, 1e-9)
            self._shown_at, self._steps_shown = now, self.steps
        losses = f"loss {figure(self.loss, '.3f')}  held-out {figure(self.val_loss, '.3f')}"
        step, epoch = self._at
        speed = figure(self._rate, ".1f")
        log.info("step %d  epoch %d  %s  steps/s %s  peers %d", step, epoch, losses, speed, peer.metrics.peers)


def _opened(rows_path: Path | None) -> TextIO | None:
    if rows_path is None:
        return None
    try:
        return rows_path.open("a", buffering=1, encoding="utf-8")  # by line: a killed peer leaves whole rows
    except OSError as error:
        wrong, mend = f"can't be written ({reason(error)})", "name a file in a folder that this user may write to"
        raise ConfigError(wrong, key="log_path", value=rows_path, mend=mend) from None
