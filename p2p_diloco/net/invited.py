"""Finds a peer's invitation and run key: in a setting, or in files in the folder that the peer was started in.

Law: finds and reads these files; `membership` uses their content. Whether a run is private follows from a peer's
settings alone: `open`, `invite`, and whether its addresses keep the run on this machine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from p2p_diloco.addresses import is_loopback
from p2p_diloco.config import PeerConfig
from p2p_diloco.errors import ConfigError
from p2p_diloco.net.issued import Issued
from p2p_diloco.net.membership import Invitation, RunKey, is_run_key
from p2p_diloco.net.private_files import open_to_others, read, write_new

SHARED_FOR_S = 365 * 86_400
"""Seconds for which the invitation that a founder writes is valid."""
SHARED_NAME, FOUNDER = "shared", "founder"
"""The names of the grant in that invitation, and of the founder's own."""
LINE_LETTERS_MIN = 300
"""A base64 text with at least this many letters is an invitation itself; a shorter text names a file."""

log = logging.getLogger(__name__)


def with_invitation(local: PeerConfig) -> PeerConfig:
    """A peer's settings, with those that its invitation adds: the run's name and, if the settings lack them, the
    initial peers and the peer's name. The invitation that a founder writes for many peers adds no name of a peer.

    Without `invite`, an invitation in this folder that has the run's name is used, unless the run is open.

    Raises:
        ConfigError: the invitation can't be read, or is to another run than `run_id` names.
    """
    if local.invite is None:
        if local.open or on_this_machine(local) or not _invite_file(local.run_id).exists():
            return local
        log.info("using the invitation %s", _invite_file(local.run_id))
        local = PeerConfig(**{**local.given, "invite": str(_invite_file(local.run_id))})
    invitation = read_invitation(local)
    given = local.given
    if given.get("run_id", invitation.run_id) != invitation.run_id:
        mend = "leave out run_id: the invitation names the run"
        raise ConfigError(
            f"is not the invitation's run, {invitation.run_id}", key="run_id", value=local.run_id, mend=mend
        )
    name = {} if invitation.grant.name == SHARED_NAME else {"name": invitation.grant.name}
    return PeerConfig(**{"initial_peers": invitation.addresses, **name, **given, "run_id": invitation.run_id})


def invitation_here() -> Path | None:
    """The only invitation in this folder. Among several, the only one that lies beside its run key, which is the one
    that the founder of a run wrote. None: there is none, or a choice."""
    found = sorted(Path().glob("*.invite"))
    if len(found) > 1:
        found = [path for path in found if is_run_key(path.with_suffix(".key"))]
    return found[0] if len(found) == 1 else None


def read_invitation(local: PeerConfig) -> Invitation:
    """The invitation that the setting `invite` names.

    Raises:
        ConfigError: there is none, or it can't be read.
    """
    given = local.invite or ""
    if len(given) >= LINE_LETTERS_MIN:
        return Invitation.unpack(given)
    path = Path(given).expanduser()
    text = read(path, key="invite")
    if open_to_others(path):
        log.warning("%s is a secret that other users of this machine can read; run: chmod 600 %s", path, path)
    try:
        return Invitation.unpack(text)
    except ConfigError as error:
        raise ConfigError(error.wrong, key="invite", value=path, mend=error.mend) from None


def check_role(local: PeerConfig, invitation: Invitation) -> None:
    """Check that the invitation allows what this peer is to do.

    Raises:
        ConfigError: it allows less.
    """
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


def on_this_machine(local: PeerConfig) -> bool:
    """Whether no other machine can reach this peer's run, by the addresses in its settings."""
    return all(map(is_loopback, (*local.initial_peers, *local.host_maddrs, *local.announce_maddrs)))


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
    key_file, invite_file = _key_file(run_id), _invite_file(run_id)
    if not key_file.exists():
        key.save(key_file)
    grant, seed = key.grant("worker", SHARED_NAME, time.time() + SHARED_FOR_S)
    issued = Issued.beside(key_file)
    issued.add(grant)
    invitation = Invitation(run_id, tuple(addresses), grant, seed, key.secret)
    write_new(invite_file, invitation.pack(), key="invite")
    issued.save()
    log.warning(
        "the run %s is private: %s is its key (keep it), and %s an invitation for others; send the invitation over a "
        "safe channel, and run on the other machine: p2p-diloco join --invite %s",
        run_id,
        key_file,
        invite_file,
        invite_file,
    )


def _key_path(local: PeerConfig, run_id: str) -> Path:
    """The run key's file: beside the invitation's, or else in this folder."""
    given = local.invite or ""
    if given and len(given) < LINE_LETTERS_MIN:
        return Path(given).expanduser().parent / _key_file(run_id)
    return _key_file(run_id)


def _key_file(run_id: str) -> Path:
    return Path(f"{run_id}.key")


def _invite_file(run_id: str) -> Path:
    return Path(f"{run_id}.invite")
