"""Lists of revocations in the DHT: every member looks for a newer list, and keeps the newest one stored.

Law: a list is valid if the run key has signed it (`Membership.revoke`); any member may pass it on. No peer owns a
list's record (see `unowned`).
"""

from __future__ import annotations

import asyncio
import logging
import time

from p2p_diloco.errors import Refused
from p2p_diloco.net.interface import Records, Unreachable
from p2p_diloco.net.membership import Membership
from p2p_diloco.node import unowned

RECORD_TTL_S = 24 * 3600.0
"""How long the DHT keeps a list that no member renews."""
LOOK_EVERY_S = 3.0
KEEP_EVERY_S = 60.0

log = logging.getLogger(__name__)


async def read(dht: Records, run_id: str, member: Membership) -> bool:
    """Take the newest list that is in the DHT; returns whether the newest known list is there.

    Raises:
        Unreachable: the DHT doesn't answer.
    """
    found = (await unowned.fetch(dht, _key(run_id))).values()
    for packed in found:
        if member.revoke(packed):
            log.info("revoked invitations to the run %s: %d", run_id, len(member.banned))
    return member.revocations in found


def refuse_if_out(member: Membership) -> None:
    """Raises Refused if this peer's own grant was revoked, or has expired."""
    if member.revoked:
        raise Refused("was revoked", key="invite", value=member.own.name, mend="ask for a new invitation")
    if time.time() >= member.own.expires:
        raise Refused("has expired", key="invite", value=member.own.name, mend="ask for a new invitation")


async def store(dht: Records, run_id: str, packed: bytes) -> bool:
    """Store a list in the DHT, or renew it. Returns False if it wasn't stored."""
    return await unowned.store(dht, _key(run_id), packed, RECORD_TTL_S)


async def watch(dht: Records, run_id: str, member: Membership) -> None:
    """Until cancelled, take each newer list in the DHT, and keep the newest one stored there, unless this peer's grant
    allows only to read.

    Raises:
        Refused: this peer's own grant was revoked, or has expired.
    """
    clock, keeps = asyncio.get_running_loop().time, member.own.role != "observer"
    keep_at = clock()
    while True:
        try:
            there = await read(dht, run_id, member)
            if keeps and member.revocations is not None and (not there or clock() >= keep_at):
                keep_at = clock() + KEEP_EVERY_S
                await store(dht, run_id, member.revocations)
        except Unreachable as error:
            log.debug("the DHT gave no answer about revocations: %s", error)
        except Exception:  # the other members look too
            log.warning("revocations in the DHT can't be read or renewed", exc_info=True)
        refuse_if_out(member)
        await asyncio.sleep(LOOK_EVERY_S)


def _key(run_id: str) -> str:
    return f"{run_id}/revocations"
