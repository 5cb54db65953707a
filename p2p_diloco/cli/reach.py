"""Sockets tried before anything heavy is loaded: is a port free, does anybody listen there.

Law: plain sockets, a few seconds at most, and nothing is sent. What is found out here would be found out
later, by libp2p; so an address that can't be judged this way is left to it. """

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Sequence

from p2p_diloco.errors import ConfigError
from p2p_diloco.net.reasons import none_reached

PROBE_S = 3.0
"""How long an initial peer may take to accept a connection, before it is left to libp2p's greater
patience."""

_REFUSED = "connection refused: nothing listens there"
_UNKNOWN_NAME = "no machine of that name"


def check_initial_peers(addresses: Sequence[str], known: Sequence[str] = ()) -> None:
    """Raise NoBootstrapReached if it is plain that none of the addresses leads anywhere, nor any that is `known`
    from before.

    An address that is slow, or not TCP, gets the benefit of the doubt.
    """
    reasons = asyncio.run(_reasons(addresses))
    if addresses and all(reasons) and all(asyncio.run(_reasons(known))):
        raise none_reached(dict(zip(addresses, reasons, strict=True)))


def check_free(address: str, *, key: str | None = None) -> None:
    """Raise ConfigError if an address of this machine that is to be listened on can't be had (TCP alone).

    `key` is the setting that the address came from; None: `--host` and `--port`.
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
            wrong, mend, of_host = _not_free(error)
            if key is not None:
                raise ConfigError(wrong, key=key, value=address, mend=mend) from None
            flag, value = ("--host", host) if of_host else ("--port", port)
            raise ConfigError(wrong, key=flag, value=value, mend=mend) from None


def _not_free(error: OSError) -> tuple[str, str, bool]:
    """What is wrong, what to do, and whether it is the host's fault and not the port's."""
    match error.errno:
        case errno.EADDRINUSE:
            return "is in use", "choose another port, or port 0 to let the system choose", False
        case errno.EADDRNOTAVAIL:
            return "is no address of this machine", "give one of its addresses, or 0.0.0.0 for all of them", True
        case errno.EACCES:
            return "needs an administrator", "choose a port from 1024 on", False
        case _:
            reason = (error.strerror or str(error)).lower()
            return f"can't be listened on ({reason})", "choose another address or port", False


async def _reasons(addresses: Sequence[str]) -> list[str | None]:
    return list(await asyncio.gather(*(_reason(address) for address in addresses)))


async def _reason(address: str) -> str | None:
    """Why nobody can be there; None if somebody may be."""
    match address.split("/"):
        case ["", "ip4" | "ip6" | "dns" | "dns4" | "dns6", host, "tcp", port, *_]:
            try:
                _, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), PROBE_S)
            except ConnectionRefusedError:
                return _REFUSED
            except socket.gaierror:
                return _UNKNOWN_NAME
            except (OSError, asyncio.TimeoutError):
                return None
            writer.close()
    return None
