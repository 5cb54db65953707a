"""Where this machine can be dialled: the IP addresses of its interfaces, and where a peer listens because of them; and
whether other peers can dial it. For this it asks the initial peers and peers of the run, at regular times.

Law: other peers are asked only to dial back; this file decides what their answers mean. If even one of them can't dial
this peer, this peer is private: a peer that aggregates must be reached by all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import psutil

from p2p_diloco.addresses import listen_for
from p2p_diloco.config import PeerConfig
from p2p_diloco.errors import printable
from p2p_diloco.net.attempts import within
from p2p_diloco.net.daemon import Daemon
from p2p_diloco.net.dial_back import place_of
from p2p_diloco.net.framing import FrameError, FrameStream
from p2p_diloco.net.interface import Limits, Reach, Refusal, Traffic, Unreachable
from p2p_diloco.net.pipe import PipeBroken, PipeStalled
from p2p_diloco.net.relay import RELAY, asking, unpacked
from p2p_diloco.net.streams import stop


def listens_at(local: PeerConfig) -> Sequence[str]:
    """The multiaddrs at which a peer listens, unless it is in client mode."""
    return local.host_maddrs or listen_for(local.initial_peers, ip6=has_ip6())


def has_ip6() -> bool:
    """Whether other machines can dial this one by IPv6: an interface has an address that is neither loopback's nor for
    one link alone."""
    own = (place for place in map(ip_address, own_hosts()) if place.version == 6)
    return any(not (place.is_loopback or place.is_link_local) for place in own)


def own_hosts() -> set[str]:
    """The IP addresses of this machine's interfaces."""
    families = (socket.AF_INET, socket.AF_INET6)
    found = (each for addresses in psutil.net_if_addrs().values() for each in addresses if each.family in families)
    return {each.address.partition("%")[0] for each in found}


def names_this_machine(host: str) -> bool:
    """Whether a request's Host header names an address, or this machine by its own name. Any other name may be another
    site's, whose page in the user's browser could then read the answer: its DNS may point the name here."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    with contextlib.suppress(ValueError):
        ip_address(name)
        return True
    return name in ("localhost", socket.gethostname().lower())


log = logging.getLogger(__name__)

ASK_S = 12.0
"""Deadline for an answer: dialling back may need the start of a daemon."""
ADDRESS_LETTERS_MAX, REASON_LETTERS_MAX = 200, 200
"""In an answer, longer addresses are ignored, and longer reasons are cut."""
ASKED_MAX = 3
"""The most peers that are asked before the questions begin again (after `ASK_EVERY_S`, or with new addresses)."""
LOOK_EVERY_S, ASK_EVERY_S = 2.0, 60.0
"""Seconds between two looks for new peers or addresses, and the time after which all questions are asked again."""


@dataclass(frozen=True, slots=True)
class DialBack:
    """The answer of a peer that was asked to dial this peer. `seen_at`: the multiaddr at which the asked peer sees this
    peer. `reached`: address of this peer -> None if the asked peer reached this peer there, else the reason why not.
    """

    seen_at: str
    reached: dict[str, str | None]


async def ask(daemon: Daemon, peer: str, addresses: Sequence[str], within_s: float = ASK_S) -> DialBack:
    """Ask a peer to dial this peer at these multiaddrs; returns that peer's answer.

    Raises:
        Unreachable: the peer gives no answer in time, or serves no such requests.
    """
    try:
        return _told(unpacked(await requested(daemon, peer, {"check": list(addresses)}, within_s)), daemon.peer_id)
    except FrameError as error:
        raise Unreachable(f"{peer}: {error}") from None


async def answers(daemon: Daemon, peer: str, within_s: float) -> bool:
    """Ping a peer over the direct path; returns whether the peer answers in time."""
    try:
        await requested(daemon, peer, {"ping": True}, within_s)
    except Unreachable:
        return False
    return True


async def requested(daemon: Daemon, peer: str, request: dict[str, Any], within_s: float) -> bytes:
    """Send a request to the `Relay` of a peer; returns the answer.

    Raises:
        Unreachable: the peer gives no answer in time, or refuses.
    """
    try:
        return await within(within_s, _requested(daemon, peer, request, within_s))
    except asyncio.TimeoutError:
        raise Unreachable(f"{peer}: no answer within {within_s:g} s") from None
    except (FrameError, PipeBroken, PipeStalled, Refusal) as error:
        raise Unreachable(f"{peer}: {error}") from None


async def _requested(daemon: Daemon, peer: str, request: dict[str, Any], within_s: float) -> bytes:
    pipe, _ = await daemon.open_stream(peer, RELAY, timeout_s=within_s)
    frames = FrameStream(pipe, peer, Limits(), Traffic())
    try:
        frames.write(asking(request, daemon.chain))
        return await frames.answer(within_s)
    finally:
        pipe.abort()


def _told(answer: object, me: str) -> DialBack:
    """Decode a peer's `DialBack` answer; addresses that are not this peer's are left out. Raises FrameError if the
    answer can't be decoded."""
    match answer:
        case {"seen": str(seen), "reached": dict(reached)}:
            told: dict[str, str | None] = {}
            for address, why in reached.items():
                if not isinstance(address, str) or not isinstance(why, str | None):  # a nested text has no end
                    continue
                if address.endswith(f"/p2p/{me}") and len(address) <= ADDRESS_LETTERS_MAX:
                    told[address] = None if why is None else printable(why[:REASON_LETTERS_MAX])
            return DialBack(seen, told)
    raise FrameError("the peer's answer can't be read")


def judged(own: Sequence[str], answer: DialBack) -> Reach:
    """Conclude from one peer's answer whether other peers can dial this peer, which listens at the addresses `own`."""
    seen = place_of(answer.seen_at)
    if seen is None or not answer.reached:
        return Reach()
    here = {place[0] for place in map(place_of, own) if place is not None}
    if reached := [address for address, why in answer.reached.items() if why is None]:
        if reached[0] in own:
            return Reach("public", f"other peers dial this peer at {reached[0]}")
        return Reach("mapped", f"other peers dial this peer at {reached[0]}, which its router forwards")
    where = f"it is seen at {seen[0]}"
    if seen[0] not in here:
        version = ip_address(seen[0]).version
        listens = any(ip_address(place).version == version for place in here)
        where += ", which is a router's address (NAT)" if listens else f", and listens at no IPv{version} address"
    dialled = {place[1]: why for a, why in answer.reached.items() if (place := place_of(a)) and place[0] == seen[0]}
    port, why = next(iter(dialled.items()), (0, "no address of it lies there"))
    return Reach("private", f"{where}; {f'port {port}: ' if port else ''}{why}")


async def ask_all(
    daemon: Daemon, peers: Sequence[str], addresses: Sequence[str] | None = None, within_s: float = ASK_S
) -> dict[str, DialBack]:
    """Ask all these peers at once to dial this peer; returns the answers by peer, without the peers that don't answer.
    `addresses`: the multiaddrs to dial; None: all addresses of this peer. If there are none, no peer is asked."""
    if addresses is None and not daemon.addresses:
        return {}
    there = daemon.addresses if addresses is None else addresses
    outcomes = await asyncio.gather(*(ask(daemon, peer, there, within_s) for peer in peers), return_exceptions=True)
    answers: dict[str, DialBack] = {}
    for peer, outcome in zip(peers, outcomes, strict=True):
        if isinstance(outcome, DialBack):
            answers[peer] = outcome
        elif isinstance(outcome, Unreachable):
            log.debug("%s doesn't tell whether this peer can be dialled: %s", peer, outcome)
        else:
            raise outcome
    return answers


def together(own: Sequence[str], answers: Iterable[DialBack]) -> Reach:
    """Conclude from the answers of several peers whether other peers can dial this peer, which listens at the addresses
    `own`."""
    if not own:
        return Reach("private", "it listens nowhere (client_mode)")
    told = [reach for reach in (judged(own, answer) for answer in answers) if reach.kind != "unknown"]
    return next((reach for reach in told if reach.private), told[0] if told else Reach())


class ReachFinder:
    """Finds out, until `close`, whether other peers can dial this peer.

    Args:
        daemon: this peer's daemon.
        answers: the answers that have come already, by the peer that gave them.
        linked: returns the peers that this peer is connected to.
        changed: called with the new value of `now` when its `kind` has changed.
    """

    def __init__(
        self,
        daemon: Daemon,
        answers: Mapping[str, DialBack],
        linked: Callable[[], Iterable[str]],
        changed: Callable[[Reach], None],
    ) -> None:
        self._daemon, self._linked, self._changed = daemon, linked, changed
        self._answers = dict(answers)
        self._asked = set(answers)
        self.now = together(daemon.addresses, answers.values())
        self._watching = asyncio.create_task(self._watch())

    @property
    def mapped(self) -> list[str]:
        """The addresses at which other peers have reached this peer, but which this peer's daemon doesn't know."""
        reached = {a for answer in self._answers.values() for a, why in answer.reached.items() if why is None}
        return sorted(reached - set(self._daemon.addresses))

    async def close(self) -> None:
        await stop(self._watching)

    async def _watch(self) -> None:
        """Until cancelled, ask newly linked peers. Ask all linked peers again when this peer's addresses have changed,
        and every `ASK_EVERY_S`."""
        clock = asyncio.get_running_loop().time
        began_at, addresses = clock(), list(self._daemon.addresses)
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if again := clock() - began_at >= ASK_EVERY_S or self._daemon.addresses != addresses:
                self._asked.clear()
                began_at, addresses = clock(), list(self._daemon.addresses)
            peers = [peer for peer in dict.fromkeys(self._linked()) if peer not in self._asked]
            if peers := peers[: max(0, ASKED_MAX - len(self._asked))]:
                self._asked.update(peers)
                if answers := await ask_all(self._daemon, peers):
                    self._answers = answers if again else {**self._answers, **answers}
            before, self.now = self.now, together(self._daemon.addresses, self._answers.values())
            if before.kind != self.now.kind:
                self._changed(self.now)
