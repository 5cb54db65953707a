"""Reads a peer's invitation and run key: from a setting, or from files in the folder that the peer was started in.
Keeps the list of a run's invitations and revocations in a file beside the run key.

Law: reads and writes these files; `membership` uses their content, and `invitation_used` chooses the invitation. Only
the owner of the run key needs the list, which shows which grants were given under a name.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from p2p_diloco.config import PeerConfig
from p2p_diloco.errors import ConfigError
from p2p_diloco.net.certificates import Grant, RunKey
from p2p_diloco.net.invitation import Invitation
from p2p_diloco.net.invitation_used import LINE_LETTERS_MIN, SHARED_NAME, invite_file
from p2p_diloco.net.private_files import open_to_others, read, write_new

SHARED_FOR_S = 365 * 86_400
"""Seconds for which the invitation that a founder writes is valid."""
FOUNDER = "founder"
"""The name of the founder's own grant."""
UNKNOWN = "unknown"
"""The name of a grant that was revoked by its id and is not in this file, but in another one."""
_NEVER = 2**53 - 1

log = logging.getLogger(__name__)


def read_invitation(local: PeerConfig, *, warns: bool = False) -> Invitation:
    """The invitation that the setting `invite` names. `warns`: of other users that can read it; of the programs that
    read it one after the other, one does.

    Raises:
        ConfigError: there is none, or it can't be read.
    """
    given = local.invite or ""
    if len(given) >= LINE_LETTERS_MIN:
        return Invitation.unpack(given)
    path = Path(given).expanduser()
    text = read(path, key="invite")
    if warns and open_to_others(path):
        log.warning("%s is a secret that other users of this machine can read; run: chmod 600 %s", path, path)
    try:
        return Invitation.unpack(text)
    except ConfigError as error:
        raise ConfigError(error.wrong, key="invite", value=path, mend=error.mend) from None


def check_invitation(local: PeerConfig) -> None:
    """Check that a peer can use its invitation, before anything is started. The owner of the run key can use any.

    Raises:
        ConfigError: it can't be read, allows less, or has expired.
    """
    invitation = read_invitation(local)
    if key_of(local, invitation) is None:
        check_role(local, invitation)


def check_role(local: PeerConfig, invitation: Invitation) -> None:
    """Check that the invitation allows what this peer is to do.

    Raises:
        ConfigError: it allows less, or has expired.
    """
    invitation.grant.check_time(time.time())
    allowed = invitation.grant.role
    if local.role == "observer":
        return  # every member may read
    if allowed == "observer":
        mend = "watch with `p2p-diloco status --invite`, read the model with `p2p-diloco export --invite` or with "
        mend += "role=observer, or ask for an invitation as a worker"
        raise ConfigError(
            "allows to watch the run, not to join it", key="invite", value=invitation.grant.name, mend=mend
        )
    if allowed == "aggregator" and local.role != "aggregator":
        mend = "start this peer with role=aggregator, or ask for an invitation as a worker"
        raise ConfigError("allows only to aggregate", key="invite", value=invitation.grant.name, mend=mend)


def key_of(local: PeerConfig, invitation: Invitation) -> RunKey | None:
    """The run key, if its file is beside the invitation's; None on all machines but the founder's.

    Raises:
        ConfigError: the file can't be read, or other users can read it.
    """
    path = _key_path(local, invitation.run_id)
    if not path.exists():
        return None
    key = RunKey.load(path)
    if key.public != invitation.grant.run:
        log.warning("%s is the key of another run of this name, and is not used", path)
        return None
    return key


def revocations_of(local: PeerConfig, run_id: str, key: RunKey) -> bytes | None:
    """The list of revocations that the file beside the run key gives; None: nothing was revoked. The DHT forgets a list
    that no member renews; the file keeps it.

    Raises:
        ConfigError: the file can't be read.
    """
    made = Issued.beside(_key_path(local, run_id)).revocations(key, (), time.time())
    return None if made is None else made[1]


def founders_key(run_id: str) -> RunKey:
    """The run key in this folder; a new one if there is none, which `write_files` later saves.

    Raises:
        ConfigError: the file can't be read, or other users can read it.
    """
    path = _key_file(run_id)
    return RunKey.load(path) if path.exists() else RunKey.create()


def founders_own(run_id: str, key: RunKey) -> Invitation:
    """A new invitation that only this process uses; it has the run key. If the invitation for others is revoked, the
    founder stays a member."""
    grant, seed = key.grant("worker", FOUNDER, time.time() + SHARED_FOR_S)
    return Invitation(run_id, (), grant, seed, key.secret)


def write_files(run_id: str, key: RunKey, addresses: Sequence[str]) -> None:
    """Write an invitation for others, with these addresses, into the current folder; also the run key, if it is new.

    Raises:
        ConfigError: one of them can't be written.
    """
    key_file, shared_file = _key_file(run_id), invite_file(run_id)
    if not key_file.exists():
        key.save(key_file)
    grant, seed = key.grant("worker", SHARED_NAME, time.time() + SHARED_FOR_S)
    issued = Issued.beside(key_file)
    issued.add(grant)
    invitation = Invitation(run_id, tuple(addresses), grant, seed, key.secret)
    write_new(shared_file, invitation.pack(), key="invite")
    issued.save()
    log.warning(
        "the run %s is private: %s is its key (keep it), and %s an invitation for others; send the invitation over a "
        "safe channel, and run on the other machine: p2p-diloco join --invite %s",
        run_id,
        key_file,
        shared_file,
        shared_file,
    )


def _key_path(local: PeerConfig, run_id: str) -> Path:
    """The run key's file: beside the invitation's, or else in this folder."""
    given = local.invite or ""
    if given and len(given) < LINE_LETTERS_MIN:
        return Path(given).expanduser().parent / _key_file(run_id)
    return _key_file(run_id)


def _key_file(run_id: str) -> Path:
    return Path(f"{run_id}.key")


@dataclass(frozen=True, slots=True)
class Entry:
    """One invitation. `id`: the grant's id, in hex; `expires`: seconds since 1970; `peer`: the only peer that may use
    the grant, None: any peer; `revoked`: the number of the first list of revocations with this grant, None: valid."""

    id: str
    name: str
    role: str
    expires: int
    peer: str | None = None
    revoked: int | None = None


class Issued:
    """The list in a file; `save` writes it."""

    def __init__(self, path: Path, entries: Iterable[Entry] = ()) -> None:
        self.path, self.entries = path, list(entries)

    @classmethod
    def beside(cls, key_file: Path) -> Issued:
        """Read the list beside a run key; an empty one if there is none.

        Raises:
            ConfigError: the file can't be read.
        """
        path = key_file.with_suffix(".issued")
        if not path.exists():
            return cls(path)
        names = {field.name for field in fields(Entry)}
        try:
            found = json.loads(read(path, key="issued"))
            return cls(path, [Entry(**{name: entry[name] for name in names & entry.keys()}) for entry in found])
        except (TypeError, ValueError, AttributeError, RecursionError):
            mend = "move it away: `p2p-diloco revoke` takes the ids of grants, too"
            raise ConfigError("is no list of invitations", key="issued", value=path, mend=mend) from None

    def add(self, grant: Grant) -> None:
        self.entries.append(Entry(grant.id.hex(), grant.name, grant.role, grant.expires, grant.peer))

    def valid(self, name: str, now: float) -> bool:
        """Whether an invitation of this name is neither revoked nor expired."""
        return any(entry.name == name and entry.revoked is None and entry.expires > now for entry in self.entries)

    def ids_of(self, name: str) -> list[bytes]:
        return [bytes.fromhex(entry.id) for entry in self.entries if entry.name == name]

    def revoke(self, ids: Iterable[bytes], number: int) -> None:
        """Mark grants as revoked by the list with this number. A grant that isn't in this file is added."""
        gone = {id.hex() for id in ids}
        for id in gone - {entry.id for entry in self.entries}:
            self.entries.append(Entry(id, UNKNOWN, "", _NEVER))
        self.entries = [
            replace(entry, revoked=number) if entry.id in gone and entry.revoked is None else entry
            for entry in self.entries
        ]

    def revocations(self, key: RunKey, banned: Iterable[bytes], now: float) -> tuple[int, bytes] | None:
        """The newest list of revocations, with its number. It has the grants revoked in this file and those that an
        earlier list has `banned`, except expired ones. None: nothing was revoked here.

        Raises:
            ConfigError: the list is too long.
        """
        revoked = [(entry.revoked, bytes.fromhex(entry.id)) for entry in self.entries if entry.revoked is not None]
        if not revoked:
            return None
        expired = {bytes.fromhex(entry.id) for entry in self.entries if entry.expires <= now}
        number = max(number for number, _ in revoked)
        return number, key.sign_revocations(number, {*banned, *(id for _, id in revoked)} - expired)

    def save(self) -> None:
        """Write the list, completely or not at all.

        Raises:
            ConfigError: it can't be written.
        """
        part = self.path.with_name(f"{self.path.name}.{os.getpid()}.part")
        write_new(part, json.dumps([asdict(entry) for entry in self.entries], indent=1) + "\n", key="issued")
        part.replace(self.path)
