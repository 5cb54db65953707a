"""Checks other peers over libp2p: their clocks, how long an answer takes, and whether large messages pass.

Law: `visit` asks one peer, in bounded time; the other functions judge what visits found, and are pure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from p2p_diloco.addresses import peer_of, without_peer
from p2p_diloco.cli.doctor.initial import unanswered
from p2p_diloco.cli.doctor.report import Finding
from p2p_diloco.net.interface import CLOCK_DIFFERENCE_S_MAX, Unreachable

if TYPE_CHECKING:
    from p2p_diloco.net.daemon import Daemon

SMALL_S, MIDDLE_S, LARGE_S = 2.0, 3.0, 4.0
"""Deadlines for an answer: to a question of a few bytes, to one of 16 KiB, and to one of `LARGE_BYTES` or more."""
TRIES = 3
"""How often a small question is asked; the shortest time counts."""
MIDDLE_BYTES, LARGE_BYTES, HUGE_BYTES = 16 << 10, 256 << 10, 2 << 20
QUICK_S = 0.5
"""If `LARGE_BYTES` take no longer than this, `HUGE_BYTES` are sent too, which measures a fast link better."""
CLOCK_WARN_S = 1.0
"""Clocks that differ by more than this are a warning; by more than `CLOCK_DIFFERENCE_S_MAX`, the peer can't join."""
_HANGS = "it takes connections but doesn't answer: its process hangs, or its machine is overloaded"
_NOT_HIVEMIND = "something else answers there, not Hivemind's DHT"


@dataclass(frozen=True, slots=True)
class Visit:
    """The result of visiting one peer. `unreached`: why the peer can't be reached; the other values are then unknown.
    `rtt_s`: seconds until a small question was answered; `clock_ahead_s`: seconds by which the peer's clock is ahead of
    this machine's."""

    address: str
    unreached: str | None = None
    rtt_s: float | None = None
    clock_ahead_s: float | None = None
    trouble: Literal["stalls", "slow"] | None = None
    """stalls: not even 16 KiB pass; slow: these pass, but `LARGE_BYTES` take longer than `LARGE_S`."""
    rate: float | None = None
    """Bytes a second to the peer; None if they were not measured."""


async def visit(daemon: Daemon, address: str, one_at_a_time: asyncio.Lock) -> Visit:
    """Ask the peer at `address`, a multiaddr with its peer id, several questions. Large questions wait for the lock, so
    that no two of them share this machine's link."""
    from p2p_diloco.net.probing import NO_ANSWER, ask

    if (why := await daemon.greet(address)) is not None:
        return Visit(address, why)
    peer = peer_of(address)
    try:
        quickest = min([await ask(daemon, peer, timeout_s=SMALL_S) for _ in range(TRIES)], key=lambda each: each.took_s)
    except Unreachable as error:
        return Visit(address, _HANGS if NO_ANSWER in str(error) else _NOT_HIVEMIND)
    rtt_s, clock_s = quickest.took_s, quickest.clock_ahead_s
    async with one_at_a_time:
        try:
            await ask(daemon, peer, timeout_s=MIDDLE_S, padding_bytes=MIDDLE_BYTES)
        except Unreachable:
            return Visit(address, None, rtt_s, clock_s, "stalls")
        try:
            rate = await _rate(daemon, peer, rtt_s)
        except Unreachable:
            return Visit(address, None, rtt_s, clock_s, "slow")
    return Visit(address, None, rtt_s, clock_s, None, rate)


async def _rate(daemon: Daemon, peer: str, rtt_s: float) -> float:
    """Measure the bytes a second to a peer. Raises Unreachable if `LARGE_BYTES` don't pass in time."""
    from p2p_diloco.net.probing import ask

    took_s = (await ask(daemon, peer, timeout_s=LARGE_S, padding_bytes=LARGE_BYTES)).took_s
    rate = LARGE_BYTES / max(1e-3, took_s - rtt_s)
    if took_s > QUICK_S:
        return rate
    try:
        took_s = (await ask(daemon, peer, timeout_s=LARGE_S, padding_bytes=HUGE_BYTES)).took_s
    except Unreachable:
        return rate
    return HUGE_BYTES / max(1e-3, took_s - rtt_s)


# -- judging


def answered(visits: Sequence[Visit]) -> list[Finding]:
    """One finding that lists the initial peers that answered, and one finding for each initial peer that didn't."""
    reached = [each for each in visits if each.unreached is None]
    findings = unanswered({each.address: each.unreached for each in visits})
    if reached:
        findings.insert(0, Finding("initial peer", "ok", f"{_listed(reached)} answered"))
    return findings


def clock(visits: Sequence[Visit]) -> Finding | None:
    """Compare this machine's clock with the visited peers' clocks. Only the smallest difference is judged. None if no
    peer told its time."""
    known = [each.clock_ahead_s for each in visits if each.clock_ahead_s is not None]
    if not known:
        return None
    least = min(known, key=abs)
    side = "behind" if least > 0 else "ahead of"
    text = f"this machine's clock is {abs(least):.1f} s {side} the initial peers'"
    mend = (
        "set this machine's clock: `sudo timedatectl set-ntp true`; if it is right (`date -u`), set the initial peers'"
    )
    if abs(least) > CLOCK_DIFFERENCE_S_MAX:
        return Finding("clock", "bad", f"{text}; at most {CLOCK_DIFFERENCE_S_MAX:g} s are allowed", mend)
    return Finding("clock", "warn", text, mend) if abs(least) > CLOCK_WARN_S else Finding("clock", "ok", text)


def transfer(visits: Sequence[Visit], device: str) -> Finding | None:
    """Judge whether large messages pass to the visited peers. None if no large message was sent. `device`: the network
    interface that the advice names."""
    stalled = [each for each in visits if each.trouble == "stalls"]
    slow = [each for each in visits if each.trouble == "slow"]
    passed = [each for each in visits if each.rate is not None]
    if stalled:
        text = (
            f"small messages pass to {_listed(stalled)}, but {MIDDLE_BYTES >> 10} KiB stall for {MIDDLE_S:g} s: large "
            "packets are lost on the way (path MTU)"
        )
        mend = (
            f"try `sudo ip link set dev {device} mtu 1280`; if that helps, keep it, or let ICMP "
            "'fragmentation needed' through the firewalls on the way"
        )
        return Finding("transfer", "bad" if not passed else "warn", text, mend)
    if slow:
        text = f"{LARGE_BYTES >> 10} KiB to {_listed(slow)} take more than {LARGE_S:g} s"
        mend = "use a faster link, end other transfers on it, or set a lower shard_elements in the run"
        return Finding("transfer", "warn", text, mend)
    return Finding("transfer", "ok", f"{LARGE_BYTES >> 10} KiB pass to {_listed(passed)}") if passed else None


def _listed(visits: Sequence[Visit]) -> str:
    return ", ".join(without_peer(each.address) for each in visits)
