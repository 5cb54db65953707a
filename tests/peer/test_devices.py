"""What a trainer tells of its GPU, with played devices."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from p2p_diloco.peer import hook as hook_module
from p2p_diloco.peer.devices import memory_reserved
from tests.peer.scripted import hooked, step

HELD = [3, 0, 5]
"""What torch holds on each device."""


def test_the_devices_that_this_process_uses_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another device of the machine is not."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(HELD))
    monkeypatch.setattr(torch.cuda, "memory_reserved", HELD.__getitem__)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=10 * 4**device)
    )
    assert memory_reserved() == (8, 10 + 160)


def test_a_process_that_uses_no_gpu_asks_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any question but the first would start CUDA, which takes memory of a GPU."""

    def asked(*_: object) -> int:
        raise AssertionError("CUDA was asked")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    for name in ("device_count", "memory_reserved", "get_device_properties"):
        monkeypatch.setattr(torch.cuda, name, asked)
    assert memory_reserved() == (0, 0)


def test_the_node_is_told_once_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at every step: the question takes some time."""
    told: list[tuple[int, int]] = []

    def reserved() -> tuple[int, int]:
        told.append((len(told) + 1, 80))
        return told[-1]

    monkeypatch.setattr(hook_module, "memory_reserved", reserved)
    hook, node, model = hooked()
    assert (node.memory.gpu_reserved, node.memory.gpu_total) == (0, 0)
    for steps in range(1, 13):
        step(hook, model)
        assert len(told) == steps // 4
    assert (node.memory.gpu_reserved, node.memory.gpu_total) == (3, 80)
