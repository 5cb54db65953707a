"""Which part of a model a process holds, with torch's pretended process group: no rank asks another for anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, distributed, nn

from p2p_diloco.errors import ConfigError
from p2p_diloco.node.slice_work import Bases
from p2p_diloco.peer.extents import ALONE, Rank, extents_of, is_sharded, local_part
from p2p_diloco.peer.inner import InnerState, restore
from p2p_diloco.peer.local import LocalModel
from p2p_diloco.peer.progress import Blend
from p2p_diloco.peer.rank_hooks import FarModel, packed, unpack
from p2p_diloco.peer.ranks import group_of
from p2p_diloco.tensors import buffers
from p2p_diloco.tensors.layout import Layout, specs_of

BLENDS = tuple(Blend)
"""One of each kind."""

tensor = pytest.importorskip("torch.distributed.tensor")
fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
if not hasattr(tensor, "DTensor"):
    pytest.skip("this torch has no public DTensor", allow_module_level=True)


pytestmark = pytest.mark.usefixtures("short_merges")


@contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    """This process is one of many, of which the others don't exist."""
    distributed.init_process_group("fake", store=fake.FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def mesh_of(*shape: int) -> Any:
    return distributed.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=tuple("abc"[: len(shape)]))


def rows_of(rows: int, rank: Rank, copies: int = 1) -> slice:
    """What fully_shard gives a rank: as `torch.chunk` cuts."""
    parts = rank.count // copies
    part, each = rank.index % parts, -(-rows // parts)
    return slice(min(part * each, rows), min((part + 1) * each, rows))


def sharded(
    values: dict[str, Tensor], rank: Rank, whole: frozenset[str] = frozenset(), copies: int | None = None
) -> nn.Module:
    """A model of these parameters by rows as seen by a rank; those in `whole` are not sharded. `copies`: of each row,
    along a second dimension of the mesh (HSDP). For use in `as_rank`."""
    model = nn.Module()
    mesh = mesh_of(rank.count) if copies is None else mesh_of(copies, rank.count // copies)
    placements = [tensor.Replicate(), tensor.Shard(0)][copies is None :]
    for name, value in values.items():
        made: Tensor = value.clone()
        if name not in whole:
            local = value[rows_of(len(value), rank, copies or 1)].clone()
            made = tensor.DTensor.from_local(
                local, mesh, placements, run_check=False, shape=value.shape, stride=value.stride()
            )
        model.register_parameter(name, nn.Parameter(made))
    return model


def alone(values: dict[str, Tensor]) -> nn.Module:
    model = nn.Module()
    for name, value in values.items():
        model.register_parameter(name, nn.Parameter(value.clone()))
    return model


SHAPES = st.lists(
    st.tuples(st.integers(1, 9)) | st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=4
)


class Served:
    """A far rank's connection to rank 0, which answers at once."""

    def __init__(self, **memory: Tensor) -> None:
        self.memory, self.asked, self.answer = memory, {}, b""

    def send(self, kind: str, **message: Any) -> None:
        if kind == "values":
            unpack(message["values"], self.memory[self.asked["which"]], self.asked["ranges"])
            return
        self.asked = message
        self.answer = packed(self.memory[message["which"]], message["ranges"]) if kind == "get" else b""

    def next(self) -> dict[str, Any]:
        return {"values": self.answer}


@settings(max_examples=20, deadline=None)
@given(SHAPES, st.integers(1, 3), st.sampled_from([None, 1, 3]), st.integers(1, 12), st.data())
def test_the_ranks_are_one_model_to_the_bit(
    shapes: list[tuple[int, ...]], parts: int, copies: int | None, largest: int, data: st.DataObject
) -> None:
    """Over any history of merges, trainings and sendings the ranks' parameters are the rows of a model that one
    process holds, and their pseudo-gradients together are its; also those of ranks on another host, which have memory
    of their own."""
    torch.manual_seed(data.draw(st.integers(0, 99)))
    values = {f"p{n}": torch.randn(shape) for n, shape in enumerate(shapes)}
    model = alone(values)
    layout = Layout.build(specs_of(model), 1, "contiguous", largest)
    theta, old, mine, theirs = (torch.zeros(layout.numel) for _ in range(4))
    one, bases = LocalModel(model, layout, theta, old, mine, share=0.25), Bases(layout, theta, old)
    world, copied = parts * (copies or 1), copies or 1
    ranks: list[tuple[Rank, nn.Module, LocalModel | FarModel]] = []
    spoken = torch.zeros(layout.numel, dtype=torch.int)
    for index in range(world):
        rank = Rank(index, world)
        memory = theta, old, theirs
        distant = index > 0 and data.draw(st.booleans(), f"rank {index} is on another host")
        with as_rank(index, world):
            part = sharded(values, rank, frozenset({"p0"}), copies)
            for extent in extents_of(part, layout, rank):
                spoken[extent.start : extent.stop] += extent.speaks
            if distant:
                memory = tuple(torch.zeros(3, layout.numel))
            local: LocalModel | FarModel = LocalModel(part, layout, *memory, rank=rank, share=0.25)
            if distant:
                local = FarModel(local, Served(theta=theta, delta=theirs), *memory)  # type: ignore[arg-type]
            ranks.append((rank, part, local))
    assert spoken.tolist() == [1] * layout.numel, "one rank speaks for each element"
    for _, _, local in ranks:
        local.write_theta()
    begun = theta.clone()
    one.write_theta()
    assert torch.equal(theta, begun)
    everything = range(len(layout.slices))
    for local in (one, *(local for _, _, local in ranks)):
        local.merge(dict.fromkeys(everything, Blend.SENT))  # as every trainer begins
    bases.loaded(everything)
    for _ in range(data.draw(st.integers(1, 3))):
        with torch.no_grad():
            for name, p in model.named_parameters():
                moved = torch.randn(p.shape)
                p.add_(moved)
                for rank, part, _ in ranks:
                    own = part.get_parameter(name)
                    local_part(own).add_(moved[rows_of(len(moved), rank, copied)] if is_sharded(own) else moved)
        slices = data.draw(st.sets(st.sampled_from(everything), min_size=1))
        for local in (one, *(local for _, _, local in ranks)):
            assert local.write_delta(slices, bases.kept)  # also where this rank holds nothing of them
        assert torch.equal(mine, theirs)
        for index in everything:
            bases.keep(index)
        theta.copy_(torch.randn(layout.numel))
        kept = data.draw(
            st.sampled_from([None, bases.kept, set()]), "asked for: nothing, the loaded, the newest values"
        )
        for rank, _, local in ranks if kept is not None else ():
            known = one.global_values(kept)
            for name, value in local.global_values(kept).items():
                rows = rows_of(len(known[name]), rank, copied) if is_sharded(value) else slice(None)
                assert torch.equal(local_part(value), known[name][rows])
        blends = data.draw(st.dictionaries(st.sampled_from(everything), st.sampled_from(BLENDS)))
        for local in (one, *(local for _, _, local in ranks)):
            local.merge(blends, bases.kept)
        assert torch.equal(mine, theirs)
        bases.loaded(blends)
        for name, p in model.named_parameters():
            for rank, part, _ in ranks:
                own = part.get_parameter(name)
                assert torch.equal(local_part(own), p[rows_of(len(p), rank, copied)] if is_sharded(own) else p)


def test_a_far_rank_loads_buffers_and_writes_none() -> None:
    """Rank 0's are the peer's. What the far rank has gained since the sending stays, as at a rank that is near."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    layout = Layout.build(specs_of(model), buffers=buffers.specs_of(model))
    theta, sent, own = torch.arange(layout.numel) + 0.0, torch.ones(layout.numel), torch.zeros(3, layout.numel)
    local = LocalModel(model, layout, *own, rank=Rank(1, 2), values=own[2])
    distant = FarModel(local, Served(theta=theta, delta=sent), *own)  # type: ignore[arg-type]
    slices = range(len(layout.slices))
    distant.write_theta()
    distant.merge(dict.fromkeys(slices, Blend.NONE))
    start = {spec.name: start for spec, start in layout.places}
    norm, mean, seen = model[1], start["1.running_mean"], start["1.num_batches_tracked"]
    assert norm.running_mean.tolist() == theta[mean : mean + 2].tolist()
    assert norm.num_batches_tracked.item() == seen
    norm.running_mean.add_(1.0)
    distant.write_delta(slices)
    norm.running_mean.add_(0.5)
    theta.mul_(2.0)
    assert distant.global_values()["1.running_mean"].tolist() == theta[mean : mean + 2].tolist()
    distant.merge(dict.fromkeys(slices, Blend.SINCE))
    assert norm.running_mean.tolist() == (theta[mean : mean + 2] + 0.5).tolist()
    assert sent.tolist() == [1.0] * layout.numel


# -- what is refused


def dtensor(shape: tuple[int, ...], mesh: Any, *placements: Any) -> nn.Module:
    model = nn.Module()
    local = torch.zeros(shape)
    model.w = nn.Parameter(tensor.DTensor.from_local(local, mesh, placements, run_check=False))
    return model


@pytest.mark.parametrize(("rank", "copies"), [(Rank(2, 4), 2), (Rank(2, 3), None), (ALONE, None)])
def test_the_group_is_the_models(rank: Rank, copies: int | None) -> None:
    """Of a model sharded over all processes: which of how many this is. With copies of the shards, too."""
    with as_rank(rank.index, rank.count):
        group = group_of(sharded({"w": torch.zeros(6)}, rank, copies=copies))
        assert group is not None
        assert (group.rank, group.device) == (rank, torch.device("cpu"))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: dtensor((2, 2), mesh_of(2, 2), tensor.Shard(0), tensor.Shard(0)), "sharded twice"),
        (lambda: dtensor((2, 2), mesh_of(4), tensor.Shard(1)), r"rows \(Shard\(0\)\) are supported"),
        (lambda: dtensor((2, 2), mesh_of(2, 2)["b"], tensor.Shard(0)), "over 2 of the 4 processes"),
    ],
)
def test_what_is_sharded_in_another_way_is_refused(make: Any, sentence: str) -> None:
    """Rows cut twice, columns, a part of the processes: each is named with its parameter."""
    with as_rank(0, 4):
        model = make()
        with pytest.raises(ConfigError, match=rf"model=w .*{sentence}"):
            group_of(model)


def test_flattened_parameters_of_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process of FSDP1 has a part of the model that looks like a model of its own."""

    class Flat(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.w, self.process_group = nn.Parameter(torch.zeros(3)), SimpleNamespace(size=lambda: count)

    monkeypatch.setattr(torch.distributed.fsdp, "FullyShardedDataParallel", Flat)
    assert group_of(Flat(1)) is None
    with pytest.raises(ConfigError, match=r"FullyShardedDataParallel keeps parts .*; use fully_shard \(FSDP2\)"):
        group_of(Flat(2))


def test_rows_that_are_cut_otherwise_are_refused() -> None:
    """A rank that holds other rows than fully_shard gives it would write over another's."""
    with as_rank(0, 2):
        mesh = mesh_of(2)
        model = nn.Module()
        placed = {"shape": (4,), "stride": (1,), "run_check": False}
        cut = tensor.DTensor.from_local(torch.zeros(1), mesh, [tensor.Shard(0)], **placed)
        model.w = nn.Parameter(cut)
        with pytest.raises(ConfigError, match="model=w is cut unevenly: rank 0 holds 1"):
            extents_of(model, Layout.build(specs_of(model)), Rank(0, 2))


# -- the inner optimizer


def test_a_ranks_moments_come_back_as_they_were_sharded(tmp_path: Any) -> None:
    """Each rank saves and loads its own part; another number of ranks starts anew."""
    values, rank = {"w": torch.randn(3, 2)}, Rank(1, 2)
    with as_rank(1, 2):

        def trained(steps: int) -> torch.optim.Optimizer:
            model = sharded(values, rank)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            for _ in range(steps):
                model.w.grad = model.w.detach().clone()
                optimizer.step()
            return optimizer

        one, other = trained(2), trained(0)
        InnerState([one], tmp_path, 1, rank).save(1, 0, 0, {"local_step": 2})
        assert restore([other], tmp_path / "checkpoint-1", rank) == {"local_step": 2}
        before, after = (next(iter(o.state_dict()["state"].values())) for o in (one, other))
        assert before["step"] == after["step"]
        for key in ("exp_avg", "exp_avg_sq"):
            assert after[key].placements == before[key].placements
            assert torch.equal(local_part(after[key]), local_part(before[key]))
        assert restore([other], tmp_path / "checkpoint-1", Rank(1, 3)) == {}


# -- what a forward pass leaves behind


def test_a_forward_pass_leaves_no_whole_parameters_in_the_way() -> None:
    """fully_shard keeps the root's parameters whole after a pass without a backward: they are given up before shards
    are read, and before they are loaded, or the next pass would see the old ones."""
    fully_shard = getattr(distributed.fsdp, "fully_shard", None)
    if fully_shard is None:
        pytest.skip("this torch has no fully_shard")
    with as_rank(0, 2):
        model = nn.Linear(3, 4)
        fully_shard(model)

        def look() -> bool:
            with torch.no_grad():
                model(torch.zeros(1, 3))
            return is_sharded(model.weight)

        assert not look()  # or this test shows nothing
        assert group_of(model) is not None
        assert is_sharded(model.weight)
        layout = Layout.build(specs_of(model))
        theta = torch.zeros(layout.numel)
        local = LocalModel(model, layout, theta, *torch.zeros(2, layout.numel), rank=Rank(0, 2))
        assert not look()
        local.merge({0: Blend.NONE})
        assert is_sharded(model.weight)
        assert not local_part(model.weight).any()
