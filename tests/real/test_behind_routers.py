"""Peers behind routers that let no connection in, and pairs of peers that can't reach each other. Needs root and nft.

All run on a small internet of network namespaces. No peer is told anything about it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from internet import Internet, missing
from swarm import Member, Swarm, agree, until

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(400)]

ROUNDS = 5
CUT_S = 60.0
CONFIG = {"sync_every": 4, "outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32", "heartbeat_timeout": 10.0}
OPTIONS = {"config": CONFIG, "step_s": 0.05, "params": {"w": [3]}}


@pytest.fixture
def routed(internet: Internet) -> Internet:
    """An internet for one test, which may have routers and cuts."""
    if (why := missing("nft")) is not None:
        pytest.skip(why)
    return internet


def seed(swarm: Swarm, internet: Internet) -> Member:
    """A bootstrap on a public machine of its own."""
    internet.public("seed")
    return swarm.bootstrap("0.0.0.0", internet.at("seed"))


def start(swarm: Swarm, internet: Internet, *names: str) -> list[Member]:
    """A peer on each of these machines; the first one founds the run."""
    first, *others = names
    members = [swarm.start(first, on=internet.at(first), **OPTIONS)]
    members += [swarm.start(name, on=internet.at(name), **{**OPTIONS, "config": {}}) for name in others]
    for member in members:
        member.wait_for("in")
    return members


def rounds(members: Sequence[Member], count: int = ROUNDS, within_s: float = 120.0) -> None:
    """All members make so many more rounds with all others, with equal digests."""
    since = time.time()
    for member in members:
        together = lambda m=member: [  # noqa: E731
            line for line in m.lines("epoch", synced=True) if line["time"] > since and line["peers"] == len(members)
        ]
        until(lambda t=together: len(t()) >= count, within_s, f"{count} rounds of {member.name} with all others")
    agree(members, since=since)


def tunnelled(swarm: Swarm, internet: Internet, *names: str) -> None:
    """Machines that reach the bootstrap alone, each through a tunnel; all later peers join through theirs."""
    seed(swarm, internet)
    address = next(address for address in swarm.addresses if "/ip4/20." in address)
    _, _, host, _, port, *peer = address.split("/")
    program, ends = str(Path(__file__).parent / "programs" / "tunnel.py"), []
    for name in names:
        internet.alone(name)
        file = str(swarm.folder / f"{name}.sock")
        ends.append(swarm.launch(f"{name}-far", [program, "far", file, host, port], internet.at("seed")))
        ends.append(swarm.launch(f"{name}-near", [program, "near", port, file], internet.at(name)))
    for end in ends:
        end.wait_for("ready")
    swarm.addresses = ["/".join(["", "ip4", "127.0.0.1", "tcp", port, *peer])]


def buried(members: Sequence[Member], but: str = "") -> list[str]:
    """The log lines in which these members call a peer dead, but for the one of this name."""
    lines = [line for member in members for line in member.log().splitlines()]
    return [line for line in lines if " died: " in line and f"died: {but} " not in line]


def test_a_public_peer_among_private_ones_may_die_and_return(swarm: Swarm, routed: Internet) -> None:
    """Two private peers and a public one train together. They go on through the bootstrap when the public one dies,
    though neither can dial the other, and with it when it is back. No live peer is called dead."""
    seed(swarm, routed)
    routed.public("pub")
    routed.private("one")
    routed.private("two")
    pub, *private = start(swarm, routed, "pub", "one", "two")
    rounds([pub, *private])
    pub.die()
    rounds(private)
    (back,) = start(swarm, routed, "pub")
    rounds([back, *private])
    assert all("no other peer can dial this one" in member.log() for member in private)
    assert buried(private, "pub") == []


def test_peers_at_the_ends_of_tunnels_train(swarm: Swarm, internet: Internet) -> None:
    """Each reaches the bootstrap alone, at an address of its own machine: they exchange through the bootstrap."""
    tunnelled(swarm, internet, "one", "two")
    members = start(swarm, internet, "one", "two")
    rounds(members)
    assert buried(members) == []


def test_peers_with_ipv6_alone_exchange_directly(swarm: Swarm, internet: Internet) -> None:
    """Two peers go on together without the bootstrap, so no relay stands between them."""
    internet.public6("seed")
    bootstrap = swarm.bootstrap("::", internet.at("seed"))
    for name in ("one", "two"):
        internet.public6(name)
    members = start(swarm, internet, "one", "two")
    rounds(members)
    bootstrap.die()
    rounds(members)
    assert buried(members) == []


@pytest.mark.chaos
def test_four_peers_of_which_two_are_private_train(swarm: Swarm, routed: Internet) -> None:
    """The public ones aggregate for all."""
    seed(swarm, routed)
    for name in ("ann", "bob"):
        routed.public(name)
    for name in ("one", "two"):
        routed.private(name)
    members = start(swarm, routed, "ann", "one", "two", "bob")
    rounds(members)
    assert buried(members) == []


@pytest.mark.chaos
@pytest.mark.parametrize("both_ways", [True, False], ids=["a pair", "one way"])
def test_a_cut_between_two_of_four_changes_nothing(swarm: Swarm, routed: Internet, both_ways: bool) -> None:
    """For a minute two of four can't reach each other, or one can't reach the other. Rounds go on with all four, nobody
    is called dead, and no lineage is left."""
    seed(swarm, routed)
    names = ["ann", "bob", "cem", "dan"]
    places = {name: routed.public(name) for name in names}
    members = start(swarm, routed, *names)
    rounds(members)
    routed.cut("bob", places["ann"])
    if both_ways:
        routed.cut("ann", places["bob"])
    cut_at = time.time()
    until(lambda: time.time() > cut_at + CUT_S, 2 * CUT_S, "the end of the cut")
    longest = {m.name: round(longest_wait_s(m, cut_at), 2) for m in members}
    print({"cut": "a pair" if both_ways else "one way", "longest_wait_s": longest})
    routed.heal("ann")
    routed.heal("bob")
    rounds(members)
    assert max(longest.values()) < CONFIG["heartbeat_timeout"]
    assert buried(members) == []
    assert not any("joined the lineage of" in member.log() for member in members)
    assert all(member.last("epoch")["dropped"] == 0 for member in members)


def longest_wait_s(member: Member, since: float) -> float:
    """The longest time between two rounds of a member since a moment."""
    times = [since, *(line["time"] for line in member.lines("epoch") if line["time"] > since), time.time()]
    return max(later - earlier for earlier, later in itertools.pairwise(times))
