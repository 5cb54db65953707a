"""`replay`: tells from the histories of a run's peers what happened.

Law: the package `history` reads and tells; this module chooses what to print. The output is on stdout.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from typer import Argument, Option

from p2p_diloco.errors import UsageError
from p2p_diloco.remembered import state_folder

if TYPE_CHECKING:
    from p2p_diloco.history.order import Ordered
    from p2p_diloco.history.reading import Life
    from p2p_diloco.history.story import Story

WIDTH_MIN, WIDTH_MAX = 60, 120
SHIFT_S = 0.01
"""Clocks that were put right by no more than this many seconds are not mentioned."""


def replay(
    paths: list[Path] | None = Argument(
        None, help="Histories of a run's peers, or folders of them; unset: this user's own.", metavar="[FILE]..."
    ),
    run_id: str | None = Option(None, help="Which run of a folder; unset: the newest there.", metavar="NAME"),
    epoch: int | None = Option(None, "--round", help="Show one round in detail: what each peer did.", metavar="N"),
    events: bool = Option(False, "--events", help="Print every event and its effects, one a line."),
    peer: str | None = Option(None, help="With --events: only the events of this peer.", metavar="NAME"),
    check: bool = Option(False, "--check", help="Play each history again, and compare effects with the recorded ones."),
    as_json: bool = Option(False, "--json", help="Print the story as one JSON object (docs/history.md)."),
) -> int:
    """Tell from the histories of a run's peers what happened, in fewer than 30 lines.

    Each peer writes a history (history_path). The more peers' histories there are, the more is told.
    With [bold]--check[/bold] the exit code is 1 if a history does not lead to the recorded effects.
    """
    from p2p_diloco.history.order import ordered
    from p2p_diloco.history.reading import check as played
    from p2p_diloco.history.reading import naming, read
    from p2p_diloco.history.story import Story

    if sum((epoch is not None, events, check)) > 1:
        raise UsageError("exclude each other", key="--round, --events and --check", mend="give one of them")
    if peer is not None and not events:
        raise UsageError("needs --events", key="--peer", value=peer, mend="give both")
    lives = read(paths or [state_folder() / "history"], run_id)
    named = naming(lives)
    if check:
        told = [played(life) for life in lives]
        for life, (done, why) in zip(lives, told, strict=True):
            said = f"{life.peer}, started {_utc(life.head.started)}: {done} of {len(life.entries)} events led to the "
            gap = f" ({life.gap})" if life.gap else ""
            typer.echo(named(f"{said}recorded effects{'; ' * bool(why)}{why}{gap}"))
        return int(any(why for _, why in told))
    history = ordered(lives)
    story = Story([] if events else history.entries, len(lives[-1].head.rules.fragments))
    width = min(max(shutil.get_terminal_size().columns, WIDTH_MIN), WIDTH_MAX)
    if events:
        lines = _events(history, named, peer)
    elif as_json:
        lines = iter([json.dumps(_plain(lives, history, story))])
    elif epoch is not None:
        lines = _round(history, story, epoch)
    else:
        lines = chain(_head(lives, history), story.text(named, width))
    for line in lines:
        typer.echo(named(line))
    return 0


def _head(lives: Sequence[Life], history: Ordered) -> Iterator[str]:
    peers, last = len({life.peer for life in lives}), history.entries[-1].time if history.entries else 0.0
    count = f"{peers} {'history' if peers == 1 else 'histories'}"
    yield f"run {lives[0].head.run_id}: {count}, {last:.1f} s since {_utc(history.began)}"
    for life in lives:
        if life.first != 1:
            yield f"{life.peer}: its first files are gone, so the story lacks its beginning"
        if life.gap:
            yield f"{life.peer}: {life.gap}"
    for peer, shift in history.shifts.items():
        if abs(shift) > SHIFT_S:
            way = "behind" if shift > 0 else "ahead"
            yield f"the clock of {peer} is {abs(shift):.2f} s {way}, by its messages; its times are put right"


def _events(history: Ordered, named: Callable[[str], str], peer: str | None) -> Iterator[str]:
    found = False
    for entry in history.entries:
        if peer is None or peer in (entry.peer, named(entry.peer)):
            found = True
            yield from entry.lines()
    if not found:
        names = ", ".join(sorted({named(entry.peer) for entry in history.entries}))
        raise UsageError("has no history here", key="--peer", value=peer, mend=f"choose {names}")


def _round(history: Ordered, story: Story, epoch: int) -> Iterator[str]:
    found = [one for one in story.rounds if one.epoch == epoch]
    if not found:
        last = max((one.epoch for one in story.rounds), default=0)
        raise UsageError("is not in the histories", key="--round", value=epoch, mend=f"choose 1 to {last}")
    for one in found:
        yield f"{story.name(one)} took {one.took:.2f} s, usually {story.usually(one):.2f} s"
        yield f"from {one.began:.2f} s to {one.ended:.2f} s after {_utc(history.began)}"
        yield "what led to it, from its beginning to its end:"
        for hop in one.why:
            yield f"{hop.since - one.began:8.2f} to {hop.until - one.began:.2f} s  {hop.text}"
        late = [f"{peer} {when - one.ended:.2f} s" for peer, when in one.done.items() if when > one.ended]
        yield f"the others had the result later: {', '.join(late) or 'none of them has it'}"


def _plain(lives: Sequence[Life], history: Ordered, story: Story) -> dict[str, object]:
    """The story as plain values."""
    return {
        "run_id": lives[0].head.run_id,
        "began": history.began,
        "peers": sorted({life.peer for life in lives}),
        "lines": [{"time": line.time, "kind": line.kind, "text": str(line)} for line in story.lines],
        "rounds": [{**asdict(one), "took": one.took} for one in story.rounds],
    }


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
