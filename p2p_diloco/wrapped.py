"""What a peer does if `join -- COMMAND` started its program: it tells `join` that it is in the run, and it logs to
stderr.

Law: uses only the standard library. Outside a command of `join` nothing here has an effect.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path

JOINED_FILE = "P2P_DILOCO_JOINED_FILE"
"""The environment variable with the path of a file. The command's peer makes this file once it is in the run. The
variable is no setting."""
PLAIN = "%(asctime)s %(levelname)s %(name)s: %(message)s"
"""The form of a plain log line."""


def tell_joined(environment: Mapping[str, str] | None = None) -> None:
    """Tell `join` that a peer of its command is in the run."""
    if path := (os.environ if environment is None else environment).get(JOINED_FILE):
        with contextlib.suppress(OSError):
            Path(path).touch()


def show_log(environment: Mapping[str, str] | None = None) -> None:
    """In a command of `join`, log to stderr from level INFO on, unless the command has set up logging itself."""
    ours = logging.getLogger("p2p_diloco")
    if JOINED_FILE not in (os.environ if environment is None else environment) or ours.hasHandlers():
        return
    to_stderr = _UntilSetUp()
    to_stderr.setFormatter(logging.Formatter(PLAIN))
    ours.addHandler(to_stderr)
    if ours.level == logging.NOTSET:
        ours.setLevel(logging.INFO)


class _UntilSetUp(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes records to stderr until the command sets up logging itself, so that no line is written twice."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, if no other handler does."""
        if not logging.getLogger().handlers:
            super().emit(record)
