"""Fixtures of all tests in this folder."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from tests.net.patience import be_patient


@pytest.fixture(autouse=True)
def patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch, real=request.node.get_closest_marker("real") is not None)


@pytest.fixture
def no_daemon_is_left() -> Iterator[None]:
    """Every test ends the daemons that it started."""
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child.name() == "p2pd"]
    for child in left:
        child.kill()
    assert left == []
