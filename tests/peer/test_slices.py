"""Slices as training code sees them: in `peer.shard` each sample comes once an epoch, a slice at a time. The node is
asked at its door, from any process."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from p2p_diloco.data.files import Piece, cut_files
from p2p_diloco.data.manifest import Manifest
from p2p_diloco.errors import GaveUpWaiting, NodeDied, Refused, UsageError
from p2p_diloco.node.channel import Door
from p2p_diloco.peer import absent
from p2p_diloco.peer.peer import Peer
from p2p_diloco.peer.slices import Slices, open_slices

SAMPLES = 100


class Stub:
    """In place of `Fetching`: the slices are on the disk already."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        lines = [f"{number}\n" for number in range(SAMPLES)]
        (folder / "a.txt").write_text("".join(lines[:37]))
        (folder / "b.txt").write_text("".join(lines[37:]))
        found: tuple[Manifest, Sequence[Piece]] = cut_files([folder], 15, lambda text: None)
        self.folder, self.manifest, self.pieces = folder, found[0], found[1]
        self.ahead: list[list[int]] = []
        self.got: list[int] = []
        self.gone: set[int] = set()
        self.stands = False

    async def open(self, name: str, identity: str, tell: Callable[[str], None]) -> Manifest:
        if name != "corpus":
            raise Refused("is the name of several data sets", key="slices", value=name, mend="stop one")
        return self.manifest

    async def get(self, identity: str, index: int, tell: Callable[[str], None]) -> Path:
        while self.stands:
            tell(f"waits for slice {index} of 'corpus': no data node serves it now")
            await asyncio.sleep(0.02)
        self.got.append(index)
        path = self.folder / f"slice{index}"
        if not path.exists():  # another process may be reading it
            path.write_bytes(self.pieces[index].read())
        if index in self.gone:
            self.gone.discard(index)
            path.unlink()
        return path

    def soon(self, identity: str, indices: list[int]) -> None:
        self.ahead.append(indices)

    def close(self) -> None:
        pass


class Behind:
    """A door in a thread of its own."""

    def __init__(self, folder: Path) -> None:
        self.stub, self.loop = Stub(folder), asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.door = self.within(self._made())
        self.path: str = self.within(self.door.open())

    async def _made(self) -> Door:
        return Door(self.stub)  # type: ignore[arg-type]

    def within(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(10)

    def close(self) -> None:
        self.within(self._closed())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    async def _closed(self) -> None:
        self.door.close()
        await asyncio.sleep(0.05)  # the connections end


@pytest.fixture
def behind(tmp_path: Path) -> Iterator[Behind]:
    made = Behind(tmp_path / "data")
    yield made
    if made.thread.is_alive():
        made.close()


def opened(behind: Behind, wait_s: float = 10.0) -> Slices:
    return open_slices(behind.path, "corpus", "", wait_s)


def test_slices_are_files_and_samples_their_lines(behind: Behind) -> None:
    # slices are files, and samples their lines
    slices = opened(behind)
    assert len(slices) == len(behind.stub.pieces) > 10
    assert slices[2].read_bytes() == behind.stub.pieces[2].read()
    assert slices[-1] == slices[len(slices) - 1]
    assert list(slices.samples) == [str(number) for number in range(SAMPLES)]
    assert slices.fingerprint == slices.samples.fingerprint == behind.stub.manifest.identity
    with pytest.raises(IndexError):
        slices[len(slices)]
    assert os.stat(Path(behind.path).parent).st_mode & 0o077 == 0, "only this user can enter"

    # the node's error is raised here
    with pytest.raises(Refused, match="slices=other is the name of several data sets; stop one"):
        open_slices(behind.path, "other", "", 10.0)

    # a slice that was removed before it was read is asked for again
    behind.stub.gone = {0}
    assert opened(behind).samples[0] == "0"
    assert behind.stub.got[-2:] == [0, 0]


def test_each_sample_comes_once_an_epoch_and_a_slice_at_a_time(behind: Behind) -> None:
    """The order is another one in each epoch, of the slices and within a slice, and depends on the seed alone."""
    samples = opened(behind).samples
    whole = samples.order("seed", np.arange(3 * SAMPLES))
    epochs = whole.reshape(3, SAMPLES)
    assert all(sorted(epoch.tolist()) == list(range(SAMPLES)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 3
    slices = np.searchsorted(samples._ends, epochs, side="right")
    assert len({tuple(epoch) for epoch in slices.tolist()}) == 3
    for epoch in slices.tolist():
        changes = [index for index, before in zip(epoch, [-1, *epoch], strict=False) if index != before]
        assert sorted(changes) == list(range(len(samples.slices)))
        assert changes != sorted(changes)
    rows = [epochs[0][slices[0] == index] for index in range(len(samples.slices))]
    assert any((np.diff(one) != 1).any() for one in rows)
    parts = np.array([7, 299, 150, 8])
    assert samples.order("seed", parts).tolist() == whole[parts].tolist()
    assert samples.order("other", parts).tolist() != whole[parts].tolist()


def test_the_node_is_told_which_slices_come_next(behind: Behind) -> None:
    slices = opened(behind)
    at = np.arange(90, 130)
    slices.samples.soon("seed", at)
    slices.soon("seed", np.arange(5))
    assert slices[0]  # the connection's requests are served in order
    first, second = behind.stub.ahead
    order = np.searchsorted(slices.samples._ends, slices.samples.order("seed", at), side="right").tolist()
    assert first == list(dict.fromkeys(order))
    assert len(second) == len(set(second)) == 5


def test_workers_of_a_loader_ask_for_themselves(behind: Behind) -> None:
    """Forked ones too, though this process has used its connection before."""
    samples = opened(behind).samples
    assert samples[0] == "0"
    loader = DataLoader(samples, batch_size=10, num_workers=2, multiprocessing_context="fork")
    assert [int(text) for batch in loader for text in batch] == list(range(SAMPLES))
    assert samples[99] == pickle.loads(pickle.dumps(samples))[99] == "99"


def test_a_wait_is_told_and_ends(behind: Behind, caplog: pytest.LogCaptureFixture) -> None:
    """The error has the last reason; a later question is not answered with what was late."""
    slices = opened(behind, wait_s=0.3)
    behind.stub.stands = True
    caplog.set_level("INFO", "p2p_diloco")
    with pytest.raises(GaveUpWaiting, match=r"wait_timeout=0.3 is over: waits for slice 7 of 'corpus': no data node"):
        slices[7]
    assert caplog.text.count("waits for slice 7 of 'corpus'") == 1
    behind.stub.stands = False
    assert slices[8].name == "slice8"


def test_the_end_of_the_node_is_no_endless_wait(behind: Behind) -> None:
    slices = opened(behind)
    behind.close()
    assert not Path(behind.path).parent.exists()
    slices.soon("seed", np.arange(3))
    with pytest.raises(NodeDied):
        slices[0]


def test_outside_a_run_there_are_no_slices() -> None:
    with pytest.raises(UsageError, match="slices=corpus come from a run's data nodes, and there is no run"):
        absent.AbsentPeer(None, None).slices("corpus")
    with pytest.raises(UsageError, match="not in its run"):
        Peer(None, None).slices("corpus")
