"""Keeps addresses of a run's peers on disk. They are used at a later start, if no initial peer answers then.

Law: the file is only an aid. If it can't be read or written, nothing is remembered, and no error is raised. An address
leads only a peer that names the same initial peer again: the name of an open run says nothing of the swarm, and another
swarm may have a run of the same name.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from p2p_diloco.addresses import check_peer_address, peer_of
from p2p_diloco.errors import AddressError

KEPT = 32
"""The most addresses that are kept for one initial peer."""
INITIAL_PEERS_KEPT = 16
"""The most initial peers for which addresses are kept."""
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


def remember(run_id: str, initial_peers: Iterable[str], addresses: Iterable[str]) -> None:
    """Add addresses to the run's file, which were met by way of these initial peers. For each initial peer only the
    `KEPT` addresses that were added last stay in the file."""
    now = time.time()
    kept, met = _read(run_id), dict.fromkeys(addresses, now)
    kept |= {peer: _newest({**kept.get(peer, {}), **met}) for peer in map(peer_of, initial_peers)}
    latest = sorted(kept, key=lambda peer: (-max(kept[peer].values(), default=0.0), peer))[:INITIAL_PEERS_KEPT]
    try:
        path = file_of(run_id)
        part = path.with_suffix(f".{os.getpid()}.part")
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "w", opener=_for_its_owner) as file:
            file.write(json.dumps({peer: kept[peer] for peer in latest}))
        part.replace(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home folder
        log.debug("the peers' addresses can't be written to disk: %s", error)


def met_through(initial_peers: Sequence[str], own_id: str) -> Sequence[str]:
    """The addresses that say which swarm a peer is in: its initial peers', or its own if it has none."""
    return initial_peers or (f"/p2p/{own_id}",)


def remembered(run_id: str, initial_peers: Sequence[str]) -> list[str]:
    """The run's addresses that were met by way of one of these initial peers in the last seven days, newest first. The
    initial peers' own addresses are left out."""
    kept, since = _read(run_id), time.time() - KEPT_FOR_S
    known: dict[str, float] = {}
    for peer in map(peer_of, initial_peers):
        for address, when in kept.get(peer, {}).items():
            known[address] = max(when, known.get(address, when))
    return [address for address in _newest(known) if known[address] > since and address not in initial_peers]


def _for_its_owner(path: str, flags: int) -> int:
    """Open a file that other users can't read: it tells where the peers of a private run are."""
    return os.open(path, flags, 0o600)


def _newest(known: dict[str, float]) -> dict[str, float]:
    """The `KEPT` addresses that were added last, newest first."""
    return {address: known[address] for address in sorted(known, key=lambda a: (-known[a], a))[:KEPT]}


def _read(run_id: str) -> dict[str, dict[str, float]]:
    """The file: initial peer's id -> address -> when it was added last. What can't be read is left out."""
    try:
        found = json.loads(file_of(run_id).read_text(), parse_int=float)  # a whole number may be too great for a float
    except (OSError, ValueError, RuntimeError):  # a RecursionError is a RuntimeError
        return {}
    if not isinstance(found, dict):
        return {}
    return {
        peer: {a: when for a, when in met.items() if isinstance(when, float) and _can_be_dialled(a)}
        for peer, met in found.items()
        if isinstance(met, dict)
    }


def _can_be_dialled(address: str) -> bool:
    try:
        check_peer_address(address)
    except AddressError:
        return False
    return True
