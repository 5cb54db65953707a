"""Shows the papers' figures beside the computed ones.

Law: only shows what `planning.paper` computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from typing import Any

from p2p_diloco.planning.paper import GUIDE, PAYLOAD_FACTOR, UTILISATIONS, cells

NAME, CELL = 10, 13
"""Columns of a row's name and of a cell."""
GUIDE_COLUMNS = ("exchange, s", "utilisation, %", "a fragment, s", "a window, s")


def all_fit() -> bool:
    """Whether each computed bandwidth is at most one grid step from the published one, and each row of the reference
    guide is computed exactly as published."""
    return all(cell.fits for cell in cells()) and all(row.computed() == row for row in GUIDE)


def as_object() -> dict[str, Any]:
    """All figures as one JSON object."""
    found = [{**asdict(cell), "apart": cell.apart, "fits": cell.fits} for cell in cells()]
    return {
        "schema_version": 1,
        "fit": sum(cell["fits"] for cell in found),
        "of": len(found),
        "cells": found,
        "guide": [{"published": row._asdict(), "ours": row.computed()._asdict()} for row in GUIDE],
    }


def drawn() -> Iterator[str]:
    """All figures as lines of text. A cell that doesn't fit has an exclamation mark."""
    found = list(cells())
    fit, exact = sum(cell.fits for cell in found), sum(not cell.apart for cell in found)
    yield "Gbit/s that reach a utilisation: published/computed"
    yield "Streaming DiLoCo (2501.18512), table 4, and Scaling Laws (2503.09799), table 7"
    yield " " * NAME + "".join(f"{wanted:>{CELL}.0%}" for wanted in UTILISATIONS)
    for method, rows in groupby(found, key=lambda cell: cell.method):
        yield method
        for name, row in groupby(rows, key=lambda cell: cell.name):
            shown = (f"{cell.published:.1f}/{cell.ours:.1f}{'' if cell.fits else '!'}" for cell in row)
            yield f"  {name}".ljust(NAME) + "".join(f"{text:>{CELL}}" for text in shown)
    yield ""
    yield f"{fit} of {len(found)} cells are within one step of the papers' grid ({exact} are equal), with a"
    yield f"payload factor of {PAYLOAD_FACTOR:.2f} that only this check uses"
    yield ""
    yield "A guide, bf16, 1 Gbit/s, H=500, steps of 1 s (fragments): published/computed"
    yield " " * NAME + "".join(f"{title:>{CELL + 3}}" for title in GUIDE_COLUMNS)
    for published in GUIDE:
        both = zip(published[3:], published.computed()[3:], strict=True)
        pairs = (f"{told}/{ours}{'' if told == ours else '!'}" for told, ours in both)
        name = f"  {published.name} ({published.fragments})".ljust(NAME)
        yield name + "".join(f"{text:>{CELL + 3}}" for text in pairs)
