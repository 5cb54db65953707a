"""`set`: changes the outer learning rate or momentum of a run in progress. Only the run's founder may do this.

Law: all checks that need no swarm come first; `observe.revise` makes the change.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from p2p_diloco.cli.join import settings_of
from p2p_diloco.cli.loop import run
from p2p_diloco.cli.reach import check_initial_peers
from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.errors import UsageError
from p2p_diloco.settings import flag

if TYPE_CHECKING:
    from p2p_diloco.net.signing import SigningKey

log = logging.getLogger(__name__)


def set_rates(
    rates: Mapping[str, object], flags: Mapping[str, object], config_file: Path | None, *, wait_s: float, as_json: bool
) -> None:
    """Change the run's outer learning rate or momentum (`rates`), and print the outcome.

    Raises:
        UsageError, ConfigError: the flags can't be used. NoBootstrapReached: no peer answers. `revise` raises
        further errors.
    """
    if not rates:
        raise UsageError("there is no rate to set", mend="give --outer-lr, --outer-momentum or both")
    if wait_s < 0:
        raise UsageError("must be 0 or more", key="--wait", value=wait_s, mend="choose e.g. 60")
    checked = RunConfig.model_validate(dict(rates)).given
    _, peer = settings_of(flags, config_file)
    if peer.identity_path is None:
        mend = "give the file that the run's founder was started with"
        raise UsageError("names no key to sign with", key=flag("identity_path"), mend=mend)
    from p2p_diloco.net.signing import SigningKey

    asker = SigningKey(peer.identity_path)
    check_initial_peers(peer.initial_peers)
    run(_ask(peer, asker, checked, wait_s, as_json))


async def _ask(peer: PeerConfig, asker: SigningKey, rates: Mapping[str, float], wait_s: float, as_json: bool) -> None:
    from p2p_diloco.net.invited import read_invitation
    from p2p_diloco.observe.look import observer
    from p2p_diloco.observe.revise import revise

    invitation = None if peer.invite is None else read_invitation(peer)
    async with observer(peer.initial_peers, invitation) as dht:
        outcome = await revise(dht, peer.run_id, asker, rates, wait_s)
    now = outcome.revision
    if as_json:
        told = {
            "schema_version": 1,
            "run_id": peer.run_id,
            "revision": now.number,
            "outer_lr": now.outer_lr,
            "outer_momentum": now.outer_momentum,
            "news": outcome.news,
            "known_by": list(outcome.known_by),
            "adopted_by": list(outcome.adopted_by),
        }
        typer.echo(json.dumps(told))
        return
    rates_now = f"outer_lr={now.outer_lr:g} outer_momentum={now.outer_momentum:g}"
    typer.echo(f"run {peer.run_id}, revision {now.number}: {rates_now}")
    if not outcome.news:
        log.info("the run has these rates already: nothing was changed")
    elif not outcome.adopted_by:
        log.info("each shard of the run adopts the new rates with its next commit")
