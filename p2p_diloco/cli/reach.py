"""Checks before anything heavy is loaded: is a port free, does a peer answer at an address.

Law: plain sockets, a few seconds at most. libp2p would find the same errors later, so an address that can't be checked
this way passes.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Sequence

from p2p_diloco.cli.loop import run
from p2p_diloco.errors import ConfigError, reason
from p2p_diloco.net.reasons import none_reached

PROBE_S = 5.0
"""How long an initial peer may take to answer."""

_REFUSED = "connection refused: nothing listens there"
_UNKNOWN_NAME = "no machine of that name"
_TIMED_OUT = f"timed out after {PROBE_S:g} s: a firewall, or no such machine"
_MUTE = "something listens there and says nothing: no p2p-diloco, or one that hangs"
_FOREIGN = "something else answers there, no p2p-diloco"

_GREETING = b"\x13/multistream/1.0.0\n"  # what a listener of libp2p says first over TCP


def check_initial_peers(addresses: Sequence[str], known: Sequence[str] = ()) -> None:
    """Raise NoBootstrapReached if no peer answers at any of the addresses, nor at any that is `known` from before.

    Only addresses of plain TCP are tried; the others count as answered.
    """
    reasons = run(_reasons(addresses))
    if addresses and all(reasons) and all(run(_reasons(known))):
        raise none_reached(dict(zip(addresses, reasons, strict=True)))


def check_free(address: str, *, key: str | None = None) -> None:
    """Raise ConfigError if this process can't listen on an address (TCP alone).

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
    """What is wrong, what to do, and whether the host is wrong and not the port."""
    match error.errno:
        case errno.EADDRINUSE:
            return "is in use", "choose another port, or port 0 to let the system choose", False
        case errno.EADDRNOTAVAIL:
            return "is no address of this machine", "give one of its addresses, or 0.0.0.0 for all of them", True
        case errno.EACCES:
            return "needs an administrator", "choose a port from 1024 on", False
        case _:
            return f"can't be listened on ({reason(error)})", "choose another address or port", False


async def _reasons(addresses: Sequence[str]) -> list[str | None]:
    return list(await asyncio.gather(*(_reason(address) for address in addresses)))


async def _reason(address: str) -> str | None:
    """Why no peer can be there; None if one may be."""
    match address.rstrip("/").split("/"):
        case ["", "ip4" | "ip6" | "dns" | "dns4" | "dns6", host, "tcp", port, "p2p", _]:
            asking = _greeted(host, int(port))
        case _:
            return None
    try:
        return await asyncio.wait_for(asking, PROBE_S)
    except asyncio.TimeoutError:
        return _TIMED_OUT
    except ConnectionRefusedError:
        return _REFUSED
    except socket.gaierror:
        return _UNKNOWN_NAME
    except OSError as error:
        return reason(error)


async def _greeted(host: str, port: int) -> str | None:
    """What is wrong with the listener there by TCP, or None."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        said = await asyncio.wait_for(reader.read(len(_GREETING)), PROBE_S / 2)
    except asyncio.TimeoutError:
        return _MUTE
    finally:
        writer.close()
    return None if said and _GREETING.startswith(said) else _FOREIGN
