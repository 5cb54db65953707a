"""Snapshots: what the records say, and nothing that strangers can do harm with."""

from __future__ import annotations

import json
import time
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest

from p2p_diloco.config import RunConfig
from p2p_diloco.net.membership import SealedRecords
from p2p_diloco.node.board import TEXT_MAX, name_of, packed
from p2p_diloco.node.privacy import Access
from p2p_diloco.node.records import BOARD
from p2p_diloco.node.run_record import RunRecord
from p2p_diloco.node.status import (
    DataProgress,
    Death,
    Deaths,
    Event,
    GpuMemory,
    LastRound,
    PeerStatus,
    RefusedPeer,
    RoundProgress,
    Ways,
)
from p2p_diloco.node.wire import PROTOCOL
from p2p_diloco.observe.snapshot import MAX_PEERS, Snapshot, look
from p2p_diloco.observe.snapshot import snapshot as made
from tests.net.members import KEY, id_of, membership
from tests.net.memory import DeafInbox, MemoryNetwork
from tests.net.patience import awaited

NOW = 1_000_000.0


def run_with(**config: Any) -> RunRecord:
    return RunRecord(config, "model", "cut", 4, 10, 1, "id-alice", 0.0)


CONFIG = run_with(mode="sync", sync_every=500, reply_codec=None)


def record(name: str = "alice", **changes: Any) -> dict[str, Any]:
    return {
        "peer_id": f"id-{name}", "name": name, "host": "box", "role": "worker", "state": "training",
        "time": NOW - 1.5, "incarnation": 7, "epoch": 12, "step": 6100, "steps_per_second": 3.5, "loss": 2.25,
        "held_out_loss": 2.5, "samples": 48800, "counted_samples": 97600, "bytes_sent": 1000,
        "bytes_received": 2000, "revision": 1,
        "outer_lr": 0.5, "outer_momentum": 0.8, "revision_known": 2, "waiting_s": 12.5,
        "waits_for": "waiting for bob", "cpu": 1.5, "memory_bytes": 812, "node_threads": 4,
        "gpu_memory": GpuMemory(11, 80),
        "last_round": LastRound(9.0, 0.2, 0.4, 0.3, 0.08, 0.02, 0.3333, 90.0), "bandwidth": 11_900_000,
        "ways": Ways(2, 0, 0),
        "reach": "public",
        "changed": [["outer_lr", 0.5], ["min_peers", 2.0], ["stop_after_epochs", None]], "checkpoint": 10,
        "unsaved": "the disk is full",
        "aggregates": [0, 2], "aggregates_count": 2, "sync_every": 500, "data": [DataProgress("train", 60, 2, 90, 20)],
        "addresses": ["/ip4/1.2.3.4/tcp/1"], **changes,
    }  # fmt: skip


def _listed(value: Any) -> Any:
    if is_dataclass(value):
        return [_listed(getattr(value, field.name)) for field in fields(value)]
    return [_listed(one) for one in value] if isinstance(value, list | tuple) else value


def status(told: dict[str, Any]) -> PeerStatus:
    return PeerStatus.unpack(packed([PROTOCOL, _listed([told.get(f.name, f.default) for f in fields(PeerStatus)])]))


def snapshot(run_id: str, run: RunRecord | None, records: list[dict[str, Any]], now: float) -> Snapshot:
    return made(run_id, run, [status(told) for told in records], now)


def test_the_schema_is_the_documented_one() -> None:
    """Every field of docs/status.md, with its name and kind; a change here is a change of the schema's
    version."""
    refused = [RefusedPeer("mallory (…abcdef)", 3, "a commit of fragment 0 is ignored")]
    told = record(round=RoundProgress(1, 2, 3), doubt="its results differ",
                  events=[Event(NOW - 10, "carol has joined")],
                  refused=refused,
                  deaths=Deaths(1, 0, 1),
                  newest_deaths=[Death(NOW - 20, "dave (…abcdef)", "silent")])  # fmt: skip
    assert json.loads(snapshot("main", CONFIG, [told], NOW).to_json()) == {
        "schema_version": 2,
        "time": NOW,
        "run": {
            "run_id": "main",
            "mode": "sync",
            "epoch": 12, "samples": 97600, "loss": 2.25, "held_out_loss": 2.5,
            "slices": 4,
            "revision": 1, "outer_lr": 0.5, "outer_momentum": 0.8,
            "changed": {"outer_lr": 0.5, "min_peers": 2, "stop_after_epochs": None},
            "config": {"mode": "sync", "sync_every": 500, "reply_codec": None},
            "ends_in_s": None,
            "round": {"fragment": 1, "got": 2, "want": 3},
            "deaths": {"trainer": 1, "node": 0, "silent": 1},
            "events": [{"time": NOW - 10, "peer": "alice", "text": "carol has joined"}],
            "compared": None,
        },
        "peers": [
            {
                "name": "alice", "peer_id": "id-alice", "host": "box", "role": "worker", "state": "training",
                "time": NOW - 1.5, "incarnation": 7, "epoch": 12, "step": 6100, "steps_per_second": 3.5,
                "loss": 2.25, "held_out_loss": 2.5, "samples": 48800, "counted_samples": 97600,
                "last_seen_s": 1.5, "seen_as": "training", "bytes_sent": 1000, "bytes_received": 2000,
                "revision": 1, "outer_lr": 0.5, "outer_momentum": 0.8, "revision_known": 2, "waiting_s": 12.5,
                "waits_for": "waiting for bob", "cpu": 1.5, "memory_bytes": 812, "node_threads": 4,
                "gpu_memory": {"reserved": 11, "total": 80},
                "changed": [["outer_lr", 0.5], ["min_peers", 2.0], ["stop_after_epochs", None]], "checkpoint": 10,
                "unsaved": "the disk is full",
                "last_round": {
                    "inner": 9.0, "encode": 0.2, "group": 0.4, "transfer": 0.3, "outer_step": 0.08, "merge": 0.02,
                    "hidden": 0.3333, "ended": 90.0,
                },
                "bandwidth": 11_900_000, "ways": {"direct": 2, "libp2p": 0, "relayed": 0},
                "reach": "public",
                "aggregates": [0, 2], "aggregates_count": 2, "round": {"fragment": 1, "got": 2, "want": 3},
                "refused": [{"peer": "mallory (…abcdef)", "count": 3, "why": "a commit of fragment 0 is ignored"}],
                "doubt": "its results differ",
                "death": {"time": NOW - 20, "text": Death(0.0, "dave (…abcdef)", "silent").text},
                "newest_deaths": [{"time": NOW - 20, "peer": "dave (…abcdef)", "cause": "silent"}],
                "deaths": {"trainer": 1, "node": 0, "silent": 1},
                "events": [{"time": NOW - 10, "text": "carol has joined"}],
                "data": [{"name": "train", "length": 60, "epochs": 2, "used": 90, "leased": 20}],
                "sync_every": 500, "submissions": None, "buffered": None, "addresses": ["/ip4/1.2.3.4/tcp/1"],
            }
        ],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("config", "changed", "expected"),
    [
        ({"stop_after_epochs": 20}, [], 8 * 100 / 2.0),  # the slowest peer makes 2 steps a second
        ({"stop_after_epochs": 20, "pace": "time"}, [], 8 * 100 / 4.0),
        ({}, [["stop_after_epochs", 14.0], ["sync_every", 10.0]], 2 * 10 / 2.0),
        ({"stop_after_epochs": 20}, [["stop_after_epochs", None]], None),
        ({"stop_after_epochs": 20, "mode": "async"}, [], None),
        ({"stop_after_epochs": 11}, [], 0.0),
        ({}, [], None),
    ],
)
def test_the_end_is_as_far_as_the_steps_that_are_left(
    config: dict[str, Any], changed: list[Any], expected: float | None
) -> None:
    """At the speed of the peer that the others wait for, by the settings that hold now. Peers that are gone don't
    count."""
    peers = [record(name, changed=changed, steps_per_second=speed) for name, speed in (("a", 2.0), ("b", 4.0))]
    gone = record("c", changed=changed, steps_per_second=0.1, time=NOW - 1000)
    seen = snapshot("main", run_with(**{"mode": "sync", "sync_every": 100, **config}), [*peers, gone], NOW)
    assert seen.run.ends_in_s == expected


def test_the_rates_are_those_of_the_revision_that_the_middle_peer_is_at() -> None:
    """Others may not be there yet, or may invent one."""
    rates = [("a", 0, 0.7, 0.9), ("b", 2**40, 0.3, 0.0), ("c", 1, 0.5, 0.9)]
    records = [record(name, revision=n, outer_lr=lr, outer_momentum=beta) for name, n, lr, beta in rates]
    run = snapshot("main", CONFIG, records, NOW).run
    assert (run.revision, run.outer_lr, run.outer_momentum) == (1, 0.5, 0.9)


def test_of_equal_revisions_the_changes_are_those_that_most_peers_tell() -> None:
    """A peer that tells other values of the revision that all have is alone with them."""
    false = {"outer_lr": 99.0, "outer_momentum": 0.0, "changed": [["stop_after_epochs", 7.0]]}
    records = [record("alice"), record("bob"), record("mallory", **false)]
    run = snapshot("main", CONFIG, records, NOW).run
    assert (run.outer_lr, run.outer_momentum) == (0.5, 0.8)
    assert run.changed == {"outer_lr": 0.5, "min_peers": 2, "stop_after_epochs": None}


@pytest.mark.parametrize("others", [("alice",), ("bob", "carol")])
def test_one_peer_does_not_say_how_far_the_run_is(others: tuple[str, ...]) -> None:
    """Neither in a pair with the founder, alice, nor in a larger run."""
    false = record("mallory", epoch=10**9, counted_samples=10**15)
    seen = snapshot("main", CONFIG, [*map(record, others), false], NOW)
    assert (seen.run.epoch, seen.run.samples) == (12, 97600)


def test_peers_are_sorted_and_the_further_one_of_two_tells_the_epoch() -> None:
    """The order doesn't jump between looks, and a joiner without state doesn't set the run back."""
    seen = snapshot("main", CONFIG, [record("zoe", epoch=3), record("bob", epoch=None), record("al", epoch=2)], NOW)
    assert [peer.name for peer in seen.peers] == ["al", "bob", "zoe"]
    assert [peer.epoch for peer in seen.peers] == [2, None, 3]
    assert seen.run.epoch == 3


def test_the_round_is_the_slowest_aggregators() -> None:
    """The least progress counts, and what stragglers say of old rounds doesn't."""
    of = (("a", 12, 3), ("b", 12, 1), ("c", 11, 0))
    rounds = [record(name, epoch=epoch, round=RoundProgress(0, got, 4)) for name, epoch, got in of]
    assert snapshot("main", CONFIG, rounds, NOW).run.round == RoundProgress(0, 1, 4)


def test_text_of_strangers_is_tamed() -> None:
    """No escape sequence reaches a terminal, and no text fills a screen."""
    seen = snapshot("main", None, [record(name="\x1b[2Jevil\n" + "x" * 999, events=[Event(NOW, "a\x07b")])], NOW)
    assert seen.peers[0].name.startswith(" [2Jevil x")
    assert len(seen.peers[0].name) == TEXT_MAX
    assert seen.run.events[0].text == "a b"


def test_a_flood_of_peers_is_cut() -> None:
    """Identities cost nothing, so the number of peers that are shown ends somewhere: the newest stay."""
    flood = [record(f"p{i}", time=NOW - i) for i in range(MAX_PEERS + 5)]
    names = {peer.name for peer in snapshot("main", None, flood, NOW).peers}
    assert len(names) == MAX_PEERS
    assert "p0" in names
    assert f"p{MAX_PEERS + 4}" not in names


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"steps_per_second": float("nan")}, "steps_per_second"),
        ({"loss": float("inf")}, "loss"),
        ({"loss": 1.7e308}, "loss"),
        ({"steps_per_second": 1e308}, "steps_per_second"),
        ({"loss": "low"}, "loss"),
        ({"step": 1.5}, "step"),
        ({"step": True}, "step"),
        ({"samples": -1}, "samples"),
        ({"bytes_sent": None}, "bytes_sent"),
        ({"ways": 3}, "ways"),
    ],
)
def test_a_value_of_the_wrong_kind_is_unknown(change: dict[str, Any], field: str) -> None:
    """A record is read field by field: one bad value costs that value alone."""
    (peer,) = snapshot("main", None, [record(**change)], NOW).peers
    assert getattr(peer, field) is None
    assert peer.name == "alice"


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), b"bytes"])
def test_settings_that_json_cant_carry_are_no_config(odd: object) -> None:
    """They are left out whole."""
    seen = snapshot("main", run_with(outer_lr=odd), [], NOW)
    assert seen.run.config is None
    assert json.loads(seen.to_json())["run"]["outer_lr"] is None


# -- looking at a run


RUN = RunRecord(RunConfig(sync_every=10).to_wire(), "model", "cut", 3, 100, 4, "id-alice", 0.0)


@awaited
async def test_an_observer_sees_what_peers_publish() -> None:
    """The records of the node, as it writes them, give a full snapshot; those of other runs don't show."""
    network = MemoryNetwork()
    eyes, transport = (network.join(name, DeafInbox()) for name in ("eyes", "id-alice"))
    events = [Event(time.time(), "founded the run")]
    alice = status(record(time=time.time(), round=RoundProgress(0, 1, 2), events=events))
    assert await transport.store(BOARD.key("main", "id-alice"), "id-alice", alice.pack(), 30.0)
    bob = replace(alice, peer_id="id-bob", name="bob")
    assert await transport.store(BOARD.key("other", "id-bob"), "id-bob", bob.pack(), 30.0, owned=False)
    assert await transport.store("main/config", name_of(RUN.pack()), RUN.pack(), 30.0, owned=False)
    seen = await look(eyes, "main")
    assert seen.peers == (PeerStatus.unpack(alice.pack()),)
    assert (seen.run.mode, seen.run.slices, seen.run.epoch) == ("sync", 3, 12)
    assert seen.run.config == RunConfig(sync_every=10).to_wire()
    assert seen.run.round == RoundProgress(0, 1, 2)
    assert [event.text for event in seen.run.events] == ["founded the run"]
    assert eyes.traffic.bytes_sent == 0


@awaited
async def test_in_a_private_run_the_run_key_signs_the_runs_record() -> None:
    """A member's record that it didn't sign is passed over, though its name may be lower."""
    network, names = MemoryNetwork(), [id_of("alice"), id_of("eyes")]
    members = [membership(name) for name in names]
    alice, eyes = (SealedRecords(network.join(n, DeafInbox()), m) for n, m in zip(names, members, strict=True))
    true = Access(members[0], KEY).signed("main", RUN)
    forged = [replace(RUN, config=RunConfig(sync_every=every).to_wire()).pack() for every in range(20, 40)]
    for value in (true, *forged):
        await alice.store("main/config", name_of(value), value, 30.0, owned=False)
    assert (await look(eyes, "main")).run.config == RUN.config
