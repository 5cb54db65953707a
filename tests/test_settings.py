"""Where settings come from: the order of sources, and errors that name the source."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.config.run import FIXES
from p2p_diloco.errors import AddressError, ConfigError
from p2p_diloco.settings import (
    check_paths,
    flag,
    from_environment,
    read_settings,
    refuse_further_ranks,
    to_environment,
    variable,
    without_ours,
)
from p2p_diloco.tensors import checkpoint

ADDRESS = "/ip4/127.0.0.1/tcp/3/p2p/12D3KooWGrk7pQsQ8dDR8yu8vUuL1tCiBGHBvCVbx8fyR3zdYpuv"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.toml"


def test_flags_before_environment_before_file_before_default(file: Path) -> None:
    """Each source gives the values that the ones before it don't."""
    file.write_text("sync_every = 1\nnum_fragments = 1\nmin_peers = 3\nname = 'from-file'\n")
    environment = {"P2P_DILOCO_SYNC_EVERY": "2", "P2P_DILOCO_START_PEERS": "4", "P2P_DILOCO_NAME": "from-env", "X": "y"}
    run, peer = read_settings({"sync_every": "5"}, environment, file)
    assert run.given == {"sync_every": 5, "num_fragments": 1, "min_peers": 3, "start_peers": 4}
    assert run.round_timeout == 600.0
    assert peer.given == {"name": "from-env"}


def test_toml_has_its_own_kinds_of_values(file: Path) -> None:
    """Numbers, switches, lists and tables are written as TOML writes them. Editors on Windows mark UTF-8."""
    text = f"sync_every = 8\nnesterov = false\ninitial_peers = ['{ADDRESS}']\n[outer_options]\n"
    file.write_text(text, encoding="utf-8-sig")
    run, peer = read_settings({}, {}, file)
    assert run.given == {"sync_every": 8, "nesterov": False, "outer_options": {}}
    assert peer.initial_peers == (ADDRESS,)


TEXTS = {"initial_peers": ADDRESS, "host_maddrs": "/ip4/0.0.0.0/tcp/0", "announce_maddrs": "/ip4/0.0.0.0/tcp/1"}


@pytest.mark.parametrize("key", [*RunConfig.model_fields, *PeerConfig.model_fields])
def test_every_field_has_a_variable(key: str) -> None:
    """Every setting can be given by the environment, and counts as given then; some of them give `outer` as well."""
    field = {**RunConfig.model_fields, **PeerConfig.model_fields}[key]
    default = field.get_default(call_default_factory=True)
    text = TEXTS.get(key) or ("{}" if default == {} else "none" if default is None else str(default))
    run, peer = read_settings({}, {variable(key): text})
    given = {**run.given, **peer.given}
    assert given.keys() == ({key, "outer"} if key in FIXES else {key})
    assert key in TEXTS or given[key] == default


@pytest.mark.parametrize(
    ("flags", "environment", "toml", "spelled"),
    [
        ({"sync_every": "0"}, {}, "", "--sync-every=0 "),
        ({}, {"P2P_DILOCO_SYNC_EVERY": "0"}, "", "P2P_DILOCO_SYNC_EVERY=0 "),
        ({}, {}, "sync_every = 0", "run.toml: sync_every=0 "),
        ({}, {"P2P_DILOCO_INITIAL_PEERS": "nowhere"}, "", "P2P_DILOCO_INITIAL_PEERS=nowhere "),
        ({}, {"P2P_DILOCO_SYNC_EVRY": "5"}, "", "did you mean P2P_DILOCO_SYNC_EVERY?"),
        ({}, {}, "sync_evry = 5", "run.toml: sync_every?"),
        ({}, {}, "lr = 3", "run.toml: lr=3 is not a setting; leave it out"),
        ({}, {}, "[peer]\nname = 'a'", "run.toml has a table [peer]; write the settings at the top, without a table"),
        ({}, {}, "found = true\nname = 'é'", "run.toml is not UTF-8 (byte 0xe9 in line 2)"),
        ({}, {}, "sync_every == 5", "run.toml is not TOML"),
        ({}, {}, None, "run.toml can't be read (no such file or directory)"),
    ],
)
def test_an_error_names_its_source(
    file: Path, flags: dict[str, object], environment: dict[str, str], toml: str | None, spelled: str
) -> None:
    """A user with settings in three places is told which of them to correct."""
    if toml is not None:
        file.write_bytes(toml.encode("latin-1"))
    with pytest.raises((ConfigError, AddressError)) as caught:
        read_settings(flags, environment, file)
    assert spelled in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_command_gets_the_given_settings() -> None:
    """Settings pass through an environment unchanged; unset ones stay unset."""
    run = RunConfig(
        sync_every=12, num_fragments=3, nesterov=False, outer_momentum=0.1, reply_codec=None, outer_options={}
    )
    peer = PeerConfig(
        run_id="r", initial_peers=(ADDRESS,), client_mode=True, checkpoint_dir=Path("a b"), wait_timeout=1.5, name=None
    )
    environment = to_environment(run, peer)
    back = from_environment({**environment, "PATH": "/bin"})
    assert back == (run, peer)
    assert back is not None
    assert back[0].given == run.given
    assert back[1].given == peer.given
    assert without_ours({**environment, "PATH": "/bin"}) == {"PATH": "/bin"}, "an inner command gets none of these"


def test_without_a_named_run_there_is_no_run() -> None:
    """A script that reads the environment trains alone when no run is named."""
    assert from_environment({"PATH": "/bin"}) is None
    assert from_environment({"P2P_DILOCO_SYNC_EVERY": "5"}) is None
    assert from_environment({"P2P_DILOCO_RUN_ID": "r"}) is not None
    assert from_environment({"P2P_DILOCO_INITIAL_PEERS": ADDRESS}) is not None


def test_every_rank_reads_its_settings_and_none_but_the_first_is_a_peer_of_its_own() -> None:
    """Under torchrun all processes get the variables; without a sharded model every process but the first gets an error
    instead of hanging."""
    named = {"P2P_DILOCO_RUN_ID": "r", "WORLD_SIZE": "2"}
    assert from_environment({**named, "RANK": "1"}) is not None
    refuse_further_ranks({**named, "RANK": "0"})
    refuse_further_ranks({**named, "WORLD_SIZE": "1", "RANK": "1"})
    with pytest.raises(ConfigError, match=r"RANK=1 is one of 2 processes .* fully_shard"):
        refuse_further_ranks({**named, "RANK": "1"})


def test_paths_that_can_be_used_pass(tmp_path: Path) -> None:
    """Missing folders are created, and no file is left in them."""
    (tmp_path / "checkpoint-7").mkdir()
    (tmp_path / "checkpoint-7" / checkpoint.MANIFEST).touch()
    peer = PeerConfig(
        checkpoint_dir=tmp_path / "a" / "b", identity_path=tmp_path / "c" / "id", from_checkpoint=tmp_path
    )
    check_paths(peer)
    assert list((tmp_path / "a" / "b").iterdir()) == []
    assert list((tmp_path / "c").iterdir()) == []


@pytest.mark.parametrize(
    ("key", "path", "wrong"),
    [
        ("checkpoint_dir", "file", "can't be written"),
        ("checkpoint_dir", "file/below", "can't be written"),
        ("cache_dir", "file", "can't be written"),
        ("identity_path", "folder", "is a folder"),
        ("identity_path", "file/id", "can't be written"),
        ("from_checkpoint", "file", "is a file"),
        ("from_checkpoint", "folder", "holds no complete checkpoint"),
        ("from_checkpoint", "missing", "can't be read (no such file or directory)"),
    ],
)
def test_paths_that_cannot_are_refused(tmp_path: Path, key: str, path: str, wrong: str) -> None:
    """A path is checked before anything heavy is loaded; the sentence names its flag."""
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError) as caught:
        check_paths(PeerConfig.model_validate({key: tmp_path / path}))
    assert wrong in str(caught.value)
    assert str(caught.value).startswith(flag(key))
