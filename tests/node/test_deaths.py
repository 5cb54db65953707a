"""Deaths are counted once, by what died, and no peer that left on purpose is among them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from p2p_diloco.core.events import Died
from p2p_diloco.node.inbox import Inbox
from p2p_diloco.node.records import BOARD, DeathCount, read_peers
from p2p_diloco.node.status import Deaths, PeerStatus
from tests.net.memory import MemoryNetwork
from tests.net.patience import awaited, until
from tests.node.conftest import QUICK, MemoryPeer


async def counted(deaths: Sequence[Died], *records: PeerStatus, put_out: str = "") -> DeathCount:
    """What a peer counts of these deaths, when these records are in the DHT. `put_out`: a peer that is no longer a
    member."""
    network, told = MemoryNetwork(), asyncio.Event()
    me = network.join("me", Inbox())
    for record in records:
        owner = network.join(record.peer_id, Inbox())
        await owner.store(BOARD.key("r", record.peer_id), record.peer_id, record.pack(), 30.0)
    count = DeathCount(me, "r", lambda peer: f"{peer}'s name", {put_out: ""}.get, told.set)
    for death in (*deaths, Died("last", 1, "node")):
        count.notice(death)
    counting = asyncio.create_task(count.count())
    while not count.newest or count.newest[-1].peer != "last's name":
        await told.wait()
        told.clear()
    counting.cancel()
    return count


@awaited
async def test_deaths_are_counted_by_their_cause() -> None:
    # Deaths are counted by their cause. From the highest count that another peer tells on; the newest have names
    # and times.
    before = [PeerStatus(peer_id="x", deaths=Deaths(1, 2, 0)), PeerStatus(peer_id="y", deaths=Deaths(0, 1, 0))]
    count = await counted([Died("a", 1, "trainer"), Died("b", 1, "silent"), Died("b", 2, "node")], *before)
    assert count.total == Deaths(2, 4, 1)
    told = [(death.peer, death.cause) for death in count.newest]
    assert told == [("b's name", "silent"), ("b's name", "node"), ("last's name", "node")]
    assert abs(count.newest[0].time - time.time()) < 60.0

    # The dead peer's own record tells the cause. Its farewell or its node's last words may have been lost: who
    # left on purpose is not dead. A record of an earlier life says nothing of this one.
    left, dead = (PeerStatus(peer_id="a", state=state, incarnation=1) for state in ("leaving", "dead"))
    assert (await counted([Died("a", 1, "node")], left)).total == Deaths(0, 1, 0)
    assert (await counted([Died("a", 2, "node")], left)).total == Deaths(0, 2, 0)
    assert (await counted([Died("a", 1, "node")], dead)).total == Deaths(1, 1, 0)
    # Nor is one whose invitation was revoked: the others have cut its connections.
    assert (await counted([Died("a", 1, "node")], dead, put_out="a")).total == Deaths(0, 1, 0)


@awaited
async def test_a_trainer_that_died_is_told_by_all() -> None:
    """In the dead peer's last record, and in the others'; a newcomer counts on, and does not look for the dead one. A
    peer that leaves on purpose is no death."""
    network = MemoryNetwork()
    watcher, peers = network.join("w", Inbox()), {name: MemoryPeer(network, name, QUICK) for name in "abcd"}

    async def record_of(peer: str) -> PeerStatus:
        return (await read_peers(watcher, "r")).get(peer, PeerStatus(peer_id=peer))

    for name in "abc":
        await peers[name].enter()
    await until(lambda: len(peers["a"].node.replica.roster.alive()) == 2)
    await peers["b"].stop()
    peers["c"]._channel.left_alone = True
    await peers["c"].stop()
    while not (await record_of("a")).newest_deaths:
        await asyncio.sleep(0.02)
    await peers["d"].enter()
    while (await record_of("d")).deaths is None:
        await asyncio.sleep(0.02)
    a, c, d = [await record_of(name) for name in "acd"]
    assert c.state == "dead"
    assert c.gone
    assert [(death.peer[0], death.cause) for death in a.newest_deaths] == [("c", "trainer")]
    assert a.death is not None
    assert a.death.text.endswith(" died: its trainer was killed, or has crashed")
    assert a.deaths == d.deaths == Deaths(1, 0, 0)
    assert not d.newest_deaths
