"""What a process tells its surroundings: its standard streams; and, in a program that `join -- COMMAND` started, the
log on stderr, and to `join` that its peer is in the run.

Law: uses only the standard library.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
from collections.abc import Mapping
from pathlib import Path

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
JOINED_FILE = "P2P_DILOCO_JOINED_FILE"
"""The environment variable with the path of a file. The command's peer makes this file once it is in the run. The
variable is no setting."""
PLAIN = "%(asctime)s %(levelname)s %(name)s: %(message)s"
"""The form of a plain log line."""


def keep_taken() -> None:
    """Open /dev/null as each of the descriptors 0, 1 and 2 that is closed, as some daemons and job runners leave them.

    Otherwise the next file or socket gets that number. A child process then loses it, because its own standard streams
    have these numbers, and whatever a library prints goes into it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def make_usable() -> None:
    """Make the streams of a command usable: each is open, and stdout writes a question mark for each letter that its
    encoding lacks. (Python's stderr escapes such letters anyway.)"""
    keep_taken()
    for number, (name, mode) in enumerate(_STREAMS):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper) and codecs.lookup(sys.stdout.encoding).name != "utf-8":
        sys.stdout.reconfigure(errors="replace")


# -- a program that `join` started


def tell_joined(environment: Mapping[str, str] | None = None) -> None:
    """Tell `join` that a peer of its command is in the run."""
    if path := (os.environ if environment is None else environment).get(JOINED_FILE):
        with contextlib.suppress(OSError):
            Path(path).touch()


def show_log(environment: Mapping[str, str] | None = None) -> None:
    """In a command of `join`, log to stderr from level INFO on, unless the command has set up logging itself, or until
    it does, so that no line is written twice."""
    import logging  # late, because a command's start handles no signal before this file is loaded

    class UntilSetUp(logging.StreamHandler):  # type: ignore[type-arg]
        def emit(self, record: logging.LogRecord) -> None:
            if not logging.getLogger().handlers:
                super().emit(record)

    ours = logging.getLogger("p2p_diloco")
    if JOINED_FILE not in (os.environ if environment is None else environment) or ours.hasHandlers():
        return
    to_stderr = UntilSetUp()
    to_stderr.setFormatter(logging.Formatter(PLAIN))
    ours.addHandler(to_stderr)
    if ours.level == logging.NOTSET:
        ours.setLevel(logging.INFO)
