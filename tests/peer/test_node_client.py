"""The trainer's end of the channel: the node's error is what the user sees."""

from __future__ import annotations

import socket
from typing import Any

import msgpack
import pytest

from p2p_diloco.errors import NodeDied, Refused
from p2p_diloco.node.channel import TrainerEnd
from p2p_diloco.peer.node_client import NodeClient


def client(*said: dict[str, Any]) -> NodeClient:
    """The client of a node that has said this, and has ended."""
    ours, theirs = socket.socketpair()
    theirs.sendall(b"".join(msgpack.packb(message) for message in said))
    theirs.close()
    return NodeClient(TrainerEnd(ours), None, lambda: "the node ended")  # type: ignore[arg-type]


ERROR = {"kind": "error", "error": Refused("was revoked", key="invite", value="alice").to_wire()}


def test_a_nodes_error_is_reported_by_every_later_call() -> None:
    """Also by a call that cleans up after the first one: it must not hide the reason behind the node's end."""
    node = client({"kind": "waiting", "text": ""}, ERROR)
    with pytest.raises(Refused, match="invite=alice was revoked"):
        node.wait_for("load", timeout_s=5)
    for _ in range(2):
        with pytest.raises(Refused, match="invite=alice was revoked"):
            node.tell("have read", loaded=[], torn=False)


def test_a_node_that_ended_without_a_word_has_died() -> None:
    """The error says how its process ended."""
    with pytest.raises(NodeDied, match="the node ended"):
        client({"kind": "waiting", "text": ""}).tell("merge")
