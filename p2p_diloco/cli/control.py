"""The commands of a run's founder: invitations, and changes of a run that goes on.

Law: one function for each command. The modules that carry a command out are loaded only when the command runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import typer
from typer import Option

from p2p_diloco.cli.flags import given
from p2p_diloco.cli.logs import set_up_logs
from p2p_diloco.cli.options import CONFIG, DEBUG, FOUNDER, INITIAL_PEERS, INVITE, KEY, LOGS, OUTCOME, RUN_ID, WAIT
from p2p_diloco.config import PeerConfig, RunConfig


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


def revoke(
    name: str = typer.Argument(..., help="The name in an invitation, or its grant's id.", metavar="NAME|ID"),
    key: Path | None = KEY,
    initial_peers: list[str] | None = INITIAL_PEERS,
    as_json: bool = OUTCOME,
    logs: str = LOGS,
    debug: bool = DEBUG,
) -> None:
    """Revoke an invitation to a private run: the run's members end all connections with peers that use it.

    Needs the run's key. What those peers have read or contributed is not undone.
    """
    set_up_logs(logs, debug=debug)
    from p2p_diloco.cli.invite import revoke as put_out

    put_out(name, key, initial_peers or (), as_json=as_json)


def set_values(
    initial_peers: list[str] | None = INITIAL_PEERS,
    run_id: str | None = RUN_ID,
    invite: str | None = INVITE,
    identity_path: Path | None = FOUNDER,
    outer_lr: float | None = Option(None, help="Learning rate of the outer optimizer.", metavar="X"),
    outer_momentum: float | None = Option(None, help="Momentum of the outer optimizer.", metavar="X"),
    sync_every: int | None = Option(None, help="H: inner steps between two exchanges.", metavar="N"),
    min_peers: int | None = Option(None, help="Contributions that an outer step needs at least.", metavar="N"),
    stop_after_epochs: str | None = Option(
        None, help="Outer steps after which the run ends for all; none: never.", metavar="N"
    ),
    stop_after_samples: str | None = Option(
        None, help="Samples after which the run ends for all; none: never.", metavar="N"
    ),
    wait: float = WAIT,
    as_json: bool = OUTCOME,
    config: Path | None = CONFIG,
    logs: str = LOGS,
    debug: bool = DEBUG,
) -> None:
    """Change settings of a run in progress. Settings that are not given stay. Only the run's founder may do this.

    Every shard takes the new values with its next commit, the same on all peers.
    Once one peer knows the new values, the change happens even if this command is ended.
    """
    set_up_logs(logs, debug=debug)
    from p2p_diloco.cli.revise import set_values as ask

    flags = {"initial_peers": initial_peers, "run_id": run_id, "invite": invite, "identity_path": identity_path}
    values = {
        "outer_lr": outer_lr,
        "outer_momentum": outer_momentum,
        "sync_every": sync_every,
        "min_peers": min_peers,
        "stop_after_epochs": stop_after_epochs,
        "stop_after_samples": stop_after_samples,
    }
    ask(given(RunConfig, values), given(PeerConfig, flags), config, wait_s=wait, as_json=as_json)


def stop(
    initial_peers: list[str] | None = INITIAL_PEERS,
    run_id: str | None = RUN_ID,
    invite: str | None = INVITE,
    identity_path: Path | None = FOUNDER,
    save: bool = Option(False, "--save", help="Refuse to stop if no peer saves the last state."),
    wait: float = WAIT,
    as_json: bool = OUTCOME,
    config: Path | None = CONFIG,
    logs: str = LOGS,
    debug: bool = DEBUG,
) -> None:
    """End a run for all its peers, after the next commits. Only the run's founder may do this.

    All peers end with the same state. Those that have a checkpoint folder save it.
    """
    set_up_logs(logs, debug=debug)
    from p2p_diloco.cli.revise import stop as ask

    flags = {"initial_peers": initial_peers, "run_id": run_id, "invite": invite, "identity_path": identity_path}
    ask(given(PeerConfig, flags), config, save=save, wait_s=wait, as_json=as_json)


def save(
    initial_peers: list[str] | None = INITIAL_PEERS,
    run_id: str | None = RUN_ID,
    invite: str | None = INVITE,
    identity_path: Path | None = FOUNDER,
    wait: float = WAIT,
    as_json: bool = OUTCOME,
    config: Path | None = CONFIG,
    logs: str = LOGS,
    debug: bool = DEBUG,
) -> None:
    """Let all peers that have a checkpoint folder save after the next commit. Only the run's founder may do this."""
    set_up_logs(logs, debug=debug)
    from p2p_diloco.cli.revise import save as ask

    flags = {"initial_peers": initial_peers, "run_id": run_id, "invite": invite, "identity_path": identity_path}
    ask(given(PeerConfig, flags), config, wait_s=wait, as_json=as_json)


def kick(
    name: str = typer.Argument(
        ...,
        help="A name that `status` shows or that is in an invitation, a grant's id, or a peer id.",
        metavar="NAME|ID",
    ),
    key: Path | None = KEY,
    initial_peers: list[str] | None = INITIAL_PEERS,
    as_json: bool = OUTCOME,
    logs: str = LOGS,
    debug: bool = DEBUG,
) -> None:
    """Put peers out of a private run, and say which other invitations may still let them in. Needs the run's key.

    Revokes the invitation of that name or grant's id, the one that was made for that peer id, or the one with which
    the peer of that name has come, if no other peer uses it.
    """
    set_up_logs(logs, debug=debug)
    from p2p_diloco.cli.invite import kick as put_out

    put_out(name, key, initial_peers or (), as_json=as_json)


COMMANDS: Mapping[str, Callable[..., None]] = {
    "invite": invite,
    "revoke": revoke,
    "kick": kick,
    "set": set_values,
    "stop": stop,
    "save": save,
}
"""The commands by their names, in the order in which the help lists them."""
