"""Private runs: the public notice that a run is private, the decision whether this peer founds a private run, what it
knows as a member, and revoked invitations.

Law: a notice is a record of the plain DHT, which strangers can read and store. It decides nothing for members; it only
keeps a peer without an invitation from founding another run of the same name.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from p2p_diloco.config import PeerConfig
from p2p_diloco.errors import Refused
from p2p_diloco.net.certificates import RunKey
from p2p_diloco.net.interface import Records, Unreachable
from p2p_diloco.net.invitation_used import on_this_machine
from p2p_diloco.net.membership import Membership
from p2p_diloco.node import run_record
from p2p_diloco.node.board import Board
from p2p_diloco.node.run_record import RunRecord, signature_of
from p2p_diloco.remembered import met_through, remembered

if TYPE_CHECKING:
    from p2p_diloco.node.shared import Setup  # would load torch, and `status` asks whether a run is private

OPEN = "each peer that knows one of its addresses can read and change it"
"""The end of a warning about an open run that other machines can reach: the run X is OPEN: …"""
NOTICES = Board("private", ttl_s=60.0)
"""A notice is the public run key of a private run."""
KEY_BYTES = 32
REVOCATIONS = Board("revocations", ttl_s=24 * 3600.0)
NOTICE_EVERY_S = 15.0
FOUNDERS_MEET_S = 0.7
"""Seconds that a founder waits to see another founder's notice."""

log = logging.getLogger(__name__)


async def is_private(dht: Records, run_id: str) -> bool:
    """Whether the DHT has a notice of a private run of this name."""
    return bool(await _keys_in(dht, run_id))


async def refuse_if_private(dht: Records, run_id: str) -> None:
    """Look for a notice of a private run of this name, on behalf of a peer without an invitation.

    Raises:
        Refused: there is one.
    """
    if await is_private(dht, run_id):
        mend = f"ask for an invitation and join with --invite {run_id}.invite, or choose another run id"
        raise Refused("is the name of a private run", key="run_id", value=run_id, mend=mend)


def has_been_in_it(local: PeerConfig, peer_id: str) -> bool:
    """Whether this machine has met peers of the run, and this peer is not told to found the run all the same."""
    return not local.found and bool(remembered(local.run_id, met_through(local.initial_peers, peer_id)))


async def founds_privately(setup: Setup, dht: Records) -> bool:
    """Whether this peer, which has no invitation, is to found a private run now. It is if it can found one and is told
    to, its settings do not ask for an open run, other machines could reach the run, and neither is there a run of this
    name nor has this machine met peers of one.

    Raises:
        Refused: there is a private run of this name.
    """
    local = setup.local
    if local.open or on_this_machine(local) or not setup.can_found:
        return False
    await refuse_if_private(dht, local.run_id)
    if has_been_in_it(local, dht.peer_id) or not setup.is_told_to_found(setup.asked):
        return False  # `Joining` says why
    try:
        return not await run_record.BOARD.fetch(dht, local.run_id)
    except Unreachable:
        return True  # as `Joining` founds a run then


async def claim(dht: Records, run_id: str, public: bytes) -> None:
    """Claim the name for a new private run with this public run key.

    Raises:
        Refused: another peer claims it at the same time, with a lower key.
    """
    await NOTICES.store(dht, run_id, public)
    await asyncio.sleep(FOUNDERS_MEET_S)
    first = min([public, *await _keys_in(dht, run_id)])
    if first != public:
        mend = f"ask that peer's user for an invitation and join with --invite {run_id}.invite"
        raise Refused("is founded by another peer at this moment", key="run_id", value=run_id, mend=mend)


async def keep_notice(dht: Records, run_id: str, public: bytes) -> None:
    """Renew the notice until cancelled. Every member does so."""
    await NOTICES.keep(dht, run_id, lambda: public, NOTICE_EVERY_S)


async def _keys_in(dht: Records, run_id: str) -> list[bytes]:
    """The public run keys in the notices under a run's name."""
    try:
        return [value for value in (await NOTICES.fetch(dht, run_id)).values() if len(value) == KEY_BYTES]
    except Unreachable:
        return []


# -- revoked invitations


async def read_revocations(dht: Records, run_id: str, member: Membership) -> None:
    """Take the newest list of revocations that is in the DHT. It is valid if the run key has signed it
    (`Membership.revoke`); any member may pass it on.

    Raises:
        Unreachable: the DHT doesn't answer.
    """
    _take(run_id, member, (await REVOCATIONS.fetch(dht, run_id)).values())


def _take(run_id: str, member: Membership, found: Collection[bytes]) -> None:
    for packed in found:
        if member.revoke(packed):
            log.info("revoked invitations to the run %s: %d", run_id, len(member.banned))


async def refuse_if_out(dht: Records, run_id: str, member: Membership) -> None:
    """Raises Refused if this peer's own grant was revoked, or has expired: no member would answer it."""
    with contextlib.suppress(Unreachable):
        await read_revocations(dht, run_id, member)
    _refuse_if_out(member)


def _refuse_if_out(member: Membership) -> None:
    if member.revoked:
        raise Refused("was revoked", key="invite", value=member.own.name, mend="ask for a new invitation")
    if time.time() >= member.own.expires:
        raise Refused("has expired", key="invite", value=member.own.name, mend="ask for a new invitation")


async def watch_revocations(dht: Records, run_id: str, member: Membership) -> None:
    """Until cancelled, take each newer list in the DHT, and keep the newest one stored there, unless this peer's grant
    allows only to read.

    Raises:
        Refused: this peer's own grant was revoked, or has expired.
    """

    def take(found: Collection[bytes]) -> None:
        _take(run_id, member, found)
        _refuse_if_out(member)

    await REVOCATIONS.watch(dht, run_id, take, lambda: None if member.own.role == "observer" else member.revocations)


# -- the run key signs the run's record, so that no member can replace it with one of its own

_KIND = b"run record"


@dataclass(frozen=True, slots=True)
class Access:
    """A private run's membership, and its run key. `key`: None on all machines but the founder's."""

    member: Membership
    key: RunKey | None = None

    def signed(self, run_id: str, record: RunRecord) -> bytes:
        """Encode a run's record, signed with the run key."""
        assert self.key is not None, "only a peer that has the run key founds the run"
        key = self.key
        return record.pack(lambda content: key.sign(_KIND, _statement(run_id, content)))

    def founded_by_the_key(self, run_id: str, value: bytes) -> bool:
        """Whether the run key signed this record of the run. `value` may be any bytes."""
        try:
            content, signature = signature_of(value)
        except ValueError:
            return False
        return self.member.by_the_run_key(_KIND, _statement(run_id, content), signature)


def _statement(run_id: str, content: bytes) -> bytes:
    return run_id.encode() + b"\0" + content
