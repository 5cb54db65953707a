"""The order of a shared data set: each epoch a permutation of its own, the same on every machine."""

from __future__ import annotations

import numpy as np
import pytest

from p2p_diloco.peer.order import indices


@pytest.mark.parametrize("length", [1, 2, 3, 7, 64, 1000, 100_003])
def test_each_epoch_is_a_permutation(length: int) -> None:
    """Every sample comes once in each epoch, also when the positions are asked for in pieces."""
    for epoch in (0, 1, 5):
        positions = np.arange(epoch * length, (epoch + 1) * length, dtype=np.int64)
        whole = indices("run/train", length, positions)
        assert sorted(whole.tolist()) == list(range(length))
        cut = length // 3
        pieces = [indices("run/train", length, part) for part in (positions[:cut], positions[cut:])]
        assert np.concatenate(pieces).tolist() == whole.tolist()


def test_epochs_and_names_have_orders_of_their_own() -> None:
    """Another epoch, run or data set has another order."""
    first = np.arange(1000, dtype=np.int64)
    orders = {
        tuple(indices("run/train", 1000, first).tolist()),
        tuple(indices("run/train", 1000, first + 1000).tolist()),
        tuple(indices("other/train", 1000, first).tolist()),
        tuple(indices("run/valid", 1000, first).tolist()),
    }
    assert len(orders) == 4


def test_the_order_never_changes() -> None:
    """A run may be continued by a later version, on another machine: these numbers must stay."""
    positions = np.array([0, 1, 2, 9, 10, 10**12], dtype=np.int64)
    assert indices("run/train", 10, positions).tolist() == [3, 7, 5, 1, 4, 3]
