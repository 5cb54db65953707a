"""Which models and optimizers are in a run, in this process.

Law: a trainable parameter, or an optimizer, is in one run at most. Two peers around one model, as a cell of a notebook
that runs again would make, would each count the progress of all, and load over each other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer

from p2p_diloco.errors import UsageError
from p2p_diloco.peer.fitness import few

_claimed: dict[int, int] = {}
"""The ids of the objects that are in a run, each with the process that put it there. A forked process inherits this,
but its objects are copies."""
MEND = "close() that Peer first, or make a new model and optimizer"


def refuse_claimed(model: nn.Module | None, optimizers: Sequence[Optimizer]) -> None:
    """Check that nothing of a peer is in a run.

    Raises:
        UsageError: it is in a run.
    """
    if taken := [name for name, each in _trained(model) if _is_claimed(each)]:
        raise UsageError("is in a run already, with another Peer", key="model", value=few(taken), mend=MEND)
    if taken := [type(each).__name__ for each in optimizers if _is_claimed(each)]:
        raise UsageError("is in a run already, with another Peer", key="optimizer", value=few(taken), mend=MEND)


@contextmanager
def claimed(model: nn.Module | None, optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """A block in which nothing of this peer can enter another run.

    Raises:
        UsageError: it is in a run.
    """
    refuse_claimed(model, optimizers)
    held = [*(each for _, each in _trained(model)), *optimizers]  # kept alive, so that no id is used again
    _claimed.update(dict.fromkeys(map(id, held), os.getpid()))
    try:
        yield
    finally:
        for each in held:
            _claimed.pop(id(each), None)


def _trained(model: nn.Module | None) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in model.named_parameters() if model is not None else ():
        if parameter.requires_grad:
            yield name, parameter


def _is_claimed(thing: object) -> bool:
    return _claimed.get(id(thing)) == os.getpid()
