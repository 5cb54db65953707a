"""The command line: `p2p-diloco bootstrap`, `join`, `status`, `set`, `demo`, `simulate`, `bench`.

Law: flags in, exit codes out. Commands say what they want and raise what goes wrong; this file alone turns
that into one sentence on stderr, in which a setting is written as its flag, and an exit code
(`p2p_diloco.errors` has the table). Nothing here imports torch or hivemind until a command needs it.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

import typer

from p2p_diloco.errors import P2PDilocoError

INTERRUPTED = 128 + signal.SIGINT


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Carry out a command line (by default the process's own) and leave with its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    received: list[int] = []

    def interrupt(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    code = carry_out(arguments)
    if code == INTERRUPTED and received:
        code = 128 + received[0]
    sys.exit(code)


def carry_out(arguments: Sequence[str]) -> int:
    """The exit code of a command line; what goes wrong is told on stderr in one sentence."""
    ours = arguments[: arguments.index("--")] if "--" in arguments else arguments
    try:
        from p2p_diloco.cli.app import app

        code = app(args=list(arguments), prog_name="p2p-diloco", standalone_mode=False)
    except P2PDilocoError as error:
        from p2p_diloco.cli.flags import as_flag

        return _told(error.spelled(as_flag), error.exit_code, "--debug" in ours)
    except typer.TyperException as error:
        return _told(_sentence(error.format_message()), 2, "--debug" in ours)
    except BrokenPipeError:
        sys.stderr.close()  # whoever read us has gone: nothing is wrong, and nobody is left to tell
        return 0
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:  # the last line of defence: a user sees a sentence, whatever happens
        fault = f"{type(error).__name__}: {error}".rstrip(": ")
        return _told(f"a fault in p2p-diloco itself ({_sentence(fault)}); --debug shows where", 1, "--debug" in ours)
    return code if isinstance(code, int) else 0


def _told(sentence: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    sys.stderr.write(f"p2p-diloco: {sentence}\n")
    return code


def _sentence(text: str) -> str:
    return " ".join(text.split()).rstrip(".")
