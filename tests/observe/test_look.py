"""Looking at a run reads what its peers publish, and nothing else."""

from __future__ import annotations

import time
from dataclasses import replace

from p2p_diloco.config import RunConfig
from p2p_diloco.net.membership import SealedRecords
from p2p_diloco.node.board import name_of
from p2p_diloco.node.privacy import Access
from p2p_diloco.node.records import BOARD
from p2p_diloco.node.run_record import RunRecord
from p2p_diloco.node.status import Event, PeerStatus, RoundProgress, Ways
from p2p_diloco.observe.snapshot import look
from tests.net.members import KEY, id_of, membership
from tests.net.memory import DeafInbox, MemoryNetwork
from tests.net.patience import awaited

ALICE = PeerStatus(
    peer_id="alice-id",
    name="alice",
    host="box",
    role="worker",
    state="waiting",
    epoch=7,
    steps_per_second=2.0,
    loss=1.5,
    bytes_sent=10,
    bytes_received=20,
    waiting_s=3.0,
    ways=Ways(2, 0, 0),
    aggregates=(0,),
    aggregates_count=1,
    round=RoundProgress(0, 1, 2),
    time=time.time(),
    events=(Event(time.time(), "founded the run"),),
)
RUN = RunRecord(RunConfig(sync_every=10).to_wire(), "model", "cut", 3, 100, 4, "alice-id", 0.0)


@awaited
async def test_an_observer_sees_what_peers_publish() -> None:
    """The records of the node, as it writes them, give a full snapshot; those of other runs don't show."""
    network = MemoryNetwork()
    alice, eyes = network.join("alice-id", DeafInbox()), network.join("eyes", DeafInbox())
    assert await alice.store(BOARD.key("main", "alice-id"), "alice-id", ALICE.pack(), 30.0)
    bob = replace(ALICE, peer_id="bob-id", name="bob")
    assert await alice.store(BOARD.key("other", "bob-id"), "bob-id", bob.pack(), 30.0, owned=False)
    assert await alice.store("main/config", name_of(RUN.pack()), RUN.pack(), 30.0, owned=False)
    seen = await look(eyes, "main")
    (peer,) = seen.peers
    assert (peer.name, peer.state, peer.epoch, peer.steps_per_second, peer.loss) == (
        "alice",
        "waiting",
        7,
        2.0,
        1.5,
    )
    assert peer.ways == Ways(direct=2, libp2p=0, relayed=0)
    assert (peer.bytes_sent, peer.bytes_received, peer.waiting_s, peer.aggregates) == (10, 20, 3.0, (0,))
    assert (seen.run.mode, seen.run.slices, seen.run.epoch) == ("sync", 3, 7)
    assert seen.run.config == RunConfig(sync_every=10).to_wire()
    assert seen.run.round is not None
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
