"""Keeps addresses of a run's peers on disk. They are used at a later start, if no initial peer answers then.

Law: the file is only an aid. If it can't be read or written, nothing is remembered, and no error is raised.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from p2p_diloco.addresses import check_peer_address
from p2p_diloco.errors import AddressError

KEPT = 32
KEPT_FOR_S = 7 * 86400.0

log = logging.getLogger(__name__)


def file_of(run_id: str) -> Path:
    """The file with the addresses of a run."""
    return state_folder() / f"{run_id}.addresses.json"


def state_folder() -> Path:
    """The folder for what outlives a peer's process, below ``$XDG_STATE_HOME`` or ``~/.local/state``.

    Raises:
        RuntimeError: this user has no home folder.
    """
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "p2p_diloco"


def cache_folder() -> Path:
    """The folder for what can be fetched again, below ``$XDG_CACHE_HOME`` or ``~/.cache``.

    Raises:
        RuntimeError: this user has no home folder.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "p2p_diloco"


def remember(run_id: str, addresses: Iterable[str]) -> None:
    """Add addresses to the run's file. Only the `KEPT` addresses that were added last stay in the file."""
    now = time.time()
    known = {**_read(run_id), **dict.fromkeys(addresses, now)}
    newest = sorted(known, key=lambda address: (-known[address], address))[:KEPT]
    try:
        path = file_of(run_id)
        part = path.with_suffix(f".{os.getpid()}.part")
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({address: known[address] for address in newest}))
        part.replace(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home folder
        log.debug("the peers' addresses can't be written to disk: %s", error)


def remembered(run_id: str, but: Sequence[str] = ()) -> list[str]:
    """The run's addresses that were added in the last seven days, newest first. Addresses in `but` are left out."""
    known = _read(run_id)
    recent = [address for address, when in known.items() if time.time() - when < KEPT_FOR_S and address not in but]
    return sorted(recent, key=lambda address: (-known[address], address))


def _read(run_id: str) -> dict[str, float]:
    try:
        found = json.loads(file_of(run_id).read_text())
    except (OSError, ValueError, RuntimeError):  # a RecursionError is a RuntimeError
        return {}
    if not isinstance(found, dict):
        return {}
    return {a: float(when) for a, when in found.items() if isinstance(when, (int, float)) and _can_be_dialled(a)}


def _can_be_dialled(address: str) -> bool:
    try:
        check_peer_address(address)
    except AddressError:
        return False
    return True
