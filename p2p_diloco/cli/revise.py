"""`set`: the outer rates of a run that goes on, changed by its founder.

Law: whatever can be known without a swarm is known before one is looked for; the asking is `observe.revise`'s.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import typer

from p2p_diloco.cli.join import needs_initial_peers
from p2p_diloco.cli.loop import run
from p2p_diloco.cli.reach import check_initial_peers
from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.errors import UsageError
from p2p_diloco.settings import flag, read_settings

log = logging.getLogger(__name__)


def set_rates(
    rates: Mapping[str, float], flags: Mapping[str, object], config_file: Path | None, *, wait_s: float, as_json: bool
) -> None:
    """Ask for these rates, and print what became of it.

    Raises:
        UsageError, ConfigError: the flags can't be used. NoBootstrapReached: nobody answers. Whatever `revise` raises.
    """
    if not rates:
        mend = "give --outer-lr, --outer-momentum or both"
        raise UsageError("nothing is named that is to be set", mend=mend)
    if wait_s < 0:
        raise UsageError("must be 0 or more", key="--wait", value=wait_s, mend="choose e.g. 60")
    RunConfig.model_validate(dict(rates))
    _, peer = read_settings(flags, os.environ, config_file)
    needs_initial_peers(peer)
    if peer.identity_path is None:
        mend = "give the file that the run's founder was started with"
        raise UsageError("names nobody to sign", key=flag("identity_path"), mend=mend)
    from p2p_diloco.net.signing import SigningKey

    asker = SigningKey(peer.identity_path)
    check_initial_peers(peer.initial_peers)
    run(_ask(peer, asker, rates, wait_s, as_json))


async def _ask(peer: PeerConfig, asker: object, rates: Mapping[str, float], wait_s: float, as_json: bool) -> None:
    from p2p_diloco.net.signing import SigningKey
    from p2p_diloco.observe.look import open_eyes
    from p2p_diloco.observe.revise import revise

    assert isinstance(asker, SigningKey)
    transport = await open_eyes(peer.run_id, peer.initial_peers)
    try:
        outcome = await revise(transport, peer.run_id, asker, rates, wait_s)
    finally:
        await transport.close()
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
        log.info("these are the run's rates already: nothing was asked for")
    elif not outcome.adopted_by:
        log.info("the run goes on to it by itself: each shard adopts it with its next commit")
