"""`status --check`: nothing of a run that goes well, and one line for each fault."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from p2p_diloco.node.status import Death, Deaths, LastRound, PeerStatus, RefusedPeer
from p2p_diloco.observe.check import faults
from p2p_diloco.observe.snapshot import Compared, Snapshot, snapshot

NOW = 1_000_000.0
ALICE = PeerStatus(
    name="alice", peer_id="a", state="training", time=NOW - 3, epoch=5, loss=2.0,
    last_round=LastRound(50.0, 2.0, 4.0, 3.0, 1.0, 0.0, 0.5, NOW - 200),
)  # fmt: skip


def seen(*peers: PeerStatus) -> Snapshot:
    return snapshot("main", None, peers, NOW)


def told(*peers: PeerStatus, rounds: float = 5.0) -> list[str]:
    return list(faults(seen(*peers), rounds))


def test_a_good_run_has_no_fault() -> None:
    """Also one whose peers have refused a few late messages, were killed an hour ago, or haven't made a round yet."""
    few = replace(ALICE, refused=(RefusedPeer("bob", 99, "late"),), newest_deaths=(Death(NOW - 3600, "bob", "silent"),))
    assert told(ALICE, few, PeerStatus(name="new", peer_id="n", state="joining", time=NOW)) == []


def test_a_run_without_peers() -> None:
    (line,) = told()
    assert line.startswith("no peers: the run main")


@pytest.mark.parametrize(
    ("changes", "rounds", "stalled"),
    [({}, 3.0, True), ({}, 4.0, False), ({"state": "finished"}, 3.0, False), ({"state": "paused"}, 3.0, False),
     ({"last_round": LastRound(1.0, 0, 0, 0, 0, 0, 0, NOW - 29)}, 3.0, False),
     ({"last_round": LastRound(1.0, 0, 0, 0, 0, 0, 0, NOW - 31)}, 3.0, True)],
)  # fmt: skip
def test_a_stalled_run(changes: dict[str, Any], rounds: float, stalled: bool) -> None:
    """No commit for so many usual rounds, and for half a minute: short rounds may end unseen for some seconds. Finished
    and paused runs are not stalled."""
    found = told(replace(ALICE, **changes), rounds=rounds)
    assert [line.split(":")[0] for line in found] == ["stalled"] * stalled


def test_a_stall_has_its_reason() -> None:
    """If a peer tells what it waits for. The newest round of any peer counts."""
    waits = replace(ALICE, waits_for="waiting for the contributions of bob")
    (line,) = told(waits, rounds=1.0)
    assert line == (
        "stalled: no commit for 200 s, where a round usually takes 60 s; alice is waiting for the contributions of bob"
    )
    follows = replace(ALICE, name="abe", peer_id="0", waits_for="waiting for a commit from alice")
    assert told(follows, waits, rounds=1.0) == [line]  # who leads knows more
    fresh = replace(ALICE, peer_id="b", last_round=replace(ALICE.last_round, ended=NOW - 2))  # type: ignore[type-var]
    assert told(waits, fresh, rounds=1.0) == []


def test_dead_and_silent_peers() -> None:
    """A death that several have noticed is told once; a silent peer may be dead too."""
    bob = Death(NOW - 60, "bob (…abcdef)", "silent")
    witnesses = [replace(ALICE, peer_id=id, newest_deaths=(bob,)) for id in "abc"]
    silent = replace(ALICE, name="dave", peer_id="d", time=NOW - 20)
    assert told(*witnesses, silent) == [
        f"dead peer: {bob.text} (60 s ago)",
        "silent peer: dave has not told of itself for 20 s",
    ]
    assert told(replace(silent, state="leaving"), ALICE) == []


def test_deaths_have_their_causes() -> None:
    """Each of the last few that a peer has noticed, and one of which only the dead peer's own node tells. All deaths
    since the run began are counted, as the peer that knows of most does."""
    noticed = (Death(NOW - 9, "bob (…abcdef)", "trainer"), Death(NOW - 8, "carol (…fedcba)", "node"))
    witness = replace(ALICE, newest_deaths=noticed, deaths=Deaths(3, 1, 0))
    dave = replace(ALICE, name="dave", peer_id="id-ddddd", state="dead", time=NOW - 2)
    total = "since the run began: 4 deaths (3 trainer, 1 node)"
    assert told(witness, replace(ALICE, peer_id="b", deaths=Deaths(1, 0, 0)), dave) == [
        f"dead peer: bob (…abcdef) died: its trainer was killed, or has crashed (9 s ago; {total})",
        f"dead peer: carol (…fedcba) died: its node was killed, or has crashed (8 s ago; {total})",
        f"dead peer: dave (…-ddddd) died: its trainer was killed, or has crashed (2 s ago; {total})",
    ]
    assert seen(witness, dave).state(dave) == "dead"


def test_doubt_refusals_a_failed_save_and_a_bad_loss() -> None:
    one = replace(
        ALICE,
        doubt="its audits fail",
        unsaved="the disk is full",
        refused=(RefusedPeer("mallory", 1200, "not asked for"),),
    )
    looked = seen(one)
    compared = Compared("loss", 1000, 2.12, 2.0, 0.06, 0.05, above=True)
    assert list(faults(replace(looked, run=replace(looked.run, compared=compared)), 5.0)) == [
        "loss above its baseline: loss 2.1200 is 6.0% above 2.0000 at 1,000 samples (allowed: 5.0%)",
        "save failed: alice: the disk is full",
        "peer in doubt: alice: its audits fail",
        "peer refused: alice refused 1,200 messages of mallory: not asked for",
    ]
