"""The trainer's end of the channel: the node's error is what the user sees."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from p2p_diloco.errors import NodeDied, Refused, UsageError
from p2p_diloco.node.channel import TrainerEnd
from p2p_diloco.peer import session
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
            node.tell("have read", loaded=[])


def test_a_node_that_ended_without_a_word_has_died() -> None:
    """The error says how its process ended."""
    with pytest.raises(NodeDied, match="the node ended"):
        client({"kind": "waiting", "text": ""}).tell("merge")


@contextlib.contextmanager
def answering() -> Iterator[NodeClient]:
    """The client of a node that answers each request at once."""
    ours, theirs = socket.socketpair()

    def answer() -> None:
        unpacker = msgpack.Unpacker()
        while data := theirs.recv(1 << 16):
            unpacker.feed(data)
            for message in unpacker:
                theirs.sendall(msgpack.packb({"kind": message["kind"], "n": message["n"]}))

    playing = threading.Thread(target=answer)
    playing.start()
    try:
        yield NodeClient(TrainerEnd(ours), None, lambda: "the node ended")  # type: ignore[arg-type]
    finally:
        ours.close()
        playing.join()
        theirs.close()


def test_each_thread_gets_its_own_answers() -> None:
    """A thread that shows progress may ask while another one trains."""
    with answering() as node, ThreadPoolExecutor(2) as threads:
        node.answer_s = 5.0
        asked = [threads.submit(node.ask, kind, kind) for kind in ("merge", "ask") * 200]
        assert [one.result()["kind"] for one in asked] == ["merge", "ask"] * 200


def test_a_thread_that_must_wait_too_long_is_told_why() -> None:
    """An exchange may last for minutes, and `peers` of another thread waits no longer than for an answer."""
    with answering() as node, ThreadPoolExecutor(1) as other:
        node.answer_s = 0.05
        with node.turn():
            assert node.ask("ask", "ask")["kind"] == "ask"
            with pytest.raises(UsageError, match=r"another thread has been in a step .* the thread that trains"):
                other.submit(node.ask, "ask", "ask").result()
        assert other.submit(node.ask, "ask", "ask").result()["n"] == 2


def test_a_node_that_tells_what_it_waits_for_may_take_long() -> None:
    """A large state comes slowly. The node bounds its own waits; one that tells nothing is given up."""
    ours, theirs = socket.socketpair()
    node = NodeClient(TrainerEnd(ours), None, lambda: "the node ended")  # type: ignore[arg-type]
    process: Any = SimpleNamespace(client=node, pid=7)

    def tell() -> None:
        for number in range(8):
            theirs.sendall(msgpack.packb({"kind": "waiting", "text": f"{number} of 8 slices"}))
            time.sleep(0.2)
        theirs.sendall(msgpack.packb({"kind": "ready"}))

    with theirs, ThreadPoolExecutor(1) as pool:
        telling = pool.submit(tell)
        assert session._awaited(process, "ready", 1.0) == {"kind": "ready"}
        telling.result()
        with pytest.raises(NodeDied, match=r"has told nothing for 1 s"):
            session._awaited(process, "ready", 1.0)
