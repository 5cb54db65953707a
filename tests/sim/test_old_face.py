"""The tensors of a simulated replica of `p2p_diloco.core`."""

from __future__ import annotations

import pytest

from p2p_diloco.core.messages import Contribution
from p2p_diloco.core.version import ContributionId, Version
from tests.sim.model import Tensors
from tests.sim.old_face import Store

VERSION = Version(0, 1, 1, "")


def test_accepting_voids_the_other_proposals() -> None:
    """Only for that shard; a digest that was never proposed can't be accepted."""
    store = Store([Tensors(), Tensors()])
    id = ContributionId(1, 1)
    mean = (("a", Contribution(0, VERSION, id, id, 1.0, 1, payload=4)),)
    digest, payload = store.average(0, mean, b"")
    assert payload == (("a", 4),)
    other, elsewhere = store.propose(0, Tensors(8), b""), store.propose(1, Tensors(16), b"")
    store.accept(0, digest)
    assert [t.steps for t in store.present] == [4, 0]
    with pytest.raises(KeyError):
        store.accept(0, other)
    store.accept(1, elsewhere)
    assert [t.steps for t in store.present] == [4, 16]
