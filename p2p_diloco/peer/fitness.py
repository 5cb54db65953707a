"""Checks a model and its optimizers before their peer enters a run.

Law: reads names and devices; changes nothing, and starts nothing. A model that can't be trained is refused; a probable
mistake causes a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import chain

from torch import nn
from torch.optim import Optimizer

from p2p_diloco.errors import ConfigError
from p2p_diloco.tensors.layout import trainable

SHOWN = 3
"""The most names that a sentence lists."""

log = logging.getLogger("p2p_diloco")


def check(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Check that every tensor of the model has values, and warn of trainable parameters that no optimizer trains.

    Raises:
        ConfigError: a tensor is on the meta device, which holds no values; or no parameter is trainable.
    """
    tensors = chain(model.named_parameters(), model.named_buffers())
    if empty := [name for name, tensor in tensors if tensor.device.type == "meta"]:
        mend = "give it values before the peer is made (model.to_empty(device=...), then load or initialise them)"
        raise ConfigError("is on the meta device, which holds no values", key="model", value=_few(empty), mend=mend)
    held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    named = trainable(model)
    if left := [name for name, parameter in named.items() if id(parameter) not in held]:
        log.warning(
            "%d of %d trainable parameters are in no given optimizer, so this peer never changes them: %s; give all "
            "optimizers, or set requires_grad=False",
            len(left),
            len(named),
            _few(left),
        )


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
