"""Checks the initial peers with plain sockets: which of them answer, why the others don't, and what mends that.

Law: one attempt for each address; Hivemind isn't loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from p2p_diloco.addresses import host, is_loopback, port_of, without_peer
from p2p_diloco.cli.doctor.report import Finding, Verdict
from p2p_diloco.cli.reach import reasons

NAME = "initial peer"
_MENDS = {
    "connection refused": "start the bootstrap there: `p2p-diloco bootstrap {open}--port {port}`; if it runs, it has "
    "another port or listens on loopback alone: take the address from the join line that it prints",
    "timed out": "check that {host} is up and is the right address; then open TCP port {port} in its firewall, and "
    "forward it if a router is in front of it",
    "no machine of that name": "correct the name; if `getent hosts {host}` fails too, repair this machine's DNS "
    "(/etc/resolv.conf), or give the address with the number, /ip4/...",
    "another peer answers there: its id is ": "the bootstrap has a new identity: use {place}/p2p/{told}, and start the "
    "bootstrap with --identity-path so that the identity stays",
    "something listens there but sends nothing": "start the bootstrap again; if a router forwards port {port}, check "
    "to which machine",
    "it takes connections but doesn't answer": "start the bootstrap again; if that doesn't help, end other programs on "
    "its machine",
    "something else answers there": "another program has port {port} of {host}: take the address from the "
    "bootstrap's join line",
    "connection closed at once": "start the bootstrap again, and take the address from its join line",
    "no route to": "check this machine's network: `ip route get {host}`; if it shows a route, {host} is off, or its "
    "firewall rejects port {port}",
}
"""Beginning of the reason why a peer doesn't answer -> the advice."""
_ANY = "take the address from the bootstrap's join line"


async def answering(addresses: Sequence[str]) -> tuple[list[str], list[Finding]]:
    """Try all addresses. Returns the addresses at which a peer may answer, and a finding for each of the other
    addresses."""
    if not addresses:
        mend = "add --initial-peers and the address from the bootstrap's join line"
        text = "none is given, so nothing outside of this machine was checked"
        return [], [Finding(NAME, "warn", text, mend)]
    found = dict(zip(addresses, await reasons(addresses), strict=True))
    return [address for address, why in found.items() if why is None], unanswered(found)


def unanswered(found: Mapping[str, str | None]) -> list[Finding]:
    """A finding for each address that doesn't answer. If another address answers, the finding is only a warning,
    because one initial peer is enough."""
    verdict: Verdict = "warn" if None in found.values() else "bad"
    return [
        Finding(NAME, verdict, f"{address}: {why}", mend(address, why))
        for address, why in found.items()
        if why is not None
    ]


def mend(address: str, why: str) -> str:
    """The advice for an initial peer that can't be reached for the reason `why`."""
    for beginning, text in _MENDS.items():
        if why.startswith(beginning):
            words = why.removeprefix(beginning).split()
            return text.format(
                host=host(address),
                port=port_of(address),
                place=without_peer(address),
                told=words[0] if words else "",
                open="" if is_loopback(address) else "--host 0.0.0.0 ",
            )
    return _ANY
