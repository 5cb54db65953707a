"""The command line: `p2p-diloco bootstrap`, `join` and the other commands that docs/cli.md lists.

Law: turns a command line into an exit code. Commands raise errors. Only this file turns an error into an exit code
(`p2p_diloco.errors` has the table) and a sentence on stderr, in which a setting is written as its flag. Nothing here
imports torch or hivemind until a command needs it.
"""

from __future__ import annotations

import errno
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import NoReturn

from p2p_diloco.errors import P2PDilocoError, left_out, reason
from p2p_diloco.interrupts import ENDING, Interrupts
from p2p_diloco.standard_streams import make_usable

INTERRUPTED = 128 + signal.SIGINT


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command line, by default this process's own, and end the process with the command line's exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    make_usable()
    if any(action == "error" for action, *_ in warnings.filters):
        warnings.simplefilter("default")  # it was meant for the user's own program: libraries warn now and then
    with Interrupts(holds_nothing=True) as interrupts:  # commands that hold resources enter a context of their own
        code = carry_out(arguments)
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)  # the command is done: from now on a signal ends the process silently
    if code == INTERRUPTED and interrupts.received:
        code = 128 + interrupts.received[0]
    sys.exit(code)


def carry_out(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code. An error is written to stderr as one sentence."""
    try:
        return _called(arguments)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of the output has closed the pipe, which is no error: `status | head`
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # a user sees one sentence after any exception
        if "--debug" in (arguments[: arguments.index("--")] if "--" in arguments else arguments):
            traceback.print_exc()
        sentence, code = _told(error)
        sys.stderr.write(f"p2p-diloco: {sentence}\n")
        return code


def _called(arguments: Sequence[str]) -> int:
    import typer  # loaded only now, because signals are handled already

    from p2p_diloco.cli.app import app

    try:
        code = app(args=list(arguments), prog_name="p2p-diloco", standalone_mode=False)
    except typer.Abort:  # what older versions of typer make of a KeyboardInterrupt; newer ones return 130
        return INTERRUPTED
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # typer has made exit code 1 of it
            raise ended.__context__ from None
        raise
    return code if isinstance(code, int) else 0


def _told(error: Exception) -> tuple[str, int]:
    """The sentence about an error, and its exit code."""
    if isinstance(error, ModuleNotFoundError):
        error = left_out(error) or error
    if isinstance(error, P2PDilocoError):
        from p2p_diloco.cli.flags import as_flag

        return error.spelled(as_flag), error.exit_code
    if hasattr(error, "format_message"):  # a misused command line: the error's class differs between versions of typer
        return _sentence(error.format_message()), 2
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.filename or 'the output'} can't be written ({reason(error)}); make room there", 1
    fault = f"{type(error).__name__}: {error}".rstrip(": ")
    return f"a fault in p2p-diloco itself ({_sentence(fault)}); --debug shows where", 1


def _sentence(text: str) -> str:
    return " ".join(text.split()).rstrip(".")
