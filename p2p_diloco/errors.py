"""All errors that a user can see, as one tree of exceptions.

Law: every error that leaves the program is one of these, and its text is one sentence that names the key, the value and
the mend. Broken invariants are assertions, and a remote peer's mistakes are refused and counted: neither is here. Only
the standard library is imported.

    P2PDilocoError                  exit 1   a fault of the program itself
    ├── UsageError                  exit 2   the command line or a call is wrong
    │   └── AddressError            exit 2   an address that can't be read
    ├── ConfigError                 exit 3   a setting, a file or a folder can't be used
    │   └── CheckpointError         exit 3   a checkpoint can't be read or written
    ├── NoBootstrapReached          exit 4   none of the initial peers answered
    ├── Refused                     exit 5   the run doesn't take this peer
    │   └── ConfigMismatch          exit 5   ... because its settings differ from the run's
    ├── ModelMismatch               exit 6   the model isn't the one that the run trains
    ├── GaveUpWaiting               exit 7   a wait ended without success after the time allowed
    ├── NodeDied                    exit 1   the process that talks to the swarm has ended
    └── RankDied                    exit 1   another process of this peer has ended, or makes other calls

A signal (^C, SIGTERM, SIGHUP) is no error: the command line ends with 130, 143 or 129.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

MAX_SHOWN = 8
"""The most keys or parameters that a sentence lists. If more differ, it adds how many more there are."""

OF_TRAINING = ("numpy", "safetensors", "torch", "xxhash")
"""The libraries that bootstrap/requirements.txt leaves out: peers, data nodes and exports use them."""


class P2PDilocoError(Exception):
    """The base of all errors. Its text is one sentence: ``key=value wrong; mend``.

    `wrong` is the predicate ("must be at least 1"), or, without a key, the whole statement. `mend` says what to do.
    `value` is kept as text, so that an error is the same on both ends of a channel.
    """

    exit_code: ClassVar[int] = 1
    sent: ClassVar[tuple[str, ...]] = ("wrong", "key", "value", "mend")
    """The constructor arguments that `to_wire` encodes, and from which `from_wire` makes the error again."""

    def __init__(self, wrong: str, *, key: str = "", value: object = "", mend: str = "") -> None:
        self.wrong = _one_line(wrong)
        self.key = _one_line(key)
        self.value = _one_line(shown(value))
        self.mend = _one_line(mend)
        super().__init__(self.sentence)

    @property
    def sentence(self) -> str:
        """The error as one line without a dot at its end: the key, the value, what is wrong, and the mend."""
        return self.spelled(str)

    def spelled(self, spell: Callable[[str], str]) -> str:
        """The error's sentence, in which each key is written as `spell(key)`, for instance as a flag."""
        key = spell(self.key)
        subject = f"{key}={self.value} " if key and self.value else f"{key} " if key else ""
        return f"{subject}{self._wrong_as(spell)}" + (f"; {self.mend}" if self.mend else "")

    def _wrong_as(self, spell: Callable[[str], str]) -> str:
        """The text `wrong`, in which each key is written as `spell(key)`."""
        return self.wrong

    def to_wire(self) -> dict[str, object]:
        """Encode the error as plain values for msgpack; `from_wire` decodes them."""
        return {"error": type(self).__name__, **{argument: getattr(self, argument) for argument in self.sent}}


class UsageError(P2PDilocoError):
    """The command line or a call is wrong."""

    exit_code = 2


class AddressError(UsageError):
    """An address can't be read as a multiaddr, or lacks a part that it needs here, such as the peer's identity."""


class ConfigError(P2PDilocoError):
    """A setting has a value that can't be used, or names a file or folder that can't be used."""

    exit_code = 3


class CheckpointError(ConfigError):
    """A checkpoint can't be read, isn't whole, or can't be written."""


class NoBootstrapReached(P2PDilocoError):
    """None of the initial peers answered."""

    exit_code = 4


class Refused(P2PDilocoError):
    """The run doesn't take this peer."""

    exit_code = 5


class ConfigMismatch(Refused):
    """Settings that all peers must agree on differ from the run's.

    `differences` holds (key, the run's value, yours), as `RunConfig.difference` gives them.
    """

    sent = ("differences", "run_id")

    def __init__(self, differences: Sequence[tuple[str, object, object]], *, run_id: str) -> None:
        self.differences = tuple((key, shown(theirs), shown(mine)) for key, theirs, mine in differences)
        self.run_id = run_id
        super().__init__(
            self._wrong_as(str),
            key="run_id",
            value=run_id,
            mend="leave these out to take the run's, or choose another run id",
        )

    def _wrong_as(self, spell: Callable[[str], str]) -> str:
        differing = [f"{spell(key)} (the run's {theirs} / yours {mine})" for key, theirs, mine in self.differences]
        return _one_line(f"differs from this peer's settings in {listed(differing)}")


class ModelMismatch(P2PDilocoError):
    """The model isn't the one that the run trains.

    `differences` holds one line for each parameter that differs, with both shapes.
    """

    exit_code = 6
    sent = ("differences", "run_id")

    def __init__(self, differences: Iterable[str], *, run_id: str) -> None:
        self.differences = tuple(_one_line(line) for line in differences)
        self.run_id = run_id
        super().__init__(
            f"trains another model: {listed(self.differences)}",
            key="run_id",
            value=run_id,
            mend="build the run's model, or choose another run id",
        )


class GaveUpWaiting(P2PDilocoError):
    """A wait ended without success after the time allowed."""

    exit_code = 7


class NodeDied(P2PDilocoError):
    """The node, the process that talks to the swarm, has ended."""


class RankDied(P2PDilocoError):
    """Another process of this peer has ended, or calls other methods of the peer than this process does."""


def from_wire(wire: Mapping[str, object]) -> P2PDilocoError:
    """Decode an error that `to_wire` encoded. The result has the same class and the same sentence.

    A dict that can't be read becomes a plain `P2PDilocoError` that shows it, so that no error is lost.
    """
    kinds = {kind.__name__: kind for kind in _tree(P2PDilocoError)}
    kind = kinds.get(str(wire.get("error")), P2PDilocoError)
    arguments: dict[str, Any] = {argument: wire.get(argument) for argument in kind.sent}
    try:
        return kind(**arguments)
    except (AttributeError, TypeError, ValueError):
        return P2PDilocoError(f"the node sent an error that can't be read: {dict(wire)}")


def left_out(error: ModuleNotFoundError) -> UsageError | None:
    """The error if the missing module is one of `OF_TRAINING`, which a small install leaves out. None: it is another
    one."""
    library = (error.name or "").partition(".")[0]
    if library not in OF_TRAINING:
        return None
    return UsageError(f"this needs {library}, which isn't installed", mend="run `pip install p2p-diloco`")


def reason(error: OSError) -> str:
    """Why a call to the operating system failed, in words that fit into a sentence."""
    return (error.strerror or str(error) or "no reason given").lower()


def printable(text: str) -> str:
    """Replace the control characters in a text by spaces. So text from other peers can't begin a line of a log, or give
    commands to a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def shown(value: object, deep: int = 9) -> str:
    """A value as a user would write it: lists with commas, switches as on and off, None as 'unset'. `deep`: how many
    lists may be in one another; a damaged file may have any number."""
    match value:
        case None:
            return "unset"
        case bool():
            return "on" if value else "off"
        case list() | tuple() | dict() if not deep:
            return "..."
        case list() | tuple():
            return ",".join(shown(item, deep - 1) for item in value)
        case dict():
            return ",".join(f"{key}={shown(item, deep - 1)}" for key, item in value.items())
        case _:
            return str(value)


def listed(items: Sequence[str], most: int = MAX_SHOWN) -> str:
    """The first `most` items, and how many more there are."""
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _tree(root: type[P2PDilocoError]) -> list[type[P2PDilocoError]]:
    return [root, *(kind for child in root.__subclasses__() for kind in _tree(child))]
