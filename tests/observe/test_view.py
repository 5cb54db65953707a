"""Views: everything that matters is on the screen, and nothing but the snapshot is drawn."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from p2p_diloco.observe.snapshot import Snapshot, snapshot
from p2p_diloco.observe.view import drawn, lines

NOW = 1_000_000.0


def seen() -> Snapshot:
    alice = {
        "peer_id": "id-a", "name": "alice", "host": "box1", "role": "worker", "state": "training",
        "epoch": 12,
        "step": 6100, "sps": 3.5, "loss": 2.25, "samples": 48800, "sent": 1_500_000, "recv": 999,
        "wait_s": 700.0, "bw": 11_900_000, "ways": {"direct": 4, "libp2p": 3},
        "agg": [0], "agg_n": 1, "round": [0, 1, 2], "time": NOW - 2, "events": [[NOW, "bob has [joined]"]],
    }  # fmt: skip
    bob = {
        "peer_id": "id-b",
        "name": "[red]bob",
        "role": "worker",
        "state": "joining",
        "epoch": -1,
        "time": NOW,
    }
    config = {"mode": "sync", "sync_every": 500, "pace": "time", "codec": "bf16", "stop_after_epochs": None}
    config |= {"min_peers": 2}
    return snapshot("main", {"config": config, "shards": 1}, [alice, bob], NOW)


def screen(snap: Snapshot) -> str:
    console = Console(file=io.StringIO(), width=160, force_terminal=False)
    console.print(drawn(snap))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_shows_every_peer_and_the_round() -> None:
    """Names, states, speeds, traffic, the round under way and the newest events."""
    text = screen(seen())
    assert "run main, sync, epoch 12, 2 peers, 1 shard, round 1 of 2" in text
    (row,) = [line for line in text.splitlines() if "alice" in line and "box1" in line]
    for cell in ("training", "12", "6,100", "3.50", "2.2500", "48,800", "12min", "1.5MB", "999B", "4/7", "2s"):
        assert cell in row
    assert "sync_every=500 pace=time codec=bf16 min_peers=2" in text
    assert "██████████░░░░░░░░░░ fragment 0: 1 of 2 contributions" in text


def test_names_are_no_markup() -> None:
    """What a peer calls itself is shown as it is."""
    text = screen(seen())
    assert "[red]bob" in text
    assert "bob has [joined]" in text


def test_lines_say_the_same() -> None:
    """Without a terminal: a line for the run, one for its settings, one for each peer and each of the newest events."""
    head, settings, bob, alice, event = lines(seen())
    assert settings == "  sync_every=500 pace=time codec=bf16 min_peers=2"
    assert event == "  alice: bob has [joined]"
    assert head == "run main, sync, epoch 12, 2 peers, 1 shard, round 1 of 2"
    assert bob.startswith("  [red]bob joining worker on - epoch=- step=- ")
    assert alice == (
        "  alice training worker on box1 epoch=12 step=6,100 steps/s=3.50 loss=2.2500 samples=48,800 "
        "waited=12min sent=1.5MB received=999B link=11.9MB/s direct=4/7 shards=0 seen=2s"
    )


def test_submissions_have_a_table() -> None:
    """Each peer's inner steps, what was counted and refused, how full its buffers are, and how stale it was."""
    alice = {"peer_id": "id-a", "name": "alice", "h": 100, "subs": [9, 1], "stale": [4, 0, 5], "fill": [1, 2]}
    bob = {"peer_id": "id-b", "name": "bob", "h": 500, "subs": [0, 0]}
    config = {"mode": "async", "dn_buffer_size": 3, "dylu": True, "max_staleness": None}
    snap = snapshot("main", {"config": config, "shards": 2}, [{**alice, "time": NOW}, {**bob, "time": NOW}], NOW)
    text = screen(snap)
    assert "dn_buffer_size=3 dylu=True" in text
    rows = [re.sub("[│┃]", " ", line).split() for line in text.splitlines()]
    assert ["peer", "steps", "counted", "refused", "buffer", "0", "1", "2"] in rows
    assert ["alice", "100", "9", "1", "1–2", "4", "0", "5"] in rows
    assert ["bob", "500", "0", "0", "-", "0", "0", "0"] in rows
    told = next(line for line in lines(snap) if "alice" in line)
    assert told.endswith("; submissions: steps=100 counted=9 refused=1 buffer=1–2 behind=0:4 2:5")


def test_where_the_last_round_went() -> None:
    """A row of its own for each peer that tells, with the steps that it made, and the same behind its line."""
    alice = {"peer_id": "id-a", "name": "alice", "time": NOW, "h": 40, "spent": [900, 20, 40, 30, 8, 2, 250]}
    bob = {"peer_id": "id-b", "name": "bob", "time": NOW}
    snap = snapshot("main", None, [alice, bob], NOW)
    text = screen(snap)
    _, below = text.split("the last round: shares of its time, and of its exchange")
    (row,) = [line for line in below.splitlines() if "alice" in line]
    cells = [cell for cell in row.replace("│", " ").split() if "%" in cell]
    assert "40" in row.replace("│", " ").split()
    assert cells == ["90.0%", "2.0%", "4.0%", "3.0%", "0.8%", "0.2%", "25.0%"]
    assert "bob" not in below
    shares = "steps=40 inner=90.0% encode=2.0% group=4.0% transfer=3.0% outer-step=0.8% merge=0.2% hidden=25.0%"
    assert lines(snap)[1].endswith(f"; last round: {shares}")
    assert "last round" not in screen(seen())


@pytest.mark.parametrize(
    ("ways", "told"),
    [
        ({}, "-"),
        ({"direct": 2}, "2/2"),
        ({"libp2p": 2}, "0/2"),
        ({"direct": 1, "libp2p": 2, "relayed": 3}, "1/6 (3 relayed)"),
    ],
)
def test_ways_are_counted(ways: dict[str, int], told: str) -> None:
    """How many of all peers get their payloads directly; what a third peer passes on is named."""
    alice = {"peer_id": "id-a", "time": NOW, "ways": ways}
    assert f" direct={told} shards" in lines(snapshot("main", None, [alice], NOW))[1]


@pytest.mark.parametrize(("aggregates", "told"), [((), "-"), ((0, 2), "0,2"), (tuple(range(16)), "0,1,2,3… (40)")])
def test_shards_are_named(aggregates: tuple[int, ...], told: str) -> None:
    """Whom one aggregates for is told by number, as long as that is short."""
    count = 40 if len(aggregates) > 4 else len(aggregates)
    alice = {"peer_id": "id-a", "time": NOW, "agg": list(aggregates), "agg_n": count}
    assert f" shards={told} " in lines(snapshot("main", None, [alice], NOW))[1]


def test_an_empty_run_says_so() -> None:
    """A misspelt run id is told from a run without peers."""
    assert lines(snapshot("mian", None, [], NOW)) == ["run mian: nobody has founded it yet"]
    assert lines(snapshot("main", {"config": {"mode": "sync"}}, [], NOW)) == ["run main, sync, epoch 0, 0 peers"]


def test_rates_that_were_set_since_are_shown() -> None:
    """In place of those that the run was founded with, with the number of their revision."""
    config = {"outer_lr": 0.7, "outer_momentum": 0.9, "codec": "bf16"}
    peer = {"peer_id": "id-a", "name": "alice", "epoch": 2, "time": NOW, "rev": [3, 0.25, 0.5, 3]}
    _, settings, *_ = lines(snapshot("main", {"config": config}, [peer], NOW))
    assert settings == "  codec=bf16 outer_lr=0.25 outer_momentum=0.5 (revision 3)"
    _, settings, *_ = lines(snapshot("main", {"config": config}, [{**peer, "rev": [0, 0.7, 0.9, 0]}], NOW))
    assert settings == "  codec=bf16 outer_lr=0.7 outer_momentum=0.9"
