"""Flags: one for every field, lists that take several values, and a command kept apart."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from p2p_diloco.cli.app import app
from p2p_diloco.cli.flags import gather_lists
from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.errors import UsageError
from p2p_diloco.settings import flag
from p2p_diloco.trainer.config import TrainerConfig

LISTS = ["--to", "--via"]


def help_of(asked: str) -> str:
    result = CliRunner().invoke(app, ["join", asked], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    assert result.exit_code == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", result.stdout)


def test_help_has_every_field_and_is_short_at_first() -> None:
    """It shows what most people set, on one screen, and names the flag that shows the rest. There a reader sees what is
    the run's and what is one's own, and what happens without a flag; no setting can be given in Python alone."""
    everything, told = help_of("--help-all"), help_of("--help")
    assert len(told.splitlines()) < 60
    assert "--help-all" in told
    assert "--initial-peers" in told
    keys = [*RunConfig.model_fields, *PeerConfig.model_fields, *TrainerConfig.model_fields]
    assert [key for key in keys if not re.search(rf"{flag(key)}\s", everything)] == []
    for panel in ("Often set", "All peers agree", "This peer", "The built-in trainer", "--no-nesterov"):
        assert panel in everything
    assert re.search(r"--sync-every +N +H: inner steps.*\(default 500\)", everything)
    assert "--outer-lr" not in told, "the whole text was shown before, and must not stay"


@pytest.mark.parametrize("arguments", [["--to", "--x", "1"], ["--to"], ["--to", "a", "--to"]])
def test_a_list_without_a_value_is_named(arguments: list[str]) -> None:
    """The next option isn't taken for a value, and its own value isn't left over."""
    with pytest.raises(UsageError, match="--to names no value; give one or more after it"):
        gather_lists(arguments, LISTS)


def test_a_shell_may_ask_what_comes_after_a_list() -> None:
    """While a line is being completed a list's missing value is no error."""
    line = {"COMP_WORDS": "p2p-diloco join --initial-peers --sy", "COMP_CWORD": "3"}
    asked = {"_P2P_DILOCO_COMPLETE": "complete_bash", **line}
    result = CliRunner().invoke(app, [], prog_name="p2p-diloco", env=asked)
    assert "--sync-every" in result.output, result.exception


@given(st.lists(st.text(st.characters(codec="ascii", exclude_characters="-")), min_size=1))
def test_no_value_of_a_list_is_lost(values: list[str]) -> None:
    """However many there are, they arrive in order."""
    gathered = gather_lists(["--to", *values, "--x"], LISTS)
    assert gathered == [*(part for value in values for part in ("--to", value)), "--x"]
