"""Processes that start with torch and hivemind loaded: forked from one that has loaded them, which saves 3 s each.

`Nursery` represents that process. It runs Python commands (`[sys.executable, "-m", module, ...]` or a script) as its
children, with the given standard streams, environment and descriptors. It has a single thread, so that no lock is held
at a fork. A process that loses its parent becomes its child: `left` finds all processes that members leave behind.

A peer's node must be its own descendant, so each peer has a nursery for its nodes, forked before the peer begins.
Differences from a user's run: the parent of a node is that nursery, all processes share one hash seed, and /proc shows
the nursery's command and environment. tests/cli and tests/chaos start every process as a user does.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

AVAILABLE = sys.platform == "linux"
"""Requires sockets that keep messages separate, and a signal at a parent's death."""
ROOT = Path(__file__).parents[2]
MESSAGE_MAX = 1 << 18
HIGH_FD = 500
"""A number above all descriptors that a process is given."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
CLONE_NEWNET = 0x40000000
POPEN = subprocess.Popen


class Warm:
    """One process of a nursery, with the used part of `subprocess.Popen`'s interface."""

    def __init__(self, nursery: Nursery, pid: int, stdin: Any, stdout: Any) -> None:
        self._nursery, self.pid = nursery, pid
        self.stdin, self.stdout = stdin, stdout
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._nursery.status(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        give_up_at = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if give_up_at is not None and time.monotonic() >= give_up_at:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(0.01)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The forking process, as its user sees it."""

    def __init__(self, sock: socket.socket, pid: int, process: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self._sock, self._process = sock, process
        self._lock = threading.Lock()
        self._ended: dict[int, int] = {}
        self.started: list[Warm] = []

    @classmethod
    def start(cls, log: Path) -> Nursery:
        """Start a process that ends with ours."""
        paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, log.open("ab") as out:
            command = [sys.executable, __file__, str(theirs.fileno())]
            streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
            process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), env=environment, **streams)
        return cls(ours, process.pid, process)

    def left(self) -> list[psutil.Process]:
        """All processes below it that belong to none of its live children."""
        kept: set[int] = set()
        for member in self.started:
            if member.poll() is None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    family = psutil.Process(member.pid).children(recursive=True)
                    kept |= {member.pid, *(process.pid for process in family)}
        below = psutil.Process(self.pid).children(recursive=True)
        return [process for process in below if process.pid not in kept and not _dead(process)]

    def end(self) -> None:
        """End the nursery; the processes that it started go on."""
        self._sock.close()
        assert self._process is not None
        self._process.wait(30.0)

    def run(
        self, command: Sequence[str], environment: Mapping[str, str], stdin: int, stdout: int, stderr: int,
        keep: Sequence[int] = (), session: bool = False, peer: bool = False, machine: str = "",
    ) -> int:  # fmt: skip
        """Run a command; returns its process id. `keep`: descriptors to pass with the same numbers. `peer`: the process
        gets its own nursery in place of `subprocess.Popen`. `machine`: the network namespace that it runs in."""
        asked = {"argv": list(command[1:]), "env": dict(environment), "fds": [0, 1, 2, *keep], "session": session}
        message = json.dumps({**asked, "peer": peer, "cwd": os.getcwd(), "machine": machine}).encode()
        with self._lock:
            socket.send_fds(self._sock, [message], [stdin, stdout, stderr, *keep])
            while True:
                told = json.loads(self._sock.recv(MESSAGE_MAX) or b'{"failed": "the nursery is gone"}')
                if "started" in told:
                    return int(told["started"])
                self._take(told)

    def popen(self, command: Any, **options: Any) -> Any:
        """Replacement of `subprocess.Popen`: forks a node, with its parent's id changed to the nursery's."""
        if command[0] != sys.executable:
            return POPEN(command, **options)
        assert set(options) <= {"pass_fds", "env", "start_new_session", "stdin", "stdout"}
        command = [f"--parent-pid={self.pid}" if part.startswith("--parent-pid=") else part for part in command]
        nothing = os.open(os.devnull, os.O_RDWR)
        try:
            session = options.get("start_new_session", False)
            pid = self.run(command, options["env"], nothing, nothing, 2, options["pass_fds"], session=session)
        finally:
            os.close(nothing)
        return Warm(self, pid, None, None)

    def status(self, pid: int) -> int | None:
        """The exit status of the process; None while it runs."""
        with self._lock:
            while pid not in self._ended and select.select([self._sock], [], [], 0.0)[0]:
                self._take(json.loads(self._sock.recv(MESSAGE_MAX) or b'{"failed": "the nursery is gone"}'))
            return self._ended.get(pid)

    def _take(self, told: dict[str, Any]) -> None:
        if "failed" in told:
            raise RuntimeError(told["failed"])
        self._ended[told["ended"]] = told["status"]


def _dead(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def member(nursery: Nursery, command: Sequence[str], environment: Mapping[str, str], stderr: int, on: str = "") -> Warm:
    """A process of a swarm, with pipes of text as its stdin and stdout. `on`: its network namespace."""
    (theirs_in, ours_in), (ours_out, theirs_out) = os.pipe(), os.pipe()
    try:
        peer = command[1] != "-m"
        pid = nursery.run(command, environment, theirs_in, theirs_out, stderr, peer=peer, machine=on)
    finally:
        os.close(theirs_in)
        os.close(theirs_out)
    nursery.started.append(Warm(nursery, pid, os.fdopen(ours_in, "w"), os.fdopen(ours_out)))
    return nursery.started[-1]


def serve(sock: socket.socket) -> dict[str, Any]:
    """Fork on request, and report ended children. Returns in each child, with the command to run."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    running: set[int] = set()
    while True:
        ready, _, _ = select.select([sock, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            for pid, status in _ended():
                if pid in running:
                    running.discard(pid)
                    with contextlib.suppress(OSError):
                        sock.send(json.dumps({"ended": pid, "status": os.waitstatus_to_exitcode(status)}).encode())
        if sock in ready:
            message, fds, _, _ = socket.recv_fds(sock, MESSAGE_MAX, 64)
            if not message:
                os._exit(0)
            asked = json.loads(message)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                sock.close()
                os.close(woken)
                os.close(wake)
                _become(asked, fds)
                return asked
            for fd in fds:
                os.close(fd)
            running.add(pid)
            sock.send(json.dumps({"started": pid}).encode())


def _ended() -> Iterator[tuple[int, int]]:
    """Children that have ended, orphans included: process id and status."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def _become(asked: dict[str, Any], fds: Sequence[int]) -> None:
    """Take over the descriptors, by their numbers, and the environment."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, HIGH_FD) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(high, asked["fds"], strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    if asked["session"]:
        os.setsid()
    if asked["machine"]:
        space = os.open(f"/run/netns/{asked['machine']}", os.O_RDONLY)
        assert ctypes.CDLL(None).setns(space, CLONE_NEWNET) == 0
        os.close(space)


def _with_a_nursery() -> dict[str, Any] | None:
    """Fork the nursery of this process. In a child of that nursery it returns the command to run."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        ours.close()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        for fd in (0, 1):  # readers of its stdout must not wait for us
            os.dup2(os.open(os.devnull, os.O_RDWR), fd)
        return serve(theirs)
    theirs.close()
    nursery = Nursery(ours, pid)
    subprocess.Popen = nursery.popen  # type: ignore[assignment, misc]
    return None


def main() -> None:
    """Load the libraries, serve, and in a child run the requested command as the main program."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    import torch

    import p2p_diloco.cli.app
    import p2p_diloco.node.participation
    import p2p_diloco.peer.peer  # noqa: F401

    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])  # the first optimizer loads another second's worth of modules
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose threads"
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    gc.freeze()
    asked = serve(sock)
    if asked["peer"]:
        asked = _with_a_nursery() or asked
    if asked["argv"][0] == "-m":
        sys.argv = asked["argv"][1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = asked["argv"]
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
