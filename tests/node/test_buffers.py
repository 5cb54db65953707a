"""BatchNorm's statistics between nodes: rounds over the in-memory swarm, with models in the trainers' place."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from p2p_diloco.config import PeerConfig
from p2p_diloco.node.exporting import of_checkpoint, write
from p2p_diloco.node.saving import read_checkpoint
from tests.net.memory import MemoryNetwork
from tests.node.conftest import QUICK, MemoryPeer
from tests.node.trained import Trained

SETTINGS = {**QUICK, "num_fragments": 2, "sync_every": 2, "codec": "bf16", "audit_rate": 1.0, "heartbeat_timeout": 10.0}


def network_of(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), nn.BatchNorm1d(2, affine=False))


def trained(swarm: MemoryNetwork, name: str, config: Mapping[str, Any], **local: Any) -> Trained:
    """A peer with data of its own. Its parameters drift at random."""
    model, drawn, offset = network_of(ord(name)), torch.Generator().manual_seed(ord(name)), float(ord(name) - ord("a"))

    def step() -> None:
        model(torch.randn(16, 3, generator=drawn) + offset)
        for parameter in model.parameters():
            parameter.data.add_(torch.randn(parameter.shape, generator=drawn), alpha=1e-3)

    return Trained(MemoryPeer(swarm, name, dict(config), model=model, **local), model, step)


def seen(peer: Trained) -> int:
    """How many batches its model has counted."""
    return int(peer.model.get_buffer("1.num_batches_tracked"))


def played(scene: Any, config: Mapping[str, Any]) -> None:
    """Play a scene; all peers that it has made with `peer(name)` leave at its end."""

    async def life() -> None:
        swarm, made = MemoryNetwork(), list[Trained]()

        async def peer(name: str, **local: Any) -> Trained:
            made.append(trained(swarm, name, config, **local))
            await made[-1].enter()
            return made[-1]

        try:
            await asyncio.wait_for(scene(peer), 60.0)
        finally:
            for one in made:
                await one.peer.stop()

    asyncio.run(life())


def is_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


async def rounds(count: int, *peers: Trained) -> None:
    for _ in range(count):
        await asyncio.gather(*(peer.exchange() for peer in peers))


def test_all_peers_have_the_same_statistics_to_the_bit(caplog: pytest.LogCaptureFixture) -> None:
    """Also a newcomer, whose own are other ones. Every commit is audited, and none is a lie; equal counters are no
    sign of equal data."""

    async def scene(peer: Any) -> None:
        a, b = await peer("k"), await peer("l")  # a history's file is named by peer and second: not those of others
        await rounds(4, a, b)
        c = await peer("m")
        one, other, third = await a.state(), await b.state(), await c.state()
        assert is_same(one, other)
        assert is_same(one, third)
        assert is_same(third, c.model.state_dict())
        await rounds(4, a, b, c)
        assert is_same(await a.state(), await c.state())
        assert seen(a) == 8
        await asyncio.sleep(0.2)  # for audits that are under way

    with caplog.at_level(logging.WARNING):
        played(scene, {**SETTINGS, "start_peers": 2})
    assert "lie" not in caplog.text
    assert "wrong mean" not in caplog.text
    assert "contribute nearly the same" not in caplog.text
    assert "history ends" not in caplog.text


def test_a_checkpoint_and_its_export_have_the_statistics(tmp_path: Path) -> None:
    """And a run that is restarted from it; a model's card is not needed for them."""
    folder, states = tmp_path / "saved", list[dict[str, Tensor]]()

    async def first(peer: Any) -> None:
        a, b = await peer("a", checkpoint_dir=folder, save_every=2), await peer("b")
        await rounds(8, a, b)
        states.append(await b.state())

    async def second(peer: Any) -> None:
        a = await peer("a", from_checkpoint=folder, restart_wait=1.0)
        states.append(await a.state())

    played(first, {**SETTINGS, "start_peers": 2, "stop_after_epochs": 4})
    saved = read_checkpoint(PeerConfig(from_checkpoint=folder))
    assert saved is not None
    assert saved.versions[0].epoch == 4
    told = write(of_checkpoint(folder), tmp_path / "out", "torch", "bfloat16", replace=False)
    assert told["missing"] == []
    assert told["parameters"] == sum(parameter.numel() for parameter in network_of(0).parameters())
    exported = torch.load(tmp_path / "out" / "model.pt", weights_only=True)
    played(second, {**SETTINGS, "stop_after_epochs": None})
    for name, values in states[0].items():
        assert torch.equal(states[1][name], values)
        trained = name in dict(network_of(0).named_parameters())
        assert torch.equal(exported[name], values.bfloat16() if trained else values)
        assert exported[name].dtype == (torch.bfloat16 if trained else values.dtype)
    model = network_of(5)
    model.load_state_dict(exported)
    assert model[1].num_batches_tracked.item() == states[0]["1.num_batches_tracked"].item() == 8
