"""Swarms of real processes on loopback: started, observed, killed by pid, and never left behind.

Law: every wait is bounded and ends on a condition; every process is known by its pid or by the mark in its environment,
and none is searched by name.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import warm
from typing_extensions import Self

PROGRAMS = Path(__file__).with_name("programs")
ROOT = PROGRAMS.parent.parent.parent
START_S = 180.0
"""How long a peer may take to start: it imports torch and hivemind twice, perhaps in parallel to many others."""
GONE_S = 30.0
"""Within this time the processes of a member that has ended must be gone; a node takes at most 5 s on a machine that
runs."""
READ_S = 10.0
"""Within this time the last lines of an ended member are read."""
MARK = "SWARM_UNDER_TEST"
LOG_TAIL = 2000

Line = dict[str, Any]


class Member:
    """One process with its JSON lines on stdout and its log in a file."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: dict[str, str],
        log: Path,
        nursery: warm.Nursery | None = None,
        on: Sequence[str] = (),
    ) -> None:
        self.name, self.log_path = name, log
        self.said: list[Line] = []
        self._news = threading.Condition()
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process: subprocess.Popen[str] | warm.Warm
        with log.open("ab") as out:
            if nursery is not None:
                self.process = warm.member(nursery, command, environment, out.fileno(), *on[-1:])
            else:
                self.process = subprocess.Popen([*on, *command], **pipes, stderr=out, text=True, env=environment)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            with self._news:
                self.said.append(json.loads(text))
                self._news.notify_all()

    # -- what it says

    def lines(self, what: str, **values: Any) -> list[Line]:
        """All lines so far of a kind that have these values."""
        with self._news:
            return [line for line in self.said if line.get("what") == what and values.items() <= line.items()]

    def last(self, what: str) -> Line:
        """The newest line of a kind."""
        return self.lines(what)[-1]

    def wait_for(
        self, what: str, within_s: float = START_S, that: Callable[[Line], bool] = lambda line: True, **values: Any
    ) -> Line:
        """The first line of a kind that has these values; an AssertionError with its log if it doesn't come."""
        give_up_at = time.monotonic() + within_s
        while True:
            ended = self.process.poll() is not None
            if ended:
                self._reader.join(READ_S)
            found = next((line for line in self.lines(what, **values) if that(line)), None)
            if found is not None:
                return found
            if ended or time.monotonic() >= give_up_at:
                told = f"{self.name} (status {self.process.poll()}) did not say {what} {values} in {within_s} s"
                raise AssertionError(f"{told}, but {self.said[-3:]}\n{self.log()[-LOG_TAIL:]}")
            with self._news:
                self._news.wait(0.05)

    def epoch(self, epoch: int, within_s: float = START_S) -> Line:
        """The line of the first epoch that is at least this one."""
        return self.wait_for("epoch", within_s, lambda line: line["epoch"] >= epoch)

    def reached(self) -> int:
        """The newest epoch that it has printed."""
        lines = self.lines("epoch")
        return int(lines[-1]["epoch"]) if lines else int(self.last("in")["epoch"])

    def log(self) -> str:
        """All of its log."""
        return self.log_path.read_text(errors="replace")

    def wait_for_log(self, text: str, within_s: float = 60.0) -> None:
        """Wait until a text stands in its log."""
        until(lambda: text in self.log(), within_s, f"{text!r} in the log of {self.name}")

    # -- what is done to it

    def tell(self, command: str) -> None:
        """Write a line to its stdin."""
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def family(self) -> list[psutil.Process]:
        """Its process and all below it: trainer, node, p2pd."""
        try:
            top = psutil.Process(self.process.pid)
            return [top, *top.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def die(self) -> float:
        """Kill all of its processes at once, as if the machine died. Returns the time as time.time()."""
        family = self.family()
        killed_at = time.time()
        for process in family:  # first stop them: one must not act on the death of another
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        for process in reversed(family):
            kill(process)
        self.process.wait(GONE_S)
        return killed_at

    def signal(self, number: int) -> float:
        """Send a signal only to its own process. Returns the time."""
        self.process.send_signal(number)
        return time.time()

    def status(self, within_s: float = 60.0) -> int:
        """The exit status, once it has ended."""
        status = self.process.wait(within_s)
        self._reader.join(READ_S)
        return status


class Swarm:
    """The members of a test. Their processes, and all processes that these start, carry a mark in their environment."""

    def __init__(self, folder: Path, nursery: warm.Nursery | None = None) -> None:
        """`nursery` forks the processes; without one each starts by its command, as a user's does."""
        self.folder, self.nursery = folder, nursery
        self.members: list[Member] = []
        self.addresses: list[str] = []
        self.mark = uuid.uuid4().hex

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def launch(self, name: str, command: Sequence[str], on: Sequence[str] = (), fresh: bool = False) -> Member:
        """Start one of our processes; `on` is a command prefix that runs it on another machine."""
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, MARK: self.mark, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        environment |= {"OMP_NUM_THREADS": "1"}  # many processes share few cores
        environment |= {"XDG_STATE_HOME": str(self.folder / "state")}  # no swarm uses another's remembered addresses
        log = self.folder / f"{name}-{len(self.members)}.log"
        forked = not fresh and list(on[:-1]) in ([], ["ip", "netns", "exec"])
        member = Member(name, [sys.executable, *command], environment, log, self.nursery if forked else None, on)
        self.members.append(member)
        return member

    def bootstrap(self, host: str = "127.0.0.1", on: Sequence[str] = ()) -> Member:
        """Start a bootstrap and have all later peers join through it."""
        command = ["-m", "p2p_diloco", "bootstrap", "--host", host, "--port", "0", "--json"]
        member = self.launch("bootstrap", command, on)
        give_up_at = time.monotonic() + START_S
        while not self.addresses and time.monotonic() < give_up_at:
            self.addresses = next((line["maddrs"] for line in list(member.said)), [])
            assert member.process.poll() is None, member.log()
            time.sleep(0.05)
        assert self.addresses, f"the bootstrap announced nothing: {member.log()}"
        return member

    def start(
        self, name: str, program: str = "train.py", on: Sequence[str] = (), fresh: bool = False, **options: Any
    ) -> Member:
        """Start a peer; see the program for its options."""
        values = {"name": name, "run_id": "test", "initial_peers": self.addresses, **options}
        return self.launch(name, [str(PROGRAMS / program), json.dumps(values)], on, fresh)

    def left(self) -> list[psutil.Process]:
        """Every live process with the mark, and processes left behind by forked members."""
        found = self.nursery.left() if self.nursery is not None else []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def gone(self, within_s: float = GONE_S) -> None:
        """Assert that soon only processes of live members are left."""
        alive = lambda: {p.pid for m in self.members if m.process.poll() is None for p in m.family()}  # noqa: E731
        until(lambda: {p.pid for p in self.left()} <= alive(), within_s, lambda: f"left behind: {self._names()}")

    def end(self) -> None:
        """Kill all members; fail if a process would have stayed."""
        for member in self.members:
            if member.process.poll() is None:
                member.die()
        try:
            self.gone()
        finally:
            for process in self.left():
                kill(process)
            for member in self.members:
                member.process.wait(GONE_S)
            for member in self.members:
                for pipe in (member.process.stdin, member.process.stdout):
                    if pipe is not None:
                        pipe.close()

    def _names(self) -> list[str]:
        return [f"{p.pid} {' '.join(p.cmdline())[:100]}" for p in self.left()]


@contextlib.contextmanager
def kept_in(folder: Path | None) -> Iterator[Path]:
    """This folder, or one that goes afterwards."""
    with contextlib.ExitStack() as stack:
        found = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        found.mkdir(parents=True, exist_ok=True)
        yield found


def kill(process: psutil.Process) -> None:
    """SIGKILL, unless it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


def until(condition: Callable[[], bool], within_s: float, what: str | Callable[[], str]) -> None:
    """Wait for a condition; an AssertionError that names it if it doesn't come."""
    give_up_at = time.monotonic() + within_s
    while not condition():
        if time.monotonic() >= give_up_at:
            raise AssertionError(f"not in {within_s} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.05)


def agree(members: Sequence[Member], epoch: int = 0, since: float = 0.0) -> None:
    """Assert that digests are equal at every epoch that two members took part in, from this epoch and moment on, and
    that there is such an epoch."""
    digests: dict[int, set[str]] = {}
    shared: dict[int, int] = {}
    for member in members:
        for line in member.lines("epoch", synced=True):
            if line["epoch"] >= epoch and line["time"] >= since:
                digests.setdefault(line["epoch"], set()).add(line["digest"])
                shared[line["epoch"]] = shared.get(line["epoch"], 0) + 1
    split = {epoch: found for epoch, found in digests.items() if len(found) > 1}
    assert not split, f"replicas of one epoch differ: {split}"
    assert max(shared.values(), default=0) >= min(2, len(members)), "no epoch in common"


def one_lineage(members: Sequence[Member], within_s: float) -> tuple[int, float]:
    """The epoch and time at which all members, some on another lineage before, first had one digest again."""
    began = time.time()

    def met() -> list[tuple[int, float]]:
        told: list[dict[tuple[int, str], float]] = [
            {(line["epoch"], line["digest"]): line["time"] for line in m.lines("epoch", synced=True)} for m in members
        ]
        common = set.intersection(*(set(one) for one in told))
        when = {place: max(one[place] for one in told) for place in common}
        return sorted((epoch, when[epoch, digest]) for epoch, digest in common if when[epoch, digest] >= began)

    until(lambda: bool(met()), within_s, lambda: f"one lineage of {', '.join(m.name for m in members)}")
    return met()[0]


def usual_round_s(member: Member, before: float, newest: int = 8) -> float:
    """The median time between two epochs of a member before this moment."""
    times = [line["time"] for line in member.lines("epoch", synced=True) if line["time"] <= before][-newest - 1 :]
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(times))


STOOD_STILL: list[tuple[float, float]] = []
"""Intervals of a second or more in which nothing ran on this machine, as time.time(), since this module was loaded."""


def _watch() -> None:
    last, never = time.time(), threading.Event()
    while not never.wait(0.1):  # a test's replacement of `time.sleep` must not affect this
        now = time.time()
        if now - last > 1.0:
            STOOD_STILL.append((last, now))
        last = now


threading.Thread(target=_watch, daemon=True).start()


def stood_still_s(begin: float, end: float) -> float:
    """How long the machine itself stood still within this time: not even a sleeping thread woke up."""
    return sum(max(0.0, min(end, until) - max(begin, since)) for since, until in STOOD_STILL)


def stall_s(member: Member, at: float, rounds: int | None = None) -> float:
    """How much longer than usual the longest round after a moment took, of all or the given number of rounds.

    Necessary compute doesn't count: a round is expected to end the usual time after the one before it, or after the
    moment if that is later. Nor does the time in which the machine stood still.
    """
    usual = usual_round_s(member, at)
    lines = member.lines("epoch", synced=True)
    times = [line["time"] for line in lines if line["time"] > at][:rounds]
    assert times, f"{member.name} told no epoch after the event"
    earlier = max((line["time"] for line in lines if line["time"] <= at), default=at)
    stalls = []
    for later in times:
        stalls.append(later - max(earlier + usual, at) - stood_still_s(max(earlier, at), later))
        earlier = later
    return max(0.0, *stalls)
