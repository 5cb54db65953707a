"""A hostile program beside a private run of three honest nodes over libp2p: what it sends is refused, clipped or passed
over, with a reason in the status, and the honest members go on with equal digests.

The core's stories, its worlds with a hostile member, and tests/node show each lie by itself; here are some of each kind
over real connections.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from liar import STATE_ZEROS, ZEROS, Liar, liar, stranger
from nodes import RUN_ID, SLICES, Field

from p2p_diloco.core.messages import Ask, Claim, Head, Part, Probe, Told
from p2p_diloco.core.version import ContributionId
from p2p_diloco.node.wire import Describe, Nudge

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(300)]


async def informed(field: Field, member: Liar) -> None:
    """Give a stranger what only members can know: the present versions, terms and plans."""
    async with liar(field, "informant") as known:
        member.state = await known.look()


def refused(answers: list[str]) -> None:
    """Each message was turned away, or its stream is closed, because an earlier message on it was turned away."""
    assert all("not a member of this run" in answer or "the stream was closed" in answer for answer in answers), answers


def test_a_stranger_reads_nothing(field: Field) -> None:
    """It is told no version, state or description, and its copies of the run's records show nothing, though it knows
    the keys under which they lie."""

    async def row() -> None:
        async with stranger(field) as outside:
            for message in (Describe(), Ask(), Ask(0), Ask(0, tuple(range(SLICES)))):
                refused(await outside.tell_all(message))
            assert outside.came == []
            member = field.nodes[0].access.member
            for key in (f"{RUN_ID}/config", *(f"{RUN_ID}/peers/{bucket}" for bucket in range(4))):
                assert await outside.transport.fetch(key) == {}
                for value, _ in (await outside.transport.fetch(member.hidden(key))).values():
                    assert not any(word in value for word in (b"sync_every", b"training", b"/ip4/", b"peer_id"))
            assert any([await outside.transport.fetch(member.hidden(f"{RUN_ID}/peers/{b}")) for b in range(4)])

    field.do(row())


def test_a_stranger_says_nothing(field: Field) -> None:
    """Whatever a hostile member could send is refused with one text before it is read, and no status names it."""

    async def row() -> None:
        async with stranger(field) as outside:
            await informed(field, outside)
            state, ready = outside.held, outside.contribution()
            base, enormous = state.version, ContributionId(2**62, 1)
            raised = replace(base, generation=base.generation + 1)
            choice = outside.choice((field.nodes[1].id, replace(ready, id=enormous, oldest=enormous)))
            seal = b"s" * 72
            said: list[tuple[Any, memoryview | None]] = [
                (Head(0, replace(state, version=raised)), None),
                (Part(0, raised, 0), STATE_ZEROS),
                (outside.close(outside.choice((outside.id, ready))), None),
                (outside.commit(outside.choice((outside.id, ready))), None),
                (outside.commit(replace(choice, by=outside.leader, seal=seal[:64]), outside.leader, seal=seal), None),
                (ready, None),
                (outside.part(ready, 0), ZEROS),
                (Claim(0, base, 2**40), None),
                (Told((raised,), (((raised.epoch, raised.chain),),)), None),
                (Probe(outside.summary()), None),
                (Nudge(base.epoch + 2), None),
            ]
            for message, payload in said:
                refused(await outside.tell_all(message, payload))
            await field.goes_on()
            told = [refused.peer for status in (await field.statuses()).values() for refused in status.refused]
            assert not any(outside.id[-6:] in peer for peer in told)

    field.do(row())


def test_a_leader_that_commits_to_a_false_version_or_invents_peers_is_passed_over(field: Field) -> None:
    """Each peer computes the version, and counts only so many newcomers: it says why it does not take the commit. One
    with 500 invented peers would take room in every state for ever. The next one commits, and two that were held up
    name the leader late: then it leads and owns after all others. Meanwhile it contributes -1000 to the rounds of the
    others: a round that closes with it and one other has no clip, but each step is limited to 1.25 of the usual
    length."""

    async def row() -> float:
        async with liar(field, "miscounter") as member:

            async def commits() -> None:
                first, *others = field.nodes
                while True:  # a node that computes ignores it without a reason
                    own = member.id, member.ready()
                    made = member.commit(member.choice(own))
                    await member.tell(first.id, member.commit(made.choice, version=made.base))
                    invented = [(f"12D3KooW{number:044d}", member.ready()) for number in range(500)]
                    for node in others:
                        await member.tell(node.id, member.commit(member.choice(own, *invented)))
                    await asyncio.sleep(0.5)

            member.delta = -1000.0
            await member.take_part(works=True)
            await member.until(lambda: member.elected, "elected", 60.0)
            committing = asyncio.create_task(commits())
            await field.tells(member.name, "its version does not follow from what it says")
            await field.tells(member.name, "it counts too many newcomers", nodes=2)
            committing.cancel()
            meanwhile = await field.moves(8)

            def comes_last() -> bool:
                known = member.held.roll.get(member.id)
                return known is not None and known.demoted[2] > member.held.version.epoch

            await member.until(comes_last, "behind the others", 60.0)
            assert member.held.plan.succession[-1] == member.id
            assert member.id not in member.held.plan.owners
            return meanwhile

    assert abs(field.do(row())) < 1.3
