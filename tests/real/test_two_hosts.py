"""A model with copies of its shards on two hosts (HSDP), which together are one peer. Needs root, `ip` and `unshare`.

Each host is a network namespace. The second one can't see the folder of the first one's Unix sockets.
"""

from __future__ import annotations

import pytest
from internet import Internet, missing
from swarm import Swarm, until
from test_ranks import CONFIG, Reference, meet, start_group

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(500)]

ROUNDS = 3


def test_ranks_of_two_hosts_are_one_peer(swarm: Swarm, internet: Internet) -> None:
    """Two ranks on each host, and a plain peer, get the parameters of two plain peers to the bit, as the same ranks on
    one host do. When a rank of the second host is killed, all others end, and the run goes on."""
    if (why := missing("unshare")) is not None:
        pytest.skip(why)
    one, _ = internet.public("one"), internet.public("two")
    folder = swarm.folder / "sockets"
    folder.mkdir()
    cover = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {folder} && exec "$@"', "sh"]
    gloo = ["env", "GLOO_SOCKET_IFNAME=eth0", f"TMPDIR={folder}"]
    first, second = {"on": [*internet.at("one"), *gloo]}, {"on": [*internet.at("two"), *gloo, *cover]}
    swarm.bootstrap("0.0.0.0", internet.at("one"))
    options = {"config": {**CONFIG, "start_peers": 2}, "seed": 1, "mesh": [2, 2], "store": f"tcp://{one}:29500"}
    group = start_group(swarm, "group", each=(first, first, second, second), **options)
    meet(swarm, group[0])
    alone = swarm.start("alone", "ranks.py", on=internet.at("two"), config={}, seed=2)
    expected = Reference([1, 2]).rounds(ROUNDS)
    for member in (*group, alone):
        member.epoch(ROUNDS)
        lines = member.lines("epoch")[:ROUNDS]
        assert [line["theta"] for line in lines] == expected
        assert [line["local"] for line in lines] == expected
        assert [line["collectives"] for line in lines] == [0] * ROUNDS
    group[3].die()
    for rank in group[:3]:
        assert rank.status(120) == 1
        assert rank.lines("failed") or rank.lines("error", kind="RankDied")
    reached = alone.reached()
    until(lambda: alone.reached() >= reached + ROUNDS, 120.0, "rounds without the group")
