"""Checks the programs on this machine: the versions of the packages, and p2pd.

Law: reads the packages' metadata and starts p2pd for a moment; imports none of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import platform
import re
import sys
from importlib import metadata
from pathlib import Path

from p2p_diloco import __version__
from p2p_diloco.cli.doctor.report import Finding
from p2p_diloco.errors import P2PDilocoError, reason
from p2p_diloco.net.stale_sockets import FOLDER, check_writable

PACKAGE = "p2p-diloco"
SHOWN = ("torch", "hivemind")
START_S = 5.0
"""How long p2pd may take to print its flags."""
_PINNED = re.compile(r"([A-Za-z0-9_.-]+)==([^\s;]+)")
_REINSTALL = "install it again: pip install --force-reinstall {}"


def versions() -> Finding:
    """The versions of this package, Python, torch and Hivemind, as a finding. It is bad if torch or Hivemind is
    missing, or if the versions don't fit together."""
    installed = {name: version_of(name) for name in SHOWN}
    told = [f"p2p_diloco {__version__}", f"Python {platform.python_version()}"]
    text = ", ".join(told + [f"{name} {version or 'is missing'}" for name, version in installed.items()])
    if None in installed.values():
        return Finding("versions", "bad", text, f"pip install {PACKAGE}")
    if not (3, 10) <= sys.version_info < (3, 15):
        return Finding("versions", "bad", text, "use Python 3.10 to 3.14")
    for name, version in _pins().items():
        if installed.get(name, version) != version:
            mend = f"pip install {name}=={version}"
            return Finding("versions", "bad", f"{text}: this version of p2p_diloco needs {name} {version}", mend)
    return Finding("versions", "ok", text)


def version_of(package: str) -> str | None:
    """The installed version of a package; None if it isn't installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _pins() -> dict[str, str]:
    """The packages that this package needs in one exact version: name -> version. Empty if this package isn't
    installed."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        needed = (_PINNED.match(line) for line in metadata.requires(PACKAGE) or ())
        return {found[1]: found[2] for found in needed if found is not None}
    return {}


def p2pd_path() -> Path | None:
    """The place of p2pd in the installed Hivemind. None if Hivemind isn't installed."""
    spec = importlib.util.find_spec("hivemind")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(folders[0]) / "hivemind_cli" / "p2pd" if folders else None


def digest_of(file: Path) -> str:
    """The first hex digits of a file's SHA-256. They identify a build of p2pd, which prints no version."""
    with contextlib.suppress(OSError):
        return hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    return "unreadable"


async def p2pd(path: Path | None) -> Finding:
    """Check whether p2pd, libp2p's daemon, is installed and can be started."""
    if path is None:
        return Finding("p2pd", "bad", "it is missing, because Hivemind is", "pip install hivemind")
    try:
        process = await asyncio.create_subprocess_exec(
            str(path), "-help", stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
        )
    except OSError as error:
        return _does_not_start(path, error)
    try:
        _, said = await asyncio.wait_for(process.communicate(), START_S)
    except asyncio.TimeoutError:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            process.kill()
        await process.wait()
        mend = "check whether this machine is overloaded, or a virus scanner blocks p2pd"
        return Finding("p2pd", "bad", f"{path} doesn't print its flags within {START_S:g} s", mend)
    if b"-hostAddrs" in said:
        return Finding("p2pd", "ok", f"{path} runs")
    last = said.decode(errors="replace").strip().splitlines()[-1:] or [f"status {process.returncode}"]
    return Finding("p2pd", "bad", f"{path} ends at once: {last[0]}", _REINSTALL.format("hivemind"))


def sockets(folder: Path = FOLDER) -> list[Finding]:
    """What keeps p2pd from making its sockets; nothing if it can."""
    try:
        check_writable(folder)
    except P2PDilocoError as error:
        return [Finding("p2pd", "bad", error.wrong, error.mend)]
    return []


def _does_not_start(path: Path, error: OSError) -> Finding:
    text = f"{path} can't be started: {reason(error)}"
    if isinstance(error, FileNotFoundError):
        return Finding("p2pd", "bad", text, _REINSTALL.format("hivemind"))
    if isinstance(error, PermissionError):
        mend = f"chmod +x {path}; if its disk is mounted with noexec, install into a folder on another disk"
        return Finding("p2pd", "bad", text, mend)
    mend = (
        f"install Hivemind's build for this processor ({platform.machine()}): pip install --no-binary hivemind hivemind"
    )
    return Finding("p2pd", "bad", text, mend)
