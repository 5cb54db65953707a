"""Sets up a command's logging: to stderr, as rich text, plain text or JSON.

Law: only a command sets up logging, once; importing or using the library never does, except in a script that `join`
runs (`standard_streams.show_log`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from p2p_diloco.errors import UsageError
from p2p_diloco.standard_streams import PLAIN

if TYPE_CHECKING:
    from rich.console import Console

FORMS = ("auto", "rich", "plain", "json")


class JsonLines(logging.Formatter):
    """Formats a log record as one JSON object: time (seconds since 1970), level, logger and message, and error if there
    is one."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of JSON."""
        entry: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def set_up_logs(form: str, *, debug: bool = False) -> None:
    """Log to stderr from level INFO on. For this package the level is DEBUG with `debug`; for Hivemind it is WARNING.
    `form` auto: rich on a terminal unless NO_COLOR is set, else plain.

    Raises:
        UsageError: `form` is not one of auto, rich, plain, json.
    """
    if form not in FORMS:
        raise UsageError("is not known", key="--logs", value=form, mend=f"choose {', '.join(FORMS)}")
    if form == "auto":
        form = "rich" if sys.stderr.isatty() and "NO_COLOR" not in os.environ else "plain"
    logging.basicConfig(handlers=[_destination(form)], level=logging.INFO, force=True)
    logging.getLogger("p2p_diloco").setLevel(logging.DEBUG if debug else logging.INFO)
    logging.getLogger("hivemind").setLevel(logging.WARNING)


@contextlib.contextmanager
def above(console: Console) -> Iterator[None]:
    """Within the block, log lines that go to the terminal appear above what is drawn live on this console. Without this
    they would move the cursor, and the next drawing would leave parts of the one before."""
    root = logging.getLogger()
    before = root.handlers
    if sys.stderr.isatty():
        root.handlers = [_rich(console)]
    try:
        yield
    finally:
        root.handlers = before


def _destination(form: str) -> logging.Handler:
    if form == "rich":
        from rich.console import Console

        return _rich(Console(stderr=True))
    to_stderr = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter(PLAIN)
    to_stderr.setFormatter(JsonLines() if form == "json" else plain)
    return to_stderr


def _rich(console: Console) -> logging.Handler:
    from rich.logging import RichHandler

    handler = RichHandler(console=console, show_path=False, log_time_format="[%X]")
    handler.setFormatter(logging.Formatter("%(message)s"))  # the level has a column of its own
    return handler
