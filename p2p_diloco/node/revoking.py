"""Lists of revocations in the DHT: every member looks for a newer list, and keeps the newest one stored.

Law: a list is valid if the run key has signed it (`Membership.revoke`); any member may pass it on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

from p2p_diloco.errors import Refused
from p2p_diloco.net.interface import Records
from p2p_diloco.net.membership import Membership
from p2p_diloco.node.board import Board

BOARD = Board("revocations", ttl_s=24 * 3600.0)

log = logging.getLogger(__name__)


async def read(dht: Records, run_id: str, member: Membership) -> None:
    """Take the newest list that is in the DHT.

    Raises:
        Unreachable: the DHT doesn't answer.
    """
    _take(run_id, member, (await BOARD.fetch(dht, run_id)).values())


def _take(run_id: str, member: Membership, found: Collection[bytes]) -> None:
    for packed in found:
        if member.revoke(packed):
            log.info("revoked invitations to the run %s: %d", run_id, len(member.banned))


def refuse_if_out(member: Membership) -> None:
    """Raises Refused if this peer's own grant was revoked, or has expired."""
    if member.revoked:
        raise Refused("was revoked", key="invite", value=member.own.name, mend="ask for a new invitation")
    if time.time() >= member.own.expires:
        raise Refused("has expired", key="invite", value=member.own.name, mend="ask for a new invitation")


async def watch(dht: Records, run_id: str, member: Membership) -> None:
    """Until cancelled, take each newer list in the DHT, and keep the newest one stored there, unless this peer's grant
    allows only to read.

    Raises:
        Refused: this peer's own grant was revoked, or has expired.
    """

    def take(found: Collection[bytes]) -> None:
        _take(run_id, member, found)
        refuse_if_out(member)

    await BOARD.watch(dht, run_id, take, lambda: None if member.own.role == "observer" else member.revocations)
