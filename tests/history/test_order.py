"""No message is shown before it is sent, whatever the clocks say."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from p2p_diloco.core.events import Received, Send
from p2p_diloco.core.messages import Commit, Ready
from p2p_diloco.history.order import DIED, Ordered, ordered
from p2p_diloco.history.reading import Entry
from tests.history.recorded import CALM, RecordedWorld, as_written
from tests.sim.settings import Settings

FIVE_MINUTES_S = 300.0
PEERS = ("p0", "p1", "p2")


def played(wrong: dict[str, float], until: float = 12.0, delay: float = 0.02) -> tuple[RecordedWorld, Ordered]:
    """A calm world whose peers' wall clocks are wrong, and its histories in one order."""
    with tempfile.TemporaryDirectory() as folder:
        world = RecordedWorld(Path(folder), 1, Settings(**{**CALM, "delay_mean": delay}), wrong=wrong)  # type: ignore[arg-type]
        world.run(until)
        return world, ordered(world.lives())


def arrivals(entries: list[Entry]) -> list[tuple[int, int]]:
    """The places of the sending and of the arrival of each message that is sent once."""
    sent: dict[object, list[int]] = {}
    found = []
    for at, entry in enumerate(entries):
        for effect in entry.effects:
            if isinstance(effect, Send) and isinstance(effect.message, (Commit, Ready)):
                sent.setdefault((entry.peer, effect.to, effect.message), []).append(at)
        if isinstance(entry.what, Received) and isinstance(entry.what.message, (Commit, Ready)):
            found.append((min(sent.get((entry.what.sender, entry.peer, entry.what.message), [len(entries)])), at))
    return found


@settings(max_examples=5, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))  # a world is slow
@given(
    wrong=st.fixed_dictionaries({peer: st.floats(-FIVE_MINUTES_S, FIVE_MINUTES_S) for peer in PEERS}),
    delay=st.sampled_from((0.001, 0.02, 0.3)),
)
def test_a_message_never_arrives_before_it_is_sent(wrong: dict[str, float], delay: float) -> None:
    """With clocks up to five minutes wrong, each arrival comes after its sending; times never fall, and every peer's
    own order is kept."""
    world, history = played(wrong, delay=delay)
    found = arrivals(history.entries)
    assert len(found) > 10
    assert all(left < arrived for left, arrived in found)
    times = [entry.time for entry in history.entries]
    assert times == sorted(times)
    for peer in PEERS:
        of_it = [
            as_written(entry for entry in entries if entry.peer == peer and not isinstance(entry.what, str))
            for entries in (history.entries, world.trace or ())
        ]
        assert of_it[0] == of_it[1]


def test_clocks_are_put_right_by_the_messages() -> None:
    """A clock that is five minutes wrong is put right to within the time that messages take. Clocks that agree are left
    alone."""
    _, history = played({"p1": FIVE_MINUTES_S})
    assert abs(history.shifts["p1"] - history.shifts["p0"] + FIVE_MINUTES_S) < 0.1
    assert {*played({})[1].shifts.values()} == {0.0}


@pytest.mark.parametrize("leaves", [False, True])
def test_a_death_is_told_from_an_end(tmp_path: Path, leaves: bool) -> None:
    """A history that ends early without a last record is that of a peer that died; one that has left has not died. A
    peer that has started again has died all the same, though nobody was left to notice it."""
    world = RecordedWorld(tmp_path, 1)
    world.run(6.0)
    process = world.alive["p1"]
    if leaves:
        world.histories[process].end(process.clock(world.now), left=True)
    world.crash("p1")
    world.run(12.0)
    died = [entry.peer for entry in ordered(world.lives()).entries if entry.what == DIED]
    assert died == ([] if leaves else ["p1"])
    for peer in ("p0", "p2"):
        world.crash(peer)
    world.run(20.0)
    for peer in PEERS:
        world.start(peer, from_disk=True)
    world.run(30.0)
    died = [entry.peer for entry in ordered(world.lives()).entries if entry.what == DIED]
    assert sorted(died) == (["p0", "p2"] if leaves else ["p0", "p1", "p2"])
