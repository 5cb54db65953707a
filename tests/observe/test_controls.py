"""The buttons of the dashboard: which wishes are carried out, and in whose name."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from p2p_diloco.errors import ConfigError, UsageError
from p2p_diloco.observe import revise as module
from p2p_diloco.observe.revise import Asker
from p2p_diloco.observe.web import Controls
from tests.net.memory import MemoryTransport
from tests.net.patience import awaited
from tests.observe.test_revise import Identity, Swarm


@pytest.fixture(autouse=True)
def looks_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(module, "FOUND_S", 0.1)


async def kicked(name: str) -> str:
    return f"revoked {name}"


def controls(swarm: Swarm, *, founder: bool = True, key: bool = True) -> Controls:
    @contextlib.asynccontextmanager
    async def records() -> AsyncIterator[MemoryTransport]:
        yield swarm.eyes

    asker: Any = Asker(Identity("alice-id")) if founder else None
    return Controls("main", asker, records, kicked if key else None)


@awaited
async def test_a_setting_is_changed_as_by_the_command() -> None:
    """The sentence names the values and the peers that know of them; asking again changes nothing."""
    swarm = Swarm(outer_lr=0.6)
    await swarm.begin([0, 0.6, 0.9, 0])
    asking = asyncio.create_task(controls(swarm).carry_out({"do": "set", "values": {"outer_lr": 0.5}}))
    while not (await swarm.there()).number:
        await asyncio.sleep(0.01)
    await swarm.publish([1, 0.5, 0.9, 1])
    assert await asking == "revision 1: outer_lr=0.5; known by alice"
    again = await controls(swarm).carry_out({"do": "set", "values": {"outer_lr": 0.5}})
    assert again == "outer_lr=0.5: it is so already, and nothing was changed"
    assert await controls(swarm).carry_out({"do": "kick", "name": "bob"}) == "revoked bob"


@pytest.mark.parametrize(
    "wish",
    [None, [], {}, {"do": "dance"}, {"do": "set"}, {"do": "set", "values": {}},
     {"do": "set", "values": {"codec": "fp32"}},
     {"do": "set", "values": {"outer_lr": "much"}}, {"do": "stop"}, {"do": "stop", "save": "yes"},
     {"do": "kick"}, {"do": "kick", "name": ""}, {"do": ["set"]}],
)  # fmt: skip
@awaited
async def test_a_wish_that_means_nothing_is_refused(wish: object) -> None:
    """Also one for a setting that can't change; nothing is stored."""
    swarm = Swarm()
    await swarm.begin([0, 0.7, 0.9, 0])
    with pytest.raises((UsageError, ConfigError)):
        await controls(swarm).carry_out(wish)
    assert (await swarm.there()).number == 0
