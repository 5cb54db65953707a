"""Connects this process to the other peers: opens the transport, in an open run or as a member of a private one.

Law: a peer that founds a private run writes its keys to disk before it tells any other peer of the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from p2p_diloco.addresses import is_loopback
from p2p_diloco.config import PeerConfig
from p2p_diloco.errors import NoBootstrapReached, NodeDied
from p2p_diloco.net import invited
from p2p_diloco.net.hivemind import HivemindTransport
from p2p_diloco.net.interface import Limits
from p2p_diloco.net.invitation import Invitation
from p2p_diloco.node.inbox import Inbox
from p2p_diloco.node.privacy import Access, claim, founds_privately
from p2p_diloco.node.shared import Setup
from p2p_diloco.remembered import met_through, remembered

CLOSE_S = 2.0
"""Deadline for closing the transport."""
LIMITS = Limits(header_bytes_max=2**20)
"""The transport's limits. Headers may be longer than usual, because a fetch lists every slice."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Swarm:
    """This process's connections to the other peers. `access`: to a private run; None in an open run. `dead`: fails if
    the transport dies."""

    transport: HivemindTransport
    inbox: Inbox
    access: Access | None
    dead: asyncio.Future[None]


@contextlib.asynccontextmanager
async def entered(setup: Setup, tell: Callable[[str], None]) -> AsyncIterator[Swarm]:
    """Start a transport, and become a member of the run if it is private; leave at the block's end. A peer that founds
    a private run also writes the run key and an invitation to disk. `tell` is called with a text about each step.

    Raises:
        Refused: the run is private, and this peer has no invitation. ConfigError: an invitation or a run key can't be
        used. `_opened` raises further errors.
    """
    local, inbox, dead = setup.local, Inbox(), asyncio.get_running_loop().create_future()
    invitation = key = revoked = None
    if local.invite is not None:
        invitation = invited.read_invitation(local, warns=True)
        if (key := invited.key_of(local, invitation)) is not None:
            invitation = invited.founders_own(local.run_id, key)
            revoked = invited.revocations_of(local, local.run_id, key)
        invited.check_role(local, invitation)
    transport = await _opened(local, inbox, tell, dead, invitation)
    try:
        if invitation is None and await founds_privately(setup, transport):
            key = invited.founders_key(local.run_id)
            await claim(transport, local.run_id, key.public)
            await transport.close()  # this open transport would take messages of peers that are no members
            transport = await _opened(local, inbox, tell, dead, invited.founders_own(local.run_id, key))
            stays = local.identity_path is not None and not transport.reach.private
            own = transport.addresses() if stays or not local.initial_peers else ()
            invited.write_files(local.run_id, key, invited_through(local.initial_peers, own))
        if local.role != "observer":  # which nobody dials
            transport.tell_reach()  # only of the transport that is kept
        inbox.knows(transport)
        if (member := transport.membership) is not None and revoked is not None:
            member.revoke(revoked)
        yield Swarm(transport, inbox, None if member is None else Access(member, key), dead)
    finally:
        if dead.done():
            dead.exception()  # marks it as seen
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(transport.close(), CLOSE_S)


def invited_through(initial_peers: Sequence[str], own: Sequence[str]) -> Sequence[str]:
    """The addresses that an invitation names: the initial peers', and the founder's own as far as other machines may
    reach them. A machine without a network has only some for itself; they will do for a try."""
    return [*initial_peers, *(address for address in own if not is_loopback(address))] or own


async def _opened(
    local: PeerConfig,
    inbox: Inbox,
    tell: Callable[[str], None],
    dead: asyncio.Future[None],
    invitation: Invitation | None,
) -> HivemindTransport:
    """Start a transport through the initial peers. If none of them answers, use addresses remembered from this run in
    their swarm; if one does, meet the peers at these addresses, too. `invitation`: to a private run; None for an open
    run.

    Raises:
        NoBootstrapReached: no initial peer and no remembered address answers.
    """

    def daemon_died(why: str) -> None:
        if not dead.done():
            dead.set_exception(NodeDied(why, mend="start this peer again"))

    async def through(initial_peers: Sequence[str]) -> HivemindTransport:
        settings = local.model_copy(update={"initial_peers": tuple(initial_peers)})
        transport = await HivemindTransport.create(
            inbox, settings, limits=LIMITS, invitation=invitation, on_daemon_death=daemon_died
        )
        transport.meet(remembered(local.run_id, met_through(local.initial_peers, transport.peer_id)))
        return transport

    tell("connecting to the swarm" if local.initial_peers else "starting a swarm of its own")
    try:
        return await through(local.initial_peers)
    except NoBootstrapReached as error:
        if not (known := remembered(local.run_id, local.initial_peers)):
            raise
        log.warning("none of the initial peers answers; trying %d addresses remembered from this run", len(known))
        try:
            return await through(known)
        except NoBootstrapReached:
            raise error from None  # name only the addresses that the user gave and can correct


async def until_one_ends(coroutines: Iterable[Coroutine[Any, Any, None]], other: asyncio.Future[None]) -> None:
    """Run the coroutines until one of them, or the future `other`, has ended. Then cancel them, but not `other`. If
    `other` or one of them has failed, raise its exception."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait([*tasks, other], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for each in (other, *tasks):  # `other` comes first: its exception may have made the tasks fail
        if each.done() and not each.cancelled() and (error := each.exception()) is not None:
            raise error
