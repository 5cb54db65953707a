"""`join`: collects and checks the settings, then runs the built-in trainer or the user's command.

Law: all checks that need no torch come before it is loaded.
"""

from __future__ import annotations

import logging
import os
import shlex
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from typer import Option

from p2p_diloco.cli.flags import JOIN, given, show_all, with_settings
from p2p_diloco.cli.processes import check_command, run_command
from p2p_diloco.cli.reach import check_free, check_initial_peers
from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.errors import UsageError
from p2p_diloco.interrupts import ENDING, Interrupts, exit_code
from p2p_diloco.net.invitation_used import LINE_LETTERS_MIN, invitation_here, with_invitation
from p2p_diloco.net.stale_sockets import check_writable
from p2p_diloco.remembered import remembered
from p2p_diloco.settings import (
    check_paths,
    flag,
    make_writable_folder,
    read_settings,
    refuse_further_ranks,
    to_environment,
    without_ours,
)
from p2p_diloco.standard_streams import JOINED_FILE
from p2p_diloco.trainer.blocks import load_text
from p2p_diloco.trainer.config import TrainerConfig

LOOK_EVERY_S = 0.2
"""Seconds between two checks of an aggregator whether the run has ended."""

CHOSEN = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""The variables with which a user chooses how many threads there are, or how they wait."""

log = logging.getLogger("p2p_diloco.join")


@with_settings(JOIN)
def join(
    ctx: typer.Context,
    flags: dict[str, Any],
    config: Path | None,
    _help_all: bool = Option(
        False, "--help-all", help="Show all options.", is_eager=True, callback=show_all, expose_value=False
    ),
) -> int:
    """Join a run, or found it. Train with the built-in trainer, or run the command after [bold]--[/bold].

    The options below are those that most people set; [bold]--help-all[/bold] shows all of them.
    What no flag, P2P_DILOCO_... variable or file gives is taken from the run.
    """
    settings, trainer_flags = {**given(RunConfig, flags), **given(PeerConfig, flags)}, given(TrainerConfig, flags)
    refuse_further_ranks(os.environ)
    if len(str(settings.get("invite", ""))) >= LINE_LETTERS_MIN:
        log.warning(
            "other users of this machine can read --invite in the list of processes: put the line into "
            "P2P_DILOCO_INVITE, or into a file"
        )
    beyond = [*ctx.args, *(each for each in flags.get("initial_peers", ())[1:] if not each.startswith("/"))]
    if beyond:
        mend = "leave it out, or put -- before a command: p2p-diloco join ... -- python train.py"
        raise UsageError(f"{beyond[0]!r} is neither an option nor an address", mend=mend)
    run, peer = settings_of(settings, config)
    check_paths(peer)
    if peer.invite is not None:
        from p2p_diloco.net.invited import check_invitation

        check_invitation(peer)
    if ctx.obj is not None:
        _refuse_any(trainer_flags, "leave it out, or leave out the command")
        return _run_command(run, peer, ctx.obj)
    if peer.role == "observer":
        mend = "read the model with `p2p-diloco export`, or give a command whose script makes an observer"
        raise UsageError("trains nothing", key=flag("role"), value=peer.role, mend=mend)
    if peer.role == "aggregator":
        _refuse_any(trainer_flags, "an aggregator trains nothing: leave it out")
        _check_network(peer)
        return _aggregate(run, peer)
    trainer = _trainer_config(trainer_flags)
    text = load_text(trainer.data)
    _check_network(peer)
    os.environ.update(sleeping_threads(os.environ))  # before torch is loaded
    from p2p_diloco.trainer.train import main

    return main(run, peer, trainer, text)


def _run_command(run: RunConfig, peer: PeerConfig, command: Sequence[str]) -> int:
    """Check the network, and run the user's command with the settings in its environment. Returns its exit status. Log
    a warning if the command never joined the run, unless a signal that ends programs has ended it."""
    check_command(command)
    _check_network(peer)
    with tempfile.TemporaryDirectory(prefix="p2p-diloco-") as folder:
        joined = Path(folder) / "joined"
        environment = {**without_ours(os.environ), **to_environment(run, peer), JOINED_FILE: str(joined)}
        environment |= sleeping_threads(environment)
        log.info("starting %s", shlex.join(command))
        status = run_command(command, environment)
        if not joined.exists() and status not in [128 + number for number in ENDING]:
            log.warning(
                "the command ended with exit code %d and never joined the run %s; if no error is shown above, it must "
                "make its peer with Peer.from_env(model, optimizer), and train inside `with peer:`",
                status,
                peer.run_id,
            )
    return status


def settings_of(flags: Mapping[str, object], config_file: Path | None) -> tuple[RunConfig, PeerConfig]:
    """Read the settings from flags, environment and file, and check that they name an initial peer. If they don't, use
    the invitation that lies in this folder.

    Raises:
        UsageError, ConfigError: the settings can't be used, or name no initial peer.
    """
    run, peer = read_settings(flags, os.environ, config_file)
    peer = with_invitation(peer)
    if not peer.initial_peers and not peer.open and (found := invitation_here()) is not None:
        log.info("using the invitation %s", found)
        peer = with_invitation(PeerConfig(**{**peer.given, "invite": str(found)}))
    if not peer.initial_peers:
        raise UsageError(
            "names no address of a peer",
            key=flag("initial_peers"),
            mend="start a bootstrap with `p2p-diloco bootstrap` and run the line that it prints; or name an invitation "
            "to a private run with --invite",
        )
    return run, peer


def _refuse_any(trainer_flags: Mapping[str, object], mend: str) -> None:
    for key in trainer_flags:
        raise UsageError("is for the built-in trainer", key=flag(key), mend=mend)


def _check_network(peer: PeerConfig) -> None:
    check_writable()
    for address in peer.host_maddrs:
        check_free(address, key=flag("host_maddrs"))
    check_initial_peers(peer.initial_peers, remembered(peer.run_id, peer.initial_peers))


def _aggregate(run: RunConfig, peer: PeerConfig) -> int:
    """Aggregate for the run, without a model, until the run ends or a signal comes. Returns the exit status."""
    from p2p_diloco.peer import Peer

    try:
        with Interrupts(), Peer(None, None, config=run, local=peer) as aggregator:
            while not aggregator.finished:
                time.sleep(LOOK_EVERY_S)
    except KeyboardInterrupt as interrupt:
        return exit_code(interrupt)
    return 0


def _trainer_config(flags: Mapping[str, object]) -> TrainerConfig:
    trainer = TrainerConfig.model_validate(dict(flags))
    if trainer.log_path is not None:
        make_writable_folder(trainer.log_path.parent, key=flag("log_path"), value=trainer.log_path)
    return trainer


def sleeping_threads(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables to add for a process that trains; none if the user has chosen any of `CHOSEN`.

    By default the threads that wait for each other keep their cores busy. Beside a node, or beside other peers on the
    same machine, a thread that has work then waits for a core, and training takes many times as long.
    """
    if any(name in environment for name in CHOSEN):
        return {}
    log.info("torch's threads sleep while they wait (OMP_WAIT_POLICY=PASSIVE); set that or OMP_NUM_THREADS to choose")
    return {"OMP_WAIT_POLICY": "PASSIVE"}
