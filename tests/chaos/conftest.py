"""The swarms and machines of tests/real, for injected faults."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

REAL = Path(__file__).parents[1] / "real"
sys.path.insert(0, str(Path(__file__).parent))
_spec = importlib.util.spec_from_file_location("real_fixtures", REAL / "conftest.py")
assert _spec is not None
assert _spec.loader is not None
_real = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_real)
swarm, shared_swarm, network = _real.swarm, _real.shared_swarm, _real.network


@pytest.fixture(scope="session")
def nursery() -> None:
    """Every process starts by its command, as a user's does."""
