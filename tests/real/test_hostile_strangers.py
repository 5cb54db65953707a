"""A stranger in a private run that knows an address, the run's name and its token: it reads and changes nothing."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from flood_cost import FLOODS
from liar import stranger
from nodes import RUN_ID, Field

from p2p_diloco.node.run_record import RunRecord
from tests.net.attacker import attacker

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]


def test_a_stranger_s_records_are_left_out(field: Field) -> None:
    """1 KiB of junk, and a run's record, under the keys where the members' records lie: members read their own."""

    async def row() -> None:
        async with stranger(field) as outside:
            member, first = field.nodes[0].access.member, field.nodes[0].transport
            config = member.hidden(f"{RUN_ID}/config")
            before = set(await first.fetch(f"{RUN_ID}/config"))
            record = RunRecord.founding(field.run(b""), outside.id, 0.0).pack()
            for name, value in (("0" * 32, record), (outside.id, record), (f"{outside.id}/~{'0' * 32}", bytes(1000))):
                await outside.transport.store(config, name, value, 60.0, owned=name.startswith(outside.id))
            for bucket in range(4):
                await outside.transport.store(member.hidden(f"{RUN_ID}/peers/{bucket}"), outside.id, bytes(1000), 60.0)
            assert set(await first.fetch(f"{RUN_ID}/config")) == before
            assert set(await field.statuses()) >= {node.id for node in field.nodes}
            assert outside.id not in await field.statuses()
            await field.goes_on()

    field.do(row())


def test_commits_go_on_under_a_flood_from_four_connections(field: Field) -> None:
    """Of streams with bytes that are no certificate, with nothing, and with requests for direct connections."""

    async def row() -> None:
        async with contextlib.AsyncExitStack() as strangers:
            floods = []
            for protocol, *said in FLOODS:
                one = await strangers.enter_async_context(attacker(field.nodes[0].transport))
                floods.append(asyncio.create_task(one.flood(protocol, *said)))
            await field.goes_on(20)
            for task in floods:
                task.cancel()
            opened = [await flood for flood in floods]
        assert min(opened) > 0
        await field.goes_on()

    field.do(row())
