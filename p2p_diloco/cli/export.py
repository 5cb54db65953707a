"""`export`: writes a run's global parameters as a model, from its peers or from a checkpoint.

Law: all checks that need no swarm come first. Progress goes to stderr, and one line of JSON to stdout.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from p2p_diloco.cli.join import settings_of
from p2p_diloco.cli.loop import run
from p2p_diloco.cli.reach import check_initial_peers
from p2p_diloco.config import PeerConfig
from p2p_diloco.errors import UsageError, few
from p2p_diloco.net.invited import read_invitation
from p2p_diloco.settings import flag

if TYPE_CHECKING:
    from p2p_diloco.node.exporting import Source

FORMATS = ("safetensors", "hf", "torch")
DTYPES = ("keep", "float32", "bfloat16", "float16")
OF_AN_OBSERVER = ("run_id", "initial_peers", "invite", "open", "direct", "wait_timeout")
"""The settings that an observer takes from the settings of a peer on the same machine. It takes no
ports, and the peer's identity only if the invitation is for one peer id."""
NAMES_MAX = 5
"""The most names of missing entries in a log line; the JSON has all."""

log = logging.getLogger("p2p_diloco.export")


def export(
    flags: Mapping[str, object],
    config_file: Path | None,
    checkpoint: Path | None,
    out: Path,
    form: str,
    dtype: str,
    *,
    replace: bool,
) -> None:
    """Write the newest state of a run, or that of a checkpoint, into the folder `out`.

    Raises:
        UsageError, ConfigError: the flags, the checkpoint or the folder can't be used. NoBootstrapReached, Refused,
            GaveUpWaiting: the run can't be read.
    """
    _check_choice("--format", form, FORMATS)
    _check_choice("--dtype", dtype, DTYPES)
    local = None if checkpoint is not None else _observer(flags, config_file)
    for key in flags if checkpoint is not None else ():
        raise UsageError("is for a run", key=flag(key), mend="leave it out, or leave out --checkpoint")
    from p2p_diloco.node.exporting import of_checkpoint, write
    from p2p_diloco.tensors.export import check_folder

    check_folder(out, replace=replace)
    if checkpoint is not None:
        source = of_checkpoint(checkpoint)
    else:
        assert local is not None, "without a checkpoint there is a run"
        check_initial_peers(local.initial_peers)
        source = run(_read(local))
    told = write(source, out, form, dtype, replace=replace)
    _tell(told)
    typer.echo(json.dumps(told))


def _check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError("is not known", key=key, value=value, mend=f"choose {', '.join(choices)}")


def _observer(flags: Mapping[str, object], config_file: Path | None) -> PeerConfig:
    """The settings of an observer that no peer can dial."""
    _, peer = settings_of(flags, config_file)
    given = {key: value for key, value in peer.given.items() if key in OF_AN_OBSERVER}
    if peer.invite is not None and read_invitation(peer).grant.peer is not None:
        given["identity_path"] = peer.identity_path
    return PeerConfig(**{**given, "role": "observer", "client_mode": True})


async def _read(local: PeerConfig) -> Source:
    from p2p_diloco.node.exporting import of_run

    told = [""]

    def tell(text: str) -> None:
        if text != told[0]:
            told[0] = text
            log.info("%s", text)

    return await of_run(local, tell)


def _tell(told: Mapping[str, Any]) -> None:
    """Log what was written, and what is missing in the files."""
    last = ", its last one" if told["finished"] else ""
    log.info("wrote %d parameters of the run %s at epoch %d%s", told["parameters"], told["run_id"], told["epoch"], last)
    if not told["described"]:
        log.warning(
            "no peer has described more of the model than what the run exchanges: local buffers, frozen parameters "
            "and further names of tied ones are not in the files"
        )
    if missing := told["missing"]:
        log.warning("not in the files, because the run does not have them: %s", few(missing, NAMES_MAX))
