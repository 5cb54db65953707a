"""What the flags of several commands need: flags made from settings, one for each field of a settings model, whose
description becomes the flag's help; shared options; and the command's logging, to stderr, as rich text, plain text or
JSON.

Law: turns models into flags and flags into plain values. Only the models check values, so that a wrong flag, variable
and file entry give the same error. Only a command sets up logging, once; importing or using the library never does,
except in a script that `join` runs (`standard_streams.show_log`).
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import BaseModel
from typer import Option
from typer.core import TyperCommand

from p2p_diloco.config import PeerConfig, RunConfig, bare_type, meanings
from p2p_diloco.errors import UsageError, shown
from p2p_diloco.settings import flag
from p2p_diloco.standard_streams import PLAIN
from p2p_diloco.trainer.config import TrainerConfig

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


MODELS: tuple[type[BaseModel], ...] = (RunConfig, PeerConfig, TrainerConfig)
"""The models whose fields are settings; no two have a field of the same name."""
ALL = "p2p_diloco.help_all"
"""The context's mark that the whole help text is asked for."""

LOGS = Option("auto", help="Form of the log on stderr.", metavar=f"[{'|'.join(FORMS)}]")
DEBUG = Option(False, "--debug", help="Log more, and show where an error comes from.")
CONFIG = Option(None, help="TOML file with settings; flags and environment come first.", metavar="PATH")
KEY = Option(None, help="File of the run's key; unset: the only *.key in this folder.", metavar="PATH")
WAIT = Option(60.0, min=0, help="Seconds to wait until the peers know of the change.", metavar="X")
OUTCOME = Option(False, "--json", help="Print the outcome as one JSON object.")

A_RUN = ("initial_peers", "run_id", "invite")
"""The settings that name a run and the way to it."""
TOLD = {
    "initial_peers": "Addresses of the run's peers or bootstraps, with spaces or commas between.",
    "run_id": "The run; unset: main.",
    "invite": "Invitation to a private run; names the run and addresses.",
    "otlp_endpoint": "OpenTelemetry collector that gets the metrics of all peers.",
}
"""What these settings mean for a command that is no peer."""
FOUNDER = {
    **TOLD,
    "identity_path": "Identity file of the run's founder; unset: the run's key, beside the invitation.",
    "outer_lr": "Learning rate of the outer optimizer.",
    "outer_momentum": "Momentum of the outer optimizer.",
    "sync_every": "H: inner steps between two exchanges.",
    "min_peers": "Contributions that an outer step needs at least.",
    "stop_after_epochs": "Outer steps after which the run ends for all; none: never.",
    "stop_after_samples": "Samples after which the run ends for all; none: never.",
}
"""What they mean for a command that changes a run."""

OFTEN_SET = "Often set"
_OFTEN = ("initial_peers", "invite", "run_id", "name", "open", "sync_every", "start_peers", "stop_after_epochs",
          "checkpoint_dir", "from_checkpoint")  # fmt: skip
JOIN = {
    OFTEN_SET: _OFTEN,
    **{
        panel: tuple(key for key in model.model_fields if key not in _OFTEN)
        for panel, model in zip(("All peers agree", "This peer", "The built-in trainer"), MODELS, strict=True)
    },
}
"""The settings that `join` has flags for, by the panel of its help text: all of them."""


def with_settings(
    keys: Sequence[str] | Mapping[str, Sequence[str]],
    helps: Mapping[str, str] | None = None,
    *,
    config: bool = True,
) -> Callable[[Callable[..., int | None]], Callable[..., int | None]]:
    """Decorate a command: give it a flag for each of these fields of `MODELS` (by the help text's panel, if `keys` is a
    mapping), and `--config`, `--logs` and `--debug`. When it is called, logging is set up, and it gets the settings
    that the user gave as `flags`, by key, and with `config` the file as `config`. What it returns is the exit code.

    `helps`: a setting's help text, where it means something else here than for a peer.
    """
    panels = keys if isinstance(keys, Mapping) else {"": keys}
    made = [_parameter(key, panel, (helps or {}).get(key)) for panel, of in panels.items() for key in of]
    common = [("config", CONFIG, Path | None)] * config + [("logs", LOGS, str), ("debug", DEBUG, bool)]

    def give(command: Callable[..., int | None]) -> Callable[..., int | None]:
        def called(*, logs: str, debug: bool, **values: Any) -> int | None:
            set_up_logs(logs, debug=debug)
            told = {one.name: values.pop(one.name) for one in made}
            return command(**values, flags={key: value for key, value in told.items() if value not in (None, [], ())})

        own = inspect.signature(command, eval_str=True).parameters.values()
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters = [
            *made,
            *(one.replace(kind=kind) for one in own if one.name not in ("flags", "config")),
            *(inspect.Parameter(name, kind, default=default, annotation=of) for name, default, of in common),
        ]
        setattr(called, "__signature__", inspect.Signature(parameters))  # noqa: B010 - unknown to the types
        called.__annotations__ = {one.name: one.annotation for one in parameters}
        called.__name__, called.__doc__ = command.__name__, command.__doc__
        return called

    return give


def given(model: type[BaseModel], flags: Mapping[str, object]) -> dict[str, object]:
    """Those of the settings that are fields of `model`."""
    return {key: flags[key] for key in model.model_fields if key in flags}


def as_flag(key: str) -> str:
    """A setting's key, written as its flag. Any other key (a flag, a variable, a part of a setting) is returned
    unchanged."""
    return flag(key) if any(key in model.model_fields for model in MODELS) else key


def with_dashes(name: str) -> str:
    """An option's name with dashes in place of underscores: ``--initial_peers`` becomes ``--initial-peers``."""
    return name.replace("_", "-")


def split_command(arguments: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """The arguments before the first ``--``, and the command after it. The command is None if there is no ``--``."""
    arguments = list(arguments)
    if "--" not in arguments:
        return arguments, None
    where = arguments.index("--")
    return arguments[:where], arguments[where + 1 :]


def gather_lists(arguments: Sequence[str], lists: Sequence[str]) -> list[str]:
    """Write the name of a list option before each of its values: ``--to A B`` becomes ``--to A --to B``. `lists`: the
    names of the list options.

    Raises:
        UsageError: a list option has no value.
    """
    gathered: list[str] = []
    name = ""  # of the list option whose values follow
    for token in (*arguments, "-"):
        if token.startswith("-"):
            if name and gathered[-1] == name:
                raise UsageError("names no value", key=with_dashes(name), mend="give one or more after it")
            option = token.partition("=")[0]
            name = option if with_dashes(option) in lists else ""
        elif name and gathered[-1] != name:
            gathered.append(name)
        gathered.append(token)
    return gathered[:-1]


class ListsAndCommand(TyperCommand):
    """A command whose list options take several values at once. It doesn't parse the arguments after ``--``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments before ``--``; the command after it is stored in ``ctx.obj``."""
        ours, ctx.obj = split_command(args)
        lists = [name for option in self.params if getattr(option, "multiple", False) for name in option.opts]
        unfinished = ctx.resilient_parsing  # a shell asks for completions, so missing values are no error
        return super().parse_args(ctx, ours if unfinished else gather_lists(ours, lists))


class BriefHelp(ListsAndCommand):
    """A command with so many options that ``--help`` shows only those without a panel, and those of `OFTEN_SET`.
    ``--help-all`` shows the others, too."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help text without the other options."""
        others = [option for option in self.params if getattr(option, "rich_help_panel", None) not in (None, OFTEN_SET)]
        for option in others:
            option.hidden = ALL not in ctx.meta  # type: ignore[attr-defined]
        super().format_help(ctx, formatter)


def show_all(ctx: typer.Context, asked: bool) -> None:
    """Print the whole help text, if it is asked for, and end the command."""
    if asked:
        ctx.meta[ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


def _parameter(key: str, panel: str, text: str | None) -> inspect.Parameter:
    (model,) = (model for model in MODELS if key in model.model_fields)
    field = model.model_fields[key]
    kind = bare_type(field.annotation)
    default = field.get_default(call_default_factory=True)
    names = [flag(key)] if kind is not bool else [f"{flag(key)}/--no-{key.replace('_', '-')}"]
    told = "" if default in (None, (), {}) else f" [dim](default {shown(default)})[/dim]"
    option = Option(
        *names,
        help=text or f"{meanings(model).get(key, '')}{told}",
        metavar=_metavar(field.annotation),
        show_default=False,
        rich_help_panel=panel or None,
    )
    annotation: object = bool | None if kind is bool else list[str] | None if kind is tuple else str | None
    return inspect.Parameter(
        key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[annotation, option]
    )


def _metavar(annotation: object) -> str:
    """The placeholder for a flag's value in the help text."""
    kind = bare_type(annotation)
    if kind is Literal:
        literal = next(part for part in (annotation, *get_args(annotation)) if get_origin(part) is Literal)
        return f"[{'|'.join(get_args(literal))}]"
    if kind is bool:
        return " "
    names: dict[object, str] = {int: "N", float: "X", tuple: "ADDR...", dict: "JSON", Path: "PATH"}
    return names.get(kind, "NAME")
