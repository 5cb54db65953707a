"""`env`: describes this machine for a bug report, as plain text.

Law: only reads, and runs nvidia-smi for at most `GPU_S` seconds. Values of variables that may be secret are left out.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from p2p_diloco import __version__
from p2p_diloco.cli.doctor.machine import free_memory
from p2p_diloco.cli.doctor.programs import digest_of, p2pd_path, version_of
from p2p_diloco.observe.figures import bytes_of
from p2p_diloco.settings import PREFIX

PACKAGES = (
    "torch", "hivemind", "multiaddr", "msgpack", "cryptography", "uvloop", "numpy", "pydantic", "safetensors", "typer",
    "rich", "psutil", "xxhash",
)  # fmt: skip
VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "NO_COLOR", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "XDG_CACHE_HOME",
    "XDG_STATE_HOME",
)  # fmt: skip
"""Environment variables that are shown in addition to those that begin with `PREFIX`."""
GPU_S = 5.0
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|(?<![A-Z])KEY|AUTH|INVITE|ENDPOINT", re.IGNORECASE)
_GPU = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")


def lines() -> Iterator[str]:
    """The lines that `env` prints. The user's home folder is written ~, so that the user's name isn't shown."""
    home = os.path.expanduser("~")
    for line in _lines():
        yield line.replace(f"{home}/", "~/") if len(home) > 1 else line


def _lines() -> Iterator[str]:
    yield f"p2p_diloco: {__version__}"
    yield f"python: {platform.python_implementation()} {platform.python_version()} ({sys.executable})"
    yield from (f"{package}: {version_of(package) or 'not installed'}" for package in PACKAGES)
    path = p2pd_path()
    yield f"p2pd: {'not there' if path is None else f'{path} (sha256 {digest_of(path)}...)'}"
    yield f"system: {platform.platform()}"
    yield f"processor: {_processor()}, {os.cpu_count()} cores"
    yield f"memory: {bytes_of(psutil.virtual_memory().total, ' ')}, {bytes_of(free_memory(), ' ')} free"
    yield f"GPU: {_gpu()}"
    yield f"open files: {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} at most"
    yield from variables(os.environ)


def variables(environment: Mapping[str, str]) -> Iterator[str]:
    """The environment variables that concern a peer. Values that may be secret are left out."""
    for name in sorted(environment):
        if name.startswith(PREFIX) or name in VARIABLES:
            yield f"{name}={'(left out)' if _SECRET.search(name) else environment[name]}"


def _processor() -> str:
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found is not None:
            return f"{found[1]} ({platform.machine()})"
    return platform.processor() or platform.machine()


def _gpu() -> str:
    try:
        told = subprocess.run(_GPU, capture_output=True, text=True, timeout=GPU_S, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "none that nvidia-smi shows"
    return "; ".join(told.splitlines()) or "none that nvidia-smi shows"
