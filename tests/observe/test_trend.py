"""The history of a run while someone looks at it, and the lines of bars that show it."""

from __future__ import annotations

import pytest

from p2p_diloco.node.status import PeerStatus
from p2p_diloco.observe.snapshot import snapshot
from p2p_diloco.observe.trend import KEPT, Trend, sparkline


@pytest.mark.parametrize(
    ("values", "width", "bars"),
    [([], 9, ""), ([1.0], 9, ""), ([1.0, 2.0], 9, "▁█"), ([3.0, 2.0, 1.0], 9, "█▅▁"), ([1.0, 1.0], 9, "▁▁"),
     ([0.0, 0.0, 4.0, 4.0], 2, "▁█"), ([1.0, float("nan"), 2.0], 9, "▁█")],
)  # fmt: skip
def test_bars_go_from_the_least_to_the_greatest(values: list[float], width: int, bars: str) -> None:
    """More values than bars are averaged; a line of one height is low."""
    assert sparkline(values, width) == bars


def test_peers_that_train_count() -> None:
    """The loss is the mean over them, the speed the sum; the oldest looks are forgotten."""
    told = [
        PeerStatus(name="a", peer_id="a", state="training", loss=1.0, steps_per_second=2.0),
        PeerStatus(name="b", peer_id="b", state="waiting", loss=3.0, steps_per_second=3.0),
        PeerStatus(name="c", peer_id="c", state="finished", loss=9.0, steps_per_second=9.0),
        PeerStatus(name="d", peer_id="d", state="training", loss=9.0, steps_per_second=9.0, time=-16.0),  # died
    ]
    trend = Trend()
    trend.saw(snapshot("main", None, told, 0.0))
    assert (list(trend.loss), list(trend.speed)) == ([2.0], [5.0])
    for _ in range(KEPT):
        trend.saw(snapshot("main", None, [], 0.0))
    assert list(trend.loss) == [2.0]
    assert set(trend.speed) == {0.0}
