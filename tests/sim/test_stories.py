"""The files in docs/traces show today's protocol in few lines."""

from __future__ import annotations

import pytest

from tests.sim.stories import FOLDER, STORIES

LINES_MAX, WIDTH_MAX = 40, 120
SHOWN = {
    "join": "holds all shards",
    "commit": "averages p0, p1, p2 on shard 1",
    "takeover": "the promise of shard 0",
    "fork": "joined the lineage of",
    "carry": "with the progress since #",
    "async": "that it holds shard 0",
}
"""The line for which each trace was made."""


@pytest.mark.parametrize("name", STORIES)
def test_a_trace_is_what_its_world_does(name: str) -> None:
    """Each file in docs/traces is what its world prints now. If not, read the difference, then run `make traces`."""
    text = STORIES[name].text()
    assert (FOLDER / f"{name}.txt").read_text() == text
    assert SHOWN[name] in text
    lines = text.splitlines()
    assert len(lines) <= LINES_MAX
    assert max(map(len, lines)) <= WIDTH_MAX


def test_every_trace_has_its_story() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == STORIES.keys() == SHOWN.keys()
