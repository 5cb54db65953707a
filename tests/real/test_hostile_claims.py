"""What a member says of itself decides nothing about the others: neither where the run is, nor when it ends, nor how
quickly it goes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from liar import Liar, liar
from nodes import RUN_ID, Field, RealNode

from p2p_diloco.core.state import SAMPLES_TIMES
from p2p_diloco.core.version import ModelVersion
from p2p_diloco.net.invitation import Invitation
from p2p_diloco.node import run_end as ending
from p2p_diloco.node.records import BOARD
from p2p_diloco.node.run_record import BOARD as RUN_BOARD
from p2p_diloco.node.run_record import Founding, RunRecord
from p2p_diloco.node.status import PeerStatus
from p2p_diloco.observe import revise
from p2p_diloco.observe.snapshot import look
from p2p_diloco.observe.view import lines
from tests.net.members import KEY, invitation
from tests.net.swarm import join

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(300)]

HUGE = 10**9
FALSE = {"epoch": HUGE, "revision": HUGE, "revision_known": HUGE, "outer_lr": 99.0, "outer_momentum": 0.5,
         "steps_per_second": 1e30, "sync_every": 1, "loss": 1e30, "counted_samples": 2**62}  # fmt: skip
"""What its record tells."""


@pytest.fixture
def own_field() -> Iterator[Field]:
    """A run that a row may end."""
    made = Field()
    try:
        yield made
    finally:
        made.end()


@pytest.mark.chaos
def test_samples_that_a_member_invents_count_for_little(field: Field, caplog: pytest.LogCaptureFixture) -> None:
    """It works as the others do, and tells 2^20 samples of each step, which the run allows. A run with
    `stop_after_samples` would be over with its first contribution."""

    async def row() -> None:
        async with liar(field, "inflator") as member:
            member.samples, member.eligible = 2**20, False
            await member.take_part(works=True)
            await member.counted()
            await field.goes_on()
            version = (await member.look()).version
            assert member.is_counted()
            assert version.samples <= (len(field.nodes) + SAMPLES_TIMES) * version.epoch

    field.do(row())
    assert f"the run counts {SAMPLES_TIMES} of {2**20} samples" in caplog.text


@pytest.mark.chaos
def test_an_invented_speed_does_not_leave_the_others_one_step_a_round() -> None:
    """With pace="time" the fastest peer's H steps set the time of a round. A member tells 2^40 steps a second, and the
    others train for a sixteenth of their round still."""
    field = Field(pace="time", sync_every=20)

    def planned_s() -> set[float]:
        return {float(node.memory.trains_for_s) for node in field.nodes}

    async def row() -> None:
        for node in field.nodes:
            node.memory.step_time_s = 10.0
            node.memory.steps = node.memory.steps + 1
        await field.until(lambda: planned_s() == {200.0}, 60.0, "all speeds")
        async with liar(field, "sprinter") as member:
            member.speed = 2.0**40
            await member.take_part()
            await field.until(lambda: planned_s() == {12.5}, 60.0, "the member's speed, as far as it counts")
            await field.goes_on()
            assert planned_s() == {12.5}

    try:
        field.do(row())
    finally:
        field.end()


async def tells_wonders(member: Liar) -> None:
    """Publish a false record until cancelled, as often as an honest peer publishes its own; and beside each of the
    others' records one in that peer's name, of another life that has ended."""
    while True:
        for peer in (member.id, *(node.id for node in member.field.nodes)):
            state, life = ("training", member.incarnation) if peer == member.id else ("finished", 0)
            status = PeerStatus(peer_id=peer, name=member.name, role="worker", state=state, time=time.time(),
                                incarnation=life, **FALSE)  # type: ignore[arg-type]  # fmt: skip
            await member.transport.store(BOARD.key(RUN_ID, peer), peer, status.pack(), 30.0)
        await asyncio.sleep(0.5)


def test_the_record_of_a_member_decides_nothing(own_field: Field) -> None:
    """Its epoch, revision, speed and loss are out of all proportion, and in the others' names it says that they have
    finished. What is shown of the run is what they say, and the run is changed and stopped as its founder asks."""
    field = own_field

    async def row() -> None:
        asker = revise.Asker(KEY, KEY.public)
        async with liar(field, "wonder") as member:
            telling = asyncio.create_task(tells_wonders(member))
            eyes = field.nodes[0].transport
            while not any(peer.epoch == HUGE for peer in (await look(eyes, RUN_ID)).peers):
                await asyncio.sleep(0.1)
            seen = await look(eyes, RUN_ID)
            assert lines(seen)
            states = {peer.peer_id: peer.state for peer in seen.peers}
            assert all(states[node.id] != "finished" for node in field.nodes)
            assert 0 < seen.run.epoch < HUGE
            assert (seen.run.revision, seen.run.outer_lr) == (0, 1.0)
            assert seen.run.samples is not None
            assert seen.run.samples < HUGE

            changed = await revise.revise(eyes, RUN_ID, asker, {"stop_after_epochs": 10**6}, 60.0)
            assert (changed.revision.number, changed.news) == (1, True)
            assert {"a", "b", "c"} <= set(changed.known_by)
            await field.goes_on()

            stopped = await revise.stop(eyes, RUN_ID, asker, 60.0)
            assert stopped.news
            assert (stopped.settings["stop_after_epochs"] or HUGE) < 10**6
            honest = {node.id for node in field.nodes}
            while {peer for peer, told in (await field.statuses()).items() if told.state == "finished"} != honest:
                await asyncio.sleep(0.1)
            telling.cancel()

    field.do(row())


@pytest.mark.chaos
def test_a_false_record_of_the_end_keeps_no_killed_run_from_starting_again(own_field: Field, tmp_path: Path) -> None:
    """All peers are gone, and have checkpoints. A member that was not in the last round stores that the run has ended.
    They start again, and go on."""
    field = own_field

    def node(name: str, invited: Invitation, founds: bool) -> RealNode:
        disk = {"checkpoint_dir": tmp_path / name, "save_every": 1, "restart_wait": 20.0}
        return RealNode(name, invited, field.config, founds=founds, **disk)

    async def row() -> None:
        invited = {name: invitation(name=name) for name in "ab"}
        field.config |= {"stop_after_epochs": HUGE, "start_peers": 2}
        boot = await join()
        first = [node(name, one, name == "a") for name, one in invited.items()]
        await asyncio.gather(*(one.begin(boot.addresses()) for one in first))
        await field.until(lambda: min(one.epoch for one in first) >= 3, 60.0, "epoch 3")
        for one in first:
            await one.end()
        async with liar(field, "herald") as member:
            (value,) = (await RUN_BOARD.fetch(member.transport, RUN_ID)).values()
            founding, model = Founding.of(RUN_ID, RunRecord.unpack(value)), ModelVersion(0, HUGE, HUGE, "d" * 32)
            assert await ending.store(
                member.transport, founding, ending.signed(member.transport, founding, model, 1, 5.0)
            )
            again = [node(name, one, name == "a") for name, one in invited.items()]
            await asyncio.gather(*(one.begin(boot.addresses()) for one in again))
            goal = max(one.epoch for one in again) + 3
            await field.until(lambda: min(one.epoch for one in again) >= goal, 60.0, "commits")
            for one in again:
                await one.end()
        await boot.close()

    field.do(row())
