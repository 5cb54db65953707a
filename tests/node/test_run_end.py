"""An ended run stays ended: a later peer doesn't train on, and no record ends a run that goes on."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_diloco.core.revision import FOUNDED
from p2p_diloco.core.rules import Rules
from p2p_diloco.core.version import ModelVersion
from p2p_diloco.errors import GaveUpWaiting, P2PDilocoError, Refused
from p2p_diloco.net.interface import Unreachable
from p2p_diloco.node import beginning, board, participation, records
from p2p_diloco.node import run_end as ending
from p2p_diloco.node.inbox import Inbox
from p2p_diloco.node.run_end import End
from p2p_diloco.node.run_record import Founding
from p2p_diloco.tensors import checkpoint
from tests.net.clocks import by_hand
from tests.net.memory import MemoryNetwork, signed
from tests.net.patience import awaited, until
from tests.node.conftest import QUICK, MemoryPeer, entered, exchange, founding_in, stop, without_a_dht

STOP = 3
FOUNDING = Founding("r", "founder", 1.0)
RULES = Rules(run="r", fragments=((0,), (1,)), stop_after_epochs=STOP)
LAST, STOPPED = ModelVersion(0, 12, 2 * STOP, "d" * 32), ModelVersion(0, 4, 2, "x")


@pytest.fixture(autouse=True)
def looks_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "PUBLISH_EVERY_S", 0.1)


def disk(folder: Path, name: str, **local: Any) -> dict[str, Any]:
    return {"checkpoint_dir": folder / name, "save_every": 2, "keep": 9, "restart_wait": 5.0, **local}


async def to_the_end(folder: Path, network: MemoryNetwork | None = None, **more: Any) -> list[float]:
    """Two peers train to the end of their run, and leave. The last θ."""
    network = network or MemoryNetwork()
    config = {**QUICK, "stop_after_epochs": STOP, "start_peers": 2, **more}
    peers = [MemoryPeer(network, name, config, **disk(folder, name)) for name in "ab"]
    for peer in peers:
        await peer.enter(theta=1.0)
    while not all(peer.memory.finished for peer in peers):
        await exchange(*peers)
    last: list[float] = peers[0].memory.theta.tolist()
    await stop(*peers)
    return last


def step_back(folder: Path, name: str) -> None:
    """A peer's newest checkpoint is lost; one is left."""
    newest = checkpoint.latest(folder / name)
    assert newest is not None
    shutil.rmtree(newest)
    assert checkpoint.epoch_of(checkpoint.latest(folder / name) or Path()) == 2


async def its_end(peer: Any) -> list[float]:
    """θ of a peer that starts and finds the run over as soon as it may train; it leaves."""
    await peer.enter()
    assert peer.memory.finished == 1
    assert peer.memory.epoch == STOP
    theta: list[float] = peer.memory.theta.tolist()
    await peer.stop()
    return theta


async def gives_up(peer: Any, error: type[P2PDilocoError] = GaveUpWaiting) -> str:
    """The sentence that a peer ends with which may not train."""
    await peer.start()
    await peer.hear("run")
    peer.tell("theta")
    with pytest.raises(error) as gave_up:
        await peer.hear("ready")
    await peer.stop()
    return gave_up.value.sentence


def signed_end(
    model: ModelVersion, signer: str = "stranger", founding: Founding = FOUNDING, fragments: int = len(RULES.fragments)
) -> End:
    proof = signed(signer, ending.KIND, ending.statement(founding, model, fragments, 5.0))
    return End(model, 5.0, signer, proof, founding.founder, founding.time, fragments)


def replica_at(model: ModelVersion, others: Mapping[str, ModelVersion] | None = None, **more: Any) -> Any:
    """What an `Ending` knows of a replica, which is the peer x: the versions that it and the other live peers hold."""
    held = {"x": model, **(others or {})}
    roster = SimpleNamespace(
        mine=SimpleNamespace(model=model),
        summaries=lambda: {peer: SimpleNamespace(model=one) for peer, one in held.items()},
        alive=lambda: [*(others or {})],
    )
    return SimpleNamespace(
        **{"me": "x", "finished": False, "roster": roster, "rules": RULES, "logs": (), "revision": FOUNDED, **more}
    )


def ending_of(transport: Any, replica: Any, group: str = "") -> ending.Ending:
    """The ending of a peer that sees nobody train."""
    common: Any = SimpleNamespace(transport=transport, founding=FOUNDING, replica=replica)
    return ending.Ending(common, group)


@awaited
async def test_an_ended_run_is_left_in_the_dht_and_not_founded_anew(tmp_path: Path) -> None:
    """Each peer that holds the last state says so under its own name, with one content; its folder holds the last
    checkpoint, though `save_every` doesn't divide the last epoch. A newcomer ends with the epoch, the reason
    and the mend, whether the run's record is there, or only that of its end; and it gets no
    older state from a peer that waits."""
    network = MemoryNetwork()
    await to_the_end(tmp_path, network=network)
    onlooker = network.join("onlooker", Inbox())
    found = await ending.BOARD.read(onlooker, "r", End, lambda end: True)
    assert {end.signer for end in found} == {"a", "b"}
    (model,) = {end.model for end in found}
    assert (model.generation, model.epochs) == (0, STOP)
    for name in "ab":
        assert checkpoint.epoch_of(checkpoint.latest(tmp_path / name) or Path()) == STOP

    sentence = await gives_up(MemoryPeer(network, "new"), Refused)  # long before its wait_timeout
    assert sentence.startswith("run_id=r has ended at epoch 3 (digest ")
    assert "choose another run id" in sentence
    step_back(tmp_path, "a")
    patience_s = 2 * QUICK["heartbeat_timeout"] + 0.5
    a = MemoryPeer(network, "a", **disk(tmp_path, "a", wait_timeout=patience_s))
    sentences = await asyncio.gather(gives_up(a), gives_up(MemoryPeer(network, "newer", wait_timeout=patience_s)))
    assert all(
        f"this peer's state is {has}" in told for has, told in zip(("of epoch 2", "none"), sentences, strict=True)
    )

    del network.records["r/config"]
    for new in (MemoryPeer(network, "founder", QUICK), MemoryPeer(network, "aggregator", sizes=None)):
        await new.start()
        with pytest.raises(Refused, match=rf"run_id=r has ended at epoch {STOP} .* choose another run id"):
            await new.hear("run", timeout_s=20.0)
        await new.stop()
    assert "r/config" not in network.records


# -- who starts afterwards


@awaited
async def test_a_checkpoint_tells_the_end_as_a_peer_of_the_last_round_has_signed_it(tmp_path: Path) -> None:
    """After all have left, one comes back under another identity, tells the record, and leaves. So a peer with an older
    checkpoint does not take it for a rumour."""
    await to_the_end(tmp_path)
    step_back(tmp_path, "a")
    network = MemoryNetwork()
    await its_end(MemoryPeer(network, "b-again", **disk(tmp_path, "b", restart_wait=0.1)))
    a = MemoryPeer(network, "a-again", **disk(tmp_path, "a", wait_timeout=1.0, restart_wait=0.1))
    assert "signed by b), this peer's state is of epoch 2" in await gives_up(a)


@pytest.mark.parametrize("slow", ["the end's record", "the newcomer's look"])
@awaited
async def test_a_newcomer_founds_no_run_whose_end_it_just_missed(monkeypatch: pytest.MonkeyPatch, slow: str) -> None:
    """The end reaches the DHT long after the peer's own record says that it has finished; or the peer ends and leaves
    while the newcomer looks for peers that hold the state."""
    network, left, looked = MemoryNetwork(), asyncio.Event(), asyncio.Event()

    def delayed(what: Any, wait: Callable[[], Awaitable[object]]) -> Any:
        async def later(*given: Any) -> Any:
            looked.set()
            await wait()
            return await what(*given)

        return later

    if slow == "the end's record":
        monkeypatch.setattr(ending, "store", delayed(ending.store, lambda: asyncio.sleep(2.0)))
        monkeypatch.setattr(participation, "LEAVE_S", 10.0)
        looked.set()
    else:
        monkeypatch.setattr(beginning, "holders_of", delayed(beginning.holders_of, left.wait))
    (a,) = await entered("a", {**QUICK, "stop_after_epochs": 2}, network)
    network.cut("a", "new")
    sentence = asyncio.create_task(gives_up(MemoryPeer(network, "new"), Refused))
    await a.exchange(1.0)
    await asyncio.wait_for(looked.wait(), 30.0)
    await a.exchange(1.0)
    while (await records.read_peers(network.peers["a"], "r"))["a"].state != "finished":
        await asyncio.sleep(0.02)
    await a.stop()
    left.set()
    assert "no peer here has its last state" in await sentence


@awaited
async def test_the_last_state_is_served_for_a_while(tmp_path: Path) -> None:
    """Whoever comes back with it waits for as many peers as the last round had, `restart_wait` at most, and ends as it
    had ended."""
    last = await to_the_end(tmp_path)
    began = time.monotonic()
    alone = MemoryPeer(MemoryNetwork(), "a", **disk(tmp_path, "a", restart_wait=0.5))
    await alone.enter()
    assert time.monotonic() - began >= 0.5
    await alone.stop()
    assert alone.memory.theta.tolist() == last
    network = MemoryNetwork()
    began = time.monotonic()
    both = [MemoryPeer(network, name, **disk(tmp_path, name, restart_wait=60.0)) for name in "ab"]
    assert await asyncio.gather(*map(its_end, both)) == [last] * 2
    assert time.monotonic() - began < 30.0


HAS, LACKS = LAST, STOPPED


@pytest.mark.parametrize(
    ("others", "through"),
    [
        ({"b": (HAS, "here"), "c": (HAS, "here")}, True),
        ({"b": (HAS, "left"), "c": (HAS, "dead")}, True),
        ({"b": (LACKS, "left"), "c": (HAS, "here")}, True),  # it has taken the end since it last told, or has given up
        ({"b": (HAS, "here"), "c": (LACKS, "here")}, False),
        ({"b": (HAS, "here"), "c": (HAS, "here"), "newcomer": (LACKS, "here")}, False),
        ({"b": (HAS, "here"), "c": (HAS, "here"), "newcomer": (LACKS, "dead")}, True),
        ({"b": (HAS, "here"), "c": (LACKS, "dead")}, False),  # it may come back
        ({"b": (HAS, "here")}, False),
    ],
)
@awaited
async def test_who_has_the_last_state_waits_for_those_that_lack_it(
    others: dict[str, tuple[ModelVersion, str]], *, through: bool
) -> None:
    """As many as the last round had, and whoever else is here; but for `wait_s` at most."""
    members = {
        peer: SimpleNamespace(
            left=1 if fate == "left" else None, live=fate == "here", summary=SimpleNamespace(model=model)
        )
        for peer, (model, fate) in others.items()
    }
    replica = replica_at(HAS, finished=True)
    replica.roster.peers = members
    began = time.monotonic()
    await beginning.until_the_others_have_it(replica, "abc", 0.4, lambda text: None)
    assert (time.monotonic() - began < 0.4) == through


# -- where an end means nothing


@awaited
async def test_a_record_does_not_end_a_run_that_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """A stranger's record, signed for this very founding, keeps no newcomer from training where others train, and
    nobody that trains listens to it."""
    network = MemoryNetwork()
    a, b = MemoryPeer(network, "a", {**QUICK, "stop_after_epochs": 1000}), MemoryPeer(network, "b")
    await a.enter(theta=1.0)
    stranger, founding = network.join("stranger", Inbox()), founding_in(network)
    false = signed_end(ModelVersion(5, 10**6, 10**6, "d" * 32), founding=founding, fragments=1)
    await ending.store(stranger, founding, false)

    async def train() -> None:
        while True:
            await a.exchange(1.0)
            await asyncio.sleep(0.02)

    training = asyncio.create_task(train())
    await b.enter()
    assert b.memory.finished == 0
    training.cancel()
    await asyncio.wait({training})
    await stop(b, a)
    assert caplog.text.count("because another peer still trains in it") == 1


@awaited
async def test_a_newer_generation_is_bound_by_no_older_end(tmp_path: Path) -> None:
    """Who sets the run back from an older checkpoint trains, whatever generation a stranger's record names: it is the
    way out. So do those that come to it or to its checkpoints."""
    network = MemoryNetwork()
    await to_the_end(tmp_path, network=network)
    stranger, founding = network.join("stranger", Inbox()), founding_in(network)
    await ending.store(stranger, founding, signed_end(dataclasses.replace(LAST, generation=9), founding=founding))
    for name in "ab":
        step_back(tmp_path, name)
    a = MemoryPeer(network, "a", **disk(tmp_path, "a", from_checkpoint=tmp_path / "a", new_generation=True))
    b = MemoryPeer(network, "b", **disk(tmp_path, "b"))
    await a.enter()
    await b.enter()
    assert [p.memory.epoch for p in (a, b)] == [0, 0]
    for _ in range(2):
        await exchange(a, b)
    await stop(a, b)
    again = MemoryPeer(network, "a", **disk(tmp_path, "a", restart_wait=0.2))
    await again.enter()
    assert again.memory.finished == 0


@awaited
async def test_a_run_goes_on_with_a_greater_stop(tmp_path: Path) -> None:
    """Once its record is gone from the DHT, a run that is started with a greater `stop_after_epochs` has not ended,
    also for those that don't ask for it and have an older checkpoint."""
    await to_the_end(tmp_path)
    step_back(tmp_path, "b")
    network = MemoryNetwork()
    a = MemoryPeer(network, "a", {"stop_after_epochs": STOP + 2}, **disk(tmp_path, "a", restart_wait=60.0))
    b = MemoryPeer(network, "b", **disk(tmp_path, "b", restart_wait=60.0))
    entering = asyncio.create_task(a.enter())
    await asyncio.sleep(0.3)
    await b.enter()
    await entering
    await until(lambda: [p.memory.epoch for p in (a, b)] == [STOP, STOP])
    await exchange(a, b)


# -- records


@pytest.mark.parametrize(
    "bad",
    [
        signed_end(dataclasses.replace(LAST, epochs=2 * STOP - 1)),  # no end by the run's rules
        dataclasses.replace(signed_end(LAST), proof="forged"),
        dataclasses.replace(signed_end(LAST), signer="founder"),
        dataclasses.replace(signed_end(LAST), model=dataclasses.replace(LAST, digest="e" * 32)),
        signed_end(LAST, founding=dataclasses.replace(FOUNDING, time=2.0)),
        signed_end(LAST, founding=dataclasses.replace(FOUNDING, run_id="other")),
        dataclasses.replace(signed_end(LAST, founding=dataclasses.replace(FOUNDING, time=2.0)), founded=1.0),
        dataclasses.replace(signed_end(LAST), fragments=1),
        signed_end(dataclasses.replace(LAST, samples=2**63)),
        signed_end(dataclasses.replace(LAST, generation=-1)),
    ],
)
@awaited
async def test_what_is_no_end_of_this_run_is_left_out(bad: End) -> None:
    """Beside it the true one is found."""
    transport = MemoryNetwork().join("x", Inbox())
    await ending.store(transport, FOUNDING, bad)
    await transport.store("r/end", "0" * 32, board.pack(signed_end(LAST)), 100.0, owned=False)  # not its name
    assert await ending.read(transport, FOUNDING, RULES) == []
    good = signed_end(LAST, "a")
    await ending.store(transport, FOUNDING, good)
    assert await ending.read(transport, FOUNDING, RULES) == [good]


@awaited
async def test_no_more_signatures_are_checked_than_a_look_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody may leave records; of those that are ends some are tried, and each time others."""
    transport, tried = MemoryNetwork().join("x", Inbox()), list[str]()
    for number in range(2 * board.TRIED_MAX):
        early = signed_end(ModelVersion(9, number, 2 * STOP - 1, "d" * 32))
        await ending.store(transport, FOUNDING, early)
    await ending.store(transport, FOUNDING, good := signed_end(LAST))
    assert await ending.read(transport, FOUNDING, RULES) == [good]
    for number in range(3 * board.TRIED_MAX):
        forged = dataclasses.replace(signed_end(dataclasses.replace(LAST, samples=100 + number)), proof="forged")
        await ending.store(transport, FOUNDING, forged)
    signed_by = transport.signed_by
    monkeypatch.setattr(transport, "signed_by", lambda *a: tried.append(a[0]) or signed_by(*a))
    assert await ending.read(transport, FOUNDING, RULES) in ([], [good])
    assert len(tried) == board.TRIED_MAX


@pytest.mark.parametrize(
    ("mine", "theirs", "binds"),
    [
        (ModelVersion(0, 4, 2 * STOP, "x"), None, False),  # another last state than what a record names
        (ModelVersion(0, 4, 2, "x"), None, True),
        (ModelVersion(), None, True),
        (ModelVersion(0, 4, 2, "x"), LAST, True),  # it holds what is waited for
        (ModelVersion(0, 4, 2, "x"), ModelVersion(0, 99, 2 * STOP, "y"), True),  # so it does, of a greater end
        (ModelVersion(0, 99, 2, "x"), None, False),  # would win against the end
        (ModelVersion(1, 0, 0, "x"), None, False),
        (ModelVersion(0, 4, 2, "x"), ModelVersion(1, 0, 0, "y"), False),
    ],
)
@awaited
async def test_an_end_binds_a_lesser_state(mine: ModelVersion, theirs: ModelVersion | None, *, binds: bool) -> None:
    """And nobody that holds as much, or has a peer beside it that holds more and has not ended."""
    transport = MemoryNetwork().join("x", Inbox())
    await ending.store(transport, FOUNDING, signed_end(LAST))
    replica = replica_at(mine, {} if theirs is None else {"y": theirs}, finished=mine.epochs == 2 * STOP)
    assert await ending_of(transport, replica).look() == binds


@pytest.mark.parametrize(
    ("group", "signers", "binds"),
    [
        ("xab", ("mallory",), False),
        ("xab", ("mallory", "eve", "carol"), False),
        ("xab", ("a",), True),
        ("xabcd", ("a", "mallory"), False),
        ("xabcd", ("a", "b"), True),
        ("xab", ("founder",), True),
        ("xab", ("x",), True),  # it has held that state itself
        ("x", ("a",), False),
        ("", ("mallory",), True),  # without a checkpoint it can't go on by itself
    ],
)
@awaited
async def test_an_end_that_too_few_of_the_last_round_have_signed_is_a_rumour(
    group: str, signers: tuple[str, ...], *, binds: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It does not keep a stopped run from going on, however many strangers tell it; half of the other peers of the last
    round, or the founder, do."""
    transport = MemoryNetwork().join("x", Inbox())
    for signer in signers:
        await ending.store(transport, FOUNDING, signed_end(LAST, signer))
    made = ending_of(transport, replica_at(STOPPED), group=group)
    assert [await made.look() for _ in range(3)] == [binds] * 3
    assert caplog.text.count("a rumour says that the run has ended at epoch 3") == (not binds)


@awaited
async def test_a_state_may_take_long_while_its_slices_come(caplog: pytest.LogCaptureFixture) -> None:
    """A large state on a slow link takes longer than `wait_timeout`, which is for each slice. Long before it gives up,
    the peer says once what it is slow against, and what helps."""
    fetching = SimpleNamespace(grew_at=0.0, rounds_since=7)
    roster = SimpleNamespace(alive=lambda: ["y"], holds_state=lambda peer: True)
    replica: Any = SimpleNamespace(has_state=False, roster=roster, fetching=fetching)
    transport = SimpleNamespace(traffic=SimpleNamespace(bytes_received=26_000_000))
    common = SimpleNamespace(replica=replica, local=SimpleNamespace(wait_timeout=300.0), transport=transport)

    async def gives_up(*_: object, **__: object) -> None:
        raise GaveUpWaiting("nothing came")

    async def goes_on() -> bool:
        return False

    newcomer: Any = SimpleNamespace(_common=common, _patience_s=9.0, _find_holders=gives_up)
    made: Any = SimpleNamespace(look=goes_on)
    with by_hand() as clock:
        fetching.grew_at = clock.now
        waiting = asyncio.create_task(beginning.Beginning.until_it_has_a_state(newcomer, made, lambda text: None))
        for _ in range(10):
            await clock.passes(200.0)
            assert not waiting.done()
            fetching.grew_at = clock.now
        assert 300.0 <= await clock.over(waiting, step_s=1.0) < 310.0
    (warning,) = caplog.messages
    assert re.search(r"come for \d+ s\. In \d+ s this link has brought 26\.0 MB, and 7 rounds .*--sync-every", warning)
    with pytest.raises(GaveUpWaiting):
        await waiting


@awaited
async def test_when_a_peer_with_the_state_is_back_nobody_says_that_there_is_none() -> None:
    """After a cut the fetch goes on; a user who is told to found the run anew might do so."""
    told, there = list[str](), list[str]()
    roster = SimpleNamespace(alive=lambda: there, holds_state=lambda peer: True)
    replica: Any = SimpleNamespace(
        has_state=False, roster=roster, fetching=SimpleNamespace(grew_at=0.0, rounds_since=0)
    )
    common = SimpleNamespace(replica=replica, local=SimpleNamespace(wait_timeout=300.0))

    async def finds_none(ending: object, tell: Callable[[str], None], *, late: bool) -> None:
        tell("no peer holds its state now")

    async def goes_on() -> bool:
        return False

    newcomer: Any = SimpleNamespace(_common=common, _patience_s=9.0, _find_holders=finds_none)
    made: Any = SimpleNamespace(look=goes_on)
    with by_hand() as clock:
        waiting = asyncio.create_task(beginning.Beginning.until_it_has_a_state(newcomer, made, told.append))
        for _ in range(12):
            await clock.passes(1.0)
        assert told[-1] == "no peer holds its state now"
        there.append("y")
        await clock.passes(3.0)
        waiting.cancel()
    assert told[-1] == ""


@awaited
async def test_a_dht_that_fails_leaves_the_end_that_is_known() -> None:
    """Storing is tried again."""
    transport, calls = without_a_dht("x", Unreachable("nobody answers"))
    replica = replica_at(STOPPED)
    made = ending_of(transport, replica)
    made.known = signed_end(LAST)
    assert await made.look()
    task, before = asyncio.create_task(made.keep()), len(calls)
    await asyncio.wait({task}, timeout=0.05)
    assert len(calls) > before
    assert not task.done()
    task.cancel()
    replica.finished, before = True, len(calls)
    await made.leave(1.0)
    assert len(calls) > before
