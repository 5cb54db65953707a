"""Revisions between nodes: the founder's word, out of the DHT or from another peer, becomes the next steps' rates."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from p2p_diloco.core.revision import CHANGEABLE, FOUNDED, Revision
from p2p_diloco.core.rules import Rules
from p2p_diloco.core.version import ModelVersion
from p2p_diloco.net.certificates import RunKey
from p2p_diloco.net.signing import as_text
from p2p_diloco.node import board, run_record
from p2p_diloco.node import run_end as ending
from p2p_diloco.node.fields import COUNT_MAX, MOST, decoded, encoded
from p2p_diloco.node.inbox import Inbox
from p2p_diloco.node.run_record import REVISION, Founding, read_revision, store_revision
from p2p_diloco.tensors import checkpoint
from p2p_diloco.tensors.outer import OuterOptimizer
from tests.net.memory import MemoryNetwork, signed
from tests.net.patience import awaited, until
from tests.node.conftest import QUICK, MemoryPeer, entered, exchange, founding_in, stop


@pytest.fixture(autouse=True)
def looks_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "LOOK_EVERY_S", 0.05)


async def ask(network: MemoryNetwork, number: int, *rates: float, who: str | None = None, **changes: Any) -> Revision:
    """Leave a revision in the DHT, signed by the founder or by somebody else, from a process that ends at once."""
    founding = founding_in(network)
    bare = Revision(number, *rates, **changes)
    proof = signed(founding.founder if who is None else who, REVISION, founding.statement(bare))
    asker = network.join(f"asker{number}{who}", Inbox())
    assert await store_revision(asker, founding, dataclasses.replace(bare, proof=proof))
    await asker.close()
    return bare


async def both(peers: list[MemoryPeer]) -> float:
    """An exchange of all; what θ is then, the same on all of them."""
    await exchange(*peers)
    (value,) = {peer.memory.theta[0].item() for peer in peers}
    return value


def test_peers_read_what_a_run_may_be_changed_to() -> None:
    """Else a change would end the run: all peers adopt it, and then refuse each other's messages, which have it."""
    most = {key: MOST.get(key, COUNT_MAX) for key in CHANGEABLE} | {"outer_momentum": 0.999}
    greatest: Any = Revision(1, **most)  # type: ignore[arg-type]
    assert decoded(encoded(greatest), Revision) == greatest
    assert most["stop_after_samples"] == MOST["samples"]


@awaited
async def test_the_rates_of_a_run_change_while_it_goes_on() -> None:
    """The asker is gone as soon as it has asked. Every outer step is taken by all with the same rates, the old ones
    until a commit brings the new ones, and these from then on; the momentum gathered so far stays. A newcomer gets
    them with the state."""
    network = MemoryNetwork()
    config = {**QUICK, "outer_momentum": 0.5, "start_peers": 2, "min_peers": 2}
    a, b, c = (MemoryPeer(network, name, config if name == "a" else {}, sizes=(4, 2)) for name in "abc")
    for peer in (a, b):
        await peer.enter()
    old, new = OuterOptimizer(lr=1.0, momentum=0.5), OuterOptimizer(lr=0.25, momentum=0.75)
    theta, state, one = torch.zeros(1), {"m": torch.zeros(1)}, torch.ones(1)
    revised = 0
    for epoch in range(200):
        if epoch == 3:
            await ask(network, 1, 0.25, 0.75)
        reached = await both([a, b])
        steps = [optimizer.step(theta, state, one) for optimizer in (old, new)]
        took = [value.item() for value, _ in steps].index(reached)
        assert took >= (revised > 0)
        theta, state = steps[took]
        revised += took
        if revised == 4:
            break
    assert revised == 4
    told = [(peer.memory.revision, peer.memory.outer_lr, peer.memory.outer_momentum) for peer in (a, b)]
    assert told == [(1, 0.25, 0.75)] * 2
    await a.stop()
    await c.enter()
    assert c.memory.revision == 1


@awaited
async def test_only_the_founders_signature_counts(caplog: pytest.LogCaptureFixture) -> None:
    """What another peer signs, or the founder for another founding, is refused in the log, and the run goes on. Of what
    the founder has signed the highest counts, whatever else lies under the key."""
    network = MemoryNetwork()
    (a,) = await entered("a", network=network)
    await ask(network, 7, 0.25, 0.75, who="b")
    founding = founding_in(network)
    earlier = dataclasses.replace(founding, time=founding.time - 60)
    stale = Revision(6, 0.25, 0.75)
    stale = dataclasses.replace(stale, proof=signed("a", REVISION, earlier.statement(stale)))
    assert await store_revision(a.transport, founding, stale)
    await until(lambda: caplog.text.count("the founder has not signed it") >= 2)
    for _ in range(3):
        await a.exchange(1.0)
    assert (a.memory.revision, await read_revision(a.transport, founding)) == (0, FOUNDED)
    for number, junk in enumerate((b"\xc1", b"\x90", b"\x95\x02\x01\x02\x03\x04", b"x" * 1000)):
        await a.transport.store("r/revisions", f"junk{number}", junk, 600.0, owned=False)
    for number, rate in ((2, 0.5), (1, 0.9)):
        await ask(network, number, rate, 0.0)
    assert await read_revision(a.transport, founding) == Revision(2, 0.5, 0.0)
    while a.memory.revision == 0:
        await a.exchange(1.0)
    assert a.memory.revision == 2


@awaited
async def test_one_peer_that_knows_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The DHT has lost the record; who has read it tells the other with its probes, and keeps it there anew."""
    network = MemoryNetwork()
    config = {**QUICK, "start_peers": 2, "min_peers": 2}
    a = MemoryPeer(network, "a", config)
    b = MemoryPeer(network, "b", {})
    highest = run_record._highest

    def only_a(transport: Any, *of: Any) -> Revision:
        return FOUNDED if transport is b.transport else highest(transport, *of)

    monkeypatch.setattr(run_record, "_highest", only_a)
    await a.enter()  # or both might found the run
    await b.enter()
    asked = await ask(network, 1, 0.5, 0.0)
    while b.memory.revision == 0:
        await both([a, b])
    network.records["r/revisions"].clear()
    while (await read_revision(a.transport, founding_in(network))) != asked:
        await asyncio.sleep(0.01)


@awaited
async def test_a_stopped_run_stays_stopped_and_goes_on_as_another(tmp_path: Path) -> None:
    """The run was founded without an end. It ends at the stop, and is over for a peer that starts from the checkpoint;
    the record of the end names the revision. A run of another name goes on from there, and doesn't stop at once."""
    disk = {"checkpoint_dir": tmp_path, "save_every": 10_000, "restart_wait": 0.5}
    network = MemoryNetwork()
    a = MemoryPeer(network, "a", QUICK, **disk)
    await a.enter()
    stop = await ask(network, 1, stop_after_epochs=4)
    while not a.memory.finished:
        await a.exchange(1.0)
    await a.stop()
    onlooker, rules = network.join("onlooker", Inbox()), Rules(run="r", fragments=((0,),))
    end = (await ending.read(onlooker, founding_in(network), rules))[0]
    assert (end.epoch, end.revision) == (a.memory.epoch, stop)
    (last,) = checkpoint.whole(tmp_path)
    assert checkpoint.epoch_of(last) >= 4
    b = MemoryPeer(MemoryNetwork(), "b", {}, **disk)
    await b.enter()
    assert b.memory.finished
    await b.stop()
    c = MemoryPeer(MemoryNetwork(), "c", {}, run_id="other", from_checkpoint=tmp_path, restart_wait=0.5)
    await c.enter()
    before = c.memory.epoch
    await c.exchange(1.0)
    assert (c.memory.finished, c.memory.epoch) == (0, before + 1)


def test_an_end_counts_only_with_the_founders_signature_on_its_stop() -> None:
    """Otherwise any peer could end a run that was founded without a stop, for peers that start."""
    transport = MemoryNetwork().join("x", Inbox())
    founding, rules = Founding("r", "founder", 1.0), Rules(run="r", fragments=((0,), (1,)))
    model, stop = ModelVersion(0, 12, 6, "d" * 32), Revision(1, stop_after_epochs=3)
    for signer, counts in (("founder", True), ("x", False)):
        proof = signed(signer, REVISION, founding.statement(stop))
        end = ending.signed(transport, founding, model, 2, 5.0, dataclasses.replace(stop, proof=proof))
        assert ending.holds(end, transport, founding, rules) is counts
    assert not ending.holds(ending.signed(transport, founding, model, 2, 5.0), transport, founding, rules)


def test_the_run_key_of_a_private_run_signs_revisions() -> None:
    """It counts as the founder's signature. Another run's key does not, nor any key in an open run."""
    key, stop = RunKey(b"k" * 32), Revision(1, stop_after_epochs=3)
    transport = MemoryNetwork().join("x", Inbox())
    for signer, public, counts in ((key, key.public, True), (RunKey(b"o" * 32), key.public, False), (key, b"", False)):
        founding = Founding("r", "founder", 1.0, public)
        proof = as_text(signer.sign(REVISION, founding.statement(stop)))
        assert founding.proven(transport, dataclasses.replace(stop, proof=proof)) is counts
    assert not Founding("r", "founder", 1.0, key.public).proven(transport, dataclasses.replace(stop, proof="no base64"))


@awaited
async def test_a_run_that_is_founded_anew_takes_a_checkpoint_without_the_earlier_founders_revision(
    tmp_path: Path,
) -> None:
    """a's run was revised, and all of its peers died. b founds it anew and doesn't know a's founder: it takes the state
    that a brings, and refuses none of a's commits."""
    network, disk = MemoryNetwork(), {"checkpoint_dir": tmp_path, "save_every": 1}
    a = MemoryPeer(network, "a", QUICK, **disk)
    await a.enter(theta=1.0)
    await ask(network, 1, 0.5, 0.5)
    while a.memory.revision != 1:
        await a.exchange(1.0)
    await a.stop()
    network = MemoryNetwork()
    b = MemoryPeer(network, "b", QUICK)
    await b.enter(theta=0.0)
    a = MemoryPeer(network, "a", **disk)
    await a.enter()
    for _ in range(2):
        await exchange(a, b)
    assert a.memory.theta.tolist() == b.memory.theta.tolist()
    await stop(a, b)
