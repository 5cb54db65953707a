"""Each broken rule of the data's leases is detected: one of the first worlds with a data set breaks an invariant."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from p2p_diloco.core import leases, state
from p2p_diloco.core.data_use import DataUse
from tests.sim.check import check, drawn
from tests.sim.settings import Settings
from tests.sim.test_sabotage import first_to_break
from tests.sim.world import World

SABOTAGES: list[tuple[str, type | ModuleType, str, str, str, int]] = [
    # the broken rule, its place, old text, new text, a seed that shows it
    (
        "no conflict is seen at the merge",
        DataUse,
        "conflicts",
        "return not within",
        "return False and not within",
        20,
    ),
    ("dropped progress keeps its positions", DataUse, "drop", "self.pending = self.sent = ()", "pass", 5),
    ("what was made under way counts, too", DataUse, "count", "minus(self.pending, self.sent)", "()", 9),
    (
        "a restart goes on with the old lease",
        leases,
        "_of",
        "(e.peer, e.life) == (peer, life)",
        "e.peer == peer",
        9,
    ),
    ("what is used stays leased", leases, "_marked", "_without(leases, use.used, (peer, life))", "leases", 0),
    (
        "freed positions are granted and stay free",
        leases,
        "_granted",
        "_without(table.freed, given)",
        "table.freed",
        1,
    ),
    ("nothing is freed", leases, "_released", "not (returned or", "True or not (returned or", 3),
    (
        "a commit forgets the tables",
        state,
        "append",
        "tables=_tables_after(state, choice, epoch, rules)",
        "tables=state.tables",
        1,
    ),
]


@pytest.mark.parametrize(
    ("owner", "method", "old", "new", "shown_by"), [pytest.param(*rest, id=what) for what, *rest in SABOTAGES]
)
def test_a_broken_rule_shows(
    kinds: dict[str, Callable[[int], None]],
    sabotage: Any,
    owner: type | ModuleType,
    method: str,
    old: str,
    new: str,
    shown_by: int,
) -> None:
    """A world breaks an invariant, though it holds without the sabotage."""
    sabotage(owner, method, old, new)
    assert first_to_break(kinds["data"], shown_by) is not None


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("mode", "faults"), [("sync", ("pause",)), ("async", ())])
def test_without_faults_no_progress_is_dropped(mode: str, faults: tuple[str, ...], seed: int) -> None:
    """If no peer fails, no position is leased to two peers one after the other, so there is no conflict; all data is
    used. In asynchronous mode no round waits for a peer that pauses, so its lease may go to another."""
    quiet = {"faults": faults, "drop": 0.0, "duplicate": 0.0, "round_timeout": 1000.0}
    world = World(seed, Settings(peers=4, mode=mode, samples=200, data_epochs=2, **quiet))
    check(world)
    assert world.data is not None
    assert world.data.used_up_to(400)
    assert not world.happened["conflict"]


def test_kinds_of_worlds_with_data() -> None:
    """The worlds with data are of both modes, with and without an end."""
    drawn_ones = [drawn(seed, "data") for seed in range(40)]
    assert {world.mode for world in drawn_ones} == {"sync", "async"}
    assert {bool(world.data_epochs) for world in drawn_ones} == {True, False}
    assert all(world.samples for world in drawn_ones)
