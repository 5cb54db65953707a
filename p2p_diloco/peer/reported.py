"""What a training script reports, as plain numbers: it may give numbers of Python, NumPy or torch.

Law: pure. A value that is no such number is refused with one sentence.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from p2p_diloco.errors import ConfigError

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
