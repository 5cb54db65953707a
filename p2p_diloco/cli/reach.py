"""Checks addresses before libp2p is loaded: whether a port is free, and whether a peer answers at an address.

Law: uses plain sockets, for a few seconds at most. An address that can't be checked this way passes, because libp2p
would find the same errors later.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Sequence

from p2p_diloco.errors import ConfigError, reason
from p2p_diloco.interrupts import run
from p2p_diloco.net.reasons import no_answer, none_reached

PROBE_S = 5.0
"""Deadline for an initial peer's answer."""

_NOT_FREE = {
    errno.EADDRINUSE: ("is in use", "choose another port, or port 0 to let the system choose"),
    errno.EADDRNOTAVAIL: ("is no address of this machine", "give one of its addresses, or 0.0.0.0 for all of them"),
    errno.EACCES: ("needs an administrator", "choose a port from 1024 on"),
}
"""System error when listening at an address -> what is wrong, and the mend."""


def check_initial_peers(addresses: Sequence[str], known: Sequence[str] = ()) -> None:
    """Raise NoBootstrapReached if no peer answers at any of the addresses, nor at any of the addresses `known` from an
    earlier start.

    Only addresses of plain TCP are tried; at any other address, a peer is assumed to answer. Without addresses nothing
    is checked.
    """
    found = run(reasons(addresses))
    if addresses and all(found) and all(run(reasons(known))):
        raise none_reached(dict(zip(addresses, found, strict=True)))


def check_free(address: str, *, key: str | None = None) -> None:
    """Raise ConfigError if this process can't listen on an address. Only TCP is checked.

    `key`: the setting that the error names; None: the error names `--host` or `--port`.
    """
    _, version, host, protocol, port, *_ = address.split("/")
    if protocol != "tcp":
        return
    family = socket.AF_INET if version == "ip4" else socket.AF_INET6
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            other = f"can't be listened on ({reason(error)})", "choose another address or port"
            wrong, mend = _NOT_FREE.get(error.errno or 0, other)
            if key is not None:
                raise ConfigError(wrong, key=key, value=address, mend=mend) from None
            flag, value = ("--host", host) if error.errno == errno.EADDRNOTAVAIL else ("--port", port)
            raise ConfigError(wrong, key=flag, value=value, mend=mend) from None


async def reasons(addresses: Sequence[str]) -> list[str | None]:
    """Check every address. Returns for each address the reason why no peer can be there, or None if a peer may be
    there."""
    return list(await asyncio.gather(*(_reason(address) for address in addresses)))


async def _reason(address: str) -> str | None:
    """Check one address. Returns the reason why no peer can be there, or None if a peer may be there."""
    match address.rstrip("/").split("/"):
        case ["", "ip4" | "ip6" | "dns" | "dns4" | "dns6", host, "tcp", port, "p2p", _]:
            return await no_answer(host, int(port), PROBE_S)
    return None
