"""What a training script reports, as plain numbers; and the sinks that get it: W&B, a file, or anything else that has
`write`.

Law: a script may give numbers of Python, NumPy or torch; any other value is refused with one sentence. A sink never
stops training. `p2p_diloco.integrations.sinks` has some.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from p2p_diloco.errors import ConfigError

log = logging.getLogger(__name__)

SAMPLES_MAX = 2**53
"""A float holds every whole number up to this one."""


def number(key: str, value: Any, mend: str = "report e.g. loss.item()") -> float | None:
    """A reported number as a float; None if it is None.

    Raises:
        ConfigError: the value is not one real number.
    """
    if value is None:
        return None
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # each library has its own
        raise ConfigError("is not one number", key=key, value=_short(value), mend=mend) from None


def samples_of(value: Any) -> int | None:
    """Reported samples as an int; None if they are None.

    Raises:
        ConfigError: the value is not a whole number that samples can have.
    """
    mend = "report how many samples the step was trained on"
    found = number("samples", value, mend)
    if found is None:
        return None
    if not (0 <= found <= SAMPLES_MAX and found.is_integer()):
        raise ConfigError("must be a whole number, 0 or more", key="samples", value=_short(value), mend=mend)
    return int(found)


def _short(value: object) -> str:
    return str(value)[:60]


# -- sinks


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
