"""Says in words for users why a peer isn't reached: what the libp2p daemon's errors mean, and what a plain TCP
connection to an address finds there.

Law: needs neither Hivemind nor the daemon. go-libp2p's messages carry no codes, so they are searched for known phrases.
"""

from __future__ import annotations

import asyncio
import errno
import re
import socket
from collections.abc import Mapping

from p2p_diloco.errors import NoBootstrapReached, reason

_TIMED_OUT = "timed out: a firewall, or no such machine"
_UNKNOWN = "its address isn't known"
_CLOSED = "connection closed at once: the process there is just ending, or is no p2p-diloco"
_MEANINGS = {
    "connection refused": "connection refused: nothing listens there",
    "protocols not supported": "it isn't in this run, or speaks another version",
    "i/o timeout": _TIMED_OUT,
    "deadline exceeded": _TIMED_OUT,
    "no route to host": "no route to that machine",
    "network is unreachable": "no route to that network",
    "no such host": "no machine of that name",
    "dial backoff": "couldn't be dialled a moment ago",
    "routing: not found": _UNKNOWN,
    "no addresses": _UNKNOWN,
    "connection reset by peer": _CLOSED,
    "security protocol: EOF": _CLOSED,
    "negotiate security protocol": "something else answers there, no p2p-diloco",  # last: every other phrase says more
}
"""Phrase -> meaning. The first phrase found in a message decides."""

_REFUSED = ("connection refused", "connection reset by peer", "broken pipe", "security protocol: EOF")
_INCONCLUSIVE = ("dial backoff", "connection failed")


def another_answers(error: Exception) -> str | None:
    """The id of the peer that answered where another one was dialled; None if a dial failed for another reason."""
    found = re.search(r"but remote key matches (\w+)", str(error))
    return None if found is None else found[1]


def likely_reason(error: Exception) -> str:
    """Name the most likely reason for a failed dial, in words for users."""
    text = str(error)
    if (other := another_answers(error)) is not None:
        return f"another peer answers there: its id is {other}"
    return next((meaning for sign, meaning in _MEANINGS.items() if sign in text), last_line(error))


def dial_refused(error: Exception) -> bool:
    """Whether a failed dial was refused at every address. Then the machine answers, but no process listens there.

    A connection that was reset before the end of the handshake counts as refused, too: a process that is being killed
    still accepts connections.
    """
    text = str(error)
    failures = [line for line in text.splitlines() if line.strip().startswith("*")] or [text]
    return all(any(sign in failure for sign in _REFUSED) for failure in failures)


def dial_inconclusive(error: Exception) -> bool:
    """Whether the error of a failed dial tells nothing about the peer: either the daemon didn't dial at all, as in the
    5 s after any failed dial ("backoff"), or the connection was made and then lost, as happens while a process is being
    killed."""
    return any(sign in str(error) for sign in _INCONCLUSIVE)


def last_line(error: Exception) -> str:
    """The last line of an error of the daemon. That line names the cause."""
    lines = str(error).strip().splitlines() or [repr(error)]
    return lines[-1].removeprefix("Connect failed. msg=").strip(" *")


def none_reached(reasons: Mapping[str, str | None]) -> NoBootstrapReached:
    """Make the error that says that no initial peer was reached at the start, with the reason for each address."""
    told = ", ".join(f"{address} ({reason})" for address, reason in reasons.items())
    mend = "look whether a bootstrap runs there, and take the address from its join line, or any peer's from its log"
    return NoBootstrapReached(f"can't be reached: {told}", key="initial_peers", mend=mend)


GREETING = b"\x13/multistream/1.0.0\n"
"""The first bytes that a libp2p listener sends over TCP."""

_UNREACHED = {errno.EHOSTUNREACH: "no route to host", errno.ENETUNREACH: "network is unreachable"}
"""The phrases for those errors of a dial for which asyncio has no text."""


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
        return _MEANINGS.get(_UNREACHED.get(error.errno or 0, "")) or reason(error)


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
