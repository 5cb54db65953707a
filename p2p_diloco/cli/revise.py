"""`set`, `stop` and `save`: change a run in progress, end it for all, or let all its peers save. Only the run's founder
may do this.

Law: all checks that need no swarm come first; `observe.revise` makes the change.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer import Option

from p2p_diloco.cli.flags import A_RUN, FOUNDER, OUTCOME, WAIT, given, with_settings
from p2p_diloco.cli.join import settings_of
from p2p_diloco.cli.reach import check_initial_peers
from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.core.revision import CHANGEABLE
from p2p_diloco.errors import UsageError
from p2p_diloco.interrupts import run
from p2p_diloco.settings import flag

if TYPE_CHECKING:
    from p2p_diloco.net.certificates import RunKey
    from p2p_diloco.net.interface import Records
    from p2p_diloco.net.invitation import Invitation
    from p2p_diloco.observe.revise import Asker, Outcome

Ask = Callable[["Records", str, "Asker"], Awaitable["Outcome"]]
"""Makes a change: called with the DHT, the name of the run and its asker."""

_THE_RUN = (*A_RUN, "identity_path")

log = logging.getLogger(__name__)


@with_settings((*_THE_RUN, *CHANGEABLE), FOUNDER)
def set_values(flags: dict[str, Any], config: Path | None, wait: float = WAIT, as_json: bool = OUTCOME) -> None:
    """Change settings of a run in progress. Settings that are not given stay. Only the run's founder may do this.

    Every fragment takes the new values with its next commit, the same on all peers.
    Once one peer knows the new values, the change happens even if this command is ended.
    """
    from p2p_diloco.observe.revise import revise

    if not (values := given(RunConfig, flags)):
        raise UsageError("there is nothing to set", mend="give e.g. --outer-lr 0.5; `p2p-diloco set --help` lists all")
    wanted = RunConfig.model_validate(values).given
    changes = {key: wanted[key] for key in values}
    _change(lambda dht, run_id, asker: revise(dht, run_id, asker, changes, wait), flags, config, as_json=as_json)


@with_settings(_THE_RUN, FOUNDER)
def stop(
    flags: dict[str, Any],
    config: Path | None,
    save: bool = Option(False, "--save", help="Refuse to stop if no peer saves the last state."),
    wait: float = WAIT,
    as_json: bool = OUTCOME,
) -> None:
    """End a run for all its peers, after the next commits. Only the run's founder may do this.

    All peers end with the same state. Those that have a checkpoint folder save it.
    """
    from p2p_diloco.observe.revise import stop as end

    _change(lambda dht, run_id, asker: end(dht, run_id, asker, wait, save=save), flags, config, as_json=as_json)


@with_settings(_THE_RUN, FOUNDER)
def save(flags: dict[str, Any], config: Path | None, wait: float = WAIT, as_json: bool = OUTCOME) -> None:
    """Let all peers that have a checkpoint folder save after the next commit. Only the run's founder may do this."""
    from p2p_diloco.observe.revise import save as keep

    _change(lambda dht, run_id, asker: keep(dht, run_id, asker, wait), flags, config, as_json=as_json)


def _change(ask: Ask, flags: Mapping[str, object], config_file: Path | None, *, as_json: bool) -> None:
    """Read the flags and the identity, ask for the change, and print the outcome: one line, or one JSON object."""
    from p2p_diloco.net.invited import key_of, read_invitation
    from p2p_diloco.observe.snapshot import observer

    _, peer = settings_of(given(PeerConfig, flags), config_file)
    invitation = None if peer.invite is None else read_invitation(peer)
    key = None if invitation is None else key_of(peer, invitation)
    asker, own = founder_of(invitation, peer.identity_path, key)
    if asker is None:
        wrong, mend = "names no key to sign with", "give the identity file that the run's founder was started with"
        if invitation is not None:
            mend += f", or do this in the founder's folder, which has the run's key {invitation.run_id}.key"
        else:
            mend += " (an open run that was founded without one can't be changed: end its peers one by one)"
        raise UsageError(wrong, key=flag("identity_path"), mend=mend)
    check_initial_peers(peer.initial_peers)

    async def asked() -> Outcome:
        async with observer(peer.initial_peers, own) as dht:
            return await ask(dht, peer.run_id, asker)

    outcome = run(asked())
    number = outcome.revision.number
    told: dict[str, object] = {
        "schema_version": 1,
        "run_id": peer.run_id,
        "revision": number,
        **outcome.settings,
        "news": outcome.news,
    }
    told |= {"known_by": outcome.known_by, "adopted_by": outcome.adopted_by, "saved_by": outcome.saved_by}
    typer.echo(json.dumps(told) if as_json else f"run {peer.run_id}, revision {number}: {outcome.told}")
    if not outcome.news:
        log.info("it is so already: nothing was changed")
    elif not outcome.adopted_by:
        log.info("each fragment of the run adopts this with its next commit")


def founder_of(
    invitation: Invitation | None, identity: Path | None, key: RunKey | None
) -> tuple[Asker | None, Invitation | None]:
    """Who may change the run: the owner of the file `identity`, or else of the run's `key`; None: nobody. And the
    invitation with which to do so: the key's owner makes one of its own. Members leave out records by an invitation
    that was revoked, and the one in its folder is the others'."""
    from p2p_diloco.net.invited import founders_own
    from p2p_diloco.net.private_files import read_key
    from p2p_diloco.observe.revise import Asker

    run_key = b"" if invitation is None else invitation.grant.run
    if invitation is not None and key is not None:
        invitation = founders_own(invitation.run_id, key)
    signs = key if identity is None else read_key(identity)
    return None if signs is None else Asker(signs, run_key), invitation
