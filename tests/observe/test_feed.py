"""What browsers are sent: everything at first, then only what is new."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, replace
from typing import Any

from p2p_diloco.node.curves import Point
from p2p_diloco.node.status import LastRound, PeerStatus
from p2p_diloco.observe import feed as module
from p2p_diloco.observe.feed import Feed
from p2p_diloco.observe.snapshot import Compared, Snapshot, snapshot

ROUND = LastRound(9.0, 0.2, 0.4, 0.3, 0.08, 0.02, 0.3333, 90.0)
ALICE = PeerStatus(
    name="alice", peer_id="id-a", time=1.0, state="training", epoch=1, step=10, samples=80, loss=2.5,
    steps_per_second=3.0, held_out_loss=2.75, last_round=ROUND,
)  # fmt: skip


def seen(*peers: PeerStatus) -> Snapshot:
    return snapshot("main", None, peers, 5.0)


def read(text: str) -> tuple[str, dict[str, Any]]:
    event, data, *rest = text.split("\n")
    assert rest == ["", ""]
    return event.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def test_a_reader_gets_all_and_then_what_is_new() -> None:
    """A reader that comes later gets the whole curves, too; a record that has not changed adds no point."""

    async def life() -> list[tuple[str, dict[str, Any]]]:
        feed = Feed()
        first = feed.follow()
        waiting = asyncio.create_task(anext(first))
        await asyncio.sleep(0)
        feed.saw(seen(ALICE))
        told = [await waiting]
        for peer in (ALICE, replace(ALICE, time=2.0, step=20, loss=2.25)):
            following = asyncio.create_task(anext(first))
            await asyncio.sleep(0)
            feed.saw(seen(peer))
            told.append(await following)
        told.append(await anext(feed.follow()))
        return [read(text) for text in told]

    (one, whole), (two, same), (three, news), (four, later) = asyncio.run(asyncio.wait_for(life(), 10.0))
    assert [one, two, three, four] == ["all", "look", "look", "all"]
    assert whole["curves"]["points"] == {"id-a": [[1.0, 10, 80, 2.5, 1, 3.0, 2.75]]}
    assert whole["curves"]["rounds"]["id-a"] == [{"epoch": 1, **asdict(ROUND)}]
    assert same["curves"] == {"points": {}, "rounds": {}, "compared": []}
    assert news["curves"] == {"points": {"id-a": [[2.0, 20, 80, 2.25, 1, 3.0, 2.75]]}, "rounds": {}, "compared": []}
    assert later["curves"]["points"]["id-a"] == [[1.0, 10, 80, 2.5, 1, 3.0, 2.75], [2.0, 20, 80, 2.25, 1, 3.0, 2.75]]
    tables = later["tables"]
    assert [table["title"] for table in tables[:2]] == ["peers", "machines"]
    assert tables[0]["rows"][0][:2] == ["alice", "training"]
    assert len(tables[0]["columns"]) == len(tables[0]["rows"][0])
    assert later["seen"] == json.loads(seen(replace(ALICE, time=2.0, step=20, loss=2.25)).to_json())


def test_the_baseline_is_a_curve_too() -> None:
    """A point for each look at which samples or losses have changed."""
    feed, looks = Feed(), [(800, 2.5), (800, 2.5), (1600, 2.25)]
    for samples, loss in looks:
        one = seen(ALICE)
        compared = Compared("loss", samples, loss, 2.0, loss / 2 - 1, 0.05, above=True)
        feed.saw(replace(one, run=replace(one.run, compared=compared)))
    assert json.loads(feed.whole)["curves"]["compared"] == [[800, 2.5, 2.0], [1600, 2.25, 2.0]]


def test_curves_are_bounded_and_keep_their_beginning(monkeypatch: Any) -> None:
    """However long the dashboard is open, its curves begin where they began, end with the newest point, and have points
    from each tenth of the time between."""
    monkeypatch.setattr(module, "POINTS_KEPT", 60)
    feed, longest = Feed(), 0
    for time in range(1, 5001):
        feed.saw(seen(replace(ALICE, time=float(time))))
        longest = max(longest, len(feed._points["id-a"]))
    assert longest == 60
    times = [point[0] for point in json.loads(feed.whole)["curves"]["points"]["id-a"]]
    assert (times[0], times[-1]) == (1.0, 5000.0)
    assert {int(time / 500) for time in times} == set(range(11))


def test_a_dashboard_that_is_opened_late_has_the_earlier_losses() -> None:
    """They come before what it sees itself. A record that is older than the last of them adds no point, so that the
    time never runs backwards."""
    feed = Feed()
    feed.knew({"id-a": [Point(0.25, 2.0, 16.0, 0.0, 4.5, None), Point(0.5, 5.0, 40.0, 0.4, 3.5, 3.25)], "id-b": []})
    feed.saw(seen(replace(ALICE, time=0.4)))
    feed.saw(seen(ALICE))
    points = [[0.25, 2, 16, 4.5, 0, None, None], [0.5, 5, 40, 3.5, 0, None, 3.25], [1.0, 10, 80, 2.5, 1, 3.0, 2.75]]
    assert json.loads(feed.whole)["curves"]["points"] == {"id-a": points}
