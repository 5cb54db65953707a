"""The trainer's end of the channel: the node's error is what the user sees."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from p2p_diloco.errors import NodeDied, Refused, UsageError
from p2p_diloco.node.channel import TrainerEnd
from p2p_diloco.peer import node_client, session
from p2p_diloco.peer.node_client import NodeClient


def client(*said: dict[str, Any]) -> NodeClient:
    """The client of a node that has said this, and has ended."""
    ours, theirs = socket.socketpair()
    theirs.sendall(b"".join(msgpack.packb(message) for message in said))
    theirs.close()
    return NodeClient(TrainerEnd(ours), None, lambda: "the node ended")  # type: ignore[arg-type]


ERROR = {"kind": "error", "error": Refused("was revoked", key="invite", value="alice").to_wire()}


def test_a_nodes_error_is_reported_by_every_later_call() -> None:
    """Also by a call that cleans up after the first one: it must not hide the reason behind the node's end. Of a node
    that ended without a word the error says how its process ended."""
    node = client({"kind": "waiting", "text": ""}, ERROR)
    with pytest.raises(Refused, match="invite=alice was revoked"):
        node.wait_for("load", timeout_s=5)
    for _ in range(2):
        with pytest.raises(Refused, match="invite=alice was revoked"):
            node.tell("have read", loaded=[])
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


def test_a_node_that_tells_what_it_waits_for_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large state comes slowly. The node bounds its own waits; one that tells nothing is given up."""
    now, told = [100.0], iter(["1 of 3 slices", "2 of 3 slices", "", "1 of 2 slices", "", ""])
    monkeypatch.setattr(node_client.time, "monotonic", lambda: now[0])
    node = client()

    def waits(kind: str, *, timeout_s: float) -> dict[str, str] | None:
        """In each such wait there is a report at the end, or the node is ready."""
        now[0] += timeout_s
        if not (text := next(told)) and now[0] < 500.0:
            return {"kind": kind}
        node.report(text)
        return None

    monkeypatch.setattr(node, "wait_for", waits)
    process: Any = SimpleNamespace(client=node, pid=7)
    assert session._awaited(process, "ready", 60.0) == {"kind": "ready"}
    now[0] = 500.0
    with pytest.raises(NodeDied, match="has told nothing for 60 s"):
        session._awaited(process, "ready", 60.0)
    assert now[0] == 500.0 + 3 * 60.0
