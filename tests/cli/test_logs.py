"""Logs: to stderr, in the form asked for."""

from __future__ import annotations

import io
import json
import logging
import sys

import pytest
from rich.console import Console
from rich.live import Live

from p2p_diloco.cli.flags import above, set_up_logs


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def logged(form: str, monkeypatch: pytest.MonkeyPatch, *, debug: bool = False) -> str:
    err = io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    set_up_logs(form, debug=debug)
    log = logging.getLogger("p2p_diloco.test")
    log.info("hello %s", "world")
    log.debug("detail")
    try:
        raise ValueError("cause")
    except ValueError:
        log.exception("bad")
    return err.getvalue()


def test_json_is_one_object_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program can read every line, a traceback included."""
    hello, bad = [json.loads(line) for line in logged("json", monkeypatch).splitlines()]
    assert hello["message"] == "hello world"
    assert (hello["level"], hello["logger"]) == ("info", "p2p_diloco.test")
    assert "ValueError: cause" in bad["error"]


@pytest.mark.parametrize("form", ["plain", "auto"])
def test_without_a_terminal_lines_are_plain(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither colours nor boxes reach a file. Rich has a column for the level, and its text is the message alone."""
    text = logged(form, monkeypatch)
    assert "INFO p2p_diloco.test: hello world\n" in text
    assert "\x1b" not in text
    assert "INFO:p2p_diloco" not in logged("rich", monkeypatch)


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, `auto` stays plain where NO_COLOR is set."""
    for variable, plain in (("1", True), (None, False)):
        err = Terminal()
        monkeypatch.setattr(sys, "stderr", err)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("NO_COLOR", variable) if variable else monkeypatch.delenv("NO_COLOR", raising=False)
        set_up_logs("auto")
        logging.getLogger("p2p_diloco.test").info("hello")
        assert ("INFO p2p_diloco.test: hello" in err.getvalue()) is plain


@pytest.mark.parametrize("form", ["rich", "plain"])
def test_lines_appear_above_what_is_drawn_live(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In either form: they go through the live console, and the handler is as before afterwards. Without a terminal the
    log stays where it is."""
    err, out = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stderr", err)
    set_up_logs(form)
    console = Console(file=out, force_terminal=True, width=80)
    with Live("drawn", console=console, auto_refresh=False), above(console):
        logging.getLogger("p2p_diloco.test").info("in between")
    logging.getLogger("p2p_diloco.test").info("afterwards")
    assert "in between" in out.getvalue()
    assert "in between" not in err.getvalue()
    assert "afterwards" in err.getvalue()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with above(console):
        logging.getLogger("p2p_diloco.test").info("to a file")
    assert "to a file" not in out.getvalue()
