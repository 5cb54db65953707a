"""Chooses which columns of a table are shown on a screen of a given width, and how wide each is.

Law: widths in, widths out, in characters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

GAP = 2
"""Characters between two columns."""


@dataclass(frozen=True, slots=True)
class Widths:
    """How wide a column may be."""

    least: int
    whole: int
    """The width of its longest text."""


def fit(columns: Mapping[str, Widths], dropped: Iterable[str], width: int) -> dict[str, int]:
    """Return the width of each column that is shown, by title, in the order of `columns`.

    Columns that can be narrowed are narrowed first. If that is not enough, whole columns drop out, in the order of
    `dropped`; the others always stay. Of the space that is left, the first column takes what its longest text needs,
    then the second, and so on.
    """
    shown = dict(columns)
    for title in dropped:
        if total(column.least for column in shown.values()) <= width:
            break
        shown.pop(title, None)
    spare = max(0, width - total(column.least for column in shown.values()))
    given = dict[str, int]()
    for title, column in shown.items():
        more = min(spare, column.whole - column.least)
        given[title] = column.least + more
        spare -= more
    return given


def total(widths: Iterable[int]) -> int:
    """The width of columns of these widths, with the gaps between them."""
    each = list(widths)
    return sum(each) + GAP * max(0, len(each) - 1)


def cut(text: str, width: int) -> str:
    """The text in at most `width` characters. What does not fit is taken out of its middle, because names often differ
    at their end."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return text[: width - 1 - tail] + "…" + text[len(text) - tail :]
