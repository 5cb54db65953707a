"""A story is short, and right in order and cause."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import pytest

from p2p_diloco.core.events import Accept, Load, Merge, Note, Send, Start, Wakeup
from p2p_diloco.core.messages import Ready
from p2p_diloco.core.version import ContributionId, Version
from p2p_diloco.history import story
from p2p_diloco.history.order import DIED, ordered
from p2p_diloco.history.reading import Entry, tell
from p2p_diloco.history.rounds import Round, _causes
from p2p_diloco.history.story import LINES_MAX, Story
from tests.history.recorded import CALM, RecordedWorld
from tests.sim.check import check as play
from tests.sim.check import drawn
from tests.sim.settings import Settings
from tests.sim.stories import Calm, carry, fork, join, takeover
from tests.sim.world import World

WIDTH = 80


def told(world: World) -> list[str]:
    return list(Story(world.trace or (), len(world.rules.fragments)).text(str, WIDTH))


def after(world: World, until: float) -> str:
    world.run(until)
    return " ".join(" ".join(told(world)).split())


def test_a_takeover_is_told() -> None:
    """Who died, who noticed and when, who went on in its place, and which rounds followed: in this order. What a
    round's time went to adds up to that time, except for the first round."""
    world = takeover()
    text = after(world, 20.0)
    order = [r"p0 founds the run", r"p1 joins at epoch 2",
             r"p1 crashes; p2 notices 0.22 s later, p0 notices 0.26 s later",
             r"p0 leads the round to epoch 7; p1 is gone",
             r"epoch 7 took 1.29 s, .*before the death of p1 0.96 s, p0 notices the death of p1 0.26 s"]  # fmt: skip
    assert re.search(".*".join(order), text), text
    rounds = Story(world.trace or (), len(world.rules.fragments)).rounds
    assert len(rounds) > 15
    for one in rounds[1:]:
        assert sum(hop.until - hop.since for hop in one.why) == pytest.approx(one.took, abs=1e-6)
        assert all(early.until == late.since for early, late in zip(one.why, one.why[1:], strict=False))


def test_a_death_is_told_as_one_though_a_message_of_the_dead_is_heard_late() -> None:
    """A notes B's death, then C reads what B had sent before. The line is of B, and both notice it."""

    def notes(time: float, peer: str) -> Entry:
        return Entry(time, peer, Wakeup(), (Note("died", "B can't be reached any more"),))

    entries = [notes(20.75, "A"), Entry(20.76, "B", DIED), notes(20.84, "C")]
    (line,) = Story(entries, 1).text(str, 100)
    assert line.split(maxsplit=1)[1] == f"B {DIED}; A notices 0.00 s later, C notices 0.09 s later"


def test_a_fork_is_told_with_its_cause() -> None:
    """Both versions are named, with the peers that made them, and the peer that gives its own up."""
    text = after(fork(), 30.0)
    order = [r"p0 is cut off", r"p0 notes that p1",
             r"fork: fragment 0 has two versions of epoch 4, one made by p0 from p0 and one made by p1 from p1, p2",
             r"p0 goes over to the lineage that most others hold, told by p1"]  # fmt: skip
    assert re.search(".*".join(order), text), text


def test_a_slow_round_names_the_peer_that_it_waited_for() -> None:
    """A round that waits until its time limit says for whom."""
    assert "epoch 7 took 2.40 s, usually 1.02 s: p1's inner steps 0.79 s, p1 waits in vain for p2 1.50 s" in after(
        carry(), 20.0
    )


def test_a_round_that_waits_for_a_newcomer_names_it() -> None:
    """As the only other peer's does, because one contribution is too few."""
    world = Calm()
    world.join("p1", 6.0)
    assert "until p1 may train" in after(world, 12.0)


def test_a_wait_for_peers_that_come_back_is_no_inner_steps() -> None:
    """A peer that starts from a checkpoint holds a state at once, but may train only after `restart_wait`."""
    entries = [
        Entry(0.0, "b", Wakeup(), (Start(),)),
        Entry(30.0, "b", Merge(), (Load((), 0),)),
        Entry(31.0, "b", Merge()),
    ]
    assert [text for _, text in _causes(entries)] == [*["until b may train"] * 2, "b's inner steps"]


def test_a_newcomer_makes_no_round_slow() -> None:
    text = after(join(), 20.0)
    assert "p2 joins at epoch 7: it holds the state 1.1 s after its start 7.40 epochs 8 to 20: 1.00 s each" in text


@pytest.mark.parametrize("seed", range(3))
def test_a_story_is_short(seed: int) -> None:
    """Whatever happens, a story has at most `LINES_MAX` lines, none too wide, and their times never fall."""
    world = World(seed, drawn(seed), trace=True)
    play(world)
    lines = told(world)
    assert 0 < len(lines) <= LINES_MAX < 30
    assert all(len(line) <= WIDTH or " " not in line.strip() for line in lines)
    times = [float(line[:8]) for line in lines if re.match(r" *\d+\.\d\d ", line[:9])]
    assert times == sorted(times)


def test_histories_tell_what_the_world_tells(tmp_path: Path) -> None:
    """Real peers' histories and a simulated world's trace give the same story: one vocabulary, one view."""
    world = RecordedWorld(tmp_path, 1, Settings(**CALM))  # type: ignore[arg-type]
    world.run(7.0)
    world.crash("p0")
    world.run(20.0)
    lives = world.lives()
    seen = Story(world.trace or (), len(world.rules.fragments))
    read = Story(ordered(lives).entries, len(lives[0].head.rules.fragments))
    masked = [[re.sub(r"\d+\.\d+ s", "N s", str(line)) for line in story.lines] for story in (seen, read)]
    assert [line.replace(DIED, "crashes") for line in masked[1]] == masked[0]


def told_of(took: Sequence[float], fragments: int, monkeypatch: pytest.MonkeyPatch) -> Story:
    """The story of rounds that took so long, in which b joined after a second."""
    ends = [*accumulate(took)]
    made = [
        Round(number % fragments, number // fragments + 1, end - long, end)
        for number, (long, end) in enumerate(zip(took, ends, strict=True))
    ]
    monkeypatch.setattr(story, "rounds", lambda entries, fragments: made)
    joins = Entry(1.0, "b", "starts"), Entry(1.0, "b", Wakeup(), (Accept(((0, Version(0, 0, 0, "")),)), Start()))
    return Story(joins, fragments)


def test_slow_rounds_do_not_crowd_out_what_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a long story the least slow rounds are left out first."""
    told = list(told_of([1.0, 1.0, *(2.0 + n / 100 for n in range(50)), *[1.0] * 60], 1, monkeypatch).text(str, WIDTH))
    text = "\n".join(told)
    assert len(told) <= LINES_MAX
    assert "b joins" in text
    assert "took 2.49 s" in text
    assert "took 2.00 s" not in text


def test_a_round_is_slow_beside_those_of_its_fragment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers evaluate after the same fragment each time, so its rounds are longer than others."""
    lines = told_of([1.0, 1.0, 3.0] * 15, 3, monkeypatch).lines
    assert [line.kind for line in lines if line.kind in ("slow", "rounds")] == ["rounds"]


def test_what_is_told_of_an_event() -> None:
    """Names as in the code, an epoch with the letters of its chain, and no detail such as a hash."""
    ready = Ready(
        0, Version(0, 0, 3, "b6e5f6abc"), ContributionId(10042, 3), ContributionId(10042, 3), 2.0, 64, ("ab",)
    )
    assert tell(Send("p1", ready)) == "Send(p1, Ready(fragment=0, base=3/b6e5f6, id=#0042.3, weight=2))"
