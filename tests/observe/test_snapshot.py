"""Snapshots: what the records say, and nothing that strangers can do harm with."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_diloco.observe.snapshot import (
    MAX_EVENTS,
    MAX_PEERS,
    MAX_TEXT,
    Buffered,
    RoundProgress,
    Submissions,
    snapshot,
)

NOW = 1_000_000.0
CONFIG = {"config": {"mode": "sync", "sync_every": 500, "reply_codec": None}, "shards": 4, "numel": 10}


def record(name: str = "alice", **changes: Any) -> dict[str, Any]:
    return {
        "v": 1, "peer_id": f"id-{name}", "name": name, "host": "box", "role": "worker", "state": "training",
        "epoch": 12, "step": 6100, "sps": 3.5, "loss": 2.25, "samples": 48800, "sent": 1000, "recv": 2000,
        "wait_s": 12.5, "bw": 11_900_000, "spent": [900, 20, 40, 30, 8, 2, 250], "ways": {"direct": 2},
        "rev": [1, 0.5, 0.8, 2],
        "agg": [0, 2], "agg_n": 2, "round": None, "h": 500, "subs": [], "stale": [], "fill": [],
        "addrs": ["/ip4/1.2.3.4/tcp/1"], "time": NOW - 1.5, "events": [], **changes,
    }  # fmt: skip


def test_the_schema_is_the_documented_one() -> None:
    """Every field of docs/status.md, with its name and kind; a change here is a change of the schema's
    version."""
    told = record(round=[1, 2, 3], events=[[NOW - 10, "carol has joined"]])
    assert json.loads(snapshot("main", CONFIG, [told], NOW).to_json()) == {
        "schema_version": 1,
        "time": NOW,
        "run": {
            "run_id": "main",
            "mode": "sync",
            "epoch": 12,
            "shards": 4,
            "revision": 1, "outer_lr": 0.5, "outer_momentum": 0.8,
            "config": {"mode": "sync", "sync_every": 500, "reply_codec": None},
            "round": {"fragment": 1, "got": 2, "want": 3},
            "events": [{"time": NOW - 10, "peer": "alice", "text": "carol has joined"}],
        },
        "peers": [
            {
                "name": "alice", "peer_id": "id-alice", "host": "box", "role": "worker", "state": "training",
                "epoch": 12, "step": 6100, "steps_per_second": 3.5, "loss": 2.25, "samples": 48800,
                "last_seen_s": 1.5, "bytes_sent": 1000, "bytes_received": 2000,
                "revision": 1, "revision_known": 2, "waiting_s": 12.5,
                "last_round": {
                    "inner": 0.9, "encode": 0.02, "group": 0.04, "transfer": 0.03, "outer_step": 0.008, "merge": 0.002,
                    "hidden": 0.25,
                },
                "bandwidth": 11_900_000, "ways": {"direct": 2, "libp2p": 0, "relayed": 0},
                "aggregates": [0, 2], "aggregates_count": 2,
                "sync_every": 500, "submissions": None, "buffered": None, "addresses": ["/ip4/1.2.3.4/tcp/1"],
            }
        ],
    }  # fmt: skip


@pytest.mark.parametrize("spent", [None, [], [0] * 7, [500] * 6, [500] * 8, [1001] * 7, [-1] * 7, ["x"] * 7, "spent"])
def test_shares_that_mean_nothing_are_left_out(spent: Any) -> None:
    """A round's time is told by seven shares or not at all; before the first one all are 0."""
    (peer,) = snapshot("main", None, [record(spent=spent)], NOW).peers
    assert peer.last_round is None


@pytest.mark.parametrize("told", [None, [], [1, 0.5, 0.9], [-1, 0.5, 0.9, 1], [1, float("nan"), 0.9, 1], ["1"] * 4])
def test_a_revision_that_means_nothing_is_left_out(told: Any) -> None:
    """Then the run's rates are those of its config."""
    config = {"config": {"outer_lr": 0.7, "outer_momentum": 0.9}}
    seen = snapshot("main", config, [record(rev=told)], NOW)
    assert (seen.run.revision, seen.run.outer_lr, seen.run.outer_momentum) == (0, 0.7, 0.9)
    assert seen.peers[0].revision is seen.peers[0].revision_known is None


def test_the_rates_are_those_of_the_highest_revision_that_a_peer_is_at() -> None:
    """Others may have heard of a higher one, or not be there yet."""
    records = [record("a", rev=[0, 0.7, 0.9, 3]), record("b", rev=[2, 0.3, 0.0, 3]), record("c", rev=[1, 0.5, 0.9, 1])]
    run = snapshot("main", CONFIG, records, NOW).run
    assert (run.revision, run.outer_lr, run.outer_momentum) == (2, 0.3, 0.0)


def test_submissions_are_told_in_asynchronous_mode() -> None:
    """What was counted and refused, by staleness; and how full the buffers are where the peer aggregates."""
    (peer,) = snapshot("main", None, [record(subs=[9, 1], stale=[4, 0, 5], fill=[1, 2], h=100)], NOW).peers
    assert peer.submissions == Submissions(9, 1, (4, 0, 5))
    assert (peer.buffered, peer.sync_every) == (Buffered(1, 2), 100)


@pytest.mark.parametrize("odd", [None, [1], [-1, 0], ["x", 1], [2, True, 3], "subs", [[1], 2]])
def test_submissions_that_mean_nothing_are_left_out(odd: Any) -> None:
    """As all that strangers write."""
    (peer,) = snapshot("main", None, [record(subs=odd, fill=odd)], NOW).peers
    assert (peer.submissions, peer.buffered) == (None, None)


def test_a_run_without_a_founder_is_empty() -> None:
    """Without records there is still a snapshot, of nothing."""
    seen = snapshot("main", None, [], NOW)
    assert (seen.run.config, seen.run.mode, seen.run.epoch, seen.run.shards, seen.peers) == (
        None,
        None,
        0,
        None,
        (),
    )


def test_peers_are_sorted_and_the_furthest_tells_the_epoch() -> None:
    """The order doesn't jump between looks, and a joiner without state doesn't set the run back."""
    seen = snapshot("main", CONFIG, [record("zoe", epoch=3), record("bob", epoch=-1), record("al", epoch=2)], NOW)
    assert [peer.name for peer in seen.peers] == ["al", "bob", "zoe"]
    assert [peer.epoch for peer in seen.peers] == [2, None, 3]
    assert seen.run.epoch == 3


def test_the_round_is_the_slowest_aggregators() -> None:
    """A fragment is through when its last shard is; what stragglers say of old rounds doesn't count."""
    rounds = [
        record("a", round=[0, 3, 4]),
        record("b", round=[0, 1, 4]),
        record("c", epoch=11, round=[0, 0, 4]),
    ]
    assert snapshot("main", CONFIG, rounds, NOW).run.round == RoundProgress(0, 1, 4)


def test_of_two_records_of_a_peer_the_newer_counts() -> None:
    """However they arrive."""
    records = [record(step=2, time=NOW - 1), record(step=1, time=NOW - 9)]
    for order in (records, records[::-1]):
        assert [peer.step for peer in snapshot("main", None, order, NOW).peers] == [2]


def test_events_are_the_newest_in_order() -> None:
    """Events of all peers in one list, oldest first, cut to the newest."""
    records = [record(f"p{i:02}", events=[[NOW - i, f"event {i}"]]) for i in range(30)]
    events = snapshot("main", None, records, NOW).run.events
    assert [event.text for event in events] == [f"event {i}" for i in reversed(range(MAX_EVENTS))]
    assert events[-1].peer == "p00"


def test_a_clock_that_is_ahead_makes_no_negative_age() -> None:
    """A peer's clock may be ahead of ours."""
    assert snapshot("main", None, [record(time=NOW + 2)], NOW).peers[0].last_seen_s == 0.0


def test_text_of_strangers_is_tamed() -> None:
    """No escape sequence reaches a terminal, and no text fills a screen."""
    seen = snapshot("main", None, [record(name="\x1b[2Jevil\n" + "x" * 999, events=[[NOW, "a\x07b"]])], NOW)
    assert seen.peers[0].name.startswith(" [2Jevil x")
    assert len(seen.peers[0].name) == MAX_TEXT
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
        ({"sps": float("nan")}, "steps_per_second"),
        ({"loss": float("inf")}, "loss"),
        ({"loss": "low"}, "loss"),
        ({"step": 1.5}, "step"),
        ({"step": True}, "step"),
        ({"samples": -1}, "samples"),
        ({"sent": None}, "bytes_sent"),
        ({"ways": 3}, "ways"),
    ],
)
def test_a_value_of_the_wrong_kind_is_unknown(change: dict[str, Any], field: str) -> None:
    """A record is read field by field: one bad value costs that value alone."""
    (peer,) = snapshot("main", None, [record(**change)], NOW).peers
    assert getattr(peer, field) is None
    assert peer.name == "alice"


@pytest.mark.parametrize("config", [{"config": 3}, {"config": {"a": float("nan")}}, {"config": {"a": b"bytes"}}, {}])
def test_an_unreadable_run_record_is_no_config(config: dict[str, Any]) -> None:
    """What JSON can't carry is left out whole."""
    assert snapshot("main", config, [], NOW).run.config is None


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


OTHERS = {key: anything for key in record() if key != "peer_id"}


@given(
    st.lists(st.fixed_dictionaries({"peer_id": st.just("x") | anything}, optional=OTHERS), max_size=3),
    st.none() | st.fixed_dictionaries({}, optional={"config": anything, "shards": anything}),
)
def test_whatever_strangers_write_there_is_a_snapshot(records: list[dict[str, Any]], config: dict[str, Any]) -> None:
    """Nothing raises, and what comes out is JSON."""
    json.loads(snapshot("main", config, records, NOW).to_json())
