"""HELLO: on each stream of a private run, both peers show their certificates before anything else is read or sent.

Law: a stream reaches its handler only once its peer is a member. A peer that isn't a member costs little memory and
time, and gets the same refusal whatever was wrong. libp2p, or a relayed stream's TLS, has proven the peer's id before.

    A opens: MESSAGE, "?" and A's certificate       B: MESSAGE, B's certificate; from now on as on any stream
             MESSAGE, "!" and A's certificate       A knows B as a member: A goes on at once, and B sends nothing
    A isn't a member                                B: REFUSED, and the stream ends
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable

from p2p_diloco.net.certificates import CHAIN_BYTES_MAX, Grant, Stranger, admit_chain
from p2p_diloco.net.framing import FrameError, FrameStream, Message, Refused
from p2p_diloco.net.interface import Limits, Traffic, Unreachable
from p2p_diloco.net.membership import Membership
from p2p_diloco.net.pipe import Pipe, PipeBroken, PipeStalled
from p2p_diloco.net.shares import has_room

log = logging.getLogger(__name__)

HELLO_S = 3.0
"""Deadline for the first message of a stream that another peer opens."""
PENDING_MAX, PENDING_PER_PEER_MAX = 64, 8
"""The most streams, of all peers and of one, that have not shown a certificate yet."""
TURNED_AWAY_MAX = 8
"""The most streams of one peer that are refused with an answer in `SWEEP_EVERY_S`. Its further streams are closed at
once, unread and unanswered, which takes half as much processor time."""
STREAMS_PER_PEER_MAX = 32
"""The most streams that one member may keep open to this peer; a member needs a link, and one or two for payloads."""
STREAMS_MAX = 2048
"""The most streams that all peers together may keep open to this one. The peers of one grant may have 3/4 of them."""
PEERS_PER_GRANT_MAX = 1024
"""The most peers of one grant that are known as members. A grant that names no peer may be used by many peers. If there
are more, the peer that opened a stream longest ago is forgotten, and its connections end."""
LINGER_S = 1.0
"""Seconds that a stranger has to read the refusal."""
SWEEP_EVERY_S = 1.0
"""Seconds between two looks for members whose certificates have expired, or whose grants were revoked."""
TELL_EVERY_S = 60.0
"""Seconds between two log lines with the number of strangers turned away."""

_LIMITS = Limits(header_bytes_max=1 + CHAIN_BYTES_MAX)
_ASKS, _KNOWS = b"?", b"!"
_FAILURES = (Stranger, FrameError, PipeBroken, PipeStalled, asyncio.TimeoutError)

Opened = tuple[Pipe, str]
Serve = Callable[[str, Pipe, str], Awaitable[None]]
RunOf = Callable[[str, bytes | None], bytes | None]
"""A function that returns the run of a peer, by the certificate that the peer shows to a relay; see `any_run`."""


def any_run(peer: str, chain: bytes | None, among: frozenset[bytes] | None = None) -> bytes | None:
    """The public key of the peer's private run, taken from the chain that the peer shows; None if it shows none, and so
    is in an open run. `among`: the only runs whose members are accepted, by their public run keys; None: any run.

    Raises:
        Stranger: the chain is not valid, or the peer is in no run of `among`.
    """
    return None if chain is None and among is None else admit_chain(chain or b"", peer, time.time(), among).run


class Pending:
    """The streams that have not shown a certificate yet. If one peer has too many, or all peers together, the oldest is
    closed. A member sends its certificate as it opens a stream, so only a stranger's stream becomes old."""

    def __init__(self, per_peer: int = PENDING_PER_PEER_MAX) -> None:
        self._per_peer = per_peer
        self._streams: dict[Pipe, str] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, peer: str, pipe: Pipe) -> None:
        """Add a stream, `pipe`, that the peer has opened. Close an older stream if there are too many."""
        theirs = [other for other, opener in self._streams.items() if opener == peer]
        if len(theirs) >= self._per_peer:
            self._close(theirs[0])
        elif len(self._streams) >= PENDING_MAX:
            self._close(next(iter(self._streams)))
        self._streams[pipe] = peer

    def remove(self, pipe: Pipe) -> None:
        """Remove a stream, `pipe`: its certificate has come, or the stream has ended."""
        self._streams.pop(pipe, None)

    def _close(self, pipe: Pipe) -> None:
        self.remove(pipe)
        pipe.abort()


class Hellos:
    """The peers that this peer knows as members, and the checks of the certificates that make a peer known.

    Args:
        membership: this peer's own membership of its run.
        cut: ends all streams and connections of a peer that is no longer a member.
        clock: returns seconds since 1970.
    """

    def __init__(
        self, membership: Membership, cut: Callable[[str], None], clock: Callable[[], float] = time.time
    ) -> None:
        self.membership = membership
        self._cut, self._clock = cut, clock
        self._known: dict[str, Grant] = {}
        self._pending = Pending()
        self._serving = Counter[str]()
        self._refused_by = set[str]()
        self._strangers = Counter[str]()  # how many streams of each peer were turned away since the last sweep
        self._told_at, self._untold = -TELL_EVERY_S, 0
        self.turned_away = 0
        """How many streams were answered with the refusal that their peer isn't a member."""
        self._sweeping = asyncio.create_task(self._sweep_often())

    async def close(self) -> None:
        """Stop looking for expired members."""
        self._sweeping.cancel()
        await asyncio.gather(self._sweeping, return_exceptions=True)

    # -- who is a member

    def admit(self, peer: str, chain: bytes) -> Grant:
        """Check the chain that a peer shows, and know the peer as a member from now on.

        Raises:
            Stranger: the peer is not a member.
        """
        if peer == self.membership.peer_id:  # a relay may send this peer's own stream and certificates back to it
            raise Stranger
        member = self.membership.admit(peer, chain, self._clock())
        if peer not in self._known:
            theirs = [other for other, known in self._known.items() if known.id == member.id]
            if len(theirs) >= PEERS_PER_GRANT_MAX:
                del self._known[theirs[0]]
                self._cut(theirs[0])
        self._known.pop(peer, None)
        self._known[peer] = member  # now the last
        return member

    def member(self, peer: str) -> Grant | None:
        """The grant by which a peer is a member; None for any other peer."""
        known = self._known.get(peer)
        return known if known is not None and self._valid(known) else None

    def admits(self, peer: str) -> bool:
        """Whether the peer is known as a member."""
        return self.member(peer) is not None

    def grant_of(self, peer: str) -> Hashable:
        """The grant by which a member was admitted; the peer itself if it is no member."""
        known = self._known.get(peer)
        return peer if known is None else known.id

    def revoke(self, packed: bytes) -> bool:
        """As `Membership.revoke`; the connections of peers whose grants are revoked end at once."""
        if not self.membership.revoke(packed):
            return False
        self.sweep()
        return True

    def sweep(self) -> None:
        """Forget the peers that are no longer members, and end their connections. Also forget how many streams of each
        peer were turned away, so that its next streams are answered again."""
        self._strangers.clear()
        for peer in [peer for peer, member in self._known.items() if not self._valid(member)]:
            member = self._known.pop(peer)
            log.info("%s (%s) is no longer a member: its invitation was revoked or has expired", peer, member.name)
            self._cut(peer)

    def _valid(self, member: Grant) -> bool:
        return member.expires > self._clock() and member.id not in self.membership.banned

    async def _sweep_often(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            self.sweep()

    def run_of(self, peer: str, chain: bytes | None) -> bytes:
        """The public key of this run. Raises Stranger if the peer shows no chain of a member of this run."""
        return self.admit(peer, chain or b"").run

    # -- streams that this peer opens

    async def greet(self, peer: str, opened: Opened, within_s: float) -> Opened:
        """Show this peer's certificate on a stream that was just opened. A peer that isn't known as a member must first
        show its own.

        Raises:
            Unreachable: the peer isn't a member, refuses this peer, or shows no certificate within `within_s`.
        """
        pipe, _ = opened
        frames = FrameStream(pipe, peer, _LIMITS, Traffic())
        known = self.admits(peer)
        frames.write(Message((_KNOWS if known else _ASKS) + self.membership.chain))
        if known:
            return opened
        try:
            match await asyncio.wait_for(frames.read(idle_s=within_s, frame_s=within_s), within_s):
                case Message(chain):
                    self.admit(peer, chain)
                    return opened
                case Refused(reason):
                    self._refused(peer)
                    raise Unreachable(f"{peer} refuses this peer: {reason}")
            raise FrameError("no certificate came")
        except BaseException as error:
            pipe.abort()
            if isinstance(error, Stranger):  # the peer counts as dead: no other process can have its id
                raise Unreachable(f"{peer}: {error}", refused=True) from None
            if isinstance(error, _FAILURES):
                raise Unreachable(f"{peer}: no certificate within {within_s:g} s ({error})") from None
            raise

    def _refused(self, peer: str) -> None:
        if peer not in self._refused_by and len(self._refused_by) < PEERS_PER_GRANT_MAX:
            self._refused_by.add(peer)
            log.warning(
                "%s doesn't accept this peer as a member: was this peer's invitation revoked? Are the clocks right?",
                peer,
            )

    # -- streams that other peers open

    def guarded(self, serve: Serve) -> Serve:
        """A handler of streams that calls `serve` for members only."""

        async def check_and_serve(peer: str, pipe: Pipe, seen_at: str) -> None:
            floods = self._strangers[peer] >= TURNED_AWAY_MAX or self._serving[peer] >= STREAMS_PER_PEER_MAX
            if floods or not has_room(peer, self._serving, STREAMS_MAX, self.grant_of):
                pipe.abort()
                return
            self._serving[peer] += 1
            try:
                if await self._admitted(peer, pipe):
                    await serve(peer, pipe, seen_at)
            finally:
                self._serving[peer] -= 1
                self._serving += Counter()  # drops zeros

        return check_and_serve

    async def _admitted(self, peer: str, pipe: Pipe) -> bool:
        """Whether the peer that opened a stream shows a valid certificate. Otherwise the stream is closed."""
        if not self.admits(peer):
            self._pending.add(peer, pipe)
        frames = FrameStream(pipe, peer, _LIMITS, Traffic())
        try:
            try:
                frame = await asyncio.wait_for(frames.read(idle_s=HELLO_S, frame_s=HELLO_S), HELLO_S)
                if not isinstance(frame, Message) or frame.header[:1] not in (_ASKS, _KNOWS):
                    raise Stranger
                self.admit(peer, frame.header[1:])
            except _FAILURES as error:
                await self._turn_away(frames, error)
                return False
            if frame.header.startswith(_ASKS):
                frames.write(Message(self.membership.chain))
            return True
        finally:
            self._pending.remove(pipe)

    async def _turn_away(self, frames: FrameStream, error: BaseException) -> None:
        self.turned_away += 1
        self._strangers[frames.peer] += 1
        self._untold += 1
        log.debug("a stream of %s was closed: %r", frames.peer, error)
        now = asyncio.get_running_loop().time()
        if now - self._told_at >= TELL_EVERY_S:
            log.info("turned away %d streams of peers that are not members of this run", self._untold)
            self._told_at, self._untold = now, 0
        frames.write(Refused(str(Stranger())))
        with contextlib.suppress(FrameError):
            await frames.discard(None, LINGER_S)  # if unread bytes were left, the refusal could be lost on its way
        frames.pipe.close()
