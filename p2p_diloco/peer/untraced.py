"""Has torch call a function after each step of an optimizer, outside of any graph.

Law: torch.compile never traces that function. A script may compile `optimizer.step()`; traced, what happens at a step
would be compiled again and again, because it differs from step to step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim import Optimizer


def after_each_step(optimizer: Optimizer, call: Callable[[], object]) -> Callable[[], None]:
    """Have torch make `call` after each step of the optimizer. Returns the function that ends that."""
    untraced = torch.compiler.disable(lambda *_: call())  # type: ignore[no-untyped-call]
    return optimizer.register_step_post_hook(untraced).remove
