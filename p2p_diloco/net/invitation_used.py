"""Chooses the invitation that a peer uses: a setting names it, or its file lies in the folder that the peer was started
in.

Law: whether a run is private follows from a peer's settings alone: `open`, `invite`, and whether its addresses keep the
run on this machine. The libraries that read an invitation (`invited`) are loaded only where there is one.
"""

from __future__ import annotations

import logging
from pathlib import Path

from p2p_diloco.addresses import is_loopback
from p2p_diloco.config import PeerConfig
from p2p_diloco.errors import ConfigError

SHARED_NAME = "shared"
"""The name of the grant in the invitation that a founder writes for many peers."""
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
        if local.open or on_this_machine(local) or not invite_file(local.run_id).exists():
            return local
        log.info("using the invitation %s", invite_file(local.run_id))
        local = PeerConfig(**{**local.given, "invite": str(invite_file(local.run_id))})
    from p2p_diloco.net.invited import read_invitation

    invitation = read_invitation(local)
    given = local.given
    if len(given["invite"]) < LINE_LETTERS_MIN:
        given["invite"] = str(Path(given["invite"]).expanduser().absolute())  # a command of `join` may go elsewhere
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
        from p2p_diloco.net.certificates import is_run_key

        found = [path for path in found if is_run_key(path.with_suffix(".key"))]
    return found[0] if len(found) == 1 else None


def on_this_machine(local: PeerConfig) -> bool:
    """Whether no other machine can reach this peer's run, by the addresses in its settings."""
    return all(map(is_loopback, (*local.initial_peers, *local.host_maddrs, *local.announce_maddrs)))


def invite_file(run_id: str) -> Path:
    """The file of the invitation to a run, in this folder."""
    return Path(f"{run_id}.invite")
