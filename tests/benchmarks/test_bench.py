"""`bench`: its flags, its figures, its tables, and a small measurement with real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from examples.benchmarks import command
from examples.benchmarks.__main__ import main
from examples.benchmarks.group import Group, Member
from examples.benchmarks.measure import Memory, Result, Round, round_of
from examples.benchmarks.ours import wire_bytes
from examples.benchmarks.plan import Plan, links_of, names_of
from examples.benchmarks.table import as_object, drawn, figures, headline
from p2p_diloco.cli.processes import Children
from p2p_diloco.config import RunConfig
from p2p_diloco.observe.figures import count_of

PLAN = Plan(2, 25_000_000, "bf16", 1, 3, beside=("gloo",))

# -- flags


def plan_of(
    peers: int, parameters: str, codec: str = "bf16", fragments: int = 1, link: str | None = None, **more: Any
) -> Plan:
    """A plan as flags describe it."""
    return Plan(peers, count_of(parameters), codec, fragments, 1, **links_of(link, peers)._asdict(), **more)


def test_flags_as_people_write_them() -> None:
    """Sizes and speeds may have units; what is measured beside comes in one order."""
    assert [count_of(text) for text in ("25M", "1.5k", "7", "1_000", "2b")] == [25_000_000, 1500, 7, 1000, 2 * 10**9]
    assert links_of("100mbit, 1Gbit,500kbit", 3) == ((100.0, 1000.0, 0.5), 0.0, 0.0)
    assert names_of("averager, raw") == ("raw", "averager")
    assert names_of("none") == names_of("") == ()


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (["--peers", "1"], "--peers"),
        (["--parameters", "many"], "--parameters"),
        (["--fragments", "0"], "--fragments"),
        (["--fragments", "30", "--parameters", "20"], "--parameters"),
        (["--link", "fast"], "--link"),
        (["--link", "10mbit,20mbit,30mbit"], "--link"),
        (["--link", "10mbit:100"], "--link"),
        (["--link", "10mbit:100ms,10mbit"], "--link"),
        (["--link", "10mbit:100ms:0.4"], "--link"),
        (["--beside", "nccl"], "--beside"),
        (["--steps", "4", "--beside", "gloo"], "--beside"),
        (["--device", "meta", "--beside", "gloo"], "--beside"),
        (["--steps", "3", "--fragments", "4"], "--steps"),
        (["--step-time", "-1"], "--step-time"),
    ],
)
def test_a_flag_that_cannot_be_used_is_named(
    flags: list[str], key: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "measured", lambda plan: pytest.fail("nothing is measured"))
    assert main(flags) == 2
    assert f"bench: {key}" in capsys.readouterr().err


def test_delay_and_loss_hold_between_any_two_machines() -> None:
    """They follow the speeds, once for all of them; the round trip time is the time given."""
    plan = plan_of(2, "1k", link="1gbit:100ms")
    assert (plan.links_mbit, plan.rtt_s, plan.loss) == ((1000.0, 1000.0), 0.1, 0.0)
    plan = plan_of(3, "1k", link="100mbit,100mbit,20mbit:0.2s:0.4%")
    assert (plan.links_mbit, plan.rtt_s, plan.loss) == ((100.0, 100.0, 20.0), 0.2, pytest.approx(0.004))
    assert "on links of 1000 Mbit/s each, 50 ms round trip, 1 % of the packets lost" in headline(
        plan_of(2, "1k", link="1gbit:50ms:1%")
    )


@pytest.mark.parametrize(
    ("link", "peers", "least_s"),
    [
        ("100mbit", 2, 4.0),  # 50 MB
        ("100mbit", 4, 6.0),  # 75 MB
        ("100mbit,100mbit,20mbit", 3, 20.0),  # one's own 50 MB at 20 Mbit/s; the others are done before
        ("100mbit,100mbit,100mbit,90mbit", 4, 6 * 4 * 50e6 * 8 / 4 / 390e6),  # all links to their end
    ],
)
def test_the_least_that_links_allow(link: str, peers: int, least_s: float) -> None:
    """Bytes over bandwidth, where the reduction is shared so that the round ends soonest; nothing on loopback."""
    plan = plan_of(peers, "25M", link=link)
    sent = round(plan.share * 100e6)
    assert plan.optimum_s(sent) == pytest.approx(least_s)
    assert plan_of(peers, "25M").optimum_s(sent) is None


def test_what_share_of_a_round_is_training() -> None:
    """Their time without exchanges against the median round's, so that steps which exchanges make slower lower it; none
    where there is no training."""
    training = [Round(2.0, {"training": 1.8}, {}, 0.0, 0.0, alone_s) for alone_s in (1.6, 1.0, 1.5)]
    result = replace(RESULT, rounds=tuple(training))
    plan = replace(PLAN, steps=2, step_s=0.75, beside=())
    assert (figures(plan, result)["training_share"], FIGURES["training_share"]) == (0.75, None)
    told = text_of([result], plan)
    assert "2 steps of 0.75 s" in told
    assert ["1.500", "1.800", "2.000", "75.0%"] in [line.split()[2:] for line in told.splitlines()]
    assert as_object(plan, [result], {})["results"][0]["training_share"] == 0.75


def test_peers_have_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least that any of them does in an inner step's time. Its time without exchanges is taken for each round, and
    is the slowest peer's."""
    asked: list[tuple[str, dict[str, int]]] = []

    def answers(_members: object, do: str, _within_s: float = 0.0, **values: int) -> list[dict[str, Any]]:
        asked.append((do, values))
        return [{"passes": 2.6, "took_s": 1.0, "parts": {}}, {"passes": 4.5, "took_s": 3.0, "parts": {}}]

    monkeypatch.setattr("examples.benchmarks.group.ask", answers)
    group = Group(plan_of(2, "1k", steps=1, step_s=0.1), "x", [], 1, Memory({}))
    group.agree_on_work()
    assert asked == [("calibrate", {}), ("work", {"passes": 3})]
    assert [group.play().alone_s for _ in range(2)] == [3.0, 3.0]
    assert [do for do, _ in asked[2:]] == 2 * ["train", "alone", "round"]


# -- figures


def a_round(took_s: float, **cpu_s: float) -> Round:
    return Round(took_s, {"exchange": took_s - 0.5, "merge": 0.5}, cpu_s, took_s, 0.0)


RESULT = Result(
    "p2p_diloco bf16",
    (a_round(3.0, node=2.0), a_round(1.0, node=1.0, p2pd=3.0), a_round(2.0, node=1.0)),
    sent_bytes=10**9,
    peers=2,
    idle=Memory({"process": 10**8, "node": 10**8}),
    peak=Memory({"process": 5 * 10**8, "node": 4 * 10**8}, shared=2 * 10**8),
)


FIGURES = figures(PLAN, RESULT)


def test_a_result_is_the_median_and_the_best() -> None:
    """Processor time is for each byte that any peer sends: in three rounds of two peers 6 GB. Memory is that over the
    idle processes; what two of them share is counted once."""
    assert [FIGURES[key] for key in ("median_s", "best_s", "waiting_s", "hidden_s")] == [2.0, 1.0, 2.0, 0.0]
    assert FIGURES["parts_s"] == {"exchange": 1.5, "merge": 0.5}
    assert FIGURES["cpu_s_per_gb"] == {"node": 4.0 / 6, "p2pd": 3.0 / 6}
    assert FIGURES["memory_over_idle_bytes"] == 5 * 10**8


def test_a_round_is_its_slowest_peers() -> None:
    """The others wait for it; waiting and hidden time are a mean peer's; one without counters stood still."""
    lines = [
        {"took_s": 2.0, "parts": {"exchange": 2.0}, "waiting_s": 1.0, "hidden_s": 1.0},
        {"took_s": 3.0, "parts": {"exchange": 3.0}, "waiting_s": 2.0, "hidden_s": 0.0},
    ]
    assert round_of(lines, {"node": 1.0}) == Round(3.0, {"exchange": 3.0}, {"node": 1.0}, 1.5, 0.5)
    assert round_of([{"took_s": 2.0, "parts": {}}], {}).waiting_s == 2.0


# -- tables


def text_of(results: list[Result], plan: Plan = PLAN) -> str:
    out = StringIO()
    Console(file=out, width=100).print(drawn(plan, results))
    return out.getvalue()


def test_a_round_on_links_stands_beside_what_they_allow() -> None:
    """The least time for these bytes, the median, and the ratio."""
    plan, result = replace(PLAN, links_mbit=(100.0, 50.0), rtt_s=0.05), replace(RESULT, sent_bytes=10**7)
    text = text_of([result], plan)
    assert "on links: 1 of 100, 1 of 50 Mbit/s, 50 ms round trip" in text
    assert ["1.600", "2.000", "1.25", "0.050"] in [line.split()[2:] for line in text.splitlines()]
    (told,) = as_object(plan, [result], {})["results"]
    assert (told["link_s"], told["ratio"]) == (1.6, 1.25)
    (told,) = as_object(PLAN, [RESULT], {})["results"]
    assert (told["link_s"], told["ratio"]) == (None, None)


def test_a_failure_is_told_and_does_not_hide_the_rest() -> None:
    failed = Result("gloo fp32", (), 1, 2, failed="gloo-fp32-1 ended with status 1: out of memory")
    told = text_of([RESULT, failed])
    assert "p2p_diloco bf16" in told
    assert "gloo fp32 failed: gloo-fp32-1 ended with status 1: out of memory" in " ".join(told.split())
    assert as_object(PLAN, [failed], {})["results"] == [{"name": "gloo fp32", "failed": failed.failed}]


# -- turns

ECHO = """
import json, sys
for line in sys.stdin:
    do = json.loads(line)["do"]
    if do == "round" and sys.argv[1] == "mute":
        continue
    if do == "round" and sys.argv[1] == "dies":
        sys.exit("no memory left")
    print(json.dumps({"took_s": 1.5, "parts": {}, "exchanges": 1, "digest": sys.argv[1]}), flush=True)
"""


@pytest.fixture
def children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Children]:
    monkeypatch.setattr(Plan, "round_s_max", 1.0)
    with Children(tmp_path) as made:
        yield made


def group_of(children: Children, *says: str) -> Group:
    """Processes that answer what they are given to say."""
    members = []
    for word in says:
        command = [sys.executable, "-c", ECHO, word]
        members.append(Member.start(children, f"p{len(children.all)}", command))
    return Group(PLAN, "x", members, 100, Memory({}))


@pytest.mark.parametrize(
    ("says", "told"),
    [
        (("same", "other"), "peers differ after a round"),
        (("same", "mute"), "p1 did not answer 'round' within 1 s"),
        (("same", "dies"), "p1 ended with status 1: no memory left"),
    ],
)
def test_a_round_that_is_none_fails(children: Children, says: tuple[str, ...], told: str) -> None:
    """Different states, silence, a death: told with a name, in bounded time; the others' turns go on."""
    bad, good = group_of(children, *says), group_of(children, "same")
    command.turn([bad, good], "round 1")
    assert told in bad.failed
    assert len(good.rounds) == 1
    command.turn([bad, good], "round 2")
    assert len(good.rounds) == 2


# -- the whole of it

MARK = "BENCH_UNDER_TEST"


def left(mark: str) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline())[:80])
        except (psutil.Error, OSError):
            continue
    return found


def measured(mark: str, *flags: str) -> tuple[dict[str, Any], str, int]:
    """What a measurement tells and logs, and its process id; no process of it is left."""
    process = subprocess.Popen(
        [sys.executable, "-m", "examples.benchmarks", "--parameters", "100k", "--rounds", "3", "--json", *flags],
        cwd=Path(__file__).parents[2], env={**os.environ, MARK: mark}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    told, log = process.communicate(timeout=240)
    if process.returncode == 2 and "can't be made here" in log:
        pytest.skip(log.strip().splitlines()[-1])
    assert process.returncode == 0, log
    assert left(mark) == []
    return json.loads(told), log, process.pid


def real(test: Callable[..., None]) -> Callable[..., None]:
    for mark in (pytest.mark.real, pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(300)):
        test = mark(test)
    return test


@real
def test_two_real_peers_are_measured(tmp_path: Path) -> None:
    """A run and gloo beside it, in turns: every figure is there and makes sense, and no process is left."""
    result, log, _ = measured(str(tmp_path), "--peers", "2", "--beside", "gloo")
    assert (result["schema_version"], result["peers"], result["parameters"], result["rounds"]) == (2, 2, 100_000, 3)
    assert result["machine"]["congestion"] is None
    ours, fp32, bf16 = result["results"]
    assert [one["name"] for one in (ours, fp32, bf16)] == ["p2p_diloco bf16", "gloo fp32", "gloo bf16"]
    assert [one["sent_bytes_per_peer"] for one in (ours, fp32, bf16)] == [200_000, 400_000, 200_000]
    for one in (ours, fp32, bf16):
        assert one["failed"] is None
        assert len(one["rounds_s"]) == 3
        assert 0 < one["best_s"] <= one["median_s"] < 60
        assert sum(one["parts_s"].values()) == pytest.approx(one["median_s"], rel=0.5, abs=0.05)
        assert one["memory_over_idle_bytes"] > 0
    assert set(ours["cpu_s_per_gb"]) == {"process", "node", "p2pd"}
    assert set(ours["parts_s"]) == {"pseudo-gradient", "codec", "exchange", "outer step", "merge"}
    assert min(ours["parts_s"].values()) > 0
    assert set(fp32["parts_s"]) == {"pseudo-gradient", "exchange", "outer step", "merge"}
    assert 0 < ours["waiting_s"] <= ours["median_s"]
    assert log.count("round ") >= 3


@real
def test_a_link_is_as_slow_as_was_asked_for(tmp_path: Path) -> None:
    """No round takes less than its bytes need at 50 Mbit/s, but for the bytes that a link lets through at once;
    and no machine is left."""
    flags = ("--parameters", "1M", "--link", "50mbit", "--beside", "raw,gloo")
    result, log, pid = measured(str(tmp_path), *flags)
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()
    usual = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    assert result["machine"]["congestion"] == ("cubic" if "cubic" in allowed else usual)
    assert ("not allowed there" in log) == (result["machine"]["congestion"] != "cubic")
    for one in result["results"]:
        at_once = 4 * 128 * 1024
        assert one["best_s"] >= (one["sent_bytes_per_peer"] - at_once) * 8 / 50e6, one
    assert f"p2pd{pid}-" not in subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    ("settings", "nbytes"),
    [
        ({}, 4),
        ({"codec": "fp32"}, 8),
        ({"codec": "int4"}, 2.515625),
        ({"codec": "int4", "reply_codec": "int4"}, 1.03125),
    ],
)
def test_bytes_are_those_of_contributions_and_commits(settings: dict[str, Any], nbytes: float) -> None:
    """The mean's codec is the run's own choice where none is asked for."""
    assert wire_bytes(RunConfig(**settings), 1280) == 1280 * nbytes
