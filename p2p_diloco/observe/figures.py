"""Writes figures for people: a number with its unit, or a dash.

Law: values in, short texts out.
"""

from __future__ import annotations

UNKNOWN = "-"


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
