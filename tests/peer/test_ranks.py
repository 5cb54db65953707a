"""Rank 0 and another rank, each in a thread, over a socket: their messages, and the effect of one's end.
And models within wrappers, as torch.compile's: they have the names of the plain one, so both fit into one run."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import distributed, nn

from p2p_diloco.errors import NodeDied, P2PDilocoError, RankDied
from p2p_diloco.peer import rank_hooks, ranks
from p2p_diloco.peer.extents import Rank
from p2p_diloco.peer.local import LocalModel, with_global_values
from p2p_diloco.peer.metrics import Metrics, Standing
from p2p_diloco.peer.progress import Blend
from p2p_diloco.peer.rank_hooks import FarModel, OtherRanks, Rank0Client, Rank0Hook, Rank0Model, RankNHook
from p2p_diloco.peer.ranks import Place, bare, group_of
from p2p_diloco.peer.session import after_each_step
from p2p_diloco.tensors.layout import Layout, specs_of, trainable

BEGIN = Standing()
WITHIN_S = 20.0


class PlayedHook:
    """Steps that do what the test says."""

    def __init__(self) -> None:
        self.standing = BEGIN
        self.reports: list[tuple[float | None, int | None]] = []
        self.does: Callable[[], None] = lambda: None
        self.after: Callable[[], None] = lambda: None

    def report(self, loss: float | None, samples: int | None) -> None:
        self.reports.append((loss, samples))

    def step(self) -> None:
        self.does()
        steps = self.standing.metrics.local_step + 1
        self.standing = replace(self.standing, metrics=Metrics(local_step=steps), global_step=3)
        self.after()

    def synchronise(self) -> None:
        self.standing = replace(self.standing, epoch=7, finished=True)


class Pair:
    """Rank 0 in this thread, rank 1 in another."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.ranks, self.rank0 = OtherRanks([ours]), Rank0Client(1, theirs)
        self.played, self.saved = PlayedHook(), []
        self.leading = Rank0Hook(self.played, self.ranks)  # type: ignore[arg-type]
        self.theta, self.base, self.delta = torch.zeros(4), torch.zeros(4), torch.zeros(4)
        self.models = [self._model() for _ in range(2)]
        self.layout = Layout.build(specs_of(self.models[0]), slice_elements=2)
        self.locals = [
            LocalModel(model, self.layout, self.theta, self.base, self.delta, rank=Rank(index, 2))
            for index, model in enumerate(self.models)
        ]
        self.led = Rank0Model(self.locals[0], self.ranks)
        self.rank_n = RankNHook(self.rank0, self.locals[1], lambda **told: self.saved.append(told))
        self.pool = ThreadPoolExecutor(1)

    @staticmethod
    def _model() -> nn.Module:
        model = nn.Module()
        model.w = nn.Parameter(torch.arange(4.0))
        return model

    def other(self, what: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Have rank 1 do something."""
        return self.pool.submit(what, *arguments)

    def step(self, rank_n: RankNHook | None = None) -> None:
        """A step of both."""
        step = self.other((rank_n or self.rank_n).step)
        self.leading.step()
        step.result(WITHIN_S)

    def close(self) -> None:
        self.ranks.close()
        self.rank0.close()
        self.pool.shutdown()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_all_ranks_stand_where_rank_0_does(pair: Pair) -> None:
    """After a call every rank tells the same of the run, though rank 0's hook may know more by then."""
    pair.step()
    assert pair.rank_n.standing == pair.leading.standing == replace(BEGIN, metrics=Metrics(local_step=1), global_step=3)
    pair.played.standing = replace(BEGIN, finished=True)
    assert not pair.leading.standing.finished
    asked = pair.other(pair.rank_n.synchronise)
    pair.leading.synchronise()
    asked.result(WITHIN_S)
    assert pair.rank_n.standing == pair.leading.standing
    assert (pair.leading.standing.epoch, pair.leading.standing.finished) == (7, True)


def test_what_ranks_tell_and_save_at_a_step(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples add up, losses are averaged over the ranks that tell one, and a report counts for one step. Nothing is
    sent of which any rank says that it may not be. If rank 0 saves its state after a step, the other ranks save theirs
    before any of them goes on."""
    for ours, theirs in (((1.0, 3), (2.0, 4)), ((None, None), (2.0, 4)), ((None, None), (None, None))):
        pair.leading.report(*ours)
        pair.rank_n.report(*theirs)
        pair.step()
    assert pair.played.reports == [(1.5, 7), (2.0, 4), (None, None)]
    answers: list[bool] = []
    pair.played.does = lambda: answers.append(pair.led.write_delta([0]))
    for doubts in ((True, True), (True, False), (False, True)):
        for local, sound in zip(pair.locals, doubts, strict=True):
            monkeypatch.setattr(local, "write_delta", lambda slices, kept, sound=sound: sound)
        pair.step()
    assert answers == [True, False, False]
    pair.played.after = lambda: pair.ranks.together("save", lambda: None, epoch=2) and None
    pair.step()
    assert pair.saved == [{"epoch": 2}]


def test_a_far_rank_reads_and_writes_rank_0s_memory(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank on another host has memory of its own. Rank 0 serves it, a piece at a time, while it waits for the rank to
    be done. Here it is the far rank that writes the parameter, and rank 0 loads what it wrote."""
    monkeypatch.setattr(rank_hooks, "PIECE_BYTES", 8)
    memory = torch.zeros(3, 4)
    mine = LocalModel(pair.models[0], pair.layout, pair.theta, pair.base, pair.delta, rank=Rank(1, 2))
    theirs = LocalModel(pair.models[1], pair.layout, *memory, rank=Rank(0, 2))
    led = Rank0Model(mine, pair.ranks)
    rank_n = RankNHook(pair.rank0, FarModel(theirs, pair.rank0, *memory), lambda **_: None)
    pair.ranks.memory = {"theta": pair.theta, "delta": pair.delta}

    def exchange() -> None:
        led.write_theta()
        assert pair.theta.tolist() == [0.0, 1.0, 2.0, 3.0]
        led.merge({0: Blend.SENT, 1: Blend.SENT})
        pair.base.copy_(pair.theta)
        pair.theta.fill_(5.0)  # of all slices, of which only one is loaded now
        led.merge({0: Blend.NONE}, kept=[0, 1])
        led.write_delta([0])
        led.write_delta([1], kept=[1])
        assert pair.delta.tolist() == [0.0, 0.0, 0.0, 0.0]

    pair.played.does = exchange
    pair.step(rank_n)
    assert [model.w.tolist() for model in pair.models] == [[5.0, 5.0, 2.0, 3.0]] * 2


def test_ranks_out_of_step_are_told_so(pair: Pair) -> None:
    """Another call on another rank ends both with a sentence that names the two, and doesn't hang."""
    asked = pair.other(pair.rank_n.synchronise)
    said = r"rank 1 calls force_sync\(\) where rank 0 calls optimizer.step\(\)"
    with pytest.raises(RankDied, match=said):
        pair.leading.step()
    with pytest.raises(RankDied, match=said):
        asked.result(WITHIN_S)


def test_a_rank_that_does_not_come_is_given_up(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_hooks, "RANK_S", 0.2)
    monkeypatch.setattr(rank_hooks, "TELL_EVERY_S", 0.05)
    with pytest.raises(RankDied, match="rank 1 has sent nothing"):
        pair.leading.step()


def test_what_ends_rank_0_ends_the_others_alike(pair: Pair) -> None:
    """The same kind of error with the same sentence."""

    def fail() -> None:
        raise NodeDied("the node was killed", mend="start it again")

    pair.played.does = fail
    step = pair.other(pair.rank_n.step)
    with pytest.raises(NodeDied) as ours:
        pair.leading.step()
    with pytest.raises(NodeDied) as theirs:
        step.result(WITHIN_S)
    assert theirs.value.sentence == ours.value.sentence


def test_what_ends_another_rank_ends_rank_0(pair: Pair) -> None:
    """Rank 0 ends with the other rank's error."""

    def fail() -> None:
        raise MemoryError("no room")

    pair.locals[1].write_theta = fail  # type: ignore[method-assign]
    pair.played.does = pair.led.write_theta
    step = pair.other(pair.rank_n.step)
    with pytest.raises(P2PDilocoError, match=r"rank 1 failed: MemoryError\('no room'\)"):
        pair.leading.step()
    with pytest.raises(MemoryError):
        step.result(WITHIN_S)


def test_a_rank_that_is_gone_is_noticed(pair: Pair) -> None:
    """Whichever it is, and whenever: the end of the connection is an error, and no wait."""
    pair.rank0.close()
    with pytest.raises(RankDied, match="rank 1 of this peer has ended"):
        pair.leading.step()
    with pytest.raises(RankDied, match="rank 1 of this peer has ended"):
        pair.led.write_theta()


def test_rank_0s_end_is_noticed(pair: Pair) -> None:
    step = pair.other(pair.rank_n.step)
    pair.ranks.close()
    with pytest.raises(RankDied, match="rank 0, which speaks for this peer, has ended"):
        step.result(WITHIN_S)


# -- meeting

HERE = "127.0.0.1"


@pytest.fixture
def listeners(tmp_path: Path) -> Iterator[tuple[socket.socket, socket.socket, Place]]:
    """Rank 0's two listeners, and their place."""
    with socket.socket(socket.AF_UNIX) as near, socket.create_server((HERE, 0)) as far:
        near.bind(str(tmp_path / "ranks"))
        near.listen(4)
        yield near, far, Place(near.getsockname(), (HERE,), far.getsockname()[1], "ab" * 16 + "cd" * 16)


def met(listeners: tuple[socket.socket, socket.socket, Place], *places: Place) -> list[socket.AddressFamily]:
    """Let rank 1, 2, ... look for rank 0 at these places. Returns how rank 0 is connected to each of them."""
    near, far, place = listeners
    with ThreadPoolExecutor() as pool:
        reached = [pool.submit(ranks._reached, each, rank) for rank, each in enumerate(places, start=1)]
        found = dict(ranks._accepted((near, far), len(places) + 1, place, lambda: False))
        for rank, theirs in enumerate(reached, start=1):
            ours, other = found[rank], theirs.result()
            assert other is not None
            with ours, other:
                other.sendall(bytes([rank]))
                assert ours.recv(1) == bytes([rank])
        return [found[rank].family for rank in sorted(found)]


def test_a_rank_takes_the_unix_socket_if_it_can(listeners: tuple[socket.socket, socket.socket, Place]) -> None:
    """Over it memory is shared. A rank that doesn't find it takes TCP."""
    place = listeners[2]
    assert met(listeners, replace(place, path="/no such/path"), place) == [socket.AF_INET, socket.AF_UNIX]


def test_an_address_of_another_program_is_passed_over(listeners: tuple[socket.socket, socket.socket, Place]) -> None:
    """Hosts may have the same private addresses, so a rank may get to a wrong listener, or to none."""
    place = replace(listeners[2], path="/no such/path")
    with socket.create_server(("127.0.0.2", place.port)) as other, ThreadPoolExecutor(1) as pool:
        closed = pool.submit(lambda: other.accept()[0].close())
        assert met(listeners, replace(place, addresses=("127.0.0.3", "127.0.0.2", HERE))) == [socket.AF_INET]
        closed.result()


def test_strangers_are_no_ranks(
    listeners: tuple[socket.socket, socket.socket, Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One without the secret, a silent one, and one with a rank that doesn't exist take nobody's place."""
    monkeypatch.setattr(ranks, "DIAL_S", 0.2)
    place = listeners[2]
    with socket.create_connection((HERE, place.port)) as rude, socket.create_connection((HERE, place.port)), \
            socket.create_connection((HERE, place.port)) as unknown:  # fmt: skip
        rude.sendall(bytes(20))
        unknown.sendall(place.halves[0] + (7).to_bytes(4, "big"))
        assert met(listeners, replace(place, path="/no such/path")) == [socket.AF_INET]  # accepted after these
        rude.settimeout(5.0)
        assert rude.recv(100) == b""


def test_rank_0_does_not_wait_for_a_rank_that_gives_up(listeners: tuple[socket.socket, socket.socket, Place]) -> None:
    """A rank without a way gives up; then rank 0 is told, and stops."""
    near, far, place = listeners
    given_up = Event()
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(lambda: dict(ranks._accepted((near, far), 3, place, given_up.is_set)))
        assert ranks._reached(replace(place, path="/no such/path", addresses=()), 1) is None
        given_up.set()
        assert accepted.result(30.0) == {}


# -- wrappers


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def with_a_compiled_part() -> nn.Module:
    model = plain()
    model[0] = compiled(model[0])
    return model


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="eager")


def test_a_compiled_step_does_not_trace_what_happens_after_it() -> None:
    """Otherwise torch.compile would compile the exchange, and warn of each call that it can't trace."""
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    traced: list[bool] = []
    stop = after_each_step(optimizer, lambda: traced.append(torch.compiler.is_compiling()))
    model(torch.ones(4, 2)).sum().backward()
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    step()
    step()
    stop()
    step()
    assert traced == [False, False]


def test_a_compiled_model_has_the_plain_names(tmp_path: Path) -> None:
    """In what is exchanged, and in the global state_dict, which a plain model loads; also inside and around
    DistributedDataParallel, where it is one peer of all ranks."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        copied = nn.parallel.DistributedDataParallel
        wrapped = [compiled(copied(plain())), copied(compiled(plain()))]
        for model in (compiled(plain()), with_a_compiled_part(), *wrapped):
            made = bare(model)
            assert made is not None
            assert specs_of(made) == specs_of(plain())
            values = {name: torch.full_like(parameter, 7.0) for name, parameter in trainable(made).items()}
            reference = plain()
            reference.load_state_dict(with_global_values(made, values))
            assert all((parameter == 7.0).all() for parameter in reference.parameters())
        groups = [group_of(model) for model in wrapped]
        assert [group.rank.count for group in groups if group is not None] == [1, 1]
    finally:
        distributed.destroy_process_group()
