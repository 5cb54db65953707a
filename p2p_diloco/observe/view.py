"""Draws a `Snapshot` for people: tables on a terminal, lines of text anywhere else. Reads the keys with which the
person in front of the screen chooses the order of the peers, marks one, or has only this one shown.

Law: only draws; it uses neither DHT nor clock, and the caller chooses the terminal. Both views show the same sections.
What matters most comes first, because a terminal with few lines shows the beginning alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.columns import Columns
from rich.console import Group, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from p2p_diloco.node.status import PeerStatus
from p2p_diloco.observe.figures import figure, seconds
from p2p_diloco.observe.sections import SECTIONS, TEXTS, WRAPPED, Section, names_of, told_of
from p2p_diloco.observe.snapshot import TRAINING, RunStatus, Snapshot

UP, DOWN, ENTER, ESCAPE = "up", "down", "enter", "escape"
_NAMED = {"\x1b[A": UP, "\x1bOA": UP, "\x1b[B": DOWN, "\x1bOB": DOWN, "\r": ENTER, "\n": ENTER, "\x1b": ESCAPE}
_KEY = re.compile(r"\x1b[\[O][\d;]*[A-Za-z~]|.", re.DOTALL)
READ_BYTES = 64

ORDERS: dict[str, Callable[[PeerStatus], tuple[Any, ...]]] = {
    "name": lambda peer: (),
    "state": lambda peer: (peer.state,),
    "epoch": lambda peer: (-(peer.epoch or 0),),
    "speed": lambda peer: (-(peer.steps_per_second or 0.0),),
    "loss": lambda peer: (peer.loss is None, peer.loss),
    "waiting": lambda peer: (-(peer.waiting_s or 0.0),),
    "sent": lambda peer: (-(peer.bytes_sent or 0),),
}
"""The sort keys of peers, by the name of the order. Peers with equal keys stay in the order of their names."""
KEYS = "s: sort   ↑ ↓: choose a peer   enter: look at it   q: quit"
KEYS_OF_ONE = "↑ ↓: the peer before or after   esc: all peers   q: quit"


@dataclass(slots=True)
class Browsing:
    """The choices so far."""

    order: str = "name"
    marked: str | None = None
    """The id of the chosen peer; None: none is chosen."""
    alone: bool = False
    """Whether the chosen peer alone is shown."""
    over: bool = False
    """Whether to quit."""

    def sort(self, peers: Sequence[PeerStatus]) -> list[PeerStatus]:
        """The peers in the chosen order."""
        return sorted(peers, key=ORDERS[self.order])

    def chosen(self, peers: Sequence[PeerStatus]) -> PeerStatus | None:
        """The chosen peer; None if none is chosen, or if it is not among `peers`."""
        return next((peer for peer in peers if peer.peer_id == self.marked), None)

    def press(self, key: str, peers: Sequence[PeerStatus]) -> None:
        """Change the choices as `key` says; a key without a meaning does nothing. `peers`: those on the screen, in any
        order."""
        match key:
            case "q":
                self.over = True
            case "s":
                names = list(ORDERS)
                self.order = names[(names.index(self.order) + 1) % len(names)]
            case "up" | "k" | "down" | "j" if peers:
                ids = [peer.peer_id for peer in self.sort(peers)]
                step = 1 if key in (DOWN, "j") else -1
                first = 0 if step == 1 else len(ids) - 1
                at = (ids.index(self.marked) + step) % len(ids) if self.marked in ids else first
                self.marked = ids[at]
            case "enter":
                self.alone = self.chosen(peers) is not None
            case "escape":
                self.alone, self.marked = False, self.marked if self.alone else None


@contextlib.contextmanager
def keys(press: Callable[[str], None]) -> Iterator[None]:
    """Within the block, call `press` in the event loop with the name of each key: a letter, or one of `UP`, `DOWN`,
    `ENTER` and `ESCAPE`. At its end the terminal's settings are restored. Without a terminal at stdin there are no
    keys."""
    if not sys.stdin.isatty():
        yield
        return
    terminal, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(terminal)

    def read() -> None:
        if not (text := os.read(terminal, READ_BYTES).decode(errors="ignore")):
            loop.remove_reader(terminal)  # the terminal is gone
        for key in named(text):
            press(key)

    try:
        tty.setcbreak(terminal)
        loop.add_reader(terminal, read)
        yield
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def named(text: str) -> list[str]:
    """The names of the keys that make a terminal send this text. A sequence without a name stands for itself."""
    return [_NAMED.get(key, key) for key in _KEY.findall(text)]


COLOURS = {"training": "green", "waiting": "yellow", "joining": "cyan", "paused": "magenta", "idle": "red",
           "aggregating": "green", "finished": "blue", "silent": "red", "dead": "bold red"}  # fmt: skip
EVENTS_SHOWN = 5
TOLD_SHOWN, TOLD_FEW = 12, 4
"""The most sentences: if every peer has a row, and if peers are left out."""
LINES_BESIDE_ROWS = 13
"""Lines of the screen that are not for rows of peers: the headline, the keys, settings, the table's head, sentences."""
ROWS_LEAST, NAME_LEAST = 3, 8
SETTINGS_SHOWN = ("sync_every", "pace", "num_fragments", "codec", "outer", "outer_optimizer", "outer_lr",
                  "outer_momentum", "min_peers", "stop_after_epochs", "stop_after_samples")  # fmt: skip
"""The settings of the run that are shown; `--json` has all."""
SHOWN_ASYNCHRONOUS = ("dn_buffer_size", "dylu", "async_grace", "max_staleness", "successors")
"""Further settings, which are shown only in asynchronous mode."""


def page(seen: Snapshot, browsing: Browsing | None = None, height: int | None = None) -> Group:
    """The run as a page for a terminal. `browsing`: what the person in front of the screen has chosen; None: there are
    no keys. `height`: the lines of the screen; None: any number."""
    chosen = browsing or Browsing()
    one = chosen.chosen(seen.peers) if chosen.alone else None
    rows, left_out = _window([one] if one is not None else chosen.sort(seen.peers), chosen.marked, height)
    parts: list[RenderableType] = [Text(_headline(seen), "bold")]
    if browsing is not None:
        parts.append(Text(KEYS_OF_ONE if one is not None else f"{KEYS}   sorted by {chosen.order}", "dim"))
    if one is None:
        parts += [Text(line, "dim") for line in _settings(seen.run)]
        parts.append(Text(_means(seen)))
        parts += [Text(line, "bold red" if above else "") for line, above in _compared(seen.run)]
    first, *others = (_table(section, seen, rows, chosen.marked) for section in SECTIONS)
    parts += [Text(), first] if first is not None else []
    parts += [Text(left_out, "dim")] * bool(left_out)
    told = _told_below(seen)[: TOLD_FEW if left_out else TOLD_SHOWN] if one is None else _details(seen, one)
    parts += [Text(), *(Text(line, "dim") for line in told), Text()]
    return Group(
        *parts, Columns([Padding(table, (0, 0, 1, 0)) for table in others if table is not None], padding=(0, 4))
    )


def _window(peers: Sequence[PeerStatus], marked: str | None, height: int | None) -> tuple[Sequence[PeerStatus], str]:
    """The peers that there is room for, the marked one among them, and a line about those left out; empty if none
    is."""
    most = len(peers) if height is None else max(ROWS_LEAST, height - LINES_BESIDE_ROWS)
    if len(peers) <= most:
        return peers, ""
    at = next((at for at, peer in enumerate(peers) if peer.peer_id == marked), 0)
    first = min(max(0, at - most // 2), len(peers) - most)
    return peers[first : first + most], f"peers {first + 1} to {first + most} of {len(peers)}: ↑ ↓ shows the others"


def _table(section: Section, seen: Snapshot, peers: Sequence[PeerStatus], marked: str | None) -> Table | None:
    """The section's table; None if it would have no row. Only names are wrapped where the screen is narrow."""
    if not (rows := section.rows(seen, peers)):
        return None
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title=section.title, title_style="dim",
                  title_justify="left")  # fmt: skip
    for title in section.titles:
        justify: JustifyMethod = "left" if title in TEXTS else "right"
        least = NAME_LEAST if title == "peer" else None
        table.add_column(title, justify=justify, overflow="fold", no_wrap=title not in WRAPPED, min_width=least)
    for peer, cells in rows:
        texts = (Text(text, COLOURS.get(text, "") if title == "state" else "")
                 for title, text in zip(section.titles, cells, strict=True))  # fmt: skip
        table.add_row(*texts, style="reverse" if peer.peer_id == marked else "")
    return table


def lines(snapshot: Snapshot) -> list[str]:
    """The run as plain text: a line for the run, one for its settings, one for each peer, then the newest events."""
    told = [_headline(snapshot), *(f"  {line}" for line in _settings(snapshot.run))]
    told += [f"  {line}" for line, _ in _compared(snapshot.run)]
    names = names_of(snapshot)
    for peer in snapshot.peers:
        columns = (pair for section in SECTIONS if section.shown(peer) for pair in section.columns.items())
        told.append(
            " ".join([f"  {names[peer.peer_id]}", *(f"{title}={cell(snapshot, peer)}" for title, cell in columns)])
        )
    return [*told, *(f"  {line}" for line in _told_below(snapshot))]


# -- the run


def _headline(snapshot: Snapshot) -> str:
    run, count = snapshot.run, len(snapshot.peers)
    if run.config is None and not count:
        return f"run {run.run_id}: no peer of it is seen; check its name, and its peers"
    parts = [f"run {run.run_id}", run.mode, f"epoch {run.epoch}", f"{count} peer{'' if count == 1 else 's'}"]
    if run.slices is not None:
        parts.append(f"{run.slices} slice{'' if run.slices == 1 else 's'}")
    if run.round is not None:
        parts.append(f"fragment {run.round.fragment}: {run.round.got} of {run.round.want} contributions")
    if run.deaths.count:
        parts.append(run.deaths.text)
    if run.ends_in_s:
        parts.append(f"ends in about {seconds(run.ends_in_s)}")
    return ", ".join(filter(None, parts))


def _settings(run: RunStatus) -> list[str]:
    """One line with the run's settings at its present revision. Without known settings there is no line."""
    now = {**(run.config or {}), **run.changed, "outer_lr": run.outer_lr, "outer_momentum": run.outer_momentum}
    shown = (*SETTINGS_SHOWN, *SHOWN_ASYNCHRONOUS) if run.mode == "async" else SETTINGS_SHOWN
    settings = [(key, now[key]) for key in shown if now.get(key) is not None]
    revised = f" (revision {run.revision})" if run.revision else ""
    return [" ".join(f"{key}={_short(value)}" for key, value in settings) + revised] if settings else []


def _means(seen: Snapshot) -> str:
    """The means of the losses that the training peers reported last, and the inner steps a second of all of them."""
    speed = sum(peer.steps_per_second or 0.0 for peer in seen.peers if seen.state(peer) in TRAINING)
    losses = f"loss {figure(seen.run.loss, '.4f')}  held-out {figure(seen.run.held_out_loss, '.4f')}"
    return f"{losses}  steps/s {speed:.2f}"


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else f"{value}"


def _compared(run: RunStatus) -> list[tuple[str, bool]]:
    """One line with the run's loss beside its baseline, and whether it is above the bound."""
    if (one := run.compared) is None:
        return []
    side = "above" if one.excess > 0 else "below"
    than = f"{abs(one.excess):.1%} {side} the baseline's {one.baseline:.4f} at {one.samples:,} samples"
    return [(f"{one.told} {one.loss:.4f}: {than}", one.above)]


# -- what is told in whole lines


def _told_below(seen: Snapshot) -> list[str]:
    """The sentences about all peers, then the newest events, the oldest of them first."""
    events = [(seconds(max(0.0, seen.time - event.time)), event) for event in seen.run.events[-EVENTS_SHOWN:]]
    wide = max((len(age) for age, _ in events), default=0)
    return [*told_of(seen.peers), *(f"{age:>{wide}} ago  {event.peer}: {event.text}" for age, event in events)]


def _details(seen: Snapshot, peer: PeerStatus) -> list[str]:
    """The lines about the peer that is shown alone: its id, addresses, revision, sentences and events."""
    told = [f"id {peer.peer_id}", *(f"address {address}" for address in peer.addresses)]
    if peer.revision is not None:
        told.append(
            f"revision {peer.revision}: outer_lr={_short(peer.outer_lr)} outer_momentum={_short(peer.outer_momentum)}"
        )
    events = [f"{seconds(max(0.0, seen.time - event.time))} ago  {event.text}" for event in peer.events]
    return [*told, *told_of([peer]), *events]
