"""What happens after a step happens outside of any graph. (Of torch.compile's: test_compiled.py.)"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from p2p_diloco.errors import UsageError
from p2p_diloco.peer.untraced import after_each_step


class SteppedInBackward:
    """A model with an optimizer for each parameter, which is stepped as soon as the gradient is there."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        self.optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in self.model.parameters()}
        self.steps = 0
        for parameter in self.optimizers:
            parameter.register_post_accumulate_grad_hook(self._step)

    def _step(self, parameter: Tensor) -> None:
        self.optimizers[parameter].step()  # type: ignore[index]
        self.optimizers[parameter].zero_grad()  # type: ignore[index]
        self.steps += 1

    def backward(self) -> None:
        self.model(torch.ones(4, 2)).sum().backward()


def test_a_step_within_a_backward_pass_is_followed_when_the_pass_has_ended() -> None:
    """Whichever optimizer it is: an exchange would change parameters that the pass still needs."""
    for which in range(4):
        training, calls = SteppedInBackward(), list[int]()

        def exchange(training: SteppedInBackward = training, calls: list[int] = calls) -> None:
            calls.append(training.steps)
            with torch.no_grad():
                for parameter in training.model.parameters():
                    parameter.add_(1.0)

        stop = after_each_step(list(training.optimizers.values())[which], exchange)
        training.backward()
        training.backward()
        assert calls == [4, 8]
        list(training.optimizers.values())[which].step()
        assert calls == [4, 8, 8]
        stop()
        training.backward()
        assert len(calls) == 3


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one, which makes no state of torch's own, as those of several packages don't."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.param_groups = base, base.param_groups

    def step(self, closure: object = None) -> None:
        self.base.step()


def test_a_wrapper_that_leaves_out_torchs_init_is_followed() -> None:
    """Torch itself calls no hook of it, or has no place to put one."""
    calls: list[int] = []
    wrapper = Wrapper(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))
    stop = after_each_step(wrapper, lambda: calls.append(1))
    wrapper.step()
    wrapper.step()
    stop()
    wrapper.step()
    assert calls == [1, 1]


def test_an_error_after_a_step_within_a_backward_pass_comes_out_of_it() -> None:
    training = SteppedInBackward()

    def fail() -> None:
        raise UsageError("no")

    after_each_step(next(iter(training.optimizers.values())), fail)
    with pytest.raises(UsageError, match="no"):
        training.backward()
