"""The outer step: the numbers of the formulas, torch's own optimizers, and purity."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from p2p_diloco.errors import ConfigError
from p2p_diloco.tensors.flat import BLOCK
from p2p_diloco.tensors.outer import OuterOptimizer

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


@pytest.mark.parametrize(("name", "options"), [("sgd", {}), ("Adam", {})])
def test_a_step_touches_none_of_its_inputs(name, options):
    """And what it gives shares no memory with them."""
    outer = OuterOptimizer(name, lr=0.01, options=options)
    theta, grad, state = torch.randn(12), torch.randn(12), outer.init_state(12)
    _, state = outer.step(theta, state, grad)
    given_ = [theta, grad, *state.values()]
    before = [t.clone() for t in given_]
    after, new = outer.step(theta, state, grad)
    for tensor in (after, *new.values()):
        tensor.add_(1)
    assert all(torch.equal(a, b) for a, b in zip(given_, before, strict=True))
    assert not after.requires_grad


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
