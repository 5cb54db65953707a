"""Shows the papers' figures beside the computed ones.

Law: only shows what `planning.paper` computes.
"""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from p2p_diloco.planning.paper import GUIDE, PAYLOAD_FACTOR, UTILISATIONS, Cell, cells, guide_row

NAME, CELL = 10, 13
"""Columns of a row's name and of a cell."""


def all_fit() -> bool:
    """Whether every cell is within a step of the grid, and the guide's rows are exact."""
    return all(cell.fits for cell in cells()) and all(guide_row(row) == row for row in GUIDE)


def as_object() -> dict[str, Any]:
    """All figures as one JSON object."""
    found = cells()
    return {
        "schema_version": 1,
        "fit": sum(cell.fits for cell in found),
        "of": len(found),
        "cells": [{**asdict(cell), "apart": cell.apart, "fits": cell.fits} for cell in found],
        "guide": [{"published": asdict(row), "ours": asdict(guide_row(row))} for row in GUIDE],
    }


def drawn() -> RenderableType:
    """All figures as tables of 80 columns."""
    found = cells()
    fit, exact = sum(cell.fits for cell in found), sum(not cell.apart for cell in found)
    lines = [Text(" " * NAME + "".join(f"{wanted:>{CELL}.0%}" for wanted in UTILISATIONS), "bold")]
    for method, rows in groupby(found, key=lambda cell: cell.method):
        lines.append(Text(method, "bold"))
        for name, row in groupby(rows, key=lambda cell: cell.name):
            lines.append(Text(f"  {name}".ljust(NAME)).append_text(Text("").join(map(_shown, row))))
    return Group(
        Text("Gbit/s that reach a utilisation: published/computed", "bold"),
        Text("Streaming DiLoCo (2501.18512), table 4, and Scaling Laws (2503.09799), table 7", "dim"),
        *lines,
        Text(),
        Text(
            f"{fit} of {len(found)} cells are within one step of the papers' grid ({exact} are equal), with a payload "
            f"factor of {PAYLOAD_FACTOR:.2f} that only this check uses",
            "bold green" if fit == len(found) else "bold red",
        ),
        Text(),
        Text("The guide, at bf16, 1 Gbit/s, H=500, 1 s a step: published/computed", "bold"),
        _guide(),
    )


def _shown(cell: Cell) -> Text:
    return Text(f"{f'{cell.published:.1f}/{cell.ours:.1f}':>{CELL}}", "" if cell.fits else "bold red")


def _guide() -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("model", "exchange, s", "utilisation, %", "fragments", "a fragment, s", "a window, s"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in GUIDE:
        ours = guide_row(row)
        pairs = [(getattr(row, key), getattr(ours, key)) for key in ("transfer", "utilisation", "fragment", "window")]
        cells_ = [Text(f"{a}/{b}", "" if a == b else "bold red") for a, b in pairs]
        table.add_row(row.name, cells_[0], cells_[1], str(row.fragments), cells_[2], cells_[3])
    return table
