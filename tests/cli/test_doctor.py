"""The checks of `doctor`, each alone: what they find, and what they say mends it."""

from __future__ import annotations

import asyncio
import errno
import json
import re
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2p_diloco.cli.doctor import examination, machine, network
from p2p_diloco.cli.doctor.examination import examine
from p2p_diloco.cli.doctor.report import Found, Report, Seen, Visit
from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.errors import ConfigError
from p2p_diloco.net.interface import Unreachable
from p2p_diloco.net.reach import DialBack
from p2p_diloco.node.status import PeerStatus

ID = "12D3KooWGrk7pQsQ8dDR8yu8vUuL1tCiBGHBvCVbx8fyR3zdYpuv"
FAR = f"/ip4/9.9.9.9/tcp/31337/p2p/{ID}"
FAR_TOO = f"/ip4/8.8.8.8/tcp/31337/p2p/{ID}"
NEAR = f"/ip4/127.0.0.1/tcp/31337/p2p/{ID}"


def the(found: Iterable[Found]) -> Found:
    """The only finding."""
    (one,) = found
    return one


def verdicts(found: Iterable[Found]) -> list[str]:
    return [each.verdict for each in found]


ANY = Seen(PeerConfig())
# -- the report


REPORT = Report.of(
    [
        ("p2pd", Found("ok", "/a/p2pd runs")),
        ("NAT", Found("warn", "behind a NAT", "forward [port] 1")),
        ("clock", Found("bad", "a minute late", "set it")),
    ],
    [
        Visit(f"/ip4/9.9.9.9/tcp/1/p2p/{ID}", None, 0.0123, rate=1_500_000.0, name="bob", way="direct"),
        Visit("/dns4/a/tcp/1/p2p/Qm", name="alice"),
    ],
    1.23,
)


def test_a_report_is_a_table_and_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """What must be mended comes first, and makes the exit code 1. The page fits on 80 columns; text in brackets is
    shown as it is."""
    assert REPORT.exit_code == 1
    assert replace(REPORT, findings=REPORT.findings[1:]).exit_code == 0
    text = REPORT.text()
    lines = text.splitlines()
    assert lines[0] == "p2p-diloco doctor: 1 thing must be mended, 1 warning (1.2 s)"
    assert [line.split()[0] for line in lines[2:7]] == ["bad", "mend:", "warn", "mend:", "ok"]
    assert "mend: forward [port] 1" in text
    assert re.search(r"alice.*/dns4/a/tcp/1 +- +- +-\nbob +/ip4/9.9.9.9/tcp/1 +12ms +1.5MB/s +direct", text)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    long = replace(REPORT, findings=(("clock", Found("bad", "late " * 50, "set it " * 30)),))
    assert max(map(len, re.sub(r"\x1b\[[\d;]*m", "", long.text()).splitlines())) <= 80
    assert "all is well" in Report((), (), 1.0).text()
    told = json.loads(REPORT.to_json())
    assert (told["schema_version"], told["well"], told["took_s"]) == (1, False, 1.23)
    assert told["findings"][0] == {"name": "clock", "verdict": "bad", "text": "a minute late", "mend": "set it"}
    assert told["links"][1] == {
        "peer_id": ID, "name": "bob", "address": "/ip4/9.9.9.9/tcp/1", "rtt_s": 0.0123, "rate": 1_500_000.0,
        "way": "direct",
    }  # fmt: skip


# -- programs


def test_versions_that_do_not_fit_are_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing package and one of another version than the pinned one name the command that installs it."""
    found = the(machine.versions(ANY))
    assert (found.verdict, "hivemind 1.1.12" in found.text) == ("ok", True)
    installed: dict[str, str | None] = {"torch": "2.9", "hivemind": "1.1.10"}
    monkeypatch.setattr(machine, "version_of", installed.get)
    assert the(machine.versions(ANY)).mend == "pip install hivemind==1.1.12"
    installed["torch"] = None
    found = the(machine.versions(ANY))
    assert (found.verdict, found.mend, "torch is missing" in found.text) == ("bad", "pip install p2p-diloco", True)


def test_an_invitation_that_has_expired_is_bad(tmp_path: Path) -> None:
    """The others would turn this peer away. The founder needs none, because it has the key."""
    from p2p_diloco.net.certificates import RunKey
    from p2p_diloco.net.invitation import Invitation

    key, file = RunKey.create(), tmp_path / "r.invite"
    for life_s, verdict in ((9e4, "ok"), (-1.0, "bad")):
        grant, seed = key.grant("aggregator", "ann", time.time() + life_s)
        file.write_text(Invitation("r", (NEAR,), grant, seed, key.secret).pack())
        found = the(machine.invitation(Seen(PeerConfig(invite=str(file)))))
        assert (found.verdict, "of ann" in found.text) == (verdict, True)
    key.save(tmp_path / "r.key")
    assert verdicts(machine.invitation(Seen(PeerConfig(invite=str(file))))) == ["ok"]
    assert verdicts(machine.invitation(ANY)) == []


def test_p2pd_that_does_not_run_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing file, one that may not be run, one for another processor, one that fails, and no place for its sockets
    each have their mend."""
    assert verdicts(machine.p2pd(ANY)) == ["ok"]
    with monkeypatch.context() as without:
        without.setattr(machine, "FOLDER", tmp_path / "absent")
        _, found = machine.p2pd(ANY)
    assert (found.verdict, "--tmpfs /tmp" in found.mend) == ("bad", True)

    def mend(path: Path | None) -> str:
        monkeypatch.setattr(machine, "p2pd_path", lambda: path)
        return the(machine.p2pd(ANY)).mend

    assert "pip install hivemind" in mend(None)
    file = tmp_path / "p2pd"
    assert "--force-reinstall hivemind" in mend(file)
    file.write_bytes(b"\x00garbage")
    file.chmod(0o644)
    assert f"chmod +x {file}" in mend(file)
    file.chmod(0o755)
    assert "for this processor" in mend(file)
    file.write_text("#!/bin/sh\necho no such library >&2; exit 1\n")
    found = the(machine.p2pd(ANY))
    assert (found.verdict, "no such library" in found.text) == ("bad", True)


# -- memory and disk


def of_a_model(parameters: int | None = None, **settings: Any) -> Seen:
    return Seen(PeerConfig(**settings), parameters=parameters)


def test_a_model_that_does_not_fit_into_memory_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 bytes for each of 10⁹ parameters and 0.2 GB must be free; without a size only the node's memory must be. What
    a container's limit leaves counts."""
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert machine.free_memory(tmp_path) == 600_000
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.free_memory(tmp_path) > 600_000
    for parameters, free, verdict in (
        (10**9, 20_200_000_000, "ok"), (10**9, 20_199_999_999, "bad"), (None, 10**9, "ok"), (None, 10**8, "bad"),
    ):  # fmt: skip
        monkeypatch.setattr(machine, "free_memory", lambda free=free: free)
        found = the(machine.memory(of_a_model(parameters)))
        assert (found.verdict, "20.2 GB needed" in found.text) == (verdict, parameters is not None)


def test_room_for_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder need not exist yet, and is not made. Too little room, a full disk and a forbidden folder are told."""
    folder = tmp_path / "new" / "deep"
    kept: dict[str, Any] = {"checkpoint_dir": folder, "keep": 2}
    assert the(machine.disk(of_a_model())).verdict == "ok"
    assert the(machine.disk(of_a_model(1000, **kept))).verdict == "ok"
    assert not folder.parent.exists()
    found = the(machine.disk(of_a_model(10**15, **kept)))
    assert (found.verdict, "48,000" in found.text or "TB needed" in found.text) == ("bad", True)
    for code, text in ((errno.ENOSPC, "the disk is full"), (errno.EACCES, "can't be written: permission denied")):

        def refuse(folder: Path, code: int = code) -> None:
            raise OSError(code, {errno.EACCES: "Permission denied"}.get(code, "No space left on device"))

        monkeypatch.setattr(machine, "_try_to_write", refuse)
        found = the(machine.disk(of_a_model(**kept)))
        assert (found.verdict, text in found.text, "--checkpoint-dir" in found.mend) == ("bad", True, True)


# -- ports


@pytest.fixture
def taken() -> Iterator[int]:
    """A port of loopback that is in use."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


def test_ports_that_can_not_be_used_are_told(taken: int) -> None:
    """The setting, the address and the command that shows the other program; the free address is still used. A
    forwarded port needs a fixed port to listen on; a local address is of no use to peers on the internet."""

    def wrong(**settings: Any) -> list[Found]:
        return [found for found in machine.listening(PeerConfig(**settings))[1] if found.verdict != "ok"]

    addresses = (f"/ip4/127.0.0.1/tcp/{taken}", "/ip4/127.0.0.1/tcp/0")
    listen, found = machine.listening(PeerConfig(host_maddrs=addresses))
    assert (listen, verdicts(found)) == (addresses[1:], ["bad", "ok"])
    assert found[0].text == f"--host-maddrs {addresses[0]} is in use"
    assert f"sport = :{taken}" in found[0].mend
    used = the(wrong(host_maddrs=addresses[1:], direct_port=taken))
    assert used.text == f"--direct-port /ip4/127.0.0.1/tcp/{taken} is in use"
    same = the(wrong(host_maddrs=("/ip4/127.0.0.1/tcp/1234",), direct_port=1234))
    assert same.mend == "--direct-port 1235"
    forwarded = the(wrong(initial_peers=(FAR,), announce_maddrs=("/ip4/8.8.8.8/tcp/4001",)))
    assert forwarded.mend == "--host-maddrs /ip4/0.0.0.0/tcp/4001"
    local = {"initial_peers": (FAR,), "announce_maddrs": ("/ip4/10.0.0.2/tcp/4001",), "host_maddrs": addresses[:1]}
    assert any("local network" in found.text for found in wrong(**local))
    assert machine.listening(PeerConfig(client_mode=True))[0] == ()


# -- initial peers


def test_every_reason_has_a_mend_of_its_own() -> None:
    """Every reason for which an initial peer isn't reached, of sockets and of libp2p, leads to a command or a place."""
    from p2p_diloco.net.reasons import _MEANINGS

    vague = {
        "it isn't in this run, or speaks another version",
        "couldn't be dialled a moment ago",
        "its address isn't known",
    }
    for why in (*_MEANINGS.values(), "timed out after 5 s: a firewall", "another peer answers there: its id is Qm1"):
        assert (network.mend_of(FAR, why) == network.ANY_MEND) == (why in vague), why
        assert "{" not in network.mend_of(FAR, why)
    assert "--host 0.0.0.0 --port 31337" in network.mend_of(FAR, "connection refused: nothing listens there")
    assert "bootstrap --port 31337" in network.mend_of(NEAR, "connection refused: nothing listens there")
    assert "/ip4/9.9.9.9/tcp/31337/p2p/Qm1," in network.mend_of(FAR, "another peer answers there: its id is Qm1")


def test_one_initial_peer_that_answers_is_enough() -> None:
    """The others are warnings then, whether a socket or libp2p did not reach them; if none answers, all are bad.
    Without any, nothing outside is checked, which is said as a warning."""
    peer, why = PeerConfig(initial_peers=(FAR, NEAR)), "connection refused: nothing listens there"
    gone, here = {FAR: why}, {NEAR: None}
    assert verdicts(network.initial_peer(Seen(peer, answers=gone | here))) == ["warn"]
    assert verdicts(network.initial_peer(Seen(peer, answers=gone | here, visits=[Visit(NEAR)]))) == ["ok", "warn"]
    assert verdicts(network.initial_peer(Seen(peer, answers=gone | here, visits=[Visit(NEAR, why)]))) == ["bad"] * 2
    report = asyncio.run(examine(RunConfig(), PeerConfig(host_maddrs=("/ip4/127.0.0.1/tcp/0",))))
    assert [name for name, found in report.findings if found.verdict != "ok"] == ["initial peer"]
    assert (report.exit_code, report.links) == (0, ())


# -- visits


class Answers:
    """A daemon and its peers: `passes` is the largest padding that is answered."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, passes: int, ahead_s: float = 0.0, why: str | None = None
    ) -> None:
        from p2p_diloco.net import probing

        self.passes, self.ahead_s, self.why = passes, ahead_s, why
        monkeypatch.setattr(probing, "ask", self.ask)

    async def greet(self, address: str) -> str | None:
        return self.why

    async def ask(self, daemon: object, peer: str, *, timeout_s: float, padding_bytes: int = 0) -> object:
        from p2p_diloco.net.probing import Answer

        if padding_bytes > self.passes:
            raise Unreachable("timed out")
        return Answer(0.02 + padding_bytes / 1e7, self.ahead_s)

    def visited(self) -> Visit:
        async def go() -> Visit:
            return await examination.visit(self, FAR, asyncio.Lock())  # type: ignore[arg-type]

        return asyncio.run(go())


def test_large_messages_that_stall_are_told_from_a_slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """If not even 16 KiB pass, packets are lost by size; if these pass, the link is slow. Both say what to do."""
    stalls, slow = Answers(monkeypatch, 100).visited(), Answers(monkeypatch, network.MIDDLE_BYTES).visited()
    well = Answers(monkeypatch, examination.HUGE_BYTES).visited()
    assert (stalls.trouble, slow.trouble) == ("stalls", "slow")
    for visits, verdict in (([stalls], "bad"), ([stalls, well], "warn"), ([slow], "warn"), ([well], "ok")):
        found = the(network.transfer(Seen(PeerConfig(), visits=visits)))
        assert (found.verdict, "mtu 1280" in found.mend) == (verdict, stalls in visits)


def test_what_is_no_peer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that libp2p can't dial has its reason; one that doesn't know the DHT's questions is no initial peer."""
    assert Answers(monkeypatch, 0, why="connection refused").visited().unreached == "connection refused"
    seen = Answers(monkeypatch, -1).visited()
    assert seen.unreached is not None
    assert "not Hivemind's DHT" in seen.unreached
    assert network.mend_of(FAR, seen.unreached) != network.ANY_MEND


@pytest.mark.parametrize(("ahead_s", "verdict"), [(0.1, "ok"), (-2.0, "warn"), (60.0, "bad"), (-60.0, "bad")])
def test_a_wrong_clock_is_told(ahead_s: float, verdict: str) -> None:
    """The nearest clock counts, as it does when a peer joins; the sentence names the side and the command."""
    visits = [Visit(FAR, clock_ahead_s=ahead_s), Visit(NEAR, clock_ahead_s=100.0), Visit(FAR_TOO)]
    found = the(network.clock(Seen(PeerConfig(), visits=visits)))
    assert (found.verdict, "behind" in found.text) == (verdict, ahead_s > 0)
    assert verdict == "ok" or "timedatectl" in found.mend


# -- reachability


def seen_by(*answers: dict[str, DialBack], own: str = "192.168.1.7", at: str = "0.0.0.0", **settings: Any) -> Seen:
    """What was seen by a peer that listens at port 4001, of which the initial peers told this."""
    peer = PeerConfig(initial_peers=(FAR, FAR_TOO), **settings)
    listen = () if peer.client_mode else (f"/ip4/{at}/tcp/4001",)
    dialled_back = {peer_id: answer for each in answers for peer_id, answer in each.items()}
    visits = [Visit(FAR), Visit(FAR_TOO)]
    return Seen(peer, listen=listen, visits=visits, own=frozenset({own, "127.0.0.1"}), dialled_back=dialled_back)


def dialled(at: str, *reached: tuple[str, str | None], seen: str = "/ip4/80.0.0.1/tcp/5") -> dict[str, DialBack]:
    return {at: DialBack(seen, {f"{address}/p2p/me": why for address, why in reached})}


def reach(seen: Seen) -> tuple[str, str, str]:
    found = the(network.reachable(seen))
    return found.verdict, found.text, found.mend


LOCAL = ("/ip4/192.168.1.7/tcp/4001", "timed out")


def test_a_nat_names_the_forward_and_the_flags() -> None:
    """Both addresses are known from an initial peer's answer, so the flags can be pasted."""
    verdict, text, mend = reach(seen_by(dialled(FAR, LOCAL)))
    assert verdict == "warn", "it trains all the same"
    assert text.startswith("private: no other peer can dial this one: /ip4/192.168.1.7/tcp/4001 (timed out)")
    assert "behind a NAT: others see this machine at 80.0.0.1. " in text
    assert "forward TCP port 4001 of the router to 192.168.1.7:4001" in mend
    assert "--host-maddrs /ip4/0.0.0.0/tcp/4001 --announce-maddrs /ip4/80.0.0.1/tcp/4001" in mend
    assert "through relays" in mend


def test_without_a_nat_the_firewall_is_named() -> None:
    """Others see this machine's own address, so a firewall keeps them away."""
    _, text, mend = reach(seen_by(dialled(FAR, ("/ip4/80.0.0.1/tcp/4001", "timed out")), own="80.0.0.1"))
    assert "NAT" not in text
    assert "open TCP port 4001" in mend


def test_a_wrong_announced_address_names_the_right_one() -> None:
    """Others see this machine elsewhere than it announces. One peer that gets through is enough, also at a forwarded
    port that isn't announced."""
    wrong, right = "/ip4/80.0.0.2/tcp/4001", "/ip4/80.0.0.1/tcp/4001"
    verdict, text, mend = reach(seen_by(dialled(FAR, (wrong, "timed out")), announce_maddrs=(wrong,)))
    assert (verdict, wrong in text, f"--announce-maddrs {right}" in mend) == ("bad", True, True)
    both = seen_by(dialled(FAR, (wrong, "timed out"), (right, None)), announce_maddrs=(wrong, right))
    verdict, text, mend = reach(both)
    assert (verdict, f"but not at {wrong}" in text) == ("warn", True)
    assert mend.endswith(f"--announce-maddrs {right}")
    assert reach(seen_by(dialled(FAR, LOCAL, (right, None)), announce_maddrs=(right,)))[0] == "ok"
    verdict, text, _ = reach(seen_by(dialled(FAR, LOCAL, (right, None))))
    assert (verdict, right in text) == ("ok", True)


def test_without_a_dial_back_it_says_what_it_cannot_tell() -> None:
    """Initial peers of an older version leave the question open."""
    verdict, text, mend = reach(seen_by())
    assert (verdict, text.startswith("can't tell"), "nc -vz ADDRESS 4001" in mend) == ("warn", True, True)
    verdict, text, mend = reach(seen_by(announce_maddrs=("/ip4/80.0.0.2/tcp/4001",)))
    assert (verdict, text.startswith("can't tell"), "nc -vz 80.0.0.2 4001" in mend) == ("warn", True, True)


def test_a_peer_on_loopback_is_well_only_among_its_like() -> None:
    """A peer that listens on loopback is of no use to a swarm on other machines; in client mode nothing is needed."""
    seen = seen_by(at="127.0.0.1")
    assert reach(seen)[::2] == ("bad", "--host-maddrs /ip4/0.0.0.0/tcp/4001")
    assert reach(replace(seen, visits=[Visit(NEAR)]))[0] == "ok"
    assert reach(seen_by(client_mode=True))[0] == "ok"
    assert [*network.reachable(replace(seen_by(), visits=[]))] == []


# -- the run's peers


ALICE = Visit("/ip4/9.9.9.9/tcp/1/p2p/Qm1", None, 0.1, rate=1e6, name="alice", way="direct")
BOB = Visit("/ip4/10.0.0.9/tcp/1/p2p/Qm2", "timed out", name="bob")


def run_of(*others: Visit, **seen: Any) -> Seen:
    return Seen(PeerConfig(direct=seen.pop("direct", True)), others=list(others), **seen)


def test_peers_that_cannot_be_reached_are_named() -> None:
    """A warning with each name, place and reason. Private peers are named, and no fault."""
    assert [*network.peers(run_of())] == []
    well = the(network.peers(run_of(ALICE, left_out=3)))
    assert (well.verdict, well.text) == ("ok", "1 of 1 peers of the run answer; 3 more were not tried")
    found = the(network.peers(run_of(ALICE, BOB, private=["carol"])))
    assert (found.verdict, "bob at /ip4/10.0.0.9/tcp/1 (timed out)" in found.text) == ("warn", True)
    assert ("1 of 2 peers" in found.text, "carol" in found.text) == (True, True)
    many = the(network.peers(run_of(private=[f"p{number}" for number in range(20)])))
    assert (many.verdict, "p7, …" in many.text, "p8" in many.text) == ("ok", True, False)


def test_private_peers_are_not_dialled() -> None:
    """Because they exchange over connections that they dial, or through relays."""
    seen = run_of(direct=False)
    statuses = [PeerStatus(peer_id=name, name=name, reach="private") for name in ("carol", "dan")]
    asyncio.run(examination._visit_run(seen, cast(Any, None), cast(Any, None), statuses, asyncio.Lock()))
    assert (seen.others, seen.private) == ([], ["carol", "dan"])


def test_a_peer_is_looked_for_at_its_addresses_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loopback address is another machine's here; libp2p would take another one, and the table show this one."""
    asked: list[str] = []

    async def visit(daemon: object, address: str, lock: object) -> Visit:
        asked.append(address)
        return Visit(address, "timed out")

    monkeypatch.setattr(examination, "visit", visit)
    daemon = cast(Any, SimpleNamespace(introduce=lambda *_: None))
    for addresses in ((NEAR, FAR), (NEAR,)):
        status = PeerStatus(peer_id=ID, addresses=addresses)
        asyncio.run(examination._visit_peer(daemon, None, status, asyncio.Lock()))
    assert asked == [FAR, NEAR]


def test_ways_of_payloads_are_counted() -> None:
    """No direct connection at all is a warning with the flag, unless they are switched off."""
    other = replace(ALICE, way="libp2p")
    cases: Sequence[tuple[list[Visit], dict[str, bool], list[str]]] = (
        ([ALICE, other], {}, ["ok"]), ([other], {}, ["warn"]), ([other], {"direct": False}, ["ok"]), ([BOB], {}, []),
    )  # fmt: skip
    for others, settings, verdict in cases:
        assert verdicts(network.direct(run_of(*others, **settings))) == verdict


# -- all together


def test_checks_that_take_too_long_or_fail_hide_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was seen before a part was cut off or failed is in the report."""

    def fails(error: Exception) -> Any:
        def check(*_: object) -> list[Found]:
            raise error

        return check

    async def hangs(seen: Seen, **_: object) -> None:
        seen.ports = [Found("ok", "can listen")]
        await asyncio.sleep(60)

    monkeypatch.setattr(examination, "look_around", hangs)
    refused = ConfigError("can't be used", key="x", value="y", mend="choose z")
    monkeypatch.setattr(examination, "LOCAL", [fails(ZeroDivisionError("oh")), fails(refused)])
    report = asyncio.run(examine(RunConfig(), PeerConfig(), limit_s=0.2))
    told = {found.text: found.mend for _, found in report.findings}
    assert "can listen" in told
    assert told["x=y can't be used"] == "choose z"
    assert any("the look at the network was cut off" in text for text in told)
    assert any("ZeroDivisionError: oh" in text for text in told)


# -- env


def test_env_shows_versions_and_leaves_secrets_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our variables are shown, those whose names speak of secrets without their values, others not at all. Paths in the
    user's own folder begin with ~."""
    monkeypatch.setenv("P2P_DILOCO_CODEC", "int4")
    *home, folder, program = Path(sys.executable).parts
    monkeypatch.setenv("HOME", str(Path(*home)))
    text = "\n".join(machine.described())
    for name in ("p2p_diloco: ", "python: ", "torch: ", "hivemind: ", "p2pd: ", "system: ", "memory: ", "GPU: "):
        assert name in text
    assert "P2P_DILOCO_CODEC=int4" in text
    assert f"(~/{folder}/{program})" in text
    assert str(Path(*home)) not in text
    variables = {"P2P_DILOCO_API_KEY": "abc", "P2P_DILOCO_RUN_ID": "r", "AWS_SECRET": "x", "RANK": "1",
                 "P2P_DILOCO_OTLP_ENDPOINT": "http://me:abc@collector"}  # fmt: skip
    told = list(machine.variables(variables))
    left_out = ["P2P_DILOCO_API_KEY=(left out)", "P2P_DILOCO_OTLP_ENDPOINT=(left out)"]
    assert told == [*left_out, "P2P_DILOCO_RUN_ID=r", "RANK=1"]
