"""What a dashboard shows: the newest snapshot of a run, and the curves since its peers have entered it.

Law: snapshots in, JSON values out. Of the time before the first snapshot it shows what the peers tell (`node.curves`);
else nothing that `p2p-diloco status` doesn't show.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any

from p2p_diloco.node.curves import Point as Past
from p2p_diloco.node.curves import thinned
from p2p_diloco.observe.sections import SECTIONS, TEXTS, told_of
from p2p_diloco.observe.snapshot import Snapshot

POINTS_KEPT = 2000
"""The most points that are kept of a curve. When there are more, about half of them go, evenly."""
ROUNDS_KEPT = 40
"""The most rounds that are kept of each peer."""
PEERS_KEPT = 256
"""The most peers whose curves are kept; those of the newest snapshot are kept even if they are more. There is a limit
because a peer may have another id after each restart."""

Point = list[float | None]
"""time, inner steps, samples, loss, epoch, inner steps a second, held-out loss; beside a baseline: samples, loss, the
baseline's loss."""


class Feed:
    """Takes snapshots, and hands each one, with the points that it adds to the curves, to any number of readers."""

    def __init__(self) -> None:
        self._points: dict[str, list[Point]] = {}
        self._rounds: dict[str, list[dict[str, Any]]] = {}
        self._compared: list[Point] = []
        self._seen: Snapshot | None = None
        self._fresh: dict[str, Any] = {}  # what the newest snapshot has added to the curves
        self._newest = ""  # that snapshot as JSON, once a reader has asked for it
        self._changed = asyncio.Event()
        self._over = False

    @property
    def whole(self) -> str:
        """The newest snapshot with all kept points, as JSON; empty before the first snapshot. It is made only when a
        reader comes, because it may have megabytes."""
        if self._seen is None:
            return ""
        return _json(self._seen, points=self._points, rounds=self._rounds, compared=self._compared)

    def end(self) -> None:
        """End `follow` for all readers."""
        self._over = True
        self._changed.set()

    def knew(self, curves: Mapping[str, Sequence[Past]]) -> None:
        """Take the peers' curves of the time before the first snapshot, by peer id. Called before `saw`."""
        told = {peer_id: past for peer_id, past in curves.items() if past}
        for peer_id, past in islice(told.items(), PEERS_KEPT):
            self._points[peer_id] = [
                [one.time, round(one.step), round(one.samples), one.loss, round(one.epoch), None, one.held_out_loss]
                for one in past
            ]

    def saw(self, seen: Snapshot) -> None:
        """Take the next snapshot."""
        points, rounds, compared = dict[str, list[Point]](), dict[str, list[dict[str, Any]]](), list[Point]()
        for peer in seen.peers:
            kept = self._points.setdefault(peer.peer_id, [])
            if not kept or peer.time > (kept[-1][0] or 0.0):
                points[peer.peer_id] = [
                    [
                        peer.time,
                        peer.step,
                        peer.samples,
                        peer.loss,
                        peer.epoch,
                        peer.steps_per_second,
                        peer.held_out_loss,
                    ]
                ]
                kept += points[peer.peer_id]
                _bound(kept)
            done = self._rounds.setdefault(peer.peer_id, [])
            last = peer.last_round if peer.epoch is not None else None
            if last is not None and not (done and done[-1]["ended"] == last.ended):
                rounds[peer.peer_id] = [{"epoch": peer.epoch, **asdict(last)}]
                done[:] = [*done, *rounds[peer.peer_id]][-ROUNDS_KEPT:]
        if (one := seen.run.compared) is not None and self._compared[-1:] != [[one.samples, one.loss, one.baseline]]:
            compared = [[one.samples, one.loss, one.baseline]]
            self._compared += compared
            _bound(self._compared)
        self._seen, self._newest = seen, ""
        self._fresh = {"points": points, "rounds": rounds, "compared": compared}
        here = {peer.peer_id for peer in seen.peers}
        gone = [peer_id for peer_id in self._points if peer_id not in here]
        for peer_id in gone[: max(0, len(self._points) - PEERS_KEPT)]:
            del self._points[peer_id]
            self._rounds.pop(peer_id, None)
        self._changed.set()
        self._changed = asyncio.Event()

    async def follow(self) -> AsyncIterator[str]:
        """Yield server-sent events: first all that is known, then each further snapshot with what is new in it."""
        while self._seen is None and not self._over:
            await self._changed.wait()
        yield f"event: all\ndata: {self.whole}\n\n"
        while True:
            await self._changed.wait()
            if self._over:
                return
            assert self._seen is not None, "a snapshot has come"
            self._newest = self._newest or _json(self._seen, **self._fresh)
            yield f"event: look\ndata: {self._newest}\n\n"


def _bound(curve: list[Point]) -> None:
    """Leave about half of a curve's points out, evenly, if it has too many."""
    if len(curve) > POINTS_KEPT:
        curve[:] = thinned(curve, POINTS_KEPT // 2)


def _json(seen: Snapshot, **curves: object) -> str:
    """One line of JSON: the snapshot, its tables and sentences as `status` shows them, and points of the curves."""
    tables = [
        {
            "title": section.title,
            "columns": [{"title": title, "text": title in TEXTS} for title in section.titles],
            "rows": [cells for _, cells in rows],
        }
        for section in SECTIONS
        if (rows := section.rows(seen, seen.peers))
    ]
    shown = {"tables": tables, "told": told_of(seen.peers), "curves": curves}
    more = json.dumps(shown, ensure_ascii=False, allow_nan=False)
    return f'{{"seen": {seen.to_json()}, {more[1:]}'
