"""Where local progress can't be merged or sent: what is loaded in its place, and told as dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from p2p_diloco.core.carry import Outcome
from p2p_diloco.errors import P2PDilocoError
from p2p_diloco.peer.local import LocalModel
from tests.peer.scripted import COUNTED, KEPT, hooked, step


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e12])
def test_progress_that_is_not_finite_is_dropped_once(value: float, caplog: pytest.LogCaptureFixture) -> None:
    """What can't be averaged is not sent: the global model is loaded, a sentence says so, and the next step's progress
    goes out at once, weighed by that step alone. A later round of good progress forgives it.
    """
    hook, node, model = hooked(fragments=2)
    node.overwrite(5.0)
    for attempt in (1, 2):
        node.log.clear()
        hook.merge()
        dropped = hook.standing.metrics.dropped_samples
        step(hook, model)
        with torch.no_grad():
            model.u.fill_(value)
            model.v.fill_(value)
        step(hook, model)
        assert node.contributed() == []
        assert model.u.tolist() == node.memory.theta[:2].tolist()
        assert model.v.tolist() == node.memory.theta[2:].tolist()
        assert len([r for r in caplog.records if "not finite" in r.message]) == attempt
        assert hook.standing.metrics.dropped_samples > dropped
        step(hook, model)
        (sent,) = node.contributed()
        assert (sent["weight"], sent["samples"]) == (1.0, 1)
        (place,) = node.layout.slices_of(sent["fragment"])
        assert node.memory.delta[place.start : place.stop].abs().max() == 1.0
        step(hook, model, 2)
    assert torch.isfinite(node.memory.theta).all()


def test_training_that_diverges_again_ends_with_a_sentence() -> None:
    hook, node, model = hooked()
    step(hook, model, 3)
    with torch.no_grad():
        model.u.fill_(float("nan"))
    step(hook, model)
    with torch.no_grad():
        model.u.fill_(float("nan"))
    with pytest.raises(P2PDilocoError, match=r"diverged.*lower the learning rate"):
        step(hook, model)
    assert node.contributed() == []


def test_after_a_merge_that_was_broken_off_all_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log takes it for merged; half of the model may be. Training begins again from the global values."""
    hook, node, model = hooked(overlap_steps=1, merge="rebase")
    step(hook, model, 5)
    merge = LocalModel.merge

    def interrupted(*_: object) -> None:
        monkeypatch.setattr(LocalModel, "merge", merge)
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalModel, "merge", interrupted)
    node.overwrite([20.0] * 4)
    node.fresh = {0: KEPT}
    node.memory.changed = node.memory.changed + 1
    with pytest.raises(KeyboardInterrupt):
        step(hook, model)
    assert node.log[-1] == ("have read", {"loaded": []})
    hook.merge()
    assert model.u.tolist() == [20.0, 20.0]
    assert hook.standing.metrics.dropped_samples == 2
    step(hook, model)
    assert model.u.tolist() == [21.0, 21.0]


@pytest.mark.parametrize(
    ("merge", "outcome", "value"), [("mix", COUNTED, 4.0), ("rebase", COUNTED, 4.0), ("rebase", KEPT, 8.0)]
)
def test_an_interrupted_wait_keeps_the_sent_progress(merge: str, outcome: Outcome, value: float) -> None:
    """Progress made since can't be separated from the rest: it is dropped, and counted as dropped once."""
    hook, node, model = hooked(merge=merge)
    wait_for = node.wait_for

    def interrupted(kind: str, *, n: int, timeout_s: float) -> Any:
        node.wait_for = lambda *_, n, **__: {"n": n, "sent": True, "stood": {}, "hidden": node.hidden}  # type: ignore
        wait_for(kind, n=n, timeout_s=timeout_s)
        node.fresh = {0: outcome}
        raise KeyboardInterrupt

    node.wait_for = interrupted  # type: ignore[method-assign,assignment]
    with pytest.raises(KeyboardInterrupt):
        step(hook, model, 4)
    step(hook, model)
    assert node.memory.theta.tolist() == [4.0] * 4
    assert model.u.tolist() == [value, value]
    assert hook.standing.metrics.dropped_samples == 1
