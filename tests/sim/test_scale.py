"""The cost of a swarm's control plane, as `examples/scale.py` measures it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def scale() -> Iterator[ModuleType]:
    """The script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
        yield import_module("scale")
        sys.modules.pop("scale", None)


def test_messages_hardly_grow_with_the_swarm_and_storms_delay_no_round(scale: ModuleType) -> None:
    """Each peer probes a few others. A tenth of the peers dies in an exchange, and as many newcomers are counted."""
    few, many = (scale.measured(peers, 24, 1, 0, ("deaths", "joins")) for peers in (5, 20))
    sent = [sum(count for count, _ in told["a_second"].values()) for told in (few, many)]
    assert sent[1] < 1.5 * sent[0]
    for told in (few, many):
        assert told["equal"]
        assert told["deaths_s"] < 3 * scale.rules_of(24).heartbeat_timeout
        assert told["joins"][0] == told["joins"][1] > 0
    assert "replicas are equal" in scale.text_of(many)
