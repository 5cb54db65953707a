"""Asking for other rates: only the founder may, the number is a new one, and somebody has to have heard."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from p2p_diloco.config import RunConfig
from p2p_diloco.core.revision import FOUNDED, Revision
from p2p_diloco.errors import ConfigError, GaveUpWaiting, Refused
from p2p_diloco.net.signing import from_text
from p2p_diloco.node.board import name_of
from p2p_diloco.node.records import BOARD
from p2p_diloco.node.run_record import REVISION, Founding, RunRecord, read_revision, store_revision
from p2p_diloco.node.status import PeerStatus
from p2p_diloco.observe import revise as module
from p2p_diloco.observe.revise import Asker, Outcome, revise
from tests.net.clocks import by_hand
from tests.net.memory import DeafInbox, MemoryNetwork, MemoryTransport, signed
from tests.net.patience import awaited

ALICE: dict[str, Any] = {"peer_id": "alice-id", "name": "alice", "role": "worker", "state": "training", "epoch": 7}
AS_FOUNDED = {
    "outer_lr": 0.7, "outer_momentum": 0.9, "sync_every": 500, "min_peers": 1, "stop_after_epochs": None,
    "stop_after_samples": None,
}  # fmt: skip
RATES = ("revision", "outer_lr", "outer_momentum", "revision_known")


@pytest.fixture(autouse=True)
def looks_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(module, "FOUND_S", 0.1)


class Identity:
    """Somebody who signs in an in-memory swarm."""

    def __init__(self, peer_id: str) -> None:
        self.peer_id = peer_id

    def sign(self, kind: bytes, statement: bytes) -> bytes:
        return from_text(signed(self.peer_id, kind, statement))


class Swarm:
    """A run that alice has founded, as its records tell, and an asker's eyes on it."""

    def __init__(self, **config: Any) -> None:
        self.network = MemoryNetwork()
        self.alice = self.network.join("alice-id", DeafInbox())
        self.eyes: MemoryTransport = self.network.join("eyes", DeafInbox())
        record = RunRecord(RunConfig(**config).to_wire(), "model", "cut", 3, 100, 4, "alice-id", 5.0)
        self.record, self.founding = record.pack(), Founding.of("main", record)

    async def begin(self, rev: list[float] | None = None) -> None:
        await self.alice.store("main/config", name_of(self.record), self.record, 60.0, owned=False)
        if rev is not None:
            await self.publish(rev)

    async def publish(self, rev: list[float], name: str = "alice", **more: Any) -> None:
        values = {**ALICE, "peer_id": f"{name}-id", "name": name, **dict(zip(RATES, rev, strict=True)), **more}
        status = PeerStatus(**values, time=time.time())
        await self.alice.store(BOARD.key("main", status.peer_id), status.peer_id, status.pack(), 30.0)

    async def ask(self, rates: Mapping[str, float], who: str = "alice-id", within_s: float = 30.0) -> Outcome:
        return await revise(self.eyes, "main", Asker(Identity(who)), rates, within_s)

    async def there(self) -> Revision:
        return await read_revision(self.eyes, self.founding)

    async def stored(self, number: int, asking: asyncio.Task[Any]) -> None:
        """Wait until a revision of this number is there, or the asker has ended."""
        while (await self.there()).number < number and not asking.done():
            await asyncio.sleep(0.01)


@awaited
async def test_what_is_not_named_stays_and_a_peer_is_waited_for() -> None:
    """The new revision follows the highest that anybody tells of, and the outcome names who has adopted it."""
    swarm = Swarm(outer_lr=0.6, outer_momentum=0.8)
    await swarm.begin([0, 0.6, 0.8, 0])
    asking = asyncio.create_task(swarm.ask({"outer_lr": 0.5}))
    await swarm.stored(1, asking)
    assert await swarm.there() == Revision(1, 0.5)
    await swarm.publish([0, 0.6, 0.8, 1])
    await asyncio.sleep(0.1)
    assert not asking.done()
    await swarm.publish([1, 0.5, 0.8, 1])
    values = {**AS_FOUNDED, "outer_lr": 0.5, "outer_momentum": 0.8}
    assert await asking == Outcome(Revision(1, 0.5), True, values, "outer_lr=0.5", ("alice",), ("alice",))
    again = await swarm.ask({"outer_lr": 0.5})
    assert (again.revision, again.news) == (Revision(1, 0.5), False)


@awaited
async def test_one_contribution_is_said_to_be_enough_though_the_run_was_founded_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By that one of a pair may go on alone. It stays said when something else is changed, until more are wanted; a
    warning says if more are wanted than are there."""
    swarm, found = Swarm(outer_lr=0.6, outer_momentum=0.8), list[Revision]()
    await swarm.begin([0, 0.6, 0.8, 0])
    for number, (changes, lr) in enumerate(
        [({"min_peers": 1}, 0.6), ({"outer_lr": 0.5}, 0.5), ({"min_peers": 2}, 0.5)], 1
    ):
        asking = asyncio.create_task(swarm.ask(changes))
        await swarm.stored(number, asking)
        await swarm.publish([number, lr, 0.8, number])
        assert (await asking).news
        found.append(await swarm.there())
    first, second, third = found
    assert (first, second) == (Revision(1, min_peers=1), Revision(2, 0.5, min_peers=1))
    assert third == Revision(3, 0.5, min_peers=2)
    (warning,) = [text for text in caplog.messages if "min_peers" in text]
    assert warning.startswith("live peers: 1, fewer than min_peers=2, so no round ends; start more, or run")


@awaited
async def test_a_rate_that_still_rises_is_fixed_by_its_own_value(caplog: pytest.LogCaptureFixture) -> None:
    """With outer=auto the founded rates are not in use yet. A rate that was set stays so when something else is
    changed. A stop that a long run has passed, or nearly, is no doubt about too few outer steps."""
    swarm, found = Swarm(), list[Revision]()
    await swarm.begin([0, 0.95, 0.1, 0])
    for number, changes in enumerate([{"outer_lr": 0.7}, {"stop_after_epochs": 5}], 1):
        asking = asyncio.create_task(swarm.ask(changes))
        await swarm.stored(number, asking)
        await swarm.publish([number, 0.7, 0.1, number])
        assert (await asking).news
        found.append(await swarm.there())
    assert found == [Revision(1, 0.7), Revision(2, 0.7, stop_after_epochs=5)]
    assert not (await swarm.ask({"outer_lr": 0.7})).news
    assert "only 5 outer steps" not in caplog.text


def test_a_revision_that_the_dht_has_lost_is_waited_for() -> None:
    """A peer tells of revision 3, and its record is gone: nothing may follow it before its values are known. The peer
    stores it again, and then the next one has number 4."""

    async def life(again: bool) -> Revision:
        swarm = Swarm()
        await swarm.begin([3, 0.4, 0.5, 3])
        if again:
            lost = Revision(3, 0.4, 0.5, stop_after_epochs=9)
            proof = signed("alice-id", REVISION, swarm.founding.statement(lost))
            assert await store_revision(swarm.alice, swarm.founding, replace(lost, proof=proof))
        with pytest.raises(GaveUpWaiting):
            await swarm.ask({"outer_momentum": 0.0}, within_s=0.0)
        return await swarm.there()

    assert asyncio.run(life(True)) == Revision(4, 0.4, 0.0, stop_after_epochs=9)
    with pytest.raises(Refused, match="peers know of a revision of the run main that can't be read"):
        asyncio.run(life(False))


def test_a_peer_that_knows_is_enough_when_time_is_up() -> None:
    """Rounds may be long: what one live peer has heard of comes by itself."""

    async def life() -> Outcome:
        with by_hand() as clock:
            swarm = Swarm()
            await swarm.begin([0, 0.7, 0.9, 0])
            asking = asyncio.create_task(swarm.ask({"outer_lr": 0.5}, within_s=0.3))
            await clock.passes(0.1)
            await swarm.publish([0, 0.7, 0.9, 1])
            assert await clock.over(asking, step_s=0.02) < 0.5
            return await asking

    outcome = asyncio.run(life())
    assert (outcome.known_by, outcome.adopted_by) == (("alice",), ())


@pytest.mark.parametrize(
    ("config", "rates", "who", "error", "told"),
    [
        ({}, {"outer_lr": 0.5}, "mallory-id", Refused, "mallory-id, but the run main was founded by alice-id"),
        ({}, {"outer_momentum": 1.0}, "alice-id", ConfigError, "outer_momentum=1.0 must be less than 1"),
        ({"num_fragments": 2, "sync_every": 4}, {"sync_every": 1}, "alice-id", ConfigError, "less than num_fragm"),
        ({"stop_after_epochs": 8}, {"stop_after_epochs": 20}, "alice-id", Refused, "is at epoch 7, and ends at 8"),
        ({"outer_optimizer": "adam"}, {"outer_momentum": 0.5}, "alice-id", ConfigError, "no meaning for outer_opt"),
        ({}, {"stop_after_samples": 10**15}, "alice-id", ConfigError, f"samples={10**15} must be at most {2**48}"),
        ({}, {"outer_lr": 7.0}, "alice-id", ConfigError, "outer_lr=7.0 is above 2: each outer step would end further"),
    ],
)
@awaited
async def test_a_forbidden_or_failed_change_says_why(
    config: dict[str, Any], rates: dict[str, Any], who: str, error: type[Exception], told: str
) -> None:
    """In one sentence, and nothing is left in the DHT. So does one of a run that is not there, after a moment, for the
    DHT may answer late."""
    swarm = Swarm(**config)
    with pytest.raises(Refused, match="run_id=main is no run that these peers know"):
        await swarm.ask(rates, who)
    await swarm.begin([0, 0.7, 0.9, 0])
    with pytest.raises(error, match=told):
        await swarm.ask(rates, who)
    assert await swarm.there() == FOUNDED


@awaited
async def test_of_two_at_once_one_is_told_that_the_other_won() -> None:
    """Both took the same number: all peers go to the greater values, and who asked for the lesser hears of it."""
    swarm = Swarm()
    await swarm.begin([0, 0.7, 0.9, 0])
    asking = asyncio.create_task(swarm.ask({"outer_lr": 0.5}))
    await swarm.stored(1, asking)
    other = Revision(1, 0.6, 0.9)
    proof = signed("alice-id", REVISION, swarm.founding.statement(other))
    assert await store_revision(swarm.alice, swarm.founding, replace(other, proof=proof))
    with pytest.raises(Refused, match=r"revision 1 \(outer_lr=0.5.*adopts revision 1 \(outer_lr=0.6"):
        await asking


async def founder_asks(what: Any, swarm: Swarm, told: list[dict[str, Any]]) -> tuple[Outcome, Revision]:
    """The outcome of a command, and the revision that it has made. `told`: what alice tells, before the revision and
    once it is stored."""
    first, *later = told
    await swarm.begin()
    await swarm.publish([0, 0.7, 0.9, 0], **first)
    asking = asyncio.create_task(what(swarm.eyes, "main", Asker(Identity("alice-id")), 30.0))
    await swarm.stored(1, asking)
    for more in later:
        await swarm.publish([1, 0.7, 0.9, 1], **more)
    return await asking, await swarm.there()


@pytest.mark.parametrize(
    ("mode", "speed", "ends"), [("sync", 0.0, 9), ("sync", 1.0, 9), ("sync", 500.0, 15), ("async", 500.0, 15)]
)
def test_a_stop_ends_the_run_soon_but_not_before_all_peers_know(mode: str, speed: float, ends: int) -> None:
    """Two epochs after the present one; later where rounds are so short that more pass while the news travels. Peers
    that have come to the end meanwhile count as told."""

    async def life() -> tuple[Outcome, Revision]:
        told: list[dict[str, Any]] = [{"steps_per_second": speed, "sync_every": 500}, {"state": "finished"}]
        return await founder_asks(module.stop, Swarm(mode=mode, outer_momentum=0.0), told)

    outcome, there = asyncio.run(asyncio.wait_for(life(), 100.0))
    assert outcome.known_by == ("alice",)
    assert there == Revision(1, stop_after_epochs=outcome.settings["stop_after_epochs"])  # type: ignore[arg-type]
    assert ends <= (there.stop_after_epochs or 0) <= ends + (4 if speed > 1 else 0)


FALSE: dict[str, Any] = {"epoch": 10**9, "steps_per_second": 1e30, "sync_every": 1}
"""What a peer tells that is neither so far nor so quick."""


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("others", [(), ("bob",)])
def test_a_peer_that_tells_wonders_neither_ends_the_run_nor_keeps_it_going(mode: str, others: tuple[str, ...]) -> None:
    """A stop is made although one peer tells of an epoch after the stop that is set, of a revision that nobody signed,
    and of a speed at which the run would be there in no time. It is said to be done when the others know of it."""

    async def life() -> tuple[Outcome, Revision]:
        swarm = Swarm(mode=mode, stop_after_epochs=1000, outer_momentum=0.0)
        await swarm.begin()
        revision = [10**9, 0.7, 0.9, 10**9]
        await swarm.publish(revision, "mallory", **FALSE)
        for name in ("alice", *others):
            await swarm.publish([0, 0.7, 0.9, 0], name, steps_per_second=50.0, sync_every=500)
        asking = asyncio.create_task(module.stop(swarm.eyes, "main", Asker(Identity("alice-id")), 30.0))
        await swarm.stored(1, asking)
        await asyncio.sleep(0.1)
        assert not asking.done()
        for name in ("alice", *others):
            await swarm.publish([1, 0.7, 0.9, 1], name)
        return await asking, await swarm.there()

    outcome, there = asyncio.run(asyncio.wait_for(life(), 100.0))
    assert {"alice", *others} < set(outcome.known_by)
    assert there.stop_after_epochs is not None
    assert 9 <= there.stop_after_epochs <= 9 + 3 * 2 * 5


@awaited
async def test_a_peer_that_tells_of_a_revision_is_not_enough_among_others_that_do_not() -> None:
    """When time is up, half of the live peers must have heard of it: one may say so and not be true."""
    swarm = Swarm()
    await swarm.begin([0, 0.7, 0.9, 0])
    await swarm.publish([0, 0.7, 0.9, 0], "bob")
    await swarm.publish([1, 0.7, 0.9, 1], "mallory")
    with pytest.raises(GaveUpWaiting, match="1 of the 3 peers of the run main have read"):
        await swarm.ask({"outer_lr": 0.5}, within_s=0.1)


@awaited
async def test_a_stop_that_is_set_already_stays() -> None:
    swarm = Swarm(stop_after_epochs=8)
    await swarm.begin([0, 0.7, 0.9, 0])
    outcome = await module.stop(swarm.eyes, "main", Asker(Identity("alice-id")), 30.0)
    assert (outcome.news, outcome.told) == (False, "ends for all peers at epoch 8")


@awaited
async def test_a_save_is_over_when_all_that_have_a_folder_have_begun() -> None:
    outcome, there = await founder_asks(module.save, Swarm(), [{"checkpoint": 4}, {"checkpoint": 8}])
    assert (outcome.saved_by, outcome.told, there) == (("alice",), "being saved by alice", Revision(1, saves=1))
    full = {"checkpoint": 8, "unsaved": "the disk is full"}
    outcome, _ = await founder_asks(module.save, Swarm(), [{"checkpoint": 4}, full])
    assert (outcome.saved_by, outcome.told) == ((), "alice could not save: the disk is full")


SAVES = "no live peer of the run main has a checkpoint folder; start a peer with"


@pytest.mark.parametrize(
    ("what", "told", "why"),
    [
        (module.save, [{}], SAVES),
        (lambda *given: module.stop(*given, save=True), [{}], SAVES),
        (module.stop, [{"state": "leaving"}], "no live peer of the run main is seen"),
        (module.stop, [{"state": "finished"}], "run_id=main has ended at epoch 7; go on from a checkpoint"),
    ],
)
@awaited
async def test_what_no_live_peer_can_do_is_not_asked_for(what: Any, told: list[dict[str, Any]], why: str) -> None:
    """The command says so, and nothing is left in the DHT. The order to stop would else wait there, and end the run as
    soon as its peers are back."""
    swarm = Swarm()
    with pytest.raises(Refused, match=why):
        await founder_asks(what, swarm, told)
    assert await swarm.there() == FOUNDED
