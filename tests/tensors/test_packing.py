"""State dicts survive tensors and JSON, types and all."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_diloco.errors import CheckpointError
from p2p_diloco.tensors.packing import pack, unpack

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
nested = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


def same(a: object, b: object) -> bool:
    """Equal, with equal types all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


def there_and_back(obj: object) -> object:
    tensors, structure = pack(obj)
    return unpack({name: tensor.clone() for name, tensor in tensors.items()}, json.loads(json.dumps(structure)))


@settings(max_examples=60, deadline=None)
@given(nested)
def test_plain_data_comes_back_as_it_was(obj):
    """Types too: integer keys, tuples, infinities, True that isn't 1; and NaN."""
    assert same(there_and_back(obj), obj)
    assert math.isnan(there_and_back([math.nan])[0])


def test_tensors_are_named_by_their_path_and_never_collide():
    one, two = torch.zeros(1), torch.ones(1)
    tensors, structure = pack({"a.b": one, "a": {"b": two}, "c": [torch.ones(2)]})
    assert set(tensors) == {"a.b", "a.b~", "c.0"}
    assert same(unpack(tensors, structure), {"a.b": one, "a": {"b": two}, "c": [torch.ones(2)]})
    assert list(pack(one)[0]) == ["value"]


@pytest.mark.parametrize("thing", [{1, 2}, b"bytes", object(), torch.eye(2).to_sparse()])
def test_what_isnt_plain_data_is_refused_by_its_place(thing):
    with pytest.raises(CheckpointError, match=rf"^optimizer.0 can't be saved: it is a {type(thing).__name__}"):
        pack({"optimizer": [thing]})


@pytest.mark.parametrize("structure", [{"tensor": "gone"}, {"what": 1}, {"dict": [[1]]}, {"float": "1"}, [1]])
def test_a_structure_that_doesnt_fit_is_refused(structure):
    with pytest.raises(CheckpointError, match="doesn't fit its tensors"):
        unpack({}, {"list": [structure]})
