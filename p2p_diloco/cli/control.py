"""The commands of a run's founder: invitations, and changes of a run that goes on.

Law: one function for each command. The modules that carry a command out are loaded only when the command runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import typer
from typer import Option

from p2p_diloco.cli.flags import given, with_settings
from p2p_diloco.cli.options import A_RUN, FOUNDER, KEY, OUTCOME, WAIT
from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.core.revision import CHANGEABLE

_THE_RUN = (*A_RUN, "identity_path")


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
    from p2p_diloco.cli.invite import invite as make

    make(name, role, expires, peer=peer, key_file=key, initial_peers=initial_peers or (), out=out, as_line=line)


@with_settings(("initial_peers",), FOUNDER, config=False)
def revoke(
    flags: dict[str, Any],
    name: str = typer.Argument(..., help="The name in an invitation, or its grant's id.", metavar="NAME|ID"),
    key: Path | None = KEY,
    as_json: bool = OUTCOME,
) -> None:
    """Revoke an invitation to a private run: the run's members end all connections with peers that use it.

    Needs the run's key. What those peers have read or contributed is not undone.
    """
    from p2p_diloco.cli.invite import revoke as put_out

    put_out(name, key, flags.get("initial_peers", ()), as_json=as_json)


@with_settings((*_THE_RUN, *CHANGEABLE), FOUNDER)
def set_values(flags: dict[str, Any], config: Path | None, wait: float = WAIT, as_json: bool = OUTCOME) -> None:
    """Change settings of a run in progress. Settings that are not given stay. Only the run's founder may do this.

    Every fragment takes the new values with its next commit, the same on all peers.
    Once one peer knows the new values, the change happens even if this command is ended.
    """
    from p2p_diloco.cli.revise import set_values as ask

    ask(given(RunConfig, flags), given(PeerConfig, flags), config, wait_s=wait, as_json=as_json)


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
    from p2p_diloco.cli.revise import stop as ask

    ask(flags, config, save=save, wait_s=wait, as_json=as_json)


@with_settings(_THE_RUN, FOUNDER)
def save(flags: dict[str, Any], config: Path | None, wait: float = WAIT, as_json: bool = OUTCOME) -> None:
    """Let all peers that have a checkpoint folder save after the next commit. Only the run's founder may do this."""
    from p2p_diloco.cli.revise import save as ask

    ask(flags, config, wait_s=wait, as_json=as_json)


@with_settings(("initial_peers",), FOUNDER, config=False)
def kick(
    flags: dict[str, Any],
    name: str = typer.Argument(
        ...,
        help="A name that `status` shows or that is in an invitation, a grant's id, or a peer id.",
        metavar="NAME|ID",
    ),
    key: Path | None = KEY,
    as_json: bool = OUTCOME,
) -> None:
    """Put peers out of a private run, and say which other invitations may still let them in. Needs the run's key.

    Revokes the invitation of that name or grant's id, the one that was made for that peer id, or the one with which
    the peer of that name has come, if no other peer uses it.
    """
    from p2p_diloco.cli.invite import kick as put_out

    put_out(name, key, flags.get("initial_peers", ()), as_json=as_json)


COMMANDS: Mapping[str, Callable[..., None]] = {
    "invite": invite,
    "revoke": revoke,
    "kick": kick,
    "set": set_values,
    "stop": stop,
    "save": save,
}
"""The commands by their names, in the order in which the help lists them."""
