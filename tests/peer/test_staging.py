"""Carrying values between a device and the host, without a device: the copies are real, the streams are played. And
what a trainer tells of its devices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
import torch
from torch import Tensor, nn

from p2p_diloco.peer.devices import Copies, CudaCopies, Staging, memory_reserved
from p2p_diloco.peer.local import LocalModel
from p2p_diloco.peer.progress import Blend
from p2p_diloco.tensors.layout import Layout, specs_of

BLENDS = tuple(Blend)
"""One of each kind."""


class LateCopies:
    """Copies that a stream carries out, in order, and no earlier than it is waited for: what doesn't wait sees old
    values, what fills a buffer too early spoils what is still to be copied out of it.
    """

    pinned = False

    def __init__(self) -> None:
        self.log: list[str] = []
        self._queue: list[tuple[int, Tensor, Tensor]] = []

    def begin(self) -> None:
        self.log.append("begin")

    def copy(self, slot: int, source: Tensor, target: Tensor) -> None:
        self.log.append(f"copy {slot}")
        self._queue.append((slot, target, source))

    def wait(self, slot: int) -> None:
        self.log.append(f"wait {slot}")
        while any(queued == slot for queued, _, _ in self._queue):
            self._carry_out()

    def end(self) -> None:
        self.log.append("end")
        while self._queue:
            self._carry_out()

    def _carry_out(self) -> None:
        _, into, out_of = self._queue.pop(0)
        into.copy_(out_of)


STAGINGS = {"host": lambda: None, "plain": lambda: Staging(Copies()), "late": lambda: Staging(LateCopies())}


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of a few elements, so that a small model takes many turns."""
    monkeypatch.setattr("p2p_diloco.peer.devices.CHUNK_BYTES", 16)
    monkeypatch.setattr("p2p_diloco.peer.local.CHUNK_BYTES", 16)


def test_the_next_chunk_is_on_its_way_before_the_host_works_on_this_one() -> None:
    """The order of a stream's work: each chunk is fetched one turn ahead, and its buffer was emptied before."""
    copies = LateCopies()
    for _, number in Staging(copies).through([(torch.zeros(4), n) for n in range(4)], fetch=True, store=True):
        copies.log.append(f"work {number}")
    assert copies.log == [
        "begin", "copy 0",
        "copy 1", "wait 0", "work 0", "copy 0",
        "copy 0", "wait 1", "work 1", "copy 1",
        "copy 1", "wait 0", "work 2", "copy 0",
        "wait 1", "work 3", "copy 1", "end",
    ]  # fmt: skip
    turns = Staging(copies).through([(torch.zeros(4), n) for n in range(4)], fetch=True, store=True)
    next(turns)
    turns.close()  # type: ignore[attr-defined]
    assert copies.log[-1] == "end", "whatever ends the work, the trainer's stream still waits for what was begun"


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a = nn.Parameter(torch.randn(7, 3))
        self.b = nn.Parameter(torch.randn(11).to(dtype))
        self.c = nn.Parameter(torch.randn(4, 5).t())


@pytest.mark.parametrize("kind", ["plain", "late"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("blend", BLENDS)
def test_staged_parameters_come_out_like_those_in_place(
    kind: str, dtype: torch.dtype, blend: Blend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model behind a device's buffers, and one in host memory, are equal to the bit after any merge, and so are
    their pseudo-gradients."""

    def told(made: Any) -> tuple[list[Tensor], Tensor, Tensor]:
        monkeypatch.setattr("p2p_diloco.peer.local.staging_for", lambda device: made())
        model = Model(dtype)
        layout = Layout.build(specs_of(model), slice_elements=9)
        theta, old, delta = (torch.zeros(layout.numel) for _ in range(3))
        local = LocalModel(model, layout, theta, old, delta, share=0.25)
        local.write_theta()
        begun = theta.clone()
        torch.manual_seed(2)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.shape).to(p.dtype))
        slices = range(len(layout.slices))
        local.write_delta(slices)
        old.copy_(theta)
        theta.copy_(torch.randn(layout.numel))
        local.merge({0: Blend.NONE, 1: Blend.MIX, 2: blend, 4: blend}, slices)
        sent = delta.clone()
        local.write_delta(slices, [index for index in slices if index not in (0, 1, 2, 4)])
        return [p.detach().clone() for p in model.parameters()], begun, torch.cat([sent, delta])

    here, there = told(STAGINGS["host"]), told(STAGINGS[kind])
    assert all(torch.equal(a, b) for a, b in zip(here[0], there[0], strict=True))
    assert torch.equal(here[1], there[1])
    assert torch.equal(here[2], there[2])


def test_copies_run_beside_the_trainers_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The side stream begins after the trainer's kernels, each copy is made on it and marked by an event that the host
    waits for, and the trainer's next kernels come after the last copy."""
    cuda = MagicMock()
    for name in ("Stream", "Event", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    copies = CudaCopies(torch.device("cuda", 0))
    side, training = cuda.Stream.return_value, cuda.current_stream.return_value
    cuda.reset_mock()
    vector, host = torch.ones(4), torch.zeros(4)
    copies.begin()
    copies.copy(0, vector, host)
    copies.wait(0)
    copies.copy(0, host.mul_(3), vector)
    copies.end()
    assert vector.tolist() == [3.0] * 4
    block = [call.stream(side), call.stream().__enter__(), call.stream().__exit__(None, None, None)]
    made = [*block, call.Event().record(side)]
    device = call.current_stream(torch.device("cuda", 0))
    before, after = call.Stream().wait_stream(training), call.current_stream().wait_stream(side)
    assert cuda.mock_calls == [device, before, *made, call.Event().synchronize(), *made, device, after]


@pytest.mark.parametrize(("used", "told"), [(True, (8, 10 + 160)), (False, (0, 0))])
def test_only_used_devices_are_counted(used: bool, told: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
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
