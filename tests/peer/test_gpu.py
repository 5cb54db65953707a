"""What differs on a GPU, on a real one. Without one these tests are skipped, and the report of the tests says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from examples.benchmarks.__main__ import main as bench
from p2p_diloco import Peer
from p2p_diloco.peer import inner
from p2p_diloco.peer.devices import finish, memory_reserved, numbered, usable
from p2p_diloco.peer.local import LocalModel
from p2p_diloco.peer.progress import Blend
from p2p_diloco.tensors import buffers
from p2p_diloco.tensors.layout import Layout, specs_of
from p2p_diloco.tensors.mean import MAGNITUDE_MAX

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT RUN: there is no GPU")
HOST = torch.device("cpu")


def model(where: torch.device, numel: int = 3_000_000) -> nn.Module:
    """Longer than a buffer of the staging, in bf16 and fp32."""
    made = nn.Module()
    drawn = torch.Generator().manual_seed(0)
    for name, dtype in (("a", torch.float32), ("b", torch.bfloat16)):
        made.register_parameter(name, nn.Parameter(torch.randn(numel, generator=drawn).to(dtype)))
    return made.to(where)


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("blend", Blend)
def test_every_blend_leaves_the_same_bits_on_a_gpu(blend: Blend, wire: torch.dtype) -> None:
    """What is sent in either of the wire's dtypes, and what a merge makes of local values, for each `Blend`; some of
    the slices' bases were kept, others are still in θ."""
    told = []
    for where in (HOST, numbered("cuda")):
        own = model(where)
        layout = Layout.build(specs_of(own))
        theta, old = torch.zeros(2, layout.numel)
        delta = torch.zeros(layout.numel, dtype=wire)
        local = LocalModel(own, layout, theta, old, delta, share=0.25)
        local.write_theta()
        drawn = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in own.parameters():
                p.add_(torch.randn(p.shape, generator=drawn).to(where, p.dtype))
        sound = local.write_delta(local.slices)
        old.copy_(theta)
        kept = local.slices[::2]
        for start, stop in local.ranges(kept):
            theta[start:stop] = torch.randn(stop - start, generator=drawn)
        local.merge(dict.fromkeys(local.slices, blend), kept)
        finish(where)
        told.append((torch.tensor(sound), delta, *(p.detach().cpu() for p in own.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*told, strict=True))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -2 * MAGNITUDE_MAX])
def test_what_may_not_be_sent_is_found_on_a_gpu(wrong: float) -> None:
    """One value among millions, in either dtype."""
    own = model(numbered("cuda"))
    layout = Layout.build(specs_of(own))
    local = LocalModel(own, layout, *torch.zeros(3, layout.numel))
    local.write_theta()
    assert local.write_delta(local.slices)
    for p in own.parameters():
        before = p.detach()[-2].clone()
        p.detach()[-2] = wrong
        assert not local.write_delta(local.slices)
        p.detach()[-2] = before
    assert local.write_delta(local.slices)


def test_buffers_on_a_gpu_are_those_on_the_host() -> None:
    """What is sent and what is loaded, also of a model in fp16 and of tensors on two devices."""
    told = []
    for where in (HOST, numbered("cuda")):
        own = nn.Sequential(nn.BatchNorm1d(5), nn.BatchNorm1d(3).half(), nn.BatchNorm1d(4)).to(where)
        own[2].to(HOST)
        layout = Layout.build(specs_of(own), buffers=buffers.specs_of(own))
        theta, old, delta, values = torch.zeros(4, layout.numel)
        local = LocalModel(own, layout, theta, old, delta, values=values)
        local.write_theta()
        slices = range(len(layout.slices))
        for _ in range(3):
            for number, buffer in enumerate(own.buffers()):
                buffer.add_(number + 1)
            local.write_delta(slices)
            old.copy_(theta)
            theta.add_(values / 3)
            local.merge(dict.fromkeys(slices, Blend.SINCE), slices)
        state = local.global_values()
        assert all(state[name].device == buffer.device for name, buffer in own.named_buffers())
        told.append((theta, values, *(b.cpu() for b in own.buffers()), *(state[name].cpu() for name in state)))
    assert all(torch.equal(a, b) for a, b in zip(*told, strict=True))


def test_a_restart_draws_what_an_uninterrupted_trainer_draws(tmp_path: Path) -> None:
    """The random states of the devices are in the checkpoint of the inner state."""
    device = usable("cuda")
    optimizer = torch.optim.AdamW(model(device, 8).parameters())
    torch.randn(5, device=device)
    inner.InnerState([optimizer], tmp_path, 1).save(1, 0, 0, {})
    drawn = torch.randn(5, device=device)
    inner.restore([optimizer], tmp_path / "checkpoint-1")
    assert torch.equal(torch.randn(5, device=device), drawn)


@pytest.mark.real
def test_a_script_whose_default_device_is_the_gpu_trains_in_a_run() -> None:
    """What `torch.set_default_device("cuda")` sets for a thread, before the peer is made."""
    with numbered("cuda"):
        own = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        optimizer = torch.optim.AdamW(own.parameters())
        config = {"sync_every": 4, "num_fragments": 2, "overlap_steps": 1, "stop_after_epochs": 3}
        with Peer(own, optimizer, run_id="test", config=config) as peer:
            while not peer.finished:
                own(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            state = peer.global_state_dict()
    assert {value.device for value in state.values()} == {numbered("cuda")}
    assert all(value.isfinite().all() for value in state.values())


@pytest.mark.real
def test_bench_measures_models_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(["--device", "cuda", "--parameters", "100k", "--rounds", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["device"], found["results"][0]["failed"]) == ("cuda", None)


def test_the_memory_of_a_gpu_is_told() -> None:
    """What torch holds, and all of the card."""
    held = torch.zeros(2**24, device=numbered("cuda"))
    reserved, total = memory_reserved()
    assert held.nbytes <= reserved < total
    assert total >= torch.cuda.get_device_properties(held.device).total_memory
