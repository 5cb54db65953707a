"""Finding a run, founding it, and not fitting into it: nodes over the in-memory swarm."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_diloco.errors import ConfigError, ConfigMismatch, GaveUpWaiting, ModelMismatch, Refused
from p2p_diloco.node import curves, records, run_record
from p2p_diloco.node.board import name_of
from p2p_diloco.node.inbox import Inbox
from p2p_diloco.node.joining import holders_of
from p2p_diloco.node.participation import LIVES_ON_S
from p2p_diloco.node.records import BOARD, look_around, publish, read_peers
from p2p_diloco.node.run_record import RunRecord
from p2p_diloco.remembered import met_through, remember
from tests.net.memory import MemoryNetwork, MemoryTransport
from tests.net.patience import awaited, until
from tests.net.swarm import STRANGER
from tests.node.conftest import QUICK, MemoryPeer, entered, stop, without_a_dht


@awaited
async def test_two_founders_become_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that found at once the record of the lowest name wins: one model is taken by both, settings included."""
    fetch = MemoryTransport.fetch

    async def slow_fetch(self: MemoryTransport, key: str) -> dict[str, tuple[bytes, float]]:
        found = await fetch(self, key)
        await asyncio.sleep(0.1)  # each has looked before the other publishes
        return found

    monkeypatch.setattr(MemoryTransport, "fetch", slow_fetch)
    monkeypatch.setattr("p2p_diloco.node.joining.FOUNDERS_MEET_S", 0.7)
    network = MemoryNetwork()
    peers = [MemoryPeer(network, name, {**QUICK, "outer_lr": rate}) for name, rate in (("a", 0.5), ("b", 0.25))]
    await asyncio.gather(peers[0].enter(theta=1.0), peers[1].enter(theta=2.0))
    records = {subkey: value for (subkey, _), (value, _) in network.records["r/config"].items()}
    assert len(records) == 2
    winner = RunRecord.unpack(records[min(records)])
    assert {peer.told_run["config"]["outer_lr"] for peer in peers} == {winner.config["outer_lr"]}
    expected = 1.0 if winner.founder == "a" else 2.0
    assert [peer.memory.theta[0].item() for peer in peers] == [expected] * 2


SOMEWHERE = "/ip4/127.0.0.1/tcp/9/p2p/QmTzQ1JRkWErjk39mryYw2WVaphAZNAREyMchXzYQ7c15n"


@pytest.mark.parametrize(
    ("config", "told"), [({}, {"found": True}), (QUICK, {"initial_peers": ()}), (QUICK | {"outer_lr": 0.5}, {})]
)
@awaited
async def test_a_peer_without_settings_waits_for_a_founder(config: dict[str, Any], told: dict[str, Any]) -> None:
    """A peer that joins through others and has no settings of the run founds nothing. It says so, and takes the
    settings of the peer that is told to found: by `found`, by having no initial peers, or by settings."""
    network = MemoryNetwork()
    waiting = MemoryPeer(network, "waiting", initial_peers=SOMEWHERE)
    entering = asyncio.create_task(waiting.enter(theta=1.0))
    await until(lambda: any("neither settings" in message.get("text", "") for message in waiting.said))
    assert "r/config" not in network.records
    founder = MemoryPeer(network, "founder", config, **{"initial_peers": SOMEWHERE, **told})
    await founder.enter(theta=2.0)
    await entering
    assert waiting.memory.theta[0].item() == 2.0


@awaited
async def test_a_peer_without_settings_waits_for_a_limited_time() -> None:
    """After `wait_timeout` it ends with the reason and the mend."""
    peer = MemoryPeer(MemoryNetwork(), "a", wait_timeout=0.3, initial_peers=SOMEWHERE)
    await peer.start()
    with pytest.raises(GaveUpWaiting, match=r"wait_timeout=0.3 is over: no peer has founded the run r.*--found"):
        await peer.hear("run")


@pytest.mark.parametrize(
    ("config", "sizes", "error", "sentence"),
    [
        ({"codec": "bf16"}, (4,), ConfigMismatch, "codec .the run's fp32 / yours bf16."),
        ({}, (5,), ModelMismatch, "p0: 4 in the run, 5 here"),
        ({}, (4, 2), ModelMismatch, "p1: not in the run, 2 here"),
    ],
)
@awaited
async def test_a_misfit_is_told_why(config: dict[str, Any], sizes: tuple[int, ...], error: Any, sentence: str) -> None:
    """Who explicitly asks for other settings, or brings another model, is refused with both sides shown."""
    network = MemoryNetwork()
    a, b = MemoryPeer(network, "a", QUICK), MemoryPeer(network, "b", config, sizes=sizes)
    await a.enter()
    await b.start()
    with pytest.raises(error, match=sentence):
        await b.hear("run")
    await b.stop()


@awaited
async def test_a_model_too_small_for_the_runs_fragments_is_another_model() -> None:
    """The settings are the run's, so it is no fault of theirs."""
    network = MemoryNetwork()
    a = MemoryPeer(network, "a", {**QUICK, "num_fragments": 2, "sync_every": 2}, sizes=(4, 4))
    b = MemoryPeer(network, "b", sizes=(1,))
    await a.enter()
    await b.start()
    with pytest.raises(ModelMismatch, match="the run has num_fragments=2, which is too many"):
        await b.hear("run")
    await b.stop()
    await a.exchange(1.0)


@awaited
async def test_only_a_founder_needs_finite_parameters() -> None:
    """A joiner's values are replaced by the run's."""
    network = MemoryNetwork()
    a, b, c = (MemoryPeer(network, name, QUICK) for name in "abc")
    for peer in (a, c):
        peer.setup = dataclasses.replace(peer.setup, not_finite="p0")
    await a.start()
    with pytest.raises(ConfigError, match="parameter=p0 has NaN or infinite values, and a founder's go to all peers"):
        await a.hear("run")
    assert "r/config" not in network.records
    await b.enter()
    await c.enter()


@awaited
async def test_code_that_a_run_names_is_run_only_if_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class of a package as the outer optimizer: a joiner that was not given its name imports nothing. One that was
    makes the same steps."""
    (tmp_path / "package_of_a_user.py").write_text("import torch\n\nclass Ours(torch.optim.Adam):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    network, ours = MemoryNetwork(), {"outer_optimizer": "package_of_a_user:Ours"}
    configs = {"a": {**QUICK, **ours}, "b": {}, "c": ours}
    a, b, c = (MemoryPeer(network, name, config) for name, config in configs.items())
    await a.enter()
    loaded = sys.modules.pop("package_of_a_user")
    await b.start()
    with pytest.raises(Refused, match="outer_optimizer=package_of_a_user:Ours is code that this peer was not told to"):
        await b.hear("run")
    assert "package_of_a_user" not in sys.modules
    sys.modules["package_of_a_user"] = loaded
    await c.enter()
    await asyncio.gather(a.exchange(1.0), c.exchange(3.0))
    assert a.memory.epoch == c.memory.epoch == 1


@pytest.mark.parametrize(("founders", "joiners", "warns"), [("f", "f", 0), ("f", "g", 1), ("", "g", 0), ("f", "", 0)])
@awaited
async def test_a_joiner_with_another_base_is_warned(
    founders: str, joiners: str, warns: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The founder's record has the fingerprint of its frozen values. Nothing is said if one of the two has none.
    Another learning rate is no ground for refusal: the run's is used."""
    network = MemoryNetwork()
    a, b = MemoryPeer(network, "a", QUICK), MemoryPeer(network, "b", {"outer_lr": 0.1})
    for peer, frozen in ((a, founders), (b, joiners)):
        peer.setup = dataclasses.replace(peer.setup, frozen=frozen)
        await peer.enter()
    assert b.told_run["config"]["outer_lr"] == 1.0
    await stop(a, b)
    assert sum("frozen parameters or buffers differ" in message for message in caplog.messages) == warns


@awaited
async def test_a_run_whose_state_nobody_holds_is_not_founded_anew(caplog: pytest.LogCaptureFixture) -> None:
    """If only the record is left, a later peer says what it waits for, even if it has the run's settings; then it ends
    with one sentence that names the mends. The same identity that has founded the run may do it again; so may one that
    is told to (`found`), whose model those take over that wait."""
    network = MemoryNetwork()
    for theta in (1.0, 2.0):
        first = MemoryPeer(network, "first", QUICK)
        await first.enter(theta=theta)
        assert first.memory.theta[0].item() == theta
        await first.exchange(1.0)
        await first.stop()
    later = MemoryPeer(network, "later", {"outer_lr": 1.0}, wait_timeout=6 * QUICK["heartbeat_timeout"])
    with pytest.raises(GaveUpWaiting, match=r"wait_timeout=3 is over: the run r has begun.*checkpoint.*--found.*--run"):
        await later.enter(theta=1.0)
    assert any("the run r has begun" in message.get("text", "") for message in later.said)
    a, b = MemoryPeer(network, "a"), MemoryPeer(network, "b", found=True)
    await asyncio.gather(a.enter(theta=1.0), b.enter(theta=2.0))
    assert [peer.memory.theta[0].item() for peer in (a, b)] == [2.0, 2.0]
    assert "founding it anew" in caplog.text


@pytest.mark.parametrize("record_is_there", [True, False])
@awaited
async def test_a_founder_that_has_met_others_founds_nothing_anew_unless_it_is_told_to(
    record_is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That it finds nobody doesn't show that they are gone. Its error names `found`, which founds the run."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    network = MemoryNetwork()
    founder = MemoryPeer(network, "founder", QUICK)
    await founder.enter()
    await founder.stop()
    remember("r", met_through((), "founder"), [f"/ip4/192.0.2.1/tcp/31337/p2p/{STRANGER}"])
    if not record_is_there:
        network.records.clear()
    again = MemoryPeer(network, "founder", QUICK, wait_timeout=4 * QUICK["heartbeat_timeout"])
    with pytest.raises(GaveUpWaiting, match=r"wait_timeout=2.* is over.*--found"):
        await again.enter(theta=1.0)
    await again.stop()
    told = MemoryPeer(network, "founder", QUICK, found=True)
    await told.enter(theta=2.0)
    assert told.memory.theta[0].item() == 2.0


@awaited
async def test_waiting_for_the_state_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody hands it over: an error after `wait_timeout` names who holds it."""
    monkeypatch.setattr(records, "PUBLISH_EVERY_S", 0.1)
    network = MemoryNetwork()
    await entered("a", network=network)
    network.cut("a", "b")
    eyes = network.join("eyes", Inbox())
    while not await holders_of(eyes, "r"):
        await asyncio.sleep(0.01)
    b = MemoryPeer(network, "b", wait_timeout=0.5 + 2 * QUICK["heartbeat_timeout"])
    with pytest.raises(GaveUpWaiting, match=r"these peers hold it: a \(/memory/a/p2p/a\)"):
        await b.enter()


@awaited
async def test_a_forged_record_is_left_out() -> None:
    """A record that isn't named by its content can't take over a run; garbage under the key harms nobody."""
    network = MemoryNetwork()
    forger = network.join("forger", Inbox())
    await entered("a", network=network)
    (real,) = [value for value, _ in network.records["r/config"].values()]
    forged = real.replace(b"fp32", b"bf16")
    await forger.store("r/config", "0" * 32, forged, 100.0, owned=False)
    await forger.store("r/config", name_of(b"\x80"), b"\x80", 100.0, owned=False)
    (b,) = await entered("b", {}, network)
    assert b.told_run["config"]["codec"] == "fp32"


EARLIER, LATER, MUCH_S = -1, 1, 2 * LIVES_ON_S


@pytest.mark.parametrize(
    ("life", "after_s", "each_s", "refused"),
    [(EARLIER, MUCH_S, 0.001, True), (EARLIER, MUCH_S, 0.0, False), (EARLIER, LIVES_ON_S / 2, 0.001, False),
     (LATER, MUCH_S, 0.001, False), (0, MUCH_S, 0.001, False)],
)  # fmt: skip
@awaited
async def test_the_second_process_with_an_identity_is_refused(
    monkeypatch: pytest.MonkeyPatch, life: int, after_s: float, each_s: float, refused: bool
) -> None:
    """Records of its own id that an earlier start writes, well after this one: a copied identity. What an earlier
    life has left behind, even if its clock was ahead, or a later one writes, is no reason."""
    monkeypatch.setattr(records, "LOOK_EVERY_S", 0.05)
    (peer,) = await entered("a")
    while (own := (await read_peers(peer.transport, "r")).get("a")) is None:  # its first record
        await asyncio.sleep(0.01)
    assert own.incarnation is not None
    record = dataclasses.replace(own, incarnation=own.incarnation + life, time=own.time + after_s, host="elsewhere")
    give_up_at = asyncio.get_running_loop().time() + (60.0 if refused else 0.5)
    while not peer.task.done() and asyncio.get_running_loop().time() < give_up_at:
        await peer.transport.store(BOARD.key("r", "a"), "a", record.pack(), 30.0)
        record = dataclasses.replace(record, time=record.time + each_s)
        await asyncio.sleep(0.02)
    ended = peer.task.done()
    await peer.stop()
    assert ended == refused
    if refused:
        with pytest.raises(Refused, match=r"identity_path.*in the run already, on the machine elsewhere"):
            peer.task.result()


@awaited
async def test_the_transport_waits_as_the_run_does() -> None:
    """Its deadlines are steps of the run's ladder as soon as a peer is in; what it allows others is as it was."""
    peer = MemoryPeer(MemoryNetwork(), "a", QUICK)
    before = peer.transport.limits
    await peer.enter()
    timeout_s = QUICK["heartbeat_timeout"]
    waits = {"connect_timeout_s": timeout_s / 2, "read_timeout_s": timeout_s, "write_timeout_s": timeout_s}
    assert peer.transport.limits == dataclasses.replace(before, **waits)


@pytest.mark.parametrize(
    ("limits", "mend"), [({"payload_bytes_max": 31}, "smaller"), ({"header_bytes_max": 64 * 3}, "larger")]
)
@awaited
async def test_slices_that_cant_be_sent_are_a_config_error(limits: dict[str, int], mend: str) -> None:
    """A cut whose states or whose list of slices no message carries is refused before anything is founded."""
    network = MemoryNetwork()
    peer = MemoryPeer(network, "a", {**QUICK, "slice_elements": 4}, sizes=(8,))
    peer.transport.limits = dataclasses.replace(peer.transport.limits, **limits)
    await peer.start()
    with pytest.raises(ConfigError, match=f"slice_elements=4 .*{mend}"):
        await peer.hear("run")
    assert "r/config" not in network.records


@awaited
async def test_a_dht_that_fails_ends_nothing() -> None:
    """Whoever publishes, looks around, keeps the record or a curve, goes on after anything that a transport raises."""
    broken, calls = without_a_dht("a", RuntimeError("what nobody thought of"))
    record: Any = SimpleNamespace(peer_id="a", time=0.0, pack=lambda: b"x")

    async def look() -> None:
        async for _ in look_around(broken, "r", lambda: 0):
            pass

    for loop in (
        publish(broken, "r", lambda: record, asyncio.Event()),
        look(),
        run_record.BOARD.keep(broken, "r", lambda: b"x", 15.0),
        curves.keep(broken, "r", lambda: curves.Point(1.0, 1.0, 1.0, 1.0, 2.0, None)),
    ):
        task, before = asyncio.create_task(loop), len(calls)
        await asyncio.wait({task}, timeout=0.05)
        assert len(calls) > before
        assert not task.done(), task.exception()
        task.cancel()
