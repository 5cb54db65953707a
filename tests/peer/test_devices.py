"""What a trainer tells of its GPU, with played devices."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from p2p_diloco.peer import hook as hook_module
from p2p_diloco.peer.devices import memory_reserved
from tests.peer.scripted import hooked, step


@pytest.mark.parametrize(("used", "told"), [(True, (8, 10 + 160)), (False, (0, 0))])
def test_the_devices_that_this_process_uses_are_counted(
    used: bool, told: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another device of the machine is not. A process that uses none asks no further question, which would start CUDA
    and take memory of a GPU."""

    def reserved(device: int) -> int:
        assert used
        return [3, 0, 5][device]

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "memory_reserved", reserved)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda at: SimpleNamespace(total_memory=10 * 4**at))
    assert memory_reserved() == told


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
