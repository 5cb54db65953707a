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
from typer import Option

from p2p_diloco.cli.flags import A_RUN, TOLD, with_settings
from p2p_diloco.cli.join import settings_of
from p2p_diloco.cli.reach import check_initial_peers
from p2p_diloco.config import PeerConfig
from p2p_diloco.errors import UsageError, listed
from p2p_diloco.interrupts import run
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


@with_settings(
    (*A_RUN, "wait_timeout"), TOLD | {"wait_timeout": "Seconds to wait for the run and for its state; unset: 300."}
)
def export(
    flags: dict[str, Any],
    config: Path | None,
    out: Path = Option(..., help="Folder to write to.", metavar="DIR"),
    checkpoint: Path | None = Option(
        None, help="Read this checkpoint, or the newest in this folder, instead of a run.", metavar="PATH"
    ),
    form: str = Option(
        "safetensors",
        "--format",
        help="hf: for from_pretrained of Transformers; torch: a state_dict.",
        metavar="[safetensors|hf|torch]",
    ),
    dtype: str = Option("keep", help="Data type of the parameters.", metavar="[keep|float32|bfloat16|float16]"),
    force: bool = Option(False, "--force", help="Replace the files of an earlier export."),
) -> None:
    """Write a run's global parameters as a model, and print one line of JSON.

    Reads the newest state from a run's peers, and takes no part in the run.
    """
    _check_choice("--format", form, FORMATS)
    _check_choice("--dtype", dtype, DTYPES)
    local = None if checkpoint is not None else _observer(flags, config)
    for key in flags if checkpoint is not None else ():
        raise UsageError("is for a run", key=flag(key), mend="leave it out, or leave out --checkpoint")
    from p2p_diloco.node.exporting import of_checkpoint, write
    from p2p_diloco.tensors.export import check_folder

    check_folder(out, replace=force)
    if checkpoint is not None:
        source = of_checkpoint(checkpoint)
    else:
        assert local is not None, "without a checkpoint there is a run"
        check_initial_peers(local.initial_peers)
        source = run(_read(local))
    told = write(source, out, form, dtype, replace=force)
    _tell(told)
    typer.echo(json.dumps(told))


def _check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError("is not known", key=key, value=value, mend=f"choose {', '.join(choices)}")


def _observer(flags: Mapping[str, object], config_file: Path | None) -> PeerConfig:
    """The settings of an observer that no peer can dial."""
    from p2p_diloco.net.invited import read_invitation

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
        log.warning("not in the files, because the run does not have them: %s", listed(missing, NAMES_MAX))
