"""Views: everything that matters is on the screen, and nothing but the snapshot is drawn."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from p2p_diloco.node.run_record import RunRecord
from p2p_diloco.node.status import (
    Buffered,
    DataProgress,
    Death,
    Event,
    GpuMemory,
    LastRound,
    PeerStatus,
    RefusedPeer,
    RoundProgress,
    Submissions,
    Ways,
)
from p2p_diloco.observe.sections import SECTIONS
from p2p_diloco.observe.snapshot import Snapshot, snapshot
from p2p_diloco.observe.view import Browsing, lines, page

NOW = 1_000_000.0


def run_with(slices: int = 1, **config: Any) -> RunRecord:
    return RunRecord(config, "model", "cut", slices, 10, 1, "id-a", 0.0)


def named(name: str, **told: Any) -> PeerStatus:
    return PeerStatus(name=name, peer_id=f"id-{name}", **{"time": NOW, **told})


def seen() -> Snapshot:
    alice = named(
        "alice", host="box1", role="worker", state="training", epoch=12, step=6100, steps_per_second=3.5, loss=2.25,
        held_out_loss=2.5, samples=48800, cpu=1.84, memory_bytes=1_500_000_000,
        gpu_memory=GpuMemory(11_200_000_000, 85_029_158_912), bytes_sent=1_500_000,
        bytes_received=999, waiting_s=700.0, bandwidth=11_900_000,
        ways=Ways(4, 3, 0), reach="private", aggregates=(0,), aggregates_count=1, sync_every=500,
        round=RoundProgress(0, 1, 2), time=NOW - 2, events=(Event(NOW, "bob has [joined]"),),
    )  # fmt: skip
    bob = named("[red]bob", role="worker", state="joining")
    run = run_with(mode="sync", sync_every=500, pace="time", codec="bf16", stop_after_epochs=None, min_peers=2)
    return snapshot("main", run, [alice, bob], NOW)


def screen(snap: Snapshot, width: int = 80, browsing: Browsing | None = None, height: int | None = None) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(page(snap, browsing, height), end="")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_tables_show_every_peer_and_the_round() -> None:
    """Names, states, speeds, traffic, the round under way and the newest events, whole on 80 columns."""
    text = screen(seen())
    assert "run main, sync, epoch 12, 2 peers, 1 slice, fragment 0: 1 of 2 contributions" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["alice", "training", "12", "6,100", "3.50", "2.2500", "2.5000", "2s"] in rows
    assert ["[red]bob", "joining", *"-----", "0s"] in rows
    machines, network = text.split("machines")[1], text.split("the network")[1]
    assert "alice     worker  box1  1.8   1.5GB  11.2GB/85.0GB" in machines
    assert "alice     private   11.9MB/s     4/7" in network
    assert "alice      48,800    12min  1.5MB      999B           0" in text
    assert "sync_every=500 pace=time codec=bf16 min_peers=2" in text
    assert "…" not in text


def test_a_peer_that_others_found_dead_is_no_training_one() -> None:
    """Until it writes a newer record: then it lives. One that has left, or of which an older death is told, is not
    dead."""
    deaths = [(Death(NOW - 1, peer, "silent"),) for peer in ("bob (…id_bob)", "…id_bob")]
    alice = named("alice", state="training", loss=3.0, newest_deaths=deaths[0])
    bob = PeerStatus(name="bob", peer_id="12D3id_bob", state="training", loss=2.0, time=NOW - 2)
    for one, shown in ((bob, "dead"), (replace(bob, time=NOW), "training"), (replace(bob, state="leaving"), "leaving")):
        snap = snapshot("main", None, [alice, one], NOW)
        assert f"bob state={shown} " in lines(snap)[2]
        assert snap.run.loss == (2.5 if shown == "training" else 3.0)
    unnamed = replace(alice, newest_deaths=deaths[1])
    assert snapshot("main", None, [unnamed, bob], NOW).state(bob) == "dead"


def test_peers_of_one_name_are_told_apart() -> None:
    """Two machines of one invitation have its name; the log tells them apart by the ends of their ids, too."""
    peers = [
        PeerStatus(name=name, peer_id=f"12D3{end}", time=NOW)
        for name, end in [("a", "x" * 6), ("a", "y" * 6), ("b", "")]
    ]
    snap = snapshot("main", None, peers, NOW)
    assert [line.split(" state=")[0] for line in lines(snap)[1:]] == ["  a (…xxxxxx)", "  a (…yyyyyy)", "  b"]
    assert "a (…yyyyyy)" in screen(snap, 200)


def test_lines_say_the_same() -> None:
    """Without a terminal: a line for the run, one for its settings, one for each peer and each of the newest events."""
    head, settings, bob, alice, event = lines(seen())
    assert settings == "  sync_every=500 pace=time codec=bf16 min_peers=2"
    assert event == "  0s ago  alice: bob has [joined]"
    assert head == "run main, sync, epoch 12, 2 peers, 1 slice, fragment 0: 1 of 2 contributions"
    nothing = "epoch=- step=- steps/s=- loss=- held-out=- seen=0s role=worker host=- cpu=- memory=- gpu=-"
    assert bob == f"  [red]bob state=joining {nothing}"
    assert alice == (
        "  alice state=training epoch=12 step=6,100 steps/s=3.50 loss=2.2500 held-out=2.5000 seen=2s role=worker "
        "host=box1 cpu=1.8 memory=1.5GB gpu=11.2GB/85.0GB samples=48,800 waiting=12min sent=1.5MB received=999B "
        "aggregates=0 reach=private bandwidth=11.9MB/s direct=4/7"
    )
    ends = run_with(mode="sync", sync_every=500, stop_after_epochs=20)  # from epoch 12 on, at 3.5 steps a second
    assert lines(snapshot("main", ends, seen().peers, NOW))[0].endswith("ends in about 19min")


def test_submissions_have_a_table() -> None:
    """What was counted and refused of each peer, how full its buffers are, and how stale it was."""
    alice = named("alice", sync_every=100, submissions=Submissions(9, 1, (4, 0, 5)), buffered=Buffered(1, 2))
    bob = named("bob", sync_every=500, submissions=Submissions(0, 0, ()))
    snap = snapshot("main", run_with(mode="async", dn_buffer_size=3, dylu=True, max_staleness=None), [alice, bob], NOW)
    text = screen(snap)
    assert "dn_buffer_size=3 dylu=True" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["peer", "counted", "refused", "buffered", "behind"] in rows
    assert ["alice", "9", "1", "1–2", "0:4,2:5"] in rows
    assert ["bob", "0", "0", "-", "-"] in rows
    told = next(line for line in lines(snap) if "alice" in line)
    assert told.endswith(" counted=9 refused=1 buffered=1–2 behind=0:4,2:5")


def test_shared_data_has_a_table() -> None:
    """How much of it is used and leased, of all epochs; data without end has no whole."""
    data = DataProgress("train", 1000, 3, 1200, 160), DataProgress("b", 10, 0, 25, 4)
    alice, bob = named("alice", data=data), named("bob")
    snap = snapshot("main", None, [alice, bob], NOW)
    _, below = screen(snap).split("shared data: samples of all epochs")
    assert "train, b" in below
    assert "40.0%, 25" in below
    assert "3,000, no end" in below
    assert "160, 4" in below
    assert "bob" not in below
    assert "shared data" not in screen(seen())


def test_doubt_and_refused_messages_are_told_above_the_events() -> None:
    """First why a peer takes its machine for faulty, or couldn't save; then what it waits for; then of which peer it
    has refused how many messages, and why the last one. Nothing of a peer that tells none of it."""
    refused = RefusedPeer("mallory (…abcdef)", 1200, "it was not asked for")
    alice = named("alice", doubt="this peer's results differ", unsaved="the disk is full", waits_for="waiting for bob",
                  refused=(refused,), events=(Event(NOW, "bob joined"),))  # fmt: skip
    snap = snapshot("main", None, [alice, named("bob")], NOW)
    doubt, full = "alice: this peer's results differ", "alice: the disk is full"
    told = "alice: refused 1,200 of mallory (…abcdef), the last one: it was not asked for"
    rest = ["  alice: waiting for bob", f"  {told}", "  0s ago  alice: bob joined"]
    assert lines(snap)[-5:] == [f"  {doubt}", f"  {full}", *rest]
    assert told in screen(snap)
    assert doubt in screen(snap, browsing=Browsing(marked="id-alice", alone=True))
    assert "refused" not in screen(seen())


def test_an_empty_run_says_so() -> None:
    """A misspelt run id is told from a run without peers."""
    assert lines(snapshot("mian", None, [], NOW)) == ["run mian: no peer of it is seen; check its name, and its peers"]
    assert lines(snapshot("main", run_with(3, mode="sync"), [], NOW)) == ["run main, sync, epoch 0, 0 peers, 3 slices"]


LONG = ("workstation-basement-1", "workstation-basement-2", "al")


def long_names() -> Snapshot:
    last = LastRound(9.0, 0.2, 0.4, 0.3, 0.08, 0.02, 0.3333, 90.0)
    peers = [
        named(
            name, host=f"{name}.example.org", role="aggregator", state="training", epoch=1200, step=6_100_000,
            steps_per_second=1234.5, loss=2.25, samples=4_880_000_000, memory_bytes=10**9, bytes_sent=10**12,
            bytes_received=10**12, waiting_s=70_000.0, bandwidth=119_000_000, ways=Ways(40, 30, 20), reach="private",
            aggregates=(10, 20, 30, 40, 50), aggregates_count=500, sync_every=500, last_round=last,
            gpu_memory=GpuMemory(10**11, 10**12),
            submissions=Submissions(900, 100, (4, 0, 5, 9, 12)), buffered=Buffered(1, 2),
            data=(DataProgress("n" * 40, 10**9, 100, 10**10, 10**7),) * 2,
        )
        for name in LONG
    ]  # fmt: skip
    return snapshot("main", run_with(sync_every=500), peers, NOW)


@pytest.mark.parametrize("width", [80, 120, 200])
def test_every_line_fits_the_screen(width: int) -> None:
    """Every peer has a row in every table, and nothing is cut: names are wrapped. A wide screen has tables side by
    side."""
    snap = long_names()
    if width == 200:
        snap = replace(snap, peers=tuple(replace(peer, data=()) for peer in snap.peers))
    text = screen(snap, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text.replace("0,20,30,40… (500)", "")
    assert text.count("training") == text.count(" 2.2500 ") - 1 == len(LONG)
    for section in SECTIONS[: -1 if width == 200 else None]:
        assert section.title in text
        assert all(title in text for title in section.columns)
    assert ("exchanges" in next(line for line in text.splitlines() if "machines" in line)) == (width == 200)


@pytest.mark.parametrize(("marked", "first"), [(None, 1), ("id-peer-01", 1), ("id-peer-20", 16), ("id-peer-49", 40)])
def test_many_peers_are_shown_in_part(marked: str | None, first: int) -> None:
    """As many as there is room for, around the chosen one; the others are counted."""
    peers = [named(f"peer-{number:02}", state="waiting", waits_for="waiting for bob") for number in range(50)]
    text = "\n".join(screen(snapshot("main", None, peers, NOW), 80, Browsing(marked=marked), 24).splitlines()[:24])
    assert f"peers {first} to {first + 10} of 50" in text
    assert (marked or "id-peer-00").removeprefix("id-") in text
    assert "peer-00, peer-01, peer-02 and 47 more: waiting for bob" in text


def test_the_chosen_peer_is_shown_alone() -> None:
    """With its identity, its addresses and its own events, and without those of others."""
    alice = named("alice", epoch=3, addresses=("/ip4/10.0.0.1/tcp/4000",), events=(Event(NOW - 7, "bob joined"),))
    bob = named("bob", epoch=3, events=(Event(NOW, "alice left"),))
    text = screen(snapshot("main", None, [alice, bob], NOW), browsing=Browsing(marked="id-alice", alone=True))
    assert "id id-alice" in text
    assert "address /ip4/10.0.0.1/tcp/4000" in text
    assert "7s ago  bob joined" in text
    assert "alice left" not in text
    assert "all peers" in text


def test_peers_that_train_count() -> None:
    """The loss is the mean over them, the speed the sum."""
    told = [
        PeerStatus(name="a", peer_id="a", state="training", loss=1.0, steps_per_second=2.0),
        PeerStatus(name="b", peer_id="b", state="waiting", loss=3.0, steps_per_second=3.0),
        PeerStatus(name="c", peer_id="c", state="finished", loss=9.0, steps_per_second=9.0),
        PeerStatus(name="d", peer_id="d", state="training", loss=9.0, steps_per_second=9.0, time=-16.0),  # died
    ]
    assert "loss 2.0000  held-out -  steps/s 5.00" in screen(snapshot("main", None, told, 0.0))
