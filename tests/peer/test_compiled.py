"""A model inside torch.compile has the names of the plain one, so both fit into one run; a compiled step works, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
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


@pytest.mark.parametrize("make", [lambda: compiled(plain()), with_a_compiled_part])
def test_a_compiled_model_has_the_plain_names(make: Any) -> None:
    """In what is exchanged, and in the global state_dict, which a plain model loads."""
    made = bare(make())
    assert made is not None
    assert specs_of(made) == specs_of(plain())
    values = {name: torch.full_like(parameter, 7.0) for name, parameter in trainable(made).items()}
    state = with_global_values(made, values)
    reference = plain()
    reference.load_state_dict(state)
    assert all((parameter == 7.0).all() for parameter in reference.parameters())


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


def test_wrappers_may_stand_in_any_order(tmp_path: Path) -> None:
    """DistributedDataParallel around a compiled model, and the other way round, are one peer of all ranks."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        copied = nn.parallel.DistributedDataParallel
        for model in (compiled(copied(plain())), copied(compiled(plain()))):
            inner = bare(model)
            assert inner is not None
            assert specs_of(inner) == specs_of(plain())
            group = group_of(model)
            assert group is not None
            assert group.rank.count == 1
    finally:
        distributed.destroy_process_group()
