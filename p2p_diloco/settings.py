"""Reads settings from their sources. A flag overrides an environment variable, a variable overrides the TOML file, and
the file overrides the default.

Law: only this module knows how a setting is written outside Python. It reads the settings file, checks paths and makes
folders, and imports neither torch nor hivemind. An unknown key is refused in every source, and an error names the flag,
the variable or the file that the value came from.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from p2p_diloco.config import PeerConfig, RunConfig, unknown_setting
from p2p_diloco.errors import ConfigError, UsageError, reason
from p2p_diloco.standard_streams import JOINED_FILE

PREFIX = "P2P_DILOCO_"
"""The prefix of this package's environment variables."""

_KNOWN: Mapping[str, type[RunConfig] | type[PeerConfig]] = {
    **dict.fromkeys(RunConfig.model_fields, RunConfig),
    **dict.fromkeys(PeerConfig.model_fields, PeerConfig),
}
_CHECKPOINTS = ("manifest.json", "checkpoint-*/manifest.json")
"""Where a checkpoint's manifest, which is written last, lies below the folder that `from_checkpoint` names."""
_NAMES_A_RUN = ("run_id", "initial_peers", "invite")


def flag(key: str) -> str:
    """The flag of a setting, such as ``--sync-every``."""
    return "--" + key.replace("_", "-")


def variable(key: str) -> str:
    """The environment variable of a setting, such as ``P2P_DILOCO_SYNC_EVERY``."""
    return PREFIX + key.upper()


def read_settings(
    flags: Mapping[str, object], environment: Mapping[str, str], file: Path | None = None
) -> tuple[RunConfig, PeerConfig]:
    """Read the settings of a peer from all sources. `flags` holds only the flags that the user gave, by field name.

    A setting that no source has gets its default, and is not in the result's `given`.

    Raises:
        ConfigError: a value, a variable or the file can't be used. AddressError: an address can't be read.
    """
    sources = [(flags, flag), (_from_variables(environment), variable)]
    if file is not None:
        sources.append((_from_file(file), lambda key: f"{file}: {key}"))
    run: dict[str, object] = {}
    peer: dict[str, object] = {}
    origin: dict[str, str] = {}
    for values, spelled in reversed(sources):
        for key, value in values.items():
            if key not in _KNOWN:
                raise unknown_setting(key, value, _KNOWN, spelled)
            (run if _KNOWN[key] is RunConfig else peer)[key] = value
            origin[key] = spelled(key)
    try:
        return RunConfig.model_validate(run), PeerConfig.model_validate(peer)
    except (ConfigError, UsageError) as error:
        as_written = origin.get(error.key, error.key)
        raise type(error)(error.wrong, key=as_written, value=error.value, mend=error.mend) from None


def to_environment(run: RunConfig, peer: PeerConfig) -> dict[str, str]:
    """Environment variables from which `from_environment` reads the same settings. There is one for each given setting,
    and one for the run's name."""
    given = {**run.given, **peer.given, "run_id": peer.run_id}
    return {variable(key): _as_text(value) for key, value in given.items()}


def without_ours(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without this package's variables."""
    return {name: value for name, value in environment.items() if not name.startswith(PREFIX)}


def from_environment(environment: Mapping[str, str] | None = None) -> tuple[RunConfig, PeerConfig] | None:
    """Read the settings that `join -- COMMAND` put into the environment of its command. None if no run is named.

    Raises:
        ConfigError: a value can't be used.
    """
    environment = os.environ if environment is None else environment
    if not any(environment.get(variable(key)) for key in _NAMES_A_RUN):
        return None
    return read_settings({}, environment)


def settings_of_join(environment: Mapping[str, str] | None = None) -> tuple[RunConfig, PeerConfig] | None:
    """The settings that `join -- COMMAND` gave this program, if it is such a command; None otherwise."""
    environment = os.environ if environment is None else environment
    return from_environment(environment) if JOINED_FILE in environment else None


def refuse_further_ranks(environment: Mapping[str, str]) -> None:
    """Raise ConfigError in every process that torchrun has started, except the first. Call this if the model is not
    spread over these processes: each of them would be a peer of its own, and all would have the same settings."""
    rank, world_size = environment.get("RANK", "0"), environment.get("WORLD_SIZE", "1")
    if rank.isdecimal() and world_size.isdecimal() and int(world_size) > 1 and int(rank) > 0:
        raise ConfigError(
            f"is one of {world_size} processes that torchrun started, and no model is spread over them",
            key="RANK",
            value=rank,
            mend="give the Peer a model after fully_shard or in DistributedDataParallel, or start each peer without "
            "torchrun; with p2p-diloco join, write torchrun after the --",
        )


def check_paths(peer: PeerConfig) -> None:
    """Check the files and folders that a peer names, before anything heavy is loaded, and make missing folders.

    Raises:
        ConfigError: one of them can't be read or written.
    """
    if peer.from_checkpoint is not None:
        check_readable(peer.from_checkpoint, key=flag("from_checkpoint"))
        if not peer.from_checkpoint.is_dir():
            mend = "name a checkpoint's folder"
            raise ConfigError("is a file", key=flag("from_checkpoint"), value=peer.from_checkpoint, mend=mend)
        if not any(any(peer.from_checkpoint.glob(pattern)) for pattern in _CHECKPOINTS):
            mend = "name a folder that holds a checkpoint, or leave it out"
            wrong, key = "holds no complete checkpoint", flag("from_checkpoint")
            raise ConfigError(wrong, key=key, value=peer.from_checkpoint, mend=mend)
    if peer.checkpoint_dir is not None:
        make_writable_folder(peer.checkpoint_dir, key=flag("checkpoint_dir"))
    if peer.cache_dir is not None:
        make_writable_folder(peer.cache_dir, key=flag("cache_dir"))
    if peer.identity_path is not None:
        prepare_identity_path(peer.identity_path)


def check_readable(path: Path, *, key: str) -> None:
    """Raise ConfigError unless there is a file or folder at `path` that can be read."""
    try:
        next(path.iterdir(), None) if path.is_dir() else path.open("rb").close()
    except OSError as error:
        raise _unreadable(key, path, error, "name one that this user can read") from None


def prepare_identity_path(path: Path) -> None:
    """Raise ConfigError unless an identity file can be read at `path` or made there. If there is no such file yet, make
    its folder."""
    key = flag("identity_path")
    if path.is_dir():
        raise ConfigError("is a folder", key=key, value=path, mend="name a file in it")
    if path.exists():
        check_readable(path, key=key)
    else:
        make_writable_folder(path.parent, key=key, value=path)


def make_writable_folder(folder: Path, *, key: str, value: Path | None = None) -> None:
    """Make a folder if it is missing. Raise ConfigError unless a file can be written in it. To find out, a file is
    written and removed at once.

    `value`: the path that the user gave, if that is not the folder itself.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        wrong, mend = f"can't be written ({reason(error)})", "name a place that this user may write to"
        raise ConfigError(wrong, key=key, value=value or folder, mend=mend) from None


def _from_variables(environment: Mapping[str, str]) -> dict[str, object]:
    ours = {name: value for name, value in environment.items() if name.startswith(PREFIX) and name != JOINED_FILE}
    return {name.removeprefix(PREFIX).lower(): value for name, value in ours.items()}


def _from_file(file: Path) -> dict[str, object]:
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise _unreadable("--config", file, error, "name a readable TOML file") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        wrong = f"is not UTF-8 (byte 0x{error.object[error.start]:02x} in line {line})"
        raise ConfigError(wrong, key="--config", value=file, mend="save it as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"is not TOML ({error})", key="--config", value=file, mend="correct that line") from None
    if tables := [key for key, value in found.items() if isinstance(value, dict) and key not in _KNOWN]:
        wrong, mend = f"has a table [{tables[0]}]", "write the settings at the top, without a table"
        raise ConfigError(wrong, key="--config", value=file, mend=mend)
    return found


def _unreadable(key: str, path: Path, error: OSError, mend: str) -> ConfigError:
    return ConfigError(f"can't be read ({reason(error)})", key=key, value=path, mend=mend)


def _as_text(value: object) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return "true" if value else "false"
        case tuple():
            return " ".join(str(item) for item in value)
        case dict():
            return json.dumps(value)
        case _:
            return str(value)
