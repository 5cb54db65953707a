"""The outer step: the formulas to the bit, torch's own optimizers, purity, and delayed Nesterov."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from p2p_diloco.errors import ConfigError
from p2p_diloco.tensors.delayed import DelayedNesterov
from p2p_diloco.tensors.flat import BLOCK
from p2p_diloco.tensors.outer import OuterOptimizer, State

pytestmark = pytest.mark.usefixtures("two_threads")

ELEMENTWISE = ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop"]
OTHERS = [
    *((name, {}) for name in ELEMENTWISE),
    ("Adam", {"amsgrad": True, "betas": [0.8, 0.9], "weight_decay": 0.1}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("Adagrad", {"initial_accumulator_value": 0.5, "lr_decay": 0.1}),
    ("AdamW", {"maximize": True}),
]


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.9, True), (0.9, False), (0.0, True)])
@pytest.mark.parametrize("numel", [1, 1000, 2 * BLOCK + 3])
def test_the_documented_order_of_operations_to_the_bit(momentum, nesterov, numel):
    """Against numpy, which rounds every product and every sum by itself; no block, lane or thread shows."""
    torch.manual_seed(1)
    outer = OuterOptimizer(lr=0.7, momentum=momentum, nesterov=nesterov)
    theta, state = torch.randn(numel), outer.init_state(numel)
    mu, eta = np.float32(momentum), np.float32(0.7)
    t, m = theta.numpy().copy(), np.zeros(numel, np.float32)
    for _ in range(4):
        g = torch.randn(numel)
        theta, state = outer.step(theta, state, g)
        m = mu * m + g.numpy()
        t = t - eta * (mu * m + g.numpy() if nesterov else m)
        assert np.array_equal(state["m"].numpy(), m)
        assert np.array_equal(theta.numpy(), t)


@pytest.mark.parametrize(("name", "options"), OTHERS)
def test_torchs_optimizers_go_on_as_if_they_had_never_been_taken_apart(name, options):
    """Many pure steps, each with a fresh optimizer and flat state, are one long life of torch's own, to the
    bit.
    """
    torch.manual_seed(2)
    outer = OuterOptimizer(name, lr=0.01, options=options)
    theta = torch.randn(12)
    state = outer.init_state(12)
    param = torch.nn.Parameter(theta.clone())
    given_ = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    reference = getattr(torch.optim, name)([param], lr=0.01, foreach=False, **given_)
    for _ in range(6):
        grad = torch.randn(12)
        theta, state = outer.step(theta, state, grad)
        param.grad = grad.clone()
        reference.step()
        assert torch.equal(theta, param.detach())
    assert {k: v.numel() for k, v in state.items()} == outer.state_lengths(12)
    assert all(v.dtype == torch.float32 and v.dim() == 1 for v in state.values())
    assert state["step"].item() == 6


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"name": "Lion"}, "outer_optimizer=Lion is unknown; use sgd, the name of a class of torch.optim, or package"),
        ({"name": "LBFGS"}, "outer_optimizer=LBFGS can't step a slice, which is a flat part of the model .*closure"),
        ({"name": "Adafactor"}, "outer_optimizer=Adafactor is not element-wise"),
        ({"name": "SparseAdam"}, "outer_optimizer=SparseAdam can't step a slice, .*dense gradients"),
        ({"name": "lr_scheduler"}, "outer_optimizer=lr_scheduler is unknown"),
        ({"name": "Adam", "options": {"beta": 1}}, "outer_options=beta=1 doesn't suit Adam: .*'beta'"),
        ({"name": "Adam", "options": {"betas": [2, 3]}}, "outer_options=betas=2,3 doesn't suit Adam: Invalid beta"),
        ({"name": "Adam", "options": {"lr": 1}}, "outer_options.lr=1 may not be set; set outer_lr instead"),
        ({"name": "Adam", "options": {"fused": True}}, "outer_options.fused=on may not be set; .* always off"),
        ({"options": {"weight_decay": 0.1}}, "outer_options=weight_decay=0.1 has no meaning for sgd"),
        ({"name": "nowhere:X"}, r"nowhere:X can't be imported \(No module named 'nowhere'\); install it"),
    ],
)
def test_what_cant_be_is_refused_with_key_value_and_mend(arguments, sentence):
    with pytest.raises(ConfigError, match=sentence):
        OuterOptimizer(**arguments)


CLASSES = """
import torch
from torch.optim import Optimizer

class Lion(Optimizer):
    def __init__(self, params, lr, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p -= group["lr"] * torch.sign(m * group["beta"] + p.grad * (1 - group["beta"]))
                m.lerp_(p.grad, 0.01)

class Slower(Lion):
    def step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p]["step"] = self.state[p].get("step", 0) + 1
            p.data -= self.param_groups[0]["lr"] / self.state[p]["step"] * p.grad

class Trusts(Lion):
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.data -= p.norm() / p.grad.norm() * p.grad

class Remembers(Lion):
    def step(self):
        self.count = getattr(self, "count", 0) + 1
        for p in self.param_groups[0]["params"]:
            p.data -= p.grad / self.count

class Noisy(Lion):
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.data -= torch.rand_like(p) * p.grad

class Whole(Lion):
    def step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p]["factor"] = torch.ones(2)

class NoOptimizer:
    pass
"""


@pytest.fixture
def classes(tmp_path, monkeypatch):
    """A package of the user's, which is no part of torch."""
    (tmp_path / "of_a_user.py").write_text(CLASSES)
    monkeypatch.syspath_prepend(tmp_path)
    yield "of_a_user:"
    sys.modules.pop("of_a_user", None)


@pytest.mark.parametrize(("name", "kept"), [("Lion", {"m": 6, "step": 1}), ("Slower", {"step": 1})])
def test_a_class_of_any_package_goes_on_as_one_long_life(classes, name, kept):
    """Also one that counts no steps, and one whose count is a Python number."""
    outer = OuterOptimizer(classes + name, lr=0.1, options={"beta": 0.8})
    assert outer.state_lengths(6) == kept
    theta, state = torch.arange(6.0), outer.init_state(6)
    param = torch.nn.Parameter(theta.clone())
    reference = getattr(sys.modules["of_a_user"], name)([param], lr=0.1, beta=0.8)
    for step in range(5):
        grad = torch.arange(6.0).roll(step) - 2.5
        theta, state = outer.step(theta, state, grad)
        param.grad = grad.clone()
        reference.step()
        assert torch.equal(theta, param.detach())
    assert state["step"].item() == 5


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Trusts", "is not element-wise: it steps each element by others"),
        ("Remembers", "keeps something beside the state of its parameters, which no checkpoint and no newcomer"),
        ("Noisy", "makes another step each time, so the peers' models would differ"),
        ("Whole", "can't step a slice.*its state factor is neither as long as the parameter nor one number"),
        ("NoOptimizer", "is no class of optimizers"),
    ],
)
def test_a_class_that_cant_be_an_outer_optimizer_is_refused_with_the_reason(classes, name, sentence):
    with pytest.raises(ConfigError, match=f"outer_optimizer={classes}{name} {sentence}"):
        OuterOptimizer(classes + name, lr=0.1)


# -- delayed Nesterov


PAPER = {2: [-0.5, -1.9, -2.4, -4.61, -5.11, -8.049], 3: [-1 / 3, -2 / 3, -1.9, -2.2333333, -2.5666667, -4.61]}
BUFFERED = {2: [-1.0, -2.9, -3.9, -6.61], 3: [-1.0, -2.0, -3.9, -4.9, -5.9, -8.61]}


def delayed(size: int, variant: str = "paper", lr: float = 1.0, momentum: float = 0.9) -> DelayedNesterov:
    return DelayedNesterov(OuterOptimizer("sgd", lr, momentum), size, variant)


def begun(dn: DelayedNesterov, numel: int = 1) -> State:
    """The state before the first submission."""
    return {name: torch.zeros(length) for name, length in dn.state_lengths(numel).items()}


def run(dn: DelayedNesterov, commits: list[tuple[Tensor, int]]) -> tuple[list[Tensor], State]:
    """θ after each commit of (mean, submissions), from zeros."""
    theta = torch.zeros_like(commits[0][0])
    state, buffered, after = begun(dn, theta.numel()), 0, []
    for grad, submissions in commits:
        theta, state = dn.step(theta, state, grad, submissions, buffered)
        buffered = (buffered + submissions) % dn.size
        after.append(theta)
    return after, state


@pytest.mark.parametrize(
    ("size", "variant", "expected"),
    [*((size, "paper", values) for size, values in PAPER.items())]
    + [(size, "buffered", values) for size, values in BUFFERED.items()],
)
def test_the_numbers(size: int, variant: str, expected: list[float]) -> None:
    """η = 1, μ = 0.9 and ḡ = 1 each time, from 0."""
    after, _ = run(delayed(size, variant), [(torch.ones(1), 1)] * len(expected))
    assert [theta.item() for theta in after] == pytest.approx(expected, rel=1e-6)


def test_the_order_of_operations_is_the_reference() -> None:
    """To the bit, and over block boundaries, what the lines of the module say, one rounding each."""
    torch.manual_seed(3)
    numel = BLOCK + 5
    theta, m, b, g = (torch.randn(numel) for _ in range(4))
    new_theta, state = delayed(3, lr=0.7).step(theta, {"m": m, "b": b}, g, 2, 1)
    full = b + g * 2
    mean = full / 3
    new_m = m * 0.9 + mean
    expected = (theta - g * (0.7 * 2 / 3)) - (new_m * 0.9) * 0.7
    assert torch.equal(new_theta, expected)
    assert torch.equal(state["m"], new_m)
    assert not state["b"].any()


@pytest.mark.parametrize(("submissions", "buffered"), [(0, 0), (2, 2), (1, 3), (4, 0), (1, -1)])
def test_more_than_fits_is_an_error(submissions: int, buffered: int) -> None:
    """The log closes a window with the submission that fills the buffer."""
    dn = delayed(3)
    with pytest.raises(ValueError, match="don't fit"):
        dn.step(torch.zeros(1), begun(dn), torch.zeros(1), submissions, buffered)


@pytest.mark.parametrize("variant", ["paper", "buffered"])
def test_other_rates_hold_from_the_next_submission_on(variant: str) -> None:
    """Also within a buffer, which keeps what is in it, as the momentum does; the last one of it is the outer step's."""
    dn, one = delayed(2, variant, lr=1.0, momentum=0.5), torch.ones(1)
    theta, state = dn.step(torch.zeros(1), begun(dn), one, 1, 0)
    before = theta.item()
    theta, state = dn.revised(0.25, 0.75).step(theta, state, one, 1, 1)
    at_once = 0.25 / 2 if variant == "paper" else 0.0
    update = 0.25 * (0.75 * 1.0 + (variant == "buffered"))  # m has become the buffer's mean, 1
    assert theta.item() == before - at_once - update
    assert state["m"].item() == 1.0
