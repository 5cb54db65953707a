"""Has torch call a function after each step of an optimizer, outside of any graph.

Law: torch.compile never traces that function. A script may compile `optimizer.step()`; traced, what happens at a step
would be compiled again and again, because it differs from step to step. Nor does it run within a backward pass, which
still needs the parameters as they are: hooks of gradients may step one optimizer for each parameter there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import Variable
from torch.optim import Optimizer


def after_each_step(optimizer: Optimizer, call: Callable[[], None]) -> Callable[[], None]:
    """Have torch make `call` after each step of the optimizer; after a step within a backward pass, when that pass has
    ended. Returns the function that ends that."""

    def stepped(*_: object) -> None:
        try:
            Variable._execution_engine.queue_callback(call)
        except RuntimeError:  # no backward pass is going on
            pass
        else:
            return
        call()

    if not getattr(type(optimizer).step, "hooked", False):  # a wrapper may not have called torch's own __init__
        Optimizer.__setstate__(optimizer, {"defaults": getattr(optimizer, "defaults", {})})
    untraced = torch.compiler.disable(stepped)  # type: ignore[no-untyped-call]
    return optimizer.register_step_post_hook(untraced).remove
