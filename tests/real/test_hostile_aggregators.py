"""A hostile member that contributes, and so leads and owns slices: it is limited, passed over, refused or expelled, and
the honest members go on with equal digests."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from liar import liar
from nodes import Field

from p2p_diloco.node import participation
from p2p_diloco.node.auditing import Audits
from p2p_diloco.node.common import Common
from p2p_diloco.tensors.mean import Given
from tests.net.members import invitation

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]
UNHURRIED = {"heartbeat_timeout": 5.0, "round_timeout": 20.0}
"""Each round has every contribution, however slow the machine is. So the figures of means don't depend on that."""


@pytest.fixture(scope="module")
def unhurried() -> Iterator[Field]:
    """A field in which no peer is given up because the machine is slow."""
    made = Field(**UNHURRIED)
    yield made
    made.end()


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
            return await field.moves(8)

    try:
        moved = field.do(row())
    finally:
        field.end()
    assert (-1.2 < moved < -0.3) if aggregation == "clip" else (moved > 50), moved


def test_a_member_that_works_and_contributes_nothing_holds_up_few_rounds(
    field: Field, caplog: pytest.LogCaptureFixture
) -> None:
    """Two rounds wait for it until `round_timeout`, later ones only for a grace; the log says so. Further peers with
    its invitation are waited for only so long from their first round on."""

    def waits_briefly(peer: str) -> bool:
        return all(node.inbox.handler._node.replica.roster.is_costly(peer) for node in field.nodes)  # type: ignore[attr-defined]

    async def row() -> None:
        invited = invitation(name="idler")
        async with liar(field, "idler", invited) as member:
            await member.take_part()
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


def test_an_owner_that_computes_wrong_means_is_expelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four programs one computes means of the wrong sign, ten times as long. The others audit every mean here; they
    find out within 10 rounds, and go on without it."""
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
            work: Any = audits[faulty.id]._work
            right = work.mean_of
            monkeypatch.setattr(audits[faulty.id]._examiner, "_work", SimpleNamespace(mean_of=right))  # its own audits

            def wrong(index: int, given: Sequence[Given]) -> memoryview:
                return memoryview(-10 * np.frombuffer(right(index, given), np.float32)).cast("B")

            monkeypatch.setattr(work, "mean_of", wrong)
            began = field.epoch
            await field.until(lambda: all(faulty.id in audits[node.id].expelled for node in honest), 60.0, "expelled")
            ended = field.epoch
            field.nodes = honest
            await field.goes_on(8)
            for node in honest:
                assert audits[node.id].expelled.keys() == {faulty.id}
                assert faulty.id not in audits[node.id]._roster.alive()
            return ended - began

        assert field.do(row()) <= 10
    finally:
        field.nodes = [*honest, faulty]
        field.end()
