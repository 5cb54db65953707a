"""Numbers with their units: writes figures for people, and reads 25M parameters, 100mbit or 80ms from flags.

Law: values in, short texts out; or the reverse, where a text that can't be read causes an error that names the flag.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from p2p_diloco.errors import UsageError

UNKNOWN = "-"
PARAMETERS_MAX = 10**10
SIZES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
RATES = {"kbit": 1e-3, "mbit": 1.0, "gbit": 1e3}
"""In Mbit/s."""
TIMES = {"ms": 1e-3, "s": 1.0}
"""In seconds."""
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([a-z%]*)")


def figure(value: float | None, form: str, unit: str = "") -> str:
    """A number as text in the Python format `form`, with its unit. A dash for None."""
    return UNKNOWN if value is None else f"{value:{form}}{unit}"


def bytes_of(amount: float | None, gap: str = "") -> str:
    """An amount of bytes as text in decimal units. `gap` is put before the unit. A dash for None."""
    if amount is None:
        return UNKNOWN
    power = min(4, (len(str(int(amount))) - 1) // 3)
    return f"{amount / 1000**power:.{1 if power else 0}f}{gap}{('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def seconds(value: float | None) -> str:
    """A time as text: 119s, 10min, 3h. A dash for None."""
    if value is None:
        return UNKNOWN
    return f"{value:.0f}s" if value < 120 else f"{value / 60:.0f}min" if value < 7200 else f"{value / 3600:.0f}h"


# -- reading


def count_of(text: str, *, key: str = "--parameters", what: str = "parameters", most: float = PARAMETERS_MAX) -> int:
    """Parse a number such as 25M, 100k, 1.5b or 1000. `key`, `what`: the flag and what is counted, for an error;
    `most`: the greatest number that is allowed.

    Raises:
        UsageError: the text can't be read, or the number is out of bounds.
    """
    count = round(number(text.replace("_", ""), SIZES) or 0)
    if not 1 <= count <= most:
        mend = "write e.g. 25M, 100k or 1000"
        raise UsageError(f"is no number of {what} from 1 to {most:,.0f}", key=key, value=text, mend=mend)
    return count


def number(text: str, units: Mapping[str, float]) -> float | None:
    """Parse a number with one of these units; None if it can't be parsed."""
    read = _NUMBER.fullmatch(text.strip().lower())
    return None if read is None or read[2] not in units else float(read[1]) * units[read[2]]
