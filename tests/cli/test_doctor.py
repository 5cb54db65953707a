"""The checks of `doctor`, each alone: what they find, and what they say mends it."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from p2p_diloco.cli import carry_out
from p2p_diloco.cli.doctor import env, examination, initial, machine, ports, programs, reachability, run_peers, swarm
from p2p_diloco.cli.doctor.examination import Notes, Wish, examine
from p2p_diloco.cli.doctor.reachability import Position
from p2p_diloco.cli.doctor.report import Finding, Link, Report
from p2p_diloco.cli.doctor.swarm import Visit
from p2p_diloco.cli.doctor.view import drawn, lines
from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.errors import ConfigError
from p2p_diloco.net import own_addresses
from p2p_diloco.net.interface import Unreachable
from p2p_diloco.net.reach import DialBack
from p2p_diloco.node.status import PeerStatus
from p2p_diloco.planning.memory import per_parameter

ID = "12D3KooWGrk7pQsQ8dDR8yu8vUuL1tCiBGHBvCVbx8fyR3zdYpuv"
FAR = f"/ip4/9.9.9.9/tcp/31337/p2p/{ID}"
FAR_TOO = f"/ip4/8.8.8.8/tcp/31337/p2p/{ID}"
NEAR = f"/ip4/127.0.0.1/tcp/31337/p2p/{ID}"


# -- the report


def report() -> Report:
    findings = [
        Finding("p2pd", "ok", "/a/p2pd runs"),
        Finding("NAT", "warn", "behind a NAT", "forward [port] 1"),
        Finding("clock", "bad", "a minute late", "set it"),
    ]
    links = [Link(ID, "bob", "/ip4/9.9.9.9/tcp/1", 0.0123, 1_500_000.0, "direct"), Link("Qm", "alice", "/dns4/a/tcp/1")]
    return Report.of(findings, links, 1.23)


def test_what_must_be_mended_comes_first() -> None:
    """Findings are sorted by verdict, links by name; only a bad finding makes the exit code 1."""
    assert [finding.verdict for finding in report().findings] == ["bad", "warn", "ok"]
    assert [link.name for link in report().links] == ["alice", "bob"]
    assert report().exit_code == 1
    assert replace(report(), findings=report().findings[1:]).exit_code == 0


def test_both_views_show_every_finding_with_its_mend() -> None:
    """The page fits on 80 columns; text in brackets is shown as it is."""
    console = Console(file=io.StringIO(), width=80, force_terminal=False)
    console.print(drawn(report()))
    assert isinstance(console.file, io.StringIO)
    page = console.file.getvalue()
    for view in (page, "\n".join(lines(report()))):
        for text in ("1 thing must be mended, 1 warning", "a minute late", "mend: set it", "mend: forward [port] 1"):
            assert text in view
        assert re.search("bob.*/ip4/9.9.9.9/tcp/1.*12ms.*1.5MB/s.*direct", view)
        assert re.search("alice.*/dns4/a/tcp/1.*-.*-.*-", view)
    assert max(map(len, page.splitlines())) <= 80
    assert "all is well" in lines(Report((), (), 1.0))[0]


def test_json_has_the_same() -> None:
    """Every field of findings and links is there, under the names that docs/cli.md lists."""
    told = json.loads(report().to_json())
    assert (told["schema_version"], told["well"], told["took_s"]) == (1, False, 1.23)
    assert told["findings"][0] == {"name": "clock", "verdict": "bad", "text": "a minute late", "mend": "set it"}
    assert told["links"][1] == {
        "peer_id": ID, "name": "bob", "address": "/ip4/9.9.9.9/tcp/1", "rtt_s": 0.0123, "rate": 1_500_000.0,
        "way": "direct",
    }  # fmt: skip


def test_a_finding_has_a_mend_exactly_if_something_is_wrong() -> None:
    """A check that names no mend for a bad finding is a fault of ours."""
    with pytest.raises(AssertionError):
        Finding("disk", "bad", "full")
    with pytest.raises(AssertionError):
        Finding("disk", "ok", "fine", "nothing to do")


# -- programs


def test_versions_that_do_not_fit_are_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing package and one of another version than the pinned one name the command that installs it."""
    found = programs.versions()
    assert found.verdict == "ok"
    assert "hivemind 1.1.12" in found.text
    installed: dict[str, str | None] = {"torch": "2.9", "hivemind": "1.1.10"}
    monkeypatch.setattr(programs, "version_of", installed.get)
    assert programs.versions().mend == "pip install hivemind==1.1.12"
    installed["torch"] = None
    found = programs.versions()
    assert (found.verdict, found.mend) == ("bad", "pip install p2p-diloco")
    assert "torch is missing" in found.text


def test_p2pd_without_a_place_for_its_sockets_is_bad(tmp_path: Path) -> None:
    assert programs.sockets(tmp_path) == []
    (found,) = programs.sockets(tmp_path / "absent")
    assert (found.name, found.verdict) == ("p2pd", "bad")
    assert "--tmpfs /tmp" in found.mend


def test_p2pd_that_does_not_run_is_bad(tmp_path: Path) -> None:
    """A missing file, one that may not be run, one for another processor, and one that fails each have their mend."""
    assert asyncio.run(programs.p2pd(programs.p2pd_path())).verdict == "ok"
    assert "pip install hivemind" in asyncio.run(programs.p2pd(None)).mend
    file = tmp_path / "p2pd"
    assert "--force-reinstall hivemind" in asyncio.run(programs.p2pd(file)).mend
    file.write_bytes(b"\x00garbage")
    file.chmod(0o644)
    assert f"chmod +x {file}" in asyncio.run(programs.p2pd(file)).mend
    file.chmod(0o755)
    assert "for this processor" in asyncio.run(programs.p2pd(file)).mend
    file.write_text("#!/bin/sh\necho no such library >&2; exit 1\n")
    found = asyncio.run(programs.p2pd(file))
    assert (found.verdict, "no such library" in found.text) == ("bad", True)


# -- memory and disk


@pytest.mark.parametrize(
    ("settings", "parameters", "each"),
    [
        ({}, 100_000_000, 12),
        ({}, 10_000_000, 14),
        ({"codec": "fp32"}, 100_000_000, 14),
        ({"codec": "int4"}, 100_000_000, 22),
        ({"overlap_steps": 5}, 100_000_000, 16),
        ({"mode": "async"}, 100_000_000, 16),
    ],
)
def test_memory_follows_the_settings(settings: dict[str, Any], parameters: int, each: int) -> None:
    """The figures of docs/operations.md: 12 bytes a parameter, and more for small models, overlap, few bits."""
    assert per_parameter(RunConfig(**settings), parameters) == each


def test_a_model_that_does_not_fit_into_memory_is_bad() -> None:
    """12 bytes for each of 10⁹ parameters and 0.2 GB must be free; without a size only the node's memory must be."""
    big = 1_000_000_000
    assert machine.memory(RunConfig(), big, 12_200_000_000).verdict == "ok"
    found = machine.memory(RunConfig(), big, 12_199_999_999)
    assert (found.verdict, "12.2 GB needed" in found.text) == ("bad", True)
    assert machine.memory(RunConfig(), None, 10**9).verdict == "ok"
    assert machine.memory(RunConfig(), None, 10**8).verdict == "bad"


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    """The memory that the container's limit leaves, not the host's; no limit changes nothing."""
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert machine.free_memory(tmp_path) == 600_000
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.free_memory(tmp_path) > 600_000


def test_room_for_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder need not exist yet, and is not made. Too little room, a full disk and a forbidden folder are told."""
    folder = tmp_path / "new" / "deep"
    peer = PeerConfig(checkpoint_dir=folder, keep=2)
    assert machine.disk(PeerConfig(), None).verdict == "ok"
    assert machine.disk(peer, 1000).verdict == "ok"
    assert not folder.parent.exists()
    found = machine.disk(peer, 10**15)
    assert (found.verdict, "48,000" in found.text or "TB needed" in found.text) == ("bad", True)
    for code, text in ((errno.ENOSPC, "the disk is full"), (errno.EACCES, "can't be written: permission denied")):

        def refuse(folder: Path, code: int = code) -> None:
            raise OSError(code, {errno.EACCES: "Permission denied"}.get(code, "No space left on device"))

        monkeypatch.setattr(machine, "_try_to_write", refuse)
        found = machine.disk(peer, None)
        assert (found.verdict, text in found.text) == ("bad", True)
        assert "--checkpoint-dir" in found.mend


# -- ports


@pytest.fixture
def taken() -> Iterator[int]:
    """A port of loopback that is in use."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


def test_a_port_in_use_is_bad(taken: int) -> None:
    """The setting, the address and the command that shows the other program; the free address is still used."""
    addresses = (f"/ip4/127.0.0.1/tcp/{taken}", "/ip4/127.0.0.1/tcp/0")
    found = ports.look(PeerConfig(host_maddrs=addresses))
    assert found.listen == addresses[1:]
    bad, ok = found.findings
    assert bad.text == f"--host-maddrs {addresses[0]} is in use"
    assert f"sport = :{taken}" in bad.mend
    assert ok.verdict == "ok"
    direct = ports.look(PeerConfig(host_maddrs=addresses[1:], direct_port=taken)).findings
    assert [f"--direct-port /ip4/127.0.0.1/tcp/{taken} is in use"] == [f.text for f in direct if f.verdict == "bad"]
    same = ports.look(PeerConfig(host_maddrs=("/ip4/127.0.0.1/tcp/1234",), direct_port=1234)).findings
    assert [f.mend for f in same if f.verdict == "bad"] == ["--direct-port 1235"]


def test_settings_that_cannot_work_together_are_told(taken: int) -> None:
    """A forwarded port needs a fixed port to listen on; a local address is of no use to peers on the internet."""
    found = ports.look(PeerConfig(initial_peers=(FAR,), announce_maddrs=("/ip4/8.8.8.8/tcp/4001",))).findings
    assert [f.mend for f in found if f.verdict == "bad"] == ["--host-maddrs /ip4/0.0.0.0/tcp/4001"]
    fixed = (f"/ip4/127.0.0.1/tcp/{taken}",)
    local = PeerConfig(initial_peers=(FAR,), announce_maddrs=("/ip4/10.0.0.2/tcp/4001",), host_maddrs=fixed)
    assert any("local network" in f.text for f in ports.look(local).findings)
    assert ports.look(PeerConfig(client_mode=True)).listen == ()


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
        assert (initial.mend(FAR, why) == initial._ANY) == (why in vague), why
        assert "{" not in initial.mend(FAR, why)
    assert "--host 0.0.0.0 --port 31337" in initial.mend(FAR, "connection refused: nothing listens there")
    assert "bootstrap --port 31337" in initial.mend(NEAR, "connection refused: nothing listens there")
    assert "/ip4/9.9.9.9/tcp/31337/p2p/Qm1," in initial.mend(FAR, "another peer answers there: its id is Qm1")


def test_one_initial_peer_that_answers_is_enough() -> None:
    """The others are warnings then; if none answers, all are bad."""
    refused = "connection refused: nothing listens there"
    assert [f.verdict for f in initial.unanswered({FAR: refused, NEAR: None})] == ["warn"]
    assert [f.verdict for f in initial.unanswered({FAR: refused, NEAR: refused})] == ["bad", "bad"]


def test_without_initial_peers_nothing_outside_is_checked() -> None:
    """It is said, as a warning, and Hivemind is not needed."""
    found = asyncio.run(examine(Wish(RunConfig(), PeerConfig(host_maddrs=("/ip4/127.0.0.1/tcp/0",)))))
    assert [f.name for f in found.findings if f.verdict != "ok"] == ["initial peer"]
    assert found.exit_code == 0
    assert found.links == ()


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
            return await swarm.visit(self, FAR, asyncio.Lock())  # type: ignore[arg-type]

        return asyncio.run(go())


def test_a_visit_measures_time_clock_and_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate is that of the largest question that passes, without the time of a small one."""
    seen = Answers(monkeypatch, swarm.HUGE_BYTES, 1.5).visited()
    assert (seen.rtt_s, seen.clock_ahead_s, seen.trouble) == (0.02, 1.5, None)
    assert seen.rate == pytest.approx(1e7)
    assert Answers(monkeypatch, swarm.LARGE_BYTES).visited().rate == pytest.approx(1e7)


def test_large_messages_that_stall_are_told_from_a_slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """If not even 16 KiB pass, packets are lost by size; if these pass, the link is slow. Both say what to do."""
    stalls, slow = Answers(monkeypatch, 100).visited(), Answers(monkeypatch, swarm.MIDDLE_BYTES).visited()
    well = Answers(monkeypatch, swarm.HUGE_BYTES).visited()
    assert (stalls.trouble, slow.trouble) == ("stalls", "slow")
    found = swarm.transfer([stalls], "eth0")
    assert found is not None
    assert found.verdict == "bad"
    assert "ip link set dev eth0 mtu 1280" in found.mend
    for visits, verdict in (([stalls, well], "warn"), ([slow], "warn"), ([well], "ok")):
        judged = swarm.transfer(visits, "eth0")
        assert judged is not None
        assert judged.verdict == verdict


def test_what_is_no_peer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that libp2p can't dial has its reason; one that doesn't know the DHT's questions is no initial peer."""
    assert Answers(monkeypatch, 0, why="connection refused").visited().unreached == "connection refused"
    seen = Answers(monkeypatch, -1).visited()
    assert seen.unreached is not None
    assert "not Hivemind's DHT" in seen.unreached
    assert initial.mend(FAR, seen.unreached) != initial._ANY
    assert [f.verdict for f in swarm.answered([seen])] == ["bad"]
    assert [f.verdict for f in swarm.answered([seen, Visit(NEAR)])] == ["ok", "warn"]


@pytest.mark.parametrize(("ahead_s", "verdict"), [(0.1, "ok"), (-2.0, "warn"), (60.0, "bad"), (-60.0, "bad")])
def test_a_wrong_clock_is_told(ahead_s: float, verdict: str) -> None:
    """The nearest clock counts, as it does when a peer joins; the sentence names the side and the command."""
    found = swarm.clock([Visit(FAR, clock_ahead_s=ahead_s), Visit(NEAR, clock_ahead_s=100.0)])
    assert found is not None
    assert found.verdict == verdict
    assert ("behind" in found.text) == (ahead_s > 0)
    assert verdict == "ok" or "timedatectl" in found.mend
    assert swarm.clock([Visit(FAR)]) is None


# -- reachability


def position(
    answers: Mapping[str, DialBack] | None = None, own: str = "192.168.1.7", port: int = 4001, **settings: Any
) -> Position:
    peer = PeerConfig(initial_peers=(FAR, FAR_TOO), **settings)
    listen = () if peer.client_mode else (f"/ip4/0.0.0.0/tcp/{port}",)
    return Position(peer, ports.Ports(listen), frozenset({own, "127.0.0.1"}), (FAR, FAR_TOO), answers or {})


def dialled(at: str, *reached: tuple[str, str | None], seen: str = "/ip4/80.0.0.1/tcp/5") -> dict[str, DialBack]:
    return {at: DialBack(seen, {f"{address}/p2p/me": why for address, why in reached})}


def reach(here: Position, firewall: str = "") -> tuple[str, str, str]:
    found = reachability.reachable(here, lambda name: name == firewall)
    assert found is not None
    return found.verdict, found.text, found.mend


LOCAL = ("/ip4/192.168.1.7/tcp/4001", "timed out")


def test_a_nat_names_the_forward_and_the_flags() -> None:
    """Both addresses are known from an initial peer's answer, so the flags can be pasted."""
    here = position(dialled(FAR, LOCAL))
    nat = reachability.nat(here)
    assert nat is not None
    assert nat.text == "behind a NAT: this machine's addresses are 192.168.1.7, others see it at 80.0.0.1"
    verdict, text, mend = reach(here)
    assert verdict == "warn", "it trains all the same"
    assert text.startswith("private: no other peer can dial this one: /ip4/192.168.1.7/tcp/4001 (timed out). ")
    assert "forward TCP port 4001 of the router to 192.168.1.7:4001" in mend
    assert "--host-maddrs /ip4/0.0.0.0/tcp/4001 --announce-maddrs /ip4/80.0.0.1/tcp/4001" in mend
    assert "through relays" in mend


def test_an_address_dependent_nat_is_told() -> None:
    """Two initial peers see two ports, although this peer dials both from the port that it listens on."""
    answers = {**dialled(FAR, LOCAL), **dialled(FAR_TOO, LOCAL, seen="/ip4/80.0.0.1/tcp/6")}
    nat = reachability.nat(position(answers))
    assert nat is not None
    assert (nat.verdict, "address-dependent mapping: 5, 6" in nat.text) == ("warn", True)
    same = reachability.nat(position({**dialled(FAR, LOCAL), **dialled(FAR_TOO, LOCAL)}))
    assert same is not None
    assert "address-dependent" not in same.text


def test_without_a_nat_the_firewall_is_named() -> None:
    """Others see this machine's own address, so a firewall keeps them away; the command is the installed one's."""
    here = position(dialled(FAR, ("/ip4/80.0.0.1/tcp/4001", "timed out")), own="80.0.0.1")
    nat = reachability.nat(here)
    assert nat is not None
    assert nat.text.startswith("none: ")
    assert "sudo ufw allow 4001/tcp" in reach(here, "ufw")[2]
    assert "iptables -I INPUT -p tcp --dport 4001" in reach(here, "iptables")[2]
    assert "open TCP port 4001" in reach(here)[2]


def test_a_wrong_announced_address_names_the_right_one() -> None:
    """Others see this machine elsewhere than it announces."""
    wrong = "/ip4/80.0.0.2/tcp/4001"
    verdict, text, mend = reach(position(dialled(FAR, (wrong, "timed out")), announce_maddrs=(wrong,)))
    assert (verdict, wrong in text) == ("bad", True)
    assert "--announce-maddrs /ip4/80.0.0.1/tcp/4001" in mend
    right = "/ip4/80.0.0.1/tcp/4001"
    both = position(dialled(FAR, (wrong, "timed out"), (right, None)), announce_maddrs=(wrong, right))
    verdict, text, mend = reach(both)
    assert (verdict, wrong in text, right in text) == ("warn", True, False)
    assert mend.endswith(f"--announce-maddrs {right}")


def test_an_address_that_is_dialled_is_well() -> None:
    """One peer that gets through is enough, also at a forwarded port that isn't announced."""
    right = "/ip4/80.0.0.1/tcp/4001"
    assert reach(position(dialled(FAR, LOCAL, (right, None)), announce_maddrs=(right,)))[0] == "ok"
    verdict, text, _ = reach(position(dialled(FAR, LOCAL, (right, None))))
    assert (verdict, right in text) == ("ok", True)


def test_without_a_dial_back_it_says_what_it_cannot_tell() -> None:
    """Initial peers of an older version: local addresses show a NAT, a public one leaves the question open."""
    nat = reachability.nat(position())
    assert nat is not None
    assert (nat.verdict, "--announce-maddrs /ip4/ROUTER/tcp/4001" in nat.mend) == ("warn", True)
    assert reachability.reachable(position()) is None
    public = position(own="80.0.0.1")
    assert reachability.nat(public) is None
    verdict, text, mend = reach(public)
    assert (verdict, text.startswith("can't tell"), "nc -vz ADDRESS 4001" in mend) == ("warn", True, True)
    announced = replace(position(announce_maddrs=("/ip4/80.0.0.2/tcp/4001",)), tried={"/ip4/80.0.0.2/tcp/4001": "gone"})
    verdict, text, mend = reach(announced)
    assert (verdict, "can't dial its own announced address" in text) == ("warn", True)


def test_a_peer_on_loopback_is_well_only_among_its_like() -> None:
    """A peer that listens on loopback is of no use to a swarm on other machines; in client mode nothing is needed."""
    here = replace(position(), ports=ports.Ports(("/ip4/127.0.0.1/tcp/4001",)))
    assert reach(here)[::2] == ("bad", "--host-maddrs /ip4/0.0.0.0/tcp/4001")
    assert reach(replace(here, dialled=(NEAR,)))[0] == "ok"
    assert reach(position(client_mode=True))[0] == "ok"
    assert reachability.reachable(replace(position(), dialled=())) is None


class Dialler:
    """A daemon of a machine behind a router."""

    addresses = ("/ip4/127.0.0.1/tcp/4001/p2p/me", "/ip4/192.168.1.7/tcp/4001/p2p/me")
    peer_id = "me"


def test_an_initial_peer_is_asked_to_dial_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for the addresses beyond this machine; its answer decides."""
    asked: list[tuple[str, ...]] = []

    async def answer(daemon: object, relay: str, addresses: Any, within_s: float) -> DialBack:
        asked.append(tuple(addresses))
        return DialBack("/ip4/80.0.0.1/tcp/5", dict.fromkeys(addresses, "timed out"))

    monkeypatch.setattr("p2p_diloco.net.reach.ask", answer)
    monkeypatch.setattr(own_addresses, "own_hosts", lambda: {"192.168.1.7"})
    notes, here = Notes(), position()
    asyncio.run(examination._reachability(here.peer, here.ports, Dialler(), [FAR], notes))  # type: ignore[arg-type]
    assert asked == [(Dialler.addresses[1],)]
    assert [f.name for f in notes.findings if f.verdict == "warn"] == ["reachable"]


# -- the run's peers


def test_peers_that_cannot_be_reached_are_named() -> None:
    """A warning with each name, place and reason."""
    link = Link("Qm1", "alice", "/ip4/9.9.9.9/tcp/1", 0.1, 1e6, "direct")
    gone = Visit("/ip4/10.0.0.9/tcp/1/p2p/Qm2", "timed out")
    assert run_peers.peers([], [], 0) is None
    well = run_peers.peers([link], [], 3)
    assert well is not None
    assert (well.verdict, well.text) == ("ok", "1 of 1 peers of the run answer; 3 more were not tried")
    found = run_peers.peers([link], [("bob", gone)], 0)
    assert found is not None
    assert (found.verdict, "bob at /ip4/10.0.0.9/tcp/1 (timed out)" in found.text) == ("warn", True)


def test_private_peers_of_the_run_are_no_fault() -> None:
    """They are named, and neither dialled nor warned of, because they exchange through relays."""
    notes, peer = Notes(), PeerConfig(direct=False)
    statuses = [PeerStatus(peer_id=name, name=name, reach="private") for name in ("carol", "dan")]
    undialled = cast(Any, object())
    asyncio.run(examination._links(peer, position().ports, undialled, statuses, notes, asyncio.Lock()))
    (found,) = notes.findings
    assert (found.verdict, found.mend, "carol, dan" in found.text) == ("ok", "", True)
    many = run_peers.peers([], [], 0, [f"p{number}" for number in range(20)])
    assert many is not None
    assert ("p7, …" in many.text, "p8" in many.text) == (True, False)
    gone = run_peers.peers([], [("bob", Visit("/ip4/10.0.0.9/tcp/1/p2p/Qm2", "timed out"))], 0, ["carol"])
    assert gone is not None
    assert (gone.verdict, "1 of 1 peers" in gone.text, "carol" in gone.text) == ("warn", True, True)


def test_ways_of_payloads_are_counted() -> None:
    """No direct connection at all is a warning with the flag, unless they are switched off."""
    direct, other = (Link("Qm1", "alice", "/ip4/9.9.9.9/tcp/1", way=way) for way in ("direct", "libp2p"))
    for links, settings, verdict in (
        ([direct, other], {}, "ok"),
        ([other], {}, "warn"),
        ([other], {"direct": False}, "ok"),
    ):
        found = run_peers.direct(PeerConfig(**settings), links)
        assert found is not None
        assert found.verdict == verdict
    assert run_peers.direct(PeerConfig(), []) is None


# -- all together


def test_checks_that_take_too_long_or_fail_hide_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a part found before it was cut off or failed is in the report."""

    async def hangs(wish: Wish, notes: Notes, before: object) -> None:
        notes.add(Finding("port", "ok", "can listen"))
        await asyncio.sleep(60)

    async def breaks(notes: Notes) -> None:
        raise ZeroDivisionError("oh")

    async def refuses(wish: Wish, notes: Notes) -> None:
        raise ConfigError("can't be used", key="x", value="y", mend="choose z")

    monkeypatch.setattr(examination, "_network", hangs)
    monkeypatch.setattr(examination, "_programs", breaks)
    monkeypatch.setattr(examination, "_machine", refuses)
    found = asyncio.run(examine(Wish(RunConfig(), PeerConfig()), limit_s=0.2))
    told = {f.text: f.mend for f in found.findings}
    assert "can listen" in told
    assert told["x=y can't be used"] == "choose z"
    assert any("the network were cut off" in text for text in told)
    assert any("ZeroDivisionError: oh" in text for text in told)


def test_wrong_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A number of parameters that can't be read names its flag; an address is checked as for `join`."""
    assert carry_out(["doctor", "--params", "many"]) == 2
    assert "--params=many is no number of parameters" in capsys.readouterr().err
    assert carry_out(["doctor", "--initial-peers", "9.9.9.9:1"]) == 2


# -- env


def test_env_shows_versions_and_leaves_secrets_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our variables are shown, those whose names speak of secrets without their values, others not at all."""
    monkeypatch.setenv("P2P_DILOCO_CODEC", "int4")
    text = "\n".join(env.lines())
    for name in ("p2p_diloco: ", "python: ", "torch: ", "hivemind: ", "p2pd: ", "system: ", "memory: ", "GPU: "):
        assert name in text
    assert "P2P_DILOCO_CODEC=int4" in text
    variables = {"P2P_DILOCO_API_KEY": "abc", "P2P_DILOCO_RUN_ID": "r", "AWS_SECRET": "x", "RANK": "1",
                 "P2P_DILOCO_OTLP_ENDPOINT": "http://me:abc@collector"}  # fmt: skip
    told = list(env.variables(variables))
    left_out = ["P2P_DILOCO_API_KEY=(left out)", "P2P_DILOCO_OTLP_ENDPOINT=(left out)"]
    assert told == [*left_out, "P2P_DILOCO_RUN_ID=r", "RANK=1"]


def test_a_bug_report_does_not_name_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths in the user's own folder begin with ~."""
    *home, folder, program = Path(sys.executable).parts
    monkeypatch.setenv("HOME", str(Path(*home)))
    told = "\n".join(env.lines())
    assert f"(~/{folder}/{program})" in told
    assert str(Path(*home)) not in told
