"""Checks this machine: its packages and p2pd, memory, disk and ports. Describes it for a bug report (`env`).

Law: looks, starts p2pd and nvidia-smi for a moment, and leaves no file behind; no other machine is asked.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from ipaddress import ip_address
from pathlib import Path
from tempfile import TemporaryFile

import psutil

from p2p_diloco import __version__
from p2p_diloco.addresses import host, port_of
from p2p_diloco.cli.doctor.report import Found, Seen
from p2p_diloco.cli.reach import check_free
from p2p_diloco.config import PeerConfig
from p2p_diloco.errors import ConfigError, P2PDilocoError, reason
from p2p_diloco.net.reach import listens_at
from p2p_diloco.net.stale_sockets import FOLDER, check_writable
from p2p_diloco.observe.figures import bytes_of
from p2p_diloco.planning.forecast import NODE_BYTES, per_parameter
from p2p_diloco.settings import PREFIX, flag

PACKAGE = "p2p-diloco"
START_S = 5.0
"""How long p2pd may take to print its flags, and nvidia-smi its answer."""
SAVED_PER_PARAMETER = 16
"""Bytes of a checkpoint for each parameter: 4 each for the global value, the outer momentum and AdamW's two moments."""
ROOM_BYTES = 1_000_000_000
"""If the model's size is unknown, less free disk space than this for its checkpoints is a warning."""
USUAL_PORT = 31338
"""The port in a suggested command, where the settings name none."""
PACKAGES = (
    "torch", "hivemind", "multiaddr", "msgpack", "cryptography", "uvloop", "numpy", "pydantic", "safetensors", "typer",
    "rich", "psutil", "xxhash",
)  # fmt: skip
VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "NO_COLOR", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "XDG_CACHE_HOME",
    "XDG_STATE_HOME",
)  # fmt: skip
"""Environment variables that `env` shows in addition to those that begin with `PREFIX`."""
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|(?<![A-Z])KEY|AUTH|INVITE|ENDPOINT", re.IGNORECASE)
_PINNED = re.compile(r"([A-Za-z0-9_.-]+)==([^\s;]+)")
_GPU = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")


# -- the invitation


def invitation(seen: Seen) -> Iterator[Found]:
    """Whether the invitation to a private run is still valid. Whoever has the run key needs none."""
    if seen.peer.invite is None:
        return
    from p2p_diloco.net.invited import key_of, read_invitation

    invited = read_invitation(seen.peer)
    left_s = invited.grant.expires - time.time()
    if left_s <= 0 and key_of(seen.peer, invited) is None:
        yield Found("bad", f"of {invited.grant.name}: has expired", "ask for a new invitation")
    else:
        left = f"valid for {left_s / 86_400:.1f} more days" if left_s > 0 else "replaced by the run key"
        yield Found("ok", f"of {invited.grant.name}, for the role {invited.grant.role}, {left}")


# -- programs


def versions(_: Seen) -> Iterator[Found]:
    """The versions of this package, Python, torch and Hivemind. It is bad if torch or Hivemind is missing, or if the
    versions don't fit together."""
    installed = {name: version_of(name) for name in ("torch", "hivemind")}
    told = [f"p2p_diloco {__version__}", f"Python {platform.python_version()}"]
    text = ", ".join(told + [f"{name} {version or 'is missing'}" for name, version in installed.items()])
    needed: list[str] = []  # empty if this package isn't installed
    with contextlib.suppress(metadata.PackageNotFoundError):
        needed = metadata.requires(PACKAGE) or []
    pins = [found.groups() for found in map(_PINNED.match, needed) if found is not None]
    other = [pin for pin in pins if installed.get(pin[0], pin[1]) != pin[1]]
    if None in installed.values():
        yield Found("bad", text, f"pip install {PACKAGE}")
    elif not (3, 10) <= sys.version_info < (3, 16):
        yield Found("bad", text, "use Python 3.10 to 3.15")
    elif other:
        name, version = other[0]
        needs = f"{text}: this version of p2p_diloco needs {name} {version}"
        yield Found("bad", needs, f"pip install {name}=={version}")
    else:
        yield Found("ok", text)


def version_of(package: str) -> str | None:
    """The installed version of a package; None if it isn't installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def p2pd_path() -> Path | None:
    """The place of p2pd in the installed Hivemind. None if Hivemind isn't installed."""
    spec = importlib.util.find_spec("hivemind")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(folders[0]) / "hivemind_cli" / "p2pd" if folders else None


def p2pd(_: Seen) -> Iterator[Found]:
    """Whether p2pd, libp2p's daemon, is installed, can be started, and can make its sockets."""
    yield _starts(p2pd_path())
    try:
        check_writable(FOLDER)
    except P2PDilocoError as error:
        yield Found("bad", error.wrong, error.mend)


def _starts(path: Path | None) -> Found:
    reinstall = "install it again: pip install --force-reinstall hivemind"
    if path is None:
        return Found("bad", "it is missing, because Hivemind is", "pip install hivemind")
    try:
        ended = subprocess.run([path, "-help"], capture_output=True, timeout=START_S)
    except subprocess.TimeoutExpired:
        mend = "check whether this machine is overloaded, or a virus scanner blocks p2pd"
        return Found("bad", f"{path} doesn't print its flags within {START_S:g} s", mend)
    except OSError as error:
        build = f"install Hivemind's build for this processor ({platform.machine()}): pip install --no-binary hivemind "
        known = {FileNotFoundError: reinstall, PermissionError: f"chmod +x {path}, or install on a disk without noexec"}
        mend = known.get(type(error), f"{build}hivemind")
        return Found("bad", f"{path} can't be started: {reason(error)}", mend)
    if b"-hostAddrs" in ended.stderr:
        return Found("ok", f"{path} runs")
    last = ended.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"status {ended.returncode}"]
    return Found("bad", f"{path} ends at once: {last[0]}", reinstall)


# -- memory and disk


def memory(seen: Seen) -> Iterator[Found]:
    """Whether the free memory is enough for the model."""
    parameters, free_bytes = seen.parameters, free_memory()
    each = 0 if parameters is None else per_parameter(seen.run, parameters)
    needed, free = NODE_BYTES + each * (parameters or 0), f"{bytes_of(free_bytes, ' ')} free"
    text = f"{free}; --params N tells whether a model of N parameters fits"
    if parameters is not None:
        text = (
            f"{bytes_of(needed, ' ')} needed beside the model and its optimizer "
            f"({each} bytes for each of {parameters:,} parameters, and {bytes_of(NODE_BYTES, ' ')} for the node); "
            f"{free}"
        )
    if needed <= free_bytes:
        yield Found("ok", text)
    elif parameters is None:
        mend = "end other programs, or take a larger machine"
        yield Found("bad", f"{free}, and a node alone takes {bytes_of(NODE_BYTES, ' ')}", mend)
    else:
        yield Found("bad", text, "end other programs, train a smaller model, or take a larger machine")


def free_memory(cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """The bytes of memory that are free on this machine; in a container, what the container's limit leaves if less."""
    free = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no limit
        limit, used = (int((cgroups / name).read_text()) for name in ("memory.max", "memory.current"))
        free = min(free, max(0, limit - used))
    return free


def disk(seen: Seen) -> Iterator[Found]:
    """Whether this peer can write its checkpoints, and whether the disk has room for them."""
    folder, parameters = seen.peer.checkpoint_dir, seen.parameters
    if folder is None:
        yield Found("ok", "no checkpoints are kept (--checkpoint-dir is unset)")
        return
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    more = f"delete files on that disk (`df -h {there}`), or name a folder on another one with --checkpoint-dir"
    try:
        free_bytes = shutil.disk_usage(there).free
        _try_to_write(there)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            yield Found("bad", f"{folder}: the disk is full", more)
            return
        mend = f"let this user write to {there}, or name another folder with --checkpoint-dir"
        yield Found("bad", f"{folder} can't be written: {reason(error)}", mend)
        return
    text, copies = f"{folder}: {bytes_of(free_bytes, ' ')} free", seen.peer.keep + 1
    if parameters is None:
        yield Found("ok", text) if free_bytes >= ROOM_BYTES else Found("warn", text, more)
        return
    needed = copies * SAVED_PER_PARAMETER * parameters
    text += f", about {bytes_of(needed, ' ')} needed ({copies} checkpoints while one is written, with AdamW)"
    yield Found("ok", text) if needed <= free_bytes else Found("bad", text, more)


def _try_to_write(folder: Path) -> None:
    with TemporaryFile(dir=folder) as file:
        file.write(bytes(64 * 1024))
        file.flush()


# -- ports


def listening(peer: PeerConfig) -> tuple[tuple[str, ...], list[Found]]:
    """Try to listen at every address in the settings. Returns the multiaddrs that are free (none in client mode), and
    what was found: also whether `--announce-maddrs` fits to the settings."""
    if peer.client_mode:
        return (), [Found("ok", "client mode: this peer listens nowhere")]
    wished = tuple(listens_at(peer))
    troubles = {address: _trouble(address, flag("host_maddrs")) for address in wished}
    found = [each for each in troubles.values() if each is not None]
    if free := tuple(address for address, trouble in troubles.items() if trouble is None):
        shown = (address if port_of(address) else f"{address} (any free port)" for address in free)
        found.append(Found("ok", f"can listen on {' '.join(shown)}"))
    return free, [*found, *_direct_port(peer, wished), *_announced(peer, wished)]


def on_the_internet(place: str) -> bool:
    """Whether a host is public: an IP address that is valid on the whole internet, or any name but localhost."""
    try:
        return ip_address(place).is_global
    except ValueError:
        return place != "localhost"


def _trouble(address: str, key: str) -> Found | None:
    try:
        check_free(address, key=key)
    except ConfigError as error:
        mend = error.mend
        if "in use" in error.wrong:
            mend += f"; `ss -ltnp 'sport = :{port_of(address)}'` shows the program that has it"
        return Found("bad", f"{key} {error.value} {error.wrong}", mend)
    return None


def _direct_port(peer: PeerConfig, wished: Sequence[str]) -> Iterator[Found]:
    """What is wrong with the port for direct connections."""
    key, number = flag("direct_port"), peer.direct_port
    if not peer.direct or not number:
        return
    if number in map(port_of, wished):
        text = f"{key} {number} is the port of {flag('host_maddrs')} too"
        yield Found("bad", text, f"{key} {number + 1}")
        return
    version = {host(address): address.split("/")[1] for address in wished}
    found = (_trouble(f"/{version[place]}/{place}/tcp/{number}", key) for place in version)
    yield from (each for each in found if each is not None)


def _announced(peer: PeerConfig, wished: Sequence[str]) -> Iterator[Found]:
    """What is wrong with the announced addresses, as far as the settings alone can show."""
    key, announced = flag("announce_maddrs"), peer.announce_maddrs
    if announced and not any(map(port_of, wished)):
        text = f"{key} names a port, but the system chooses the port to listen on anew at each start"
        yield Found("bad", text, f"{flag('host_maddrs')} /ip4/0.0.0.0/tcp/{port_of(announced[0]) or USUAL_PORT}")
        return
    far = any(on_the_internet(host(address)) for address in peer.initial_peers)
    if announced and far and not any(on_the_internet(host(address)) for address in announced):
        text = (
            f"{key} {' '.join(announced)} is an address of a local network, and the initial peers are on the internet"
        )
        yield Found("warn", text, "announce the public address of this machine or of its router")


# -- env


def described() -> Iterator[str]:
    """The lines that `env` prints. The user's home folder is written ~, so that the user's name isn't shown."""
    home = os.path.expanduser("~")
    for line in _described():
        yield line.replace(f"{home}/", "~/") if len(home) > 1 else line


def _described() -> Iterator[str]:
    yield f"p2p_diloco: {__version__}"
    yield f"python: {platform.python_implementation()} {platform.python_version()} ({sys.executable})"
    yield from (f"{package}: {version_of(package) or 'not installed'}" for package in PACKAGES)
    path, digest = p2pd_path(), "unreadable"
    with contextlib.suppress(OSError):  # the digest identifies a build of p2pd, which prints no version
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path else ""
    yield f"p2pd: {'not there' if path is None else f'{path} (sha256 {digest}...)'}"
    yield f"system: {platform.platform()}"
    processor = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        processor = f"{found[1]} ({platform.machine()})" if found else processor
    yield f"processor: {processor}, {os.cpu_count()} cores"
    yield f"memory: {bytes_of(psutil.virtual_memory().total, ' ')}, {bytes_of(free_memory(), ' ')} free"
    gpu = ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        gpu = subprocess.run(_GPU, capture_output=True, text=True, timeout=START_S, check=True).stdout.strip()
    yield f"GPU: {'; '.join(gpu.splitlines()) or 'none that nvidia-smi shows'}"
    yield f"open files: {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} at most"
    yield from variables(os.environ)


def variables(environment: Mapping[str, str]) -> Iterator[str]:
    """The environment variables that concern a peer. Values that may be secret are left out."""
    for name in sorted(environment):
        if name.startswith(PREFIX) or name in VARIABLES:
            yield f"{name}={'(left out)' if _SECRET.search(name) else environment[name]}"
