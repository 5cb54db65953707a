"""Headers: what is sent comes back, and whatever else comes in is a refusal."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_diloco.core.version import Version
from p2p_diloco.net.interface import Refusal
from p2p_diloco.node import wire
from p2p_diloco.node.headers import of_nodes, packed

TOKEN = b"t" * wire.TOKEN_BYTES

names, hashes = st.text(max_size=20), st.binary(min_size=16, max_size=16).map(bytes.hex)
counts = st.integers(0, 2**40)
st.register_type_strategy(str, names)
st.register_type_strategy(int, counts)
st.register_type_strategy(bytes, st.binary(max_size=64).map(lambda seal: seal if len(seal) == 64 else b""))
st.register_type_strategy(Version, st.builds(Version, counts, counts, counts, hashes))
means = st.builds(wire.OfMean, counts, hashes, counts, names, st.binary(min_size=32, max_size=32).map(bytes.hex))
st.register_type_strategy(wire.OfMean, means)


def any_message() -> st.SearchStrategy[wire.NodeMessage]:
    """Each kind that there is, with whatever its fields may hold, and no payload."""
    return st.one_of(
        *(
            st.builds(k, **({"payload": st.none()} if "payload" in k.__slots__ else {}))
            for k in get_args(wire.NodeMessage)
        )
    )


@settings(deadline=None)  # the machine may be busy
@given(any_message())
def test_a_message_survives_its_header(message: wire.NodeMessage) -> None:
    """Every kind of message, with any values, is equal after the trip."""
    assert of_nodes(packed(message, TOKEN), TOKEN) == message


def test_the_token_of_another_run_is_refused() -> None:
    """A data node knows no run's token, so messages to and from it have none."""
    with pytest.raises(Refusal, match="wrong run token"):
        of_nodes(packed(wire.Nudge(3), b"x" * 16), TOKEN)
    with pytest.raises(Refusal, match="wrong run token"):
        of_nodes(packed(wire.Nudge(3), wire.ANY_RUN), TOKEN)
    assert of_nodes(packed(wire.ListSlices("a"), b"x" * 16), TOKEN) == wire.ListSlices("a")
