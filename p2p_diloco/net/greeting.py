"""Checks by a plain TCP connection whether a libp2p listener answers at an address.

Law: makes one connection, for a few seconds at most, and needs neither Hivemind nor the daemon.
"""

from __future__ import annotations

import asyncio
import errno
import socket

from p2p_diloco.errors import reason

GREETING = b"\x13/multistream/1.0.0\n"
"""The first bytes that a libp2p listener sends over TCP."""

_UNREACHED = {errno.EHOSTUNREACH: "no route to that machine", errno.ENETUNREACH: "no route to that network"}
"""The words for those errors of a dial for which asyncio has no text; `net.reasons` uses the same words."""


async def no_answer(host: str, port: int, within_s: float) -> str | None:
    """Check whether a libp2p listener answers at an address; returns None if it does, else the reason why not."""
    try:
        return await asyncio.wait_for(_greeted(host, port, within_s), within_s)
    except asyncio.TimeoutError:
        return f"timed out after {within_s:g} s: a firewall, or no such machine"
    except ConnectionRefusedError:
        return "connection refused: nothing listens there"
    except socket.gaierror:
        return "no machine of that name"
    except OSError as error:
        return _UNREACHED.get(error.errno or 0) or reason(error)


async def _greeted(host: str, port: int, within_s: float) -> str | None:
    """Connect by TCP and read the greeting of a libp2p listener; returns None if the greeting is right, else what is
    wrong."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        said = await asyncio.wait_for(reader.read(len(GREETING)), within_s / 2)
    except asyncio.TimeoutError:
        return "something listens there but sends nothing: no p2p-diloco, or one that hangs"
    finally:
        writer.close()
    return None if said and GREETING.startswith(said) else "something else answers there, no p2p-diloco"
