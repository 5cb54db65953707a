"""The memory that two processes share."""

from __future__ import annotations

import os

from p2p_diloco.node.shared import Header, SharedMemory, create
from p2p_diloco.node.status import LastRound


def test_slots_and_vectors_do_not_overlap() -> None:
    # slots and vectors do not overlap. Writing all of one thing leaves all others alone; memory begins zeroed.
    fd = create(3)
    memory = SharedMemory(fd, 3)
    assert memory.theta.tolist() == memory.delta.tolist() == [0, 0, 0]
    slots = [name for name, *_ in Header._fields_ if name != "_round"]
    assert all(getattr(memory, name) == 0 for name in slots)
    assert memory.last_round is None
    for number, name in enumerate(slots):
        setattr(memory, name, type(getattr(memory, name))(number))
    memory.last_round = last = LastRound(*(number / 10 for number in range(8)))
    memory.theta.fill_(7)
    memory.delta.fill_(8)
    assert [getattr(memory, name) for name in slots] == list(range(len(slots)))
    assert memory.last_round == last
    assert memory.theta.tolist() == [7, 7, 7]
    assert memory.delta.tolist() == [8, 8, 8]
    os.close(fd)

    # a peer without a model shares the header alone
    fd = create(0)
    memory = SharedMemory(fd, 0)
    memory.finished = 1
    assert memory.theta.numel() == memory.delta.numel() == 0
    assert SharedMemory(fd, 0).finished == 1
    os.close(fd)
