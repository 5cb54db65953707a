"""The files in docs/traces show today's protocol in few lines."""

from __future__ import annotations

import pytest

from tests.sim.stories import FOLDER, STORIES

LINES_MAX, WIDTH_MAX = 40, 120


@pytest.mark.parametrize("name", STORIES)
def test_a_trace_is_what_its_world_does(name: str) -> None:
    """Each file in docs/traces is what its world prints now. If not, read the difference, then run `make traces`."""
    text = STORIES[name].text()
    assert (FOLDER / f"{name}.txt").read_text() == text
    assert STORIES[name].shown in text
    lines = text.splitlines()
    assert len(lines) <= LINES_MAX
    assert max(map(len, lines)) <= WIDTH_MAX


def test_every_trace_has_its_story() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == STORIES.keys()
