"""Each broken rule is detected: a world breaks an invariant, or a story of the core does not end as it should.

docs/testing.md lists the rules whose loss neither detects. What a story shows is said above it (`fails_if`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from p2p_diloco.core import claims, closing, holding, leading, leases, plan, state
from p2p_diloco.core.carry import Carried
from p2p_diloco.core.exchange import Exchange
from p2p_diloco.core.fetching import Fetching
from p2p_diloco.core.fragment import FragmentLog
from p2p_diloco.core.leases import DataUse
from p2p_diloco.core.lineage import Lineage
from p2p_diloco.core.presence import Presence
from p2p_diloco.core.replica import Replica
from p2p_diloco.core.roster import Roster
from p2p_diloco.core.training import Training
from tests.core.sabotage import sabotages
from tests.sim.check import check, drawn, play
from tests.sim.model import Violation
from tests.sim.world import World

IN_WORLDS = [
    # the broken rule, its place, old text, new text, kind of worlds, a world that shows it
    ("no takeover", claims.advance, "elif peer != log.me or log.leads:", "elif True:", "bereaved", 3),
    ("counted progress is kept", Exchange._load, "None if member is None else member.id", "None", "healed", 0),
    ("what was sent is never counted", Carried.merge, "Outcome(first) if kin", "Outcome() if kin", "healed", 0),
    ("what was sent is counted twice", Carried.merge, "Outcome(first) if kin", "Outcome(True) if kin", "healed", 5),
    ("the dead are waited for", Roster.summaries, "if r.live and ", "if ", "bereaved", 2),
    ("the idle are waited for", closing.works, "not summary.idle", "True", "hesitant", 125),
    ("nobody asks what it missed", Lineage._is_behind, "now - since >= self.rules.settle", "False", "healed", 2),
    ("other lineages are not seen", FragmentLog.is_here, "return known == chain", "return True", "healed", 23),
    ("the few win", Lineage._judged, "if for_it < against or", "if for_it > against or", "healed", 7),
    ("a silent donor is not replaced", Fetching.tick, ">= self.rules.fetch_again or", "< 0.0 and", "healed", 453),
    ("an old life's numbers", Exchange.renew_incarnation, "if member is not None and", "if False and", "patient", 1),
    ("the dead are never probed", Roster.to_probe, "+ dead[:1]", "", "healed", 2),
    ("sent though the base has changed", Exchange._counts, "else base == log.version", "else True", "hesitant", 1),
    ("the roll is not written", state._roll_after, "Member(ready.id,", "Member((before or ready).id,", "healed", 0),
    ("an exchange never ends", Exchange.landed, "if not self.flying or self.ready is None:", "if True:", "healed", 1),
    ("a revision is not adopted", FragmentLog.revision_next, "self.roster.mine.revision, ", "FOUNDED, ", "healed", 0),
    ("steps are counted by the new H", state._paced_after, "choice.revision", "state.revision", "healed", 2),
    ("a revision is not handed on", Presence.summarized, "self.learn(summary.revision)", "[]", "async", 2),
    ("a pausing peer is idle at once", Training.is_idle, ">= self.rules.pause_timeout", ">= 0", "joining", 3),
    ("private peers lead like reachable ones", plan.plan_after, "not member.reachable, ", "False, ", "private", 2),
    ("who turns private tells nobody", Replica._of_peers, "self.roster.says(eligible=reachable)", "pass", "private", 6),
    ("an answer is no sign of life", Roster.heard, "record.unanswered = None", "pass", "private", 0),
    ("no probe is known to arrive", Roster.reached, "if peer in self.peers", "if False", "private", 0),
    ("only itself is counted", leading.choose, "_delivered(log)", "{log.me: log.round.readys[log.me]}", "healed", 1),
    ("a submission is counted again", holding._ready, "log.final or is", "log.final and is", "torn", 39),
    ("the stale are counted", holding.is_stale, "base.epoch > most", "base.epoch > most + 3", "async", 6),
    ("a window counts one", state._buffered_after, "buffered + count)", "buffered + bool(count))", "async", 2),
    ("a window is too long", holding.window, "size - log.held.buffered if", "size if", "async", 2),
    ("shown before the named hold it", holding.must_hold, "for peer in named if", "for peer in () if", "async", 14),
    ("an answered exchange goes on", Exchange._is_over, " or is_counted(log.held, self.me, ready)", "", "async", 1),
    ("no conflict is seen at the merge", DataUse.conflicts, "return not within", "return False and within", "data", 20),
    ("dropped progress keeps its positions", DataUse.drop, "self.pending = self.sent = ()", "pass", "data", 2),
    ("what was made under way counts, too", DataUse.count, "minus(self.pending, self.sent)", "()", "data", 9),
    ("a restart has the old lease", leases._of, "(e.peer, e.life) == (peer, life)", "e.peer == peer", "data", 9),
    ("what is used stays leased", leases._marked, "_without(leases, use.used, (peer, life))", "leases", "data", 0),
    ("what is granted stays free", leases._granted, "_without(table.freed, given)", "table.freed", "data", 1),
    ("nothing is freed", leases._released, "not (returned or", "True or not (returned or", "data", 3),
    ("a commit forgets the tables", state.append, "_tables_after(state, choice, epoch, rules)", "()", "data", 1),
]
SEARCH_S = 60.0
"""Processor time for other worlds, if the first one does not show it. A change of the protocol may change which world
does: then name one that shows it."""


def first_to_break(kind: str, shown_by: int) -> int | None:
    """Play world ``shown_by``, then others from seed 0 on. Returns the first that breaks; None if none does in time."""
    until = time.process_time() + SEARCH_S
    for seed in itertools.chain([shown_by], itertools.count()):
        if seed != shown_by and time.process_time() > until:
            return None
        try:
            play(kind, seed)
        except Exception:  # a broken rule may break the simulator itself, too
            return seed
    return None


@pytest.mark.parametrize(
    ("place", "old", "new", "kind", "shown_by"), [row[1:] for row in IN_WORLDS], ids=[row[0] for row in IN_WORLDS]
)
def test_a_broken_rule_shows_in_a_world(
    sabotage: Any, place: Any, old: str, new: str, kind: str, shown_by: int
) -> None:
    """A world breaks an invariant, though it holds without the sabotage."""
    sabotage(place, old, new)
    assert first_to_break(kind, shown_by) is not None


@pytest.mark.parametrize(("place", "old", "new", "story"), sabotages())
def test_a_broken_rule_shows_in_a_story(
    sabotage: Any, place: Any, old: str, new: str, story: Callable[[], None]
) -> None:
    """A story of the core does not end as it should, though it does without the sabotage."""
    sabotage(place, old, new)
    with pytest.raises((AssertionError, KeyError)):
        story()


def test_a_quorum_that_is_too_small_shows(sabotage: Any) -> None:
    """A round past its deadline closes with one of two peers' data, in a world whose trainers pause for longer."""

    settings = replace(drawn(3, "joining"), faults=("pause",), round_timeout=3.0, pause_timeout=8.0)
    check(World(3, settings))
    sabotage(closing.quorum, "max(needed(log), min(part, max(least, math.ceil(part / 2))))", "needed(log)")
    with pytest.raises(Violation, match=r"\(m\)"):
        check(World(3, settings))
