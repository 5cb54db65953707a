"""`invite`, `revoke` and `kick`: let peers into a private run, and put them out. All need the run key's file.

Law: all checks that need no swarm come first. `invite` needs no network at all; `revoke` and `kick` store one signed
list in the run's DHT records, and take no part in the run.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import typer
from typer import Argument, Option

from p2p_diloco.cli.flags import FOUNDER, KEY, OUTCOME, with_settings
from p2p_diloco.cli.reach import check_initial_peers
from p2p_diloco.config import PeerConfig
from p2p_diloco.errors import ConfigError, GaveUpWaiting, UsageError
from p2p_diloco.interrupts import run

if TYPE_CHECKING:
    from p2p_diloco.net.certificates import Grant, RunKey
    from p2p_diloco.net.interface import Records
    from p2p_diloco.net.invitation import Invitation
    from p2p_diloco.net.invited import Entry, Issued
    from p2p_diloco.net.membership import SealedRecords

log = logging.getLogger(__name__)

STORED_WITHIN_S = 30.0
"""Deadline for storing a list of revocations."""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def invite(
    name: str = Option(..., help="The name of the person or machine that is let in.", metavar="NAME"),
    role: str = Option("worker", help="What it may do.", metavar="[worker|aggregator|observer]"),
    expires: str = Option("30d", help="How long the invitation is valid: 7d, 12h, 30m.", metavar="TIME"),
    peer: str | None = Option(None, help="Only the peer with this id may use it; unset: any peer.", metavar="ID"),
    key: Path | None = KEY,
    initial_peers: list[str] | None = Option(
        None, help="Addresses to join through; unset: those of the run's own invitation.", metavar="ADDR..."
    ),
    out: Path | None = Option(None, help="File to write; unset: NAME.invite.", metavar="PATH"),
    line: bool = Option(False, "--line", help="Print the invitation as a line for P2P_DILOCO_INVITE, not to a file."),
) -> None:
    """Write an invitation to a private run. Needs the run's key, and no network."""
    from p2p_diloco.net.certificates import RunKey
    from p2p_diloco.net.invited import Issued
    from p2p_diloco.net.private_files import write_new

    lasts_s = seconds(expires)
    path = key or only_key()
    run_key, shared, issued = RunKey.load(path), shared_invitation(path), Issued.beside(path)
    now = time.time()
    if issued.valid(name, now):
        mend = "choose another, or revoke the first one"
        raise UsageError("is the name of a valid invitation", key="--name", value=name, mend=mend)
    grant, seed = run_key.grant(role, name, now + lasts_s, peer)
    addresses = PeerConfig(initial_peers=tuple(initial_peers or ())).initial_peers or shared.addresses
    made = replace(shared, grant=grant, seed=seed, secret=run_key.secret, addresses=tuple(addresses))
    issued.add(grant)
    if line:
        issued.save()
        typer.echo(made.line())
        return
    file = out or Path(f"{name}.invite")
    write_new(file, made.pack(), key="--out")
    issued.save()
    typer.echo(f"# {file} is a secret: give it to {name} over a safe channel, and run there:")
    typer.echo(f"p2p-diloco {'status' if role == 'observer' else 'join'} --invite {file.name}")


@with_settings(("initial_peers",), FOUNDER, config=False)
def revoke(
    flags: dict[str, Any],
    name: str = Argument(..., help="The name in an invitation, or its grant's id.", metavar="NAME|ID"),
    key: Path | None = KEY,
    as_json: bool = OUTCOME,
) -> None:
    """Revoke an invitation to a private run: the run's members end all connections with peers that use it.

    Needs the run's key. What those peers have read or contributed is not undone.
    """
    from p2p_diloco.net.invited import Issued

    path = key or only_key()
    shared_invitation(path)  # raises ConfigError, for instance for a mistyped path
    _checked(Issued.beside(path), name)  # raises UsageError
    _put_out_and_tell(name, path, flags, as_json=as_json)


@with_settings(("initial_peers",), FOUNDER, config=False)
def kick(
    flags: dict[str, Any],
    name: str = Argument(
        ...,
        help="A name that `status` shows or that is in an invitation, a grant's id, or a peer id.",
        metavar="NAME|ID",
    ),
    key: Path | None = KEY,
    as_json: bool = OUTCOME,
) -> None:
    """Put peers out of a private run, and say which other invitations may still let them in. Needs the run's key.

    Revokes the invitation of that name or grant's id, or the one that was made for that peer id; and the one with which
    the peer of that name or id has come, if no other peer uses it. Says whom it puts out.
    """
    made = _put_out_and_tell(name, key or only_key(), flags, as_json=as_json)
    if made.others:
        log.warning(
            "a kicked peer that also holds one of these invitations can come back with it: %s; revoke that one, and "
            "give its other holders a new one",
            made.others,
        )


class PutOut(NamedTuple):
    """What was revoked: grants with these `ids`. `others`: the names of invitations with which their holders may come
    back."""

    ids: list[bytes]
    told: str
    others: str


def _put_out_and_tell(name: str, key_file: Path, flags: Mapping[str, Any], *, as_json: bool) -> PutOut:
    shared = shared_invitation(key_file)
    addresses = PeerConfig(**flags).initial_peers or shared.addresses
    check_initial_peers(addresses)
    made = run(put_out(name, key_file, addresses))
    told = {"schema_version": 1, "run_id": shared.run_id, "revoked": [id.hex() for id in made.ids]}
    typer.echo(json.dumps(told) if as_json else made.told)
    return made


async def put_out(name: str, key_file: Path, addresses: Sequence[str]) -> PutOut:
    """Revoke the invitation that `kick` means by `name`. `addresses`: of the run's peers; if empty, those of the
    invitation beside the key."""
    from p2p_diloco.net.certificates import RunKey
    from p2p_diloco.net.invited import Issued, founders_own
    from p2p_diloco.node.records import BOARD
    from p2p_diloco.observe.snapshot import look, named, observer

    key, shared, issued = RunKey.load(key_file), shared_invitation(key_file), Issued.beside(key_file)
    own, run_id = founders_own(shared.run_id, key), shared.run_id
    async with observer(addresses or shared.addresses, own) as dht:
        there = {peer.peer_id: peer for peer in (await look(dht, run_id)).peers if not peer.gone}
        used: dict[str, Grant] = {}
        for place in sorted({BOARD.key(run_id, peer) for peer in there}):
            used |= await cast("SealedRecords", dht).grants(place)
        came = {peer: (named(status), used[peer]) for peer, status in there.items() if peer in used}
        meant = {peer: grant for peer, (_, grant) in came.items() if name in (peer, there[peer].name)}
        listed = _grants(issued, name)
        ids = [*listed, *_came_with(name, listed, meant, came, issued)]
        banned = await _revoke(dht, own, key, issued, ids)
    out = ", ".join(sorted(who for who, grant in came.values() if grant.id in ids)) or "nobody who is there now"
    told = f"revoked {name}: the members of {run_id} put out {out} within seconds ({banned} revoked in all)"
    return PutOut(ids, told, _other_ways_in(issued, ids))


def _grants(issued: Issued, name: str) -> list[bytes]:
    """The ids of the grants that were made for the peer with this id; or else of those of this name, or with this
    id."""
    of_the_peer = [bytes.fromhex(entry.id) for entry in issued.entries if entry.peer == name]
    as_id = [bytes.fromhex(name)] if re.fullmatch(r"[0-9a-f]{16}", name) else []
    return of_the_peer or issued.ids_of(name) or as_id


def _checked(issued: Issued, name: str) -> None:
    """Raise UsageError if `name` means no grant."""
    if not _grants(issued, name):
        known = ", ".join(sorted({entry.name for entry in issued.entries})) or "none"
        mend = f"give a name ({known}), or the id of a grant, 16 hex digits"
        raise UsageError("is no invitation that this key has issued", value=name, key="NAME", mend=mend)


def _came_with(
    name: str,
    listed: Collection[bytes],
    meant: Mapping[str, Grant],
    came: Mapping[str, tuple[str, Grant]],
    issued: Issued,
) -> list[bytes]:
    """The ids of the grants by which the peers came that are `meant` by a name in `status`, or by an id, without those
    that the name means in the list, `listed`. `came`: by peer, how others name it, and its grant.

    Raises:
        UsageError: there is no such peer, it needs no invitation, several peers may be meant, or others have come with
            the same invitation.
    """
    from p2p_diloco.net.invited import FOUNDER

    if not (meant or listed):
        _checked(issued, name)  # raises UsageError
    ids = sorted({grant.id for grant in meant.values() if grant.name != FOUNDER} - {*listed})
    if not ids and not listed:
        wrong, mend = "has founded the run with its key, so it needs no invitation", "end its program, or the whole run"
        raise UsageError(wrong, key="NAME", value=name, mend=f"{mend} with `p2p-diloco stop`")
    asked = {peer for peer, (_, grant) in came.items() if grant.id in listed}
    if ids and len({came[peer][1].id for peer in asked} | {*ids}) > 1:  # peers choose their names themselves
        several = sorted(asked | {peer for peer, grant in meant.items() if grant.id in ids})
        raise UsageError("means several peers", key="NAME", value=name, mend=f"give an id: {', '.join(several)}")
    if others := sorted(who for peer, (who, grant) in came.items() if grant.id in ids and peer not in meant):
        which = ", ".join(f"{grant.name} (its grant's id: {grant.id.hex()})" for grant in {*meant.values()})
        wrong = f"has come with the invitation {which}, as have {', '.join(others)}"
        mend = "put all of them out with `p2p-diloco revoke ID`, and give those who stay one each (p2p-diloco invite)"
        raise UsageError(wrong, key="NAME", value=name, mend=mend)
    return ids


def _other_ways_in(issued: Issued, ids: Collection[bytes]) -> str:
    """The names of the valid invitations that any peer may use, without those with these `ids`."""
    return ", ".join(sorted({e.name for e in issued.entries if _lets_anyone_in(e) and bytes.fromhex(e.id) not in ids}))


def _lets_anyone_in(entry: Entry) -> bool:
    """Whether an invitation is valid and may be used by any peer that holds it."""
    return entry.revoked is None and entry.peer is None and entry.expires > time.time()


async def _revoke(dht: Records, own: Invitation, key: RunKey, issued: Issued, ids: Sequence[bytes]) -> int:
    """Store the new list of revocations in the DHT and in the file beside the key; returns its length."""
    from p2p_diloco.net.membership import Membership
    from p2p_diloco.node import privacy
    from p2p_diloco.observe.revise import until

    run_id, now = own.run_id, time.time()
    member = Membership(own, dht.peer_id, now)
    await privacy.read_revocations(dht, run_id, member)
    issued.revoke(ids, max(member.number + 1, int(now)))
    made = issued.revocations(key, member.banned, now)
    assert made is not None, "these grants are revoked"
    issued.save()
    if not await until(lambda: privacy.REVOCATIONS.store(dht, run_id, made[1]), STORED_WITHIN_S):
        raise GaveUpWaiting("the DHT did not store the revocation", mend="check that its peers are up, and try again")
    member.revoke(made[1])
    return len(member.banned)


def only_key() -> Path:
    """The only run key in this folder.

    Raises:
        UsageError: there is none, or there are several.
    """
    from p2p_diloco.net.certificates import is_run_key

    found = [path for path in sorted(Path().glob("*.key")) if is_run_key(path)]
    if len(found) != 1:
        mend = "name the .key file that the run's founder wrote; an open run has none, and lets every peer in"
        raise UsageError(f"is needed: this folder has {len(found)} run keys", key="--key", mend=mend)
    return found[0]


def shared_invitation(key_file: Path) -> Invitation:
    """The invitation beside a run key, which has the run's name and addresses.

    Raises:
        ConfigError: there is none, or it is of another run; or the key can't be read.
    """
    from p2p_diloco.net.certificates import RunKey
    from p2p_diloco.net.invited import read_invitation

    key, path = RunKey.load(key_file), key_file.with_suffix(".invite")
    if not path.exists():
        wrong = f"needs an invitation to its run beside it, {path.name}"
        mend = "put the founder's there, or any member's under this name"
        raise ConfigError(wrong, key="run key", value=key_file, mend=mend)
    invitation = read_invitation(PeerConfig(invite=str(path)))
    if invitation.grant.run != key.public:
        mend = f"put the founder's .invite file beside {key_file}"
        raise ConfigError("is the invitation to another run", key="invite", value=path, mend=mend)
    return invitation


def seconds(text: str) -> float:
    """A time such as 7d, 12h, 30m or 90s, in seconds. Raises UsageError."""
    found = re.fullmatch(r"(\d{1,5})([smhd])", text)
    if found is None or not int(found[1]):
        raise UsageError("is no length of time", key="--expires", value=text, mend="write it like 7d, 12h or 30m")
    return int(found[1]) * _UNITS[found[2]]
