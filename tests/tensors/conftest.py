"""Fixtures of the tests in this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module")
def two_threads() -> Iterator[None]:
    """Torch divides long vectors among two threads, as it may in a trainer; elsewhere tests give it one."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
