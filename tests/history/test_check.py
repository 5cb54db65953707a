"""A history leads to the effects that it records: the core has no clock, no randomness and no other input."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from p2p_diloco.core.events import Send
from p2p_diloco.history.reading import check
from tests.history.recorded import RecordedWorld
from tests.sim.check import check as play
from tests.sim.check import drawn


@pytest.mark.parametrize("seed", range(3))
def test_every_life_plays_again(seed: int, tmp_path: Path) -> None:
    """In worlds of every kind, with faults of every kind, each life of each peer is written, read, and played again
    with the same effects."""
    world = RecordedWorld(tmp_path, seed, drawn(seed))
    play(world)
    lives = world.lives(of_killed=True)
    assert len(lives) == len(world.histories)
    for life in lives:
        assert (*check(life), life.gap) == (len(life.entries), "", "")
    told = sum(not isinstance(entry.what, str) for entry in world.trace or ())
    assert sum(len(life.entries) for life in lives) == told


def test_a_changed_effect_is_found(tmp_path: Path) -> None:
    """If one recorded effect differs in one field, the check names the event, and both effects."""
    world = RecordedWorld(tmp_path)
    world.run(10.0)
    life = world.lives()[0]
    sends = [at for at, entry in enumerate(life.entries) if any(isinstance(one, Send) for one in entry.effects)]
    at = next(at for at in sends if at > 50)
    entry = life.entries[at]
    effects = [dataclasses.replace(one, to="p9") if isinstance(one, Send) else one for one in entry.effects]
    life.entries[at] = dataclasses.replace(entry, effects=tuple(effects))
    played, why = check(life)
    assert played == at
    assert "p9" in why


def test_a_history_without_its_beginning_is_not_played(tmp_path: Path) -> None:
    """Once its first files are gone, a history can't be played, and the reason is said."""
    world = RecordedWorld(tmp_path, bytes_max=5_000)
    world.run(60.0)
    played, why = check(world.lives()[0])
    assert played == 0
    assert "first files are gone" in why
