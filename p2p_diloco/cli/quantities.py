"""Reads numbers with units from flags: 25M parameters, 100mbit, 80ms.

Law: turns text into numbers. A text that can't be read causes an error that names the flag.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from p2p_diloco.errors import UsageError

PARAMETERS_MAX = 10**10
SIZES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
RATES = {"kbit": 1e-3, "mbit": 1.0, "gbit": 1e3}
"""In Mbit/s."""
TIMES = {"ms": 1e-3, "s": 1.0}
"""In seconds."""
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([a-z%]*)")


def count_of(text: str, *, key: str = "--parameters", what: str = "parameters", most: float = PARAMETERS_MAX) -> int:
    """Parse a number such as 25M, 100k, 1.5b or 1000. `key`, `what`: the flag and what is counted, for an error;
    `most`: the greatest number that is allowed.

    Raises:
        UsageError: the text can't be read, or the number is out of bounds.
    """
    count = round(number(text.replace("_", ""), SIZES))
    if not 1 <= count <= most:
        mend = "write e.g. 25M, 100k or 1000"
        raise UsageError(f"is no number of {what}", key=key, value=text, mend=mend)
    return count


def is_zero(text: str, units: Mapping[str, float]) -> bool:
    """Whether a text says 0, with one of these units or without."""
    read = _NUMBER.fullmatch(text.strip().lower())
    return read is not None and float(read[1]) == 0.0 and (not read[2] or read[2] in units)


def number(text: str, units: Mapping[str, float]) -> float:
    """Parse a number with one of these units; 0 if it can't be parsed."""
    read = _NUMBER.fullmatch(text.strip().lower())
    return 0.0 if read is None or read[2] not in units else float(read[1]) * units[read[2]]
