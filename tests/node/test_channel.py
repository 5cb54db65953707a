"""The channel between a trainer and its node."""

from __future__ import annotations

import asyncio
import socket
from itertools import pairwise

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_diloco.node.channel import ChannelClosed, NodeEnd, TrainerEnd

values = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=20) | st.binary(max_size=20)
messages = st.lists(st.dictionaries(st.text(max_size=5), values, max_size=4), max_size=5)


@settings(deadline=None)  # the machine may be busy
@given(messages, st.data())
def test_messages_survive_any_split(sent: list[dict[str, object]], data: st.DataObject) -> None:
    """However the stream is cut, the same messages come out in the same order."""
    stream = b"".join(map(msgpack.packb, sent))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        end, found = TrainerEnd(ours), []
        cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
        for start, stop in pairwise([0, *cuts, len(stream)]):
            theirs.sendall(stream[start:stop])
            while (message := end.receive(0.001)) is not None:
                found.append(message)
        while len(found) < len(sent) and (message := end.receive(10.0)) is not None:  # the machine may be busy
            found.append(message)
        assert found == sent
        assert end.receive(0.0) is None


def test_both_ends_speak_and_notice_the_others_end() -> None:
    # Both ends speak. What one end sends the other receives, both ways, also where it is long.
    async def both() -> None:
        ours, theirs = socket.socketpair()
        trainer, node = TrainerEnd(ours), await NodeEnd.over(theirs)
        trainer.send({"kind": "ask", "n": 7})
        assert await node.receive() == {"kind": "ask", "n": 7}
        node.send("answer", blob=b"x" * 200_000)
        answer, _ = await asyncio.gather(asyncio.to_thread(trainer.receive, 30.0), node.flush())
        assert answer == {"kind": "answer", "blob": b"x" * 200_000}
        await node.close()
        trainer.close()

    asyncio.run(both())

    # The end of the other process is told. Both ends raise when the other one is gone, sending or receiving;
    # messages sent before are still read.
    ours, theirs = socket.socketpair()
    theirs.sendall(msgpack.packb({"kind": "last"}))
    theirs.close()
    trainer = TrainerEnd(ours)
    assert trainer.receive(30.0) == {"kind": "last"}
    with pytest.raises(ChannelClosed):
        trainer.receive(30.0)
    with pytest.raises(ChannelClosed):
        trainer.send({"kind": "ask", "blob": b"x" * 10_000_000}, timeout_s=1.0)

    async def node_side() -> None:
        ours, theirs = socket.socketpair()
        end = await NodeEnd.over(theirs)
        ours.close()
        with pytest.raises(ChannelClosed):
            await end.receive()
        await end.close()

    asyncio.run(node_side())
    trainer.close()

    # A node that does not read is noticed. Sending to a frozen node ends in bounded time.
    ours, theirs = socket.socketpair()
    trainer = TrainerEnd(ours)
    with pytest.raises(ChannelClosed):
        trainer.send({"kind": "ask", "blob": b"x" * 50_000_000}, timeout_s=0.2)
    trainer.close()
    theirs.close()
