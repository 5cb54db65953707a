"""Who may read from a data node of a private run, over real daemons: workers, and nobody else."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from p2p_diloco.data.files import cut_files
from p2p_diloco.net.interface import Refusal, Unreachable
from p2p_diloco.node.data_node import DataNode, Served
from p2p_diloco.node.fetching import Fetching
from p2p_diloco.node.headers import packed
from p2p_diloco.node.inbox import Inbox
from p2p_diloco.node.providers import read_data_nodes
from p2p_diloco.node.wire import GetSlice, ListSlices
from tests.net.members import invitation
from tests.net.patience import run
from tests.net.swarm import join
from tests.node.test_data_node import Reader

pytestmark = [pytest.mark.real]


def test_workers_read_and_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An observer learns from the records that the data is there, and gets none of it; a stranger, who knows the data
    node's address and the data set's identity, does not even see a record."""
    monkeypatch.setattr("p2p_diloco.net.hello.LINGER_S", 0.2)
    (tmp_path / "a.txt").write_text("a\nb\n")
    served = Served("corpus", *cut_files([tmp_path / "a.txt"], 10, lambda text: None))
    identity = served.manifest.identity

    async def test() -> None:
        inbox, reading = Inbox(), Inbox()
        node = await join(inbox, invitation=invitation())
        inbox.knows(node)
        inbox.handler = serving = DataNode(node, inbox, served)
        ready = asyncio.Event()
        announcing = asyncio.create_task(serving.announce("real", "node", ready.set))
        await ready.wait()
        others = [
            await join(box, invitation=invited, initial_peers=node.addresses())
            for box, invited in ((reading, invitation()), (None, invitation("observer", "eve")), (None, None))
        ]
        worker, observer, stranger = others
        reading.knows(worker)
        reader = Fetching(worker, "real", tmp_path / "cache", 100)
        reading.handler = Reader(reader)
        manifest = await reader.open("corpus", "", print)
        assert (await reader.get(manifest.identity, 0, print)).read_bytes() == b"a\nb\n"

        assert len(await read_data_nodes(observer, "real", "corpus")) == 1
        assert await read_data_nodes(stranger, "real", "corpus") == []
        for message in (ListSlices("corpus"), GetSlice(identity, 0)):
            with pytest.raises(Refusal, match="an observer's invitation allows no"):
                await observer.send(node.peer_id, packed(message))
            with pytest.raises((Refusal, Unreachable)):
                await stranger.send(node.peer_id, packed(message))
        assert list(serving.sent) == [worker.peer_id]
        announcing.cancel()
        reader.close()
        for transport in (*others, node):
            await transport.close()

    run(test())
