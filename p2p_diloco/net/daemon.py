"""libp2p's daemon, p2pd: a child process that dials, listens and encrypts for this peer, and ends when this peer ends.

Law: opens and serves streams by protocol name, dials and listens; knows nothing of the DHT or of messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from ipaddress import ip_address
from pathlib import Path
from typing import Any, ClassVar

from p2p_diloco.addresses import by_reach, leads_over_a_relay
from p2p_diloco.errors import ConfigError, P2PDilocoError
from p2p_diloco.net import stale_sockets
from p2p_diloco.net.attempts import within
from p2p_diloco.net.hivemind_library import P2P, Multiaddr, P2PDaemonError, PeerID, StreamInfo
from p2p_diloco.net.interface import Unreachable
from p2p_diloco.net.pipe import Pipe
from p2p_diloco.net.reasons import another_answers, dial_inconclusive, dial_refused, last_line, likely_reason
from p2p_diloco.net.streams import stop

DIALS_MAX, DIALS_S = 64, 60.0
"""The most dials to one host in so many seconds that have not found the peer in whose name the host was given."""
HOSTS_MAX, PROVEN_MAX = 4096, 4096
"""The most hosts whose dials are counted, and the most pairs of peer and host that are known to be right."""


class Unproven:
    """Bounds the dials to hosts at which no peer has proven its id yet. A record names the addresses at which its peer
    is dialled, and it may name another host's: a few invented records would have every member of a run dial that host
    again and again. A peer that was reached at a host is dialled there without limit, so many peers may share the
    address of a router. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._dials: dict[str, list[tuple[float, str]]] = {}  # by host: when, and in which peer's name
        self._proven: dict[tuple[str, str], None] = {}  # peer and host, oldest first

    def proven(self, peer: str, addresses: Iterable[str]) -> bool:
        """Whether the peer was reached at the hosts of all these multiaddrs."""
        return all((peer, _host(address)) in self._proven for address in addresses)

    def admit(self, peer: str, addresses: Iterable[str]) -> list[str]:
        """Those of a peer's multiaddrs that may be dialled now. They are counted as dialled."""
        return [address for address in addresses if self._spend(peer, _host(address))]

    def prove(self, peer: str, address: str) -> None:
        """The peer was reached at this multiaddr: its dials to that host don't count any more."""
        if leads_over_a_relay(address):
            return  # the host is the relay's
        host = _host(address)
        self._proven.pop((peer, host), None)
        self._proven[peer, host] = None
        if len(self._proven) > PROVEN_MAX:
            del self._proven[next(iter(self._proven))]
        if host in self._dials:
            self._dials[host] = [dial for dial in self._dials[host] if dial[1] != peer]

    def _spend(self, peer: str, host: str) -> bool:
        if (peer, host) in self._proven:
            return True
        now = self._clock()
        lately = [dial for dial in self._dials.pop(host, []) if now - dial[0] < DIALS_S]
        self._dials[host] = lately
        if len(self._dials) > HOSTS_MAX:
            del self._dials[next(iter(self._dials))]
        if len(lately) >= DIALS_MAX:
            return False
        lately.append((now, peer))
        return True


def _host(address: str) -> str:
    """The IP address in a multiaddr. All names count as one host, because many names may lead to one."""
    match address.split("/"):
        case ["", "ip4" | "ip6", text, *_]:
            with contextlib.suppress(ValueError):
                ip = ip_address(text)
                return str(getattr(ip, "ipv4_mapped", None) or ip)
    return ""


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]

_opened: ContextVar[list[asyncio.StreamWriter] | None] = ContextVar("_opened", default=None)


def noted(opens: Callable[[], Awaitable[Connection]]) -> Callable[[], Awaitable[Connection]]:
    """Wrap the function that opens connections, so that `closed_on_failure` knows them."""

    async def open_and_note() -> Connection:
        reader, writer = await opens()
        if (opened := _opened.get()) is not None:
            opened.append(writer)
        return reader, writer

    return open_and_note


@contextlib.contextmanager
def closed_on_failure() -> Iterator[None]:
    """Close the connections to the daemon that were opened in this block if the block raises: Hivemind leaves them open
    then. Otherwise the garbage collector would
    close them in the thread in which it happens to run, but only the event loop's own thread may do that."""
    opened: list[asyncio.StreamWriter] = []
    token = _opened.set(opened)
    try:
        yield
    except BaseException:
        for writer in opened:
            writer.close()
        raise
    finally:
        _opened.reset(token)


log = logging.getLogger(__name__)

CLOSE_S = 3.0
"""How long the daemon may take to end before it is killed."""
REAP_S = 0.1
"""Seconds that asyncio gets to notice that a daemon which failed to start has ended."""
DIAL_S = 5.0
"""Deadline for dialling an initial peer. Dialling it and asking for its clock take less than 10 s together."""
ADDRESSES_PER_PEER_MAX = 16
ASKED_TO_END = (0, 0x80 + signal.SIGTERM, 0x80 + signal.SIGINT)
"""The daemon's statuses after a signal that asks it to end, as ^C in a terminal asks all. Two of its threads then end
it, one with 0 and one with the signal's number, and either may be first."""
CONFIGURATION = Path(__file__).with_name("p2pd.json")
"""The daemon's configuration file. It turns libp2p's relay off, which would serve strangers: no flag does that."""


class _Configured(P2P):  # type: ignore[misc]  # Hivemind has no types
    """Hivemind's client of a daemon, which starts it with our configuration file; `create` has no setting for that."""

    DHT_MODE_MAPPING: ClassVar = {mode: {**flags, "f": CONFIGURATION} for mode, flags in P2P.DHT_MODE_MAPPING.items()}


class Daemon:
    """A running p2pd, made by `start` and ended by `close`. If p2pd ends by itself, `on_death` is called with the
    reason."""

    def __init__(self, p2p: Any, on_death: Callable[[str], None] | None) -> None:
        self.p2p = p2p
        connector = p2p._client.control.daemon_connector
        connector.open_connection = noted(connector.open_connection)
        self.peer_id = str(p2p.peer_id)
        self.addresses: list[str] = []
        """The full multiaddrs, with /p2p/<peer id>, under which others may reach this peer, public ones first."""
        self.chain: bytes | None = None
        """What proves to relays that this peer is a member of a private run; None: it isn't in one."""
        self._known: dict[str, dict[str, Multiaddr]] = {}  # by peer, and by the address as text
        self._unproven = Unproven()
        self._died: str | None = None
        self._watching = asyncio.create_task(self._watch(on_death))

    @classmethod
    async def start(
        cls,
        *,
        identity_path: str | None,
        host_maddrs: Sequence[str],
        announce_maddrs: Sequence[str],
        client_mode: bool,
        timeout_s: float,
        on_death: Callable[[str], None] | None,
        map_port: bool = False,
    ) -> Daemon:
        """Start a daemon that listens at `host_maddrs`, or nowhere in client mode. Without `identity_path` the daemon
        makes a new identity. With `map_port` the daemon asks the router to forward its port, by UPnP or NAT-PMP.

        Raises:
            ConfigError: the daemon can't listen at `host_maddrs`, or `announce_maddrs` has port 0.
            P2PDilocoError: the daemon doesn't start.
        """
        if stale := stale_sockets.sweep():
            log.debug("removed the sockets of %d daemons that are gone", stale)
        starting = asyncio.ensure_future(
            _Configured.create(
                host_maddrs=None if client_mode else list(host_maddrs),
                announce_maddrs=list(announce_maddrs) or None,
                identity_path=identity_path,
                dht_mode="client" if client_mode else "server",
                no_listen=client_mode,
                use_relay=False,
                nat_port_map=map_port,
                auto_nat=False,
                startup_timeout=timeout_s,
            )
        )
        try:
            self = cls(await asyncio.shield(starting), on_death)
        except asyncio.CancelledError:  # cancelling the start of a process may make asyncio wait for ever
            await asyncio.wait([starting])
            if not starting.cancelled() and starting.exception() is None:
                await cls(starting.result(), None).close()
            raise
        except ValueError:  # the only check that Hivemind makes itself: port 0
            mend = "give the port that others dial"
            wrong, value = "can't have port 0", list(announce_maddrs)
            raise ConfigError(wrong, key="announce_maddrs", value=value, mend=mend) from None
        except P2PDaemonError as error:
            traceback.clear_frames(error.__traceback__)  # frees the half-made P2P while the loop runs,
            await asyncio.sleep(REAP_S)  # so that asyncio sees its process end
            if "address" in str(error) or "listen" in str(error):
                mend = "choose another port, or 0 to let the system choose"
                wrong = f"can't be listened on ({last_line(error)})"
                raise ConfigError(wrong, key="host_maddrs", value=list(host_maddrs), mend=mend) from None
            mend = "look whether this machine lets p2pd run"
            raise P2PDilocoError(f"the libp2p daemon doesn't start: {last_line(error)}", mend=mend) from None
        await self.look_up_addresses()
        return self

    async def _watch(self, on_death: Callable[[str], None] | None) -> None:
        status = await self.p2p._child.wait()
        self._died = f"the libp2p daemon ended with status {status}"
        level = logging.INFO if status in ASKED_TO_END else logging.ERROR
        log.log(level, "%s, so other peers can't reach this peer any more", self._died)
        if on_death is not None:
            on_death(self._died)

    async def look_up_addresses(self) -> None:
        """Ask the daemon for this peer's present addresses, and update `addresses`."""
        try:
            visible = await self.p2p.get_visible_maddrs(latest=True)
        except ValueError:  # no addresses: it doesn't listen
            visible = []
        self.addresses = by_reach([str(address) for address in visible])

    @property
    def runs(self) -> bool:
        return self.p2p._child.returncode is None

    # -- other peers

    def introduce(self, peer: str, addresses: Sequence[str]) -> None:
        """Remember the addresses at which a peer can be dialled. Addresses that can't be read, or that name another
        peer, are ignored."""
        known = {}
        for address in list(addresses)[:ADDRESSES_PER_PEER_MAX]:
            host, _, named = address.rpartition("/p2p/")
            if named == peer and host:
                with contextlib.suppress(Exception):  # Multiaddr's parsers raise exceptions of many kinds
                    known[host] = Multiaddr(host)
        if known:
            self._known[peer] = known

    def known_at(self, peer: str) -> list[str]:
        """The multiaddrs of a peer that `introduce` has remembered."""
        return list(self._known.get(peer, ()))

    def dialable_at(self, peer: str) -> list[str]:
        """Those of a peer's known multiaddrs that may be dialled now; see `Unproven`."""
        return self._unproven.admit(peer, self.known_at(peer))

    async def _reach(self, peer: str) -> None:
        """Connect to a peer at those of its known multiaddrs that may be dialled now; if it is connected already, or
        none is known, nothing is dialled.

        Raises:
            Unreachable: none of its addresses may be dialled now. The daemon's errors, if the dials fail.
        """
        known = self._known.get(peer, {})
        if not known:
            return
        places, met = list(known), list[str]()
        if not (proven := self._unproven.proven(peer, places)) and not (met := await self._connected_at(peer)):
            places = self.dialable_at(peer)
            if not places:
                raise Unreachable(f"{peer}: too many dials to its hosts have found no peer in the last minute")
        # returns at once if already connected
        await self.p2p._client.connect(PeerID.from_base58(peer), tuple(known[place] for place in places))
        if not proven:
            for address in met or await self._connected_at(peer):
                self._unproven.prove(peer, address)

    async def _connected_at(self, peer: str) -> list[str]:
        """The multiaddrs at which the daemon is connected to a peer."""
        return [str(a) for info in await self.p2p.list_peers() if str(info.peer_id) == peer for a in info.addrs]

    async def greet(self, address: str) -> str | None:
        """Connect to the peer at a full multiaddr; returns None, or the reason why this failed."""
        host, _, peer = address.rpartition("/p2p/")
        if peer == self.peer_id:
            return "that is this peer itself"
        try:
            await self._connect(PeerID.from_base58(peer), [Multiaddr(host)] if host else [])
        except asyncio.TimeoutError:
            return f"timed out after {DIAL_S:g} s: a firewall, or no such machine"
        except (P2PDaemonError, OSError, asyncio.IncompleteReadError, ValueError) as error:
            return likely_reason(error)
        return None

    async def meet(self, address: str) -> str | None:
        """Connect to the peer at a full multiaddr, or to another one that answers there; returns its id, or None if
        none does."""
        host, _, peer = address.rpartition("/p2p/")
        with contextlib.suppress(
            asyncio.TimeoutError, P2PDaemonError, OSError, asyncio.IncompleteReadError, ValueError
        ):
            try:
                await self._connect(PeerID.from_base58(peer), [Multiaddr(host)])
            except P2PDaemonError as error:
                if (peer := another_answers(error) or "") in ("", self.peer_id):
                    return None
                await self._connect(PeerID.from_base58(peer), [Multiaddr(host)])
            return peer
        return None

    async def _connect(self, peer: PeerID, addresses: Sequence[Multiaddr]) -> None:
        with closed_on_failure():
            await within(DIAL_S, self.p2p._client.connect(peer, addresses))

    async def found_at(self, peer: str) -> list[str]:
        """The multiaddrs at which the daemon is connected to a peer and has checked the peer's identity. Without a
        connection the daemon first dials the peer's known addresses; empty if none of them answers."""
        with contextlib.suppress(asyncio.TimeoutError, P2PDaemonError, OSError, ValueError, Unreachable):
            with closed_on_failure():
                await within(DIAL_S, self._reach(peer))
            return [address for address in await self._connected_at(peer) if not leads_over_a_relay(address)]
        return []

    async def open_stream(self, peer: str, protocol: str, *, timeout_s: float) -> tuple[Pipe, str]:
        """Open a stream to a peer for a protocol that the peer serves; returns the stream, and the multiaddr at which
        the peer was found.

        Raises:
            Unreachable: no stream could be opened in time; the error says why.
        """
        if self._died is not None:
            raise Unreachable(self._died)
        try:
            opening = self._open_stream(peer, protocol)
            return await within(timeout_s, opening, discard=lambda opened: opened[0].abort())
        except asyncio.TimeoutError:
            raise Unreachable(f"{peer}: no answer within {timeout_s:g} s") from None
        except Unreachable:
            raise
        except Exception as error:  # Hivemind raises exceptions of many kinds for its daemon's answers
            raise Unreachable(f"{peer}: {likely_reason(error)}") from None

    async def _open_stream(self, peer: str, protocol: str) -> tuple[Pipe, str]:
        peer_id = PeerID.from_base58(peer)
        with closed_on_failure():
            try:
                await self._reach(peer)
                stream, reader, writer = await self.p2p.call_binary_stream_handler(peer_id, protocol)
            except P2PDaemonError as error:
                refused = dial_refused(error) or (dial_inconclusive(error) and await self._all_refuse(peer))
                raise Unreachable(f"{peer}: {likely_reason(error)}", refused=refused) from None
            return await Pipe.adopt(reader, writer), str(stream.addr)

    async def _all_refuse(self, peer: str) -> bool:
        """Dial a peer's known addresses by plain TCP; returns whether all of them refuse the connection."""
        places = self.dialable_at(peer)
        return places == self.known_at(peer) and await all_refuse(places)

    async def serve_streams(self, protocol: str, serve: Callable[[str, Pipe, str], Any]) -> None:
        """Serve a protocol: await `serve(peer id, pipe, the peer's multiaddr)` for every stream that another peer opens
        for the protocol."""

        async def take(stream: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await serve(str(stream.peer_id), await Pipe.adopt(reader, writer), str(stream.addr))

        await self.p2p.add_binary_stream_handler(protocol, take)

    async def close(self) -> None:
        await stop(self._watching)
        try:
            await asyncio.wait_for(self.p2p.shutdown(), CLOSE_S)
        except asyncio.TimeoutError:
            self.p2p._child.kill()
        self.p2p._child._transport.close()  # else asyncio warns when it is collected after the loop's end
        await asyncio.sleep(0)


async def all_refuse(addresses: Sequence[str]) -> bool:
    """Dial each of these addresses by plain TCP; returns whether all of them refuse the connection. False without
    addresses."""

    async def refuses(address: str) -> bool:
        match address.split("/"):
            case ["", "ip4" | "ip6" | "dns" | "dns4" | "dns6", host, "tcp", port, *_]:
                try:
                    _, writer = await asyncio.open_connection(host, int(port))
                except OSError as error:
                    return isinstance(error, ConnectionRefusedError)
                writer.close()
        return False

    return bool(addresses) and all(await asyncio.gather(*map(refuses, addresses)))
