"""`data`: serves files of this machine to the peers of a run.

Law: the files are read and cut before anything is started. A data node takes no part in the run. The modules that
carry the command out are loaded only when it runs.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import typer
from typer import Option

from p2p_diloco.cli.flags import A_RUN, TOLD, with_settings
from p2p_diloco.config import PeerConfig
from p2p_diloco.errors import ConfigError, UsageError
from p2p_diloco.observe.figures import count_of
from p2p_diloco.settings import check_paths, flag

SETTINGS = (*A_RUN, "open", "name", "host_maddrs", "announce_maddrs", "identity_path", "direct_port")
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"

log = logging.getLogger("p2p_diloco.data")


@with_settings(
    SETTINGS,
    {
        **TOLD,
        "run_id": "The run whose peers may read; unset: main.",
        "open": "Serve to every peer that knows an address of the run.",
        "name": "This data node's name in logs; unset: the host's name.",
        "identity_path": "File that keeps the data node's identity across restarts; unset: a new one.",
    },
)
def data(
    flags: dict[str, Any],
    config: Path | None,
    paths: list[Path] = typer.Argument(..., help="Files to serve, or folders of them.", metavar="PATH"),
    data_set: str | None = Option(
        None, "--as", help="Name under which peers find the data; unset: that of the first path.", metavar="NAME"
    ),
    slice_bytes: str = Option("8M", help="Approximate bytes of a slice.", metavar="N"),
) -> None:
    """Serve files to those peers of a run that don't have them ([bold]peer.slices[/bold]). Takes no part in the run.

    Text and .tar files are cut into slices, a .safetensors file is one slice. All are read at each start, and hashed.
    Several data nodes may serve the same files. Prints one line of JSON once peers find it.
    """
    from p2p_diloco.cli.join import settings_of
    from p2p_diloco.cli.reach import check_free, check_initial_peers
    from p2p_diloco.data.files import cut_files
    from p2p_diloco.data.manifest import SLICE_BYTES_MAX
    from p2p_diloco.interrupts import run

    _, local = settings_of(flags, config)
    local = PeerConfig(**{key: value for key, value in local.given.items() if key in SETTINGS})
    _check_access(local)
    check_paths(local)
    for address in local.host_maddrs:
        check_free(address, key=flag("host_maddrs"))
    check_initial_peers(local.initial_peers)
    name_of_data = data_set or paths[0].resolve().stem
    if not re.fullmatch(NAME, name_of_data):
        mend = "give --as with letters, digits, dots, dashes and underscores, at most 64"
        raise ConfigError("can't be the name of a data set", key="--as", value=name_of_data, mend=mend)
    length = count_of(slice_bytes, key="--slice-bytes", what="bytes", most=SLICE_BYTES_MAX)
    manifest, pieces = cut_files(paths, length, _tell)
    from p2p_diloco.node.data_node import Served, serve

    served = Served(name_of_data, manifest, pieces)
    told = {"name": served.name, "format": manifest.form, "slices": len(manifest.slices), "samples": manifest.samples}
    line = json.dumps({**told, "bytes": manifest.nbytes, "fingerprint": manifest.identity})
    run(serve(local, served, _tell, lambda: typer.echo(line)))


def _check_access(local: PeerConfig) -> None:
    """Check that this process may serve data, and that strangers can't read it unless that is wanted.

    Raises:
        UsageError, ConfigError: it may not serve, or strangers could read the data.
    """
    from p2p_diloco.net.invitation_used import on_this_machine
    from p2p_diloco.net.invited import check_invitation

    if local.invite is not None:
        check_invitation(local)
    elif not (local.open or on_this_machine(local)):
        mend = "give it, or --open to serve the data to every peer that knows an address of the run"
        raise UsageError("is missing, and other machines can reach this run", key="--invite", mend=mend)


def _tell(text: str) -> None:
    log.info("%s", text)
