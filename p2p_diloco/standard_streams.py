"""The standard streams of a process that was started without some of them, or with an encoding that lacks letters.

Law: uses only the standard library.
"""

from __future__ import annotations

import codecs
import io
import os
import sys

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


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
