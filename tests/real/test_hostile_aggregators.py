"""A hostile member that contributes, and so is elected to aggregate: it is limited, passed over or refused, and the
honest members go on with equal digests."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from liar import ZEROS, liar
from nodes import SHARDS, Field

from p2p_diloco.core.messages import Counted, Plan
from p2p_diloco.core.version import ContributionId
from p2p_diloco.node import participation
from p2p_diloco.node.auditing import Audits
from p2p_diloco.node.common import Common
from p2p_diloco.tensors.mean import Given
from tests.net.members import invitation

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(300)]
UNHURRIED = {"heartbeat_timeout": 5.0, "round_timeout": 20.0}
"""Each round has every contribution, however slow the machine is. So the figures of means don't depend on that."""


@pytest.fixture(scope="module")
def unhurried() -> Iterator[Field]:
    """A field in which no peer is given up because the machine is slow."""
    made = Field(**UNHURRIED)
    yield made
    made.end()


async def moves(field: Field, epochs: int) -> float:
    """The mean change of θ in each of this many rounds."""
    node = field.nodes[0]
    epoch, theta = node.epoch, float(node.memory.theta.mean())
    await field.goes_on(epochs)
    return (float(node.memory.theta.mean()) - theta) / (node.epoch - epoch)


@pytest.mark.parametrize(("aggregation", "step_limit"), [("clip", 1.25), ("mean", 0.0)])
def test_a_contribution_times_a_thousand_is_clipped(aggregation: str, step_limit: float) -> None:
    """Three honest peers contribute 1, the member -1000 to every round. With clip it counts as -1, so θ goes on in the
    honest direction, by 0.5 a round and more; with the plain mean θ goes the other way."""
    field = Field(aggregation=aggregation, step_limit=step_limit, **UNHURRIED)

    async def row() -> float:
        async with liar(field, "shouter") as member:
            member.delta, member.eligible = -1000.0, False
            await member.take_part(works=True)
            await member.counted()
            return await moves(field, 8)

    try:
        moved = field.do(row())
    finally:
        field.end()
    assert (-1.2 < moved < -0.3) if aggregation == "clip" else (moved > 50), moved


def test_a_member_that_holds_the_term_and_never_commits_is_passed_over(field: Field) -> None:
    """Its successor commits, and each honest peer passes it over once. Meanwhile it contributes -1000 to the rounds of
    the other shards, long before the others: a round that closes with it and one other has no clip, but each step is
    limited to 1.25 of the usual length."""

    async def row() -> float:
        async with liar(field, "holder") as member:
            member.delta = -1000.0
            await member.take_part(works=True)
            await member.until(lambda: member.elected is not None, "elected", 60.0)
            meanwhile = await moves(field, 8)
            await member.until(lambda: not any(member.id in plan.succession for _, _, plan in member.known.values()),
                               "named by no plan", 60.0)  # fmt: skip
            return meanwhile

    assert abs(field.do(row())) < 1.3


def test_a_member_that_works_and_contributes_nothing_holds_up_few_rounds(
    field: Field, caplog: pytest.LogCaptureFixture
) -> None:
    """Two rounds wait for it until `round_timeout`, later ones only for a grace; the log says so. Further peers with
    its invitation are waited for only so long from their first round on."""

    def waits_briefly(peer: str) -> bool:
        return all(node.inbox.handler._replica.roster.behind("works", peer) for node in field.nodes)  # type: ignore[attr-defined]

    async def row() -> None:
        invited = invitation(name="idler")
        async with liar(field, "idler", invited) as member:
            await member.take_part()
            await member.until(lambda: any(member.id in plan.group for _, _, plan in member.known.values()), "named")
            await field.goes_on(6)
            noted = re.compile(rf"…{member.id[-6:]}\)? says that it works, and has missed")
            await member.until(lambda: noted.search(caplog.text) is not None, "noted")
            await field.goes_on(6)
            assert not waits_briefly(member.id)
        async with liar(field, "idler again", invited) as further, liar(field, "honest") as other:
            await further.take_part()
            await other.take_part()
            await further.until(lambda: waits_briefly(further.id), "behind the others")
            assert not waits_briefly(other.id)
            await field.goes_on()

    field.do(row())


@pytest.mark.parametrize("where", ["contributions", "plan"])
def test_an_aggregator_that_invents_peers_commits_nothing(unhurried: Field, where: str) -> None:
    """A sound commit of an elected member lists 500 contributions of invented peers, or a plan that names 200 of them.
    The first would take room in every state for ever, the second would make rounds wait for these peers."""

    field = unhurried

    async def row() -> None:
        async with liar(field, f"sybil-{where}") as member:
            invented = [f"12D3KooW{number:044d}" for number in range(500)]
            listed = tuple(Counted(peer, ContributionId(member.incarnation, 1), 1.0, 1) for peer in invented)
            plan = Plan((*(node.id for node in field.nodes), *invented[:200]), (field.nodes[0].id, *invented[:200]))
            said = (listed, Plan((), (member.id,))) if where == "contributions" else ((), plan)

            async def commits(shard: int) -> None:
                while True:  # a node that computes ignores it without a reason
                    await member.tell_all(await member.sound_commit(shard, *said), ZEROS)
                    await asyncio.sleep(0.5)

            member.commits = commits
            await member.take_part(works=True)
            await member.until(lambda: member.elected is not None, "elected", 60.0)
            why = "it counts too many peers" if where == "contributions" else "its plan names too many peers"
            await field.tells(member.name, why, nodes=3)
            member.works = member.present = False
        await field.goes_on()
        async with liar(field, "reader") as member:
            for shard in range(SHARDS):
                assert len(member.states[shard].counted if await member.look(shard) else ()) < 30

    field.do(row())


def test_a_commit_with_a_wrong_digest_is_never_taken(field: Field) -> None:
    """Of an elected member: each honest peer computes the step, doubts its own state, and goes on without it."""

    async def row() -> None:
        async with liar(field, "miscounter") as member:

            async def commits(shard: int) -> None:
                await member.tell_all(member.commit(shard, member.id), ZEROS)

            member.commits = commits
            await member.take_part(works=True)
            await member.until(lambda: member.elected is not None, "elected", 60.0)
            await field.tells(member.name, f"shard {member.elected}: a commit on epoch", nodes=3)
            await field.goes_on(8)

    field.do(row())


def test_an_aggregator_that_commits_wrong_means_is_expelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four programs one commits means of the wrong sign, ten times as long. The others audit every commit here; they
    find out within 20 rounds, and go on without it."""
    audits = dict[str, Audits]()

    class Known(Audits):
        def __init__(self, common: Common, *given: Any) -> None:
            super().__init__(common, *given)
            audits[common.transport.peer_id] = self

    monkeypatch.setattr(participation, "Audits", Known)
    field = Field("abcd", audit_rate=1.0, **UNHURRIED)
    try:
        faulty, *honest = reversed(field.nodes)

        async def row() -> int:
            work = audits[faulty.id]._work
            right = work._mean
            monkeypatch.setattr(work, "mean_of", right)  # its own audits are right

            def wrong(shard: int, contributions: Sequence[Given]) -> memoryview:
                return memoryview(-10 * np.frombuffer(right(shard, contributions), np.float32)).cast("B")

            monkeypatch.setattr(work, "_mean", wrong)
            began = field.epoch
            await field.until(lambda: all(faulty.id in audits[node.id].expelled for node in honest), 60.0, "expelled")
            ended = field.epoch
            field.nodes = honest
            await field.goes_on(8)
            for node in honest:
                assert audits[node.id].expelled.keys() == {faulty.id}
                assert faulty.id not in audits[node.id]._roster.alive()
            return ended - began

        assert field.do(row()) <= 20
    finally:
        field.nodes = [*honest, faulty]
        field.end()
