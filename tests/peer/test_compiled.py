"""A model inside torch.compile has the names of the plain one, so both fit into one run; a compiled step works, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from p2p_diloco.peer.local import with_global_values
from p2p_diloco.peer.ranks import bare, group_of
from p2p_diloco.peer.session import after_each_step
from p2p_diloco.tensors.layout import specs_of, trainable


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def with_a_compiled_part() -> nn.Module:
    model = plain()
    model[0] = compiled(model[0])
    return model


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="eager")


def test_a_compiled_step_does_not_trace_what_happens_after_it() -> None:
    """Otherwise torch.compile would compile the exchange, and warn of each call that it can't trace."""
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    traced: list[bool] = []
    stop = after_each_step(optimizer, lambda: traced.append(torch.compiler.is_compiling()))
    model(torch.ones(4, 2)).sum().backward()
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    step()
    step()
    stop()
    step()
    assert traced == [False, False]


def test_a_compiled_model_has_the_plain_names(tmp_path: Path) -> None:
    """In what is exchanged, and in the global state_dict, which a plain model loads; also inside and around
    DistributedDataParallel, where it is one peer of all ranks."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        copied = nn.parallel.DistributedDataParallel
        wrapped = [compiled(copied(plain())), copied(compiled(plain()))]
        for model in (compiled(plain()), with_a_compiled_part(), *wrapped):
            made = bare(model)
            assert made is not None
            assert specs_of(made) == specs_of(plain())
            values = {name: torch.full_like(parameter, 7.0) for name, parameter in trainable(made).items()}
            reference = plain()
            reference.load_state_dict(with_global_values(made, values))
            assert all((parameter == 7.0).all() for parameter in reference.parameters())
        groups = [group_of(model) for model in wrapped]
        assert [group.rank.count for group in groups if group is not None] == [1, 1]
    finally:
        distributed.destroy_process_group()
