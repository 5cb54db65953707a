"""Links that are cut silently, healed, or slow: machines are network namespaces on a switch."""

from __future__ import annotations

import time

import pytest
from cables import Cables
from swarm import Member, Swarm, agree, one_lineage, stall_s, until

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(300)]

INTERVAL_S, TIMEOUT_S = 0.5, 3.0
CUT_S = 3 * TIMEOUT_S
CONFIG = {"sync_every": 4, "outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32"}
CONFIG |= {"heartbeat_interval": INTERVAL_S, "heartbeat_timeout": TIMEOUT_S}


def on_machines(
    swarm: Swarm, network: Cables, names: str, params: dict[str, list[int]] | None = None, **config: object
) -> list[Member]:
    """A bootstrap and peers, each on its own machine, in rounds of all peers."""
    swarm.bootstrap("10.77.0.1", network.machine("seed"))
    settings = {**CONFIG, "start_peers": len(names), **config}
    options = {"config": settings, "step_s": 0.05, "params": params or {"w": [3]}}
    members = [swarm.start(name, on=network.machine(name), **options) for name in names]
    for member in members:
        until(lambda m=member: len(m.lines("epoch", synced=True)) > 8, 120.0, f"rounds of {member.name}")
    return members


def together(members: list[Member], within_s: float = 60.0) -> None:
    """All peers see each other again, and make rounds with one digest."""
    met, since = one_lineage(members, within_s)
    for member in members:
        member.epoch(met + 5, 60.0)
        assert member.last("epoch")["peers"] == len(members)
    agree(members, met, since)


def test_a_cut_link_is_found_out_and_heals(swarm: Swarm, network: Cables) -> None:
    """One of three is cut off: the other two commit again within the heartbeat timeout and two seconds; the one goes on
    alone. After healing all are on the lineage of the larger side, and go on together."""
    a, b, c = on_machines(swarm, network, "abc")
    network.cut("c")
    cut_at = time.time()
    for member in (a, b):
        until(lambda m=member: m.last("epoch")["time"] > cut_at + CUT_S, 60.0, f"rounds of {member.name} after the cut")
    stalls = {member.name: round(stall_s(member, cut_at), 2) for member in (a, b)}
    print({"cut off": "one of three", "stall_s": stalls})
    assert max(stalls.values()) <= TIMEOUT_S + 2.0
    network.heal()
    together([a, b, c])
    agree([a, b])
    assert "joined the lineage of" in c.log()


def test_below_the_floor_a_side_waits(swarm: Swarm, network: Cables) -> None:
    """With min_peers=2 the peer that is cut off makes no outer step, logs why, and joins the others again. Only a round
    whose contributions had come before the cut may still close: that commit is dropped."""
    a, b, c = on_machines(swarm, network, "abc", min_peers=2)
    network.cut("c")
    c.wait_for_log("waiting for", 30.0)
    stood_at = c.reached()
    a.epoch(a.reached() + 10, 60.0)
    assert c.reached() <= stood_at + 1
    network.heal()
    together([a, b, c])
    assert not any("joined the lineage of" in member.log() for member in (a, b))
    assert c.log().count("joined the lineage of") <= 1


def test_a_slow_link_delays_rounds_and_breaks_none(swarm: Swarm, network: Cables) -> None:
    """A peer whose link falls to an eighth of a megabyte a second stays in the run: rounds wait for it, no peer counts
    as dead, and the digests agree."""
    members = on_machines(swarm, network, "abc", {"w": [50_000]}, round_timeout=30.0)
    network.throttle("c", 1)
    throttled = members[0].reached()
    for member in members:
        member.epoch(throttled + 10, 120.0)
    agree(members, throttled + 1)
    assert not any("died: " in member.log() for member in members)
