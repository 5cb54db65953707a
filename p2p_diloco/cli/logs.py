"""Sets up a command's logging: to stderr, as rich text, plain text or JSON.

Law: only a command sets up logging, once; importing or using the library never does, except in a script that `join`
runs (`wrapped.show_log`).
"""

from __future__ import annotations

import json
import logging
import os
import sys

from p2p_diloco.errors import UsageError
from p2p_diloco.wrapped import PLAIN

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


def set_up_logs(form: str, *, debug: bool = False, quiet: bool = False) -> None:
    """Log to stderr from level INFO on. For this package the level is DEBUG with `debug`, and ERROR with `quiet`.

    Raises:
        UsageError: `form` is not one of auto, rich, plain, json.
    """
    if form not in FORMS:
        raise UsageError("is not known", key="--logs", value=form, mend=f"choose {', '.join(FORMS)}")
    if form == "auto":
        form = "rich" if sys.stderr.isatty() and "NO_COLOR" not in os.environ else "plain"
    logging.basicConfig(handlers=[_destination(form)], level=logging.INFO, force=True)
    logging.getLogger("p2p_diloco").setLevel(logging.DEBUG if debug else logging.ERROR if quiet else logging.INFO)
    logging.getLogger("hivemind").setLevel(logging.WARNING)


def _destination(form: str) -> logging.Handler:
    if form == "rich":
        from rich.console import Console
        from rich.logging import RichHandler

        return RichHandler(console=Console(stderr=True), show_path=False, log_time_format="[%X]")
    to_stderr = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter(PLAIN)
    to_stderr.setFormatter(JsonLines() if form == "json" else plain)
    return to_stderr
