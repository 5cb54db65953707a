"""Two signed statements of one peer, of which an honest peer signs only one.

Law: only remembers and judges bytes whose signatures were checked. The two prove a lie to anyone, without tensors:

    contributions of one id      with unlike slices
    Closes of one attempt        of one term on one base, with unlike choices
    commits of one term          on one base, with unlike choices

A leader that starts again has forgotten what it signed. So Closes and commits are signed with a number that the process
has drawn, and two lives of one peer don't contradict each other.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import msgpack

from p2p_diloco.node.signatures import CLOSE, COMMIT, LIFE_BYTES, READY, Statement

REMEMBERED_BYTES = 16 * 2**20
"""The bytes of statements that are remembered; the oldest are forgotten first."""
ABOUT = {
    READY: ("two contributions of one id", (1, 6, 7), 15),
    CLOSE: ("two Closes of one attempt", (1, 2, 3, 4, 5, 6, 8), 9),
    COMMIT: ("two commits of one term", (1, 2, 3, 4, 5, 10), 12),
}
"""By kind: what is contradicted, the fields of a statement by which two are about one thing, and the field that must be
equal then. The first field of all is the run's token."""


@dataclass(frozen=True, slots=True)
class Contradiction:
    """Two statements of `signer`, each with its signature."""

    signer: str
    kind: bytes
    first: tuple[bytes, bytes]
    second: tuple[bytes, bytes]

    @property
    def lie(self) -> str:
        """The lie, as text."""
        return f"it signed {ABOUT[self.kind][0]} that contradict each other"


def contradict(kind: bytes, first: bytes, second: bytes, token: bytes) -> bool:
    """Whether no honest peer of the run with this token signs both of these statements."""
    one, other = _read(kind, first), _read(kind, second)
    if one is None or other is None or one[0][0] != token:
        return False
    return one[0] == other[0] and one[1] != other[1]


class Remembered:
    """The statements that this peer has seen lately."""

    def __init__(self, token: bytes) -> None:
        """`token`: the run's."""
        self._token = token
        self._seen: OrderedDict[object, tuple[bytes, bytes]] = OrderedDict()
        self._nbytes = 0

    def saw(self, said: Statement) -> Contradiction | None:
        """Remember a statement. Returns how it contradicts an earlier one; None if it doesn't."""
        signer, kind, statement, seal = said
        told = _read(kind, statement)
        if told is None:
            return None
        key = signer, kind, told[0]
        if (known := self._seen.get(key)) is not None:
            differs = contradict(kind, known[0], statement, self._token)
            return Contradiction(signer, kind, known, (statement, seal)) if differs else None
        self._seen[key] = statement, seal
        self._nbytes += len(statement)
        while self._nbytes > REMEMBERED_BYTES:
            _, (oldest, _) = self._seen.popitem(last=False)
            self._nbytes -= len(oldest)
        return None


def _read(kind: bytes, statement: bytes) -> tuple[tuple[object, ...], object] | None:
    """Return (what a statement is about, what it says of that); None if two of this kind can't contradict."""
    if kind not in ABOUT:
        return None
    life = b"" if kind == READY else statement[-LIFE_BYTES:]
    _, about, says = ABOUT[kind]
    try:
        fields = msgpack.unpackb(statement[: len(statement) - len(life)])
        return (fields[0], life, *(fields[place] for place in about)), fields[says]
    except (ValueError, TypeError, LookupError, msgpack.UnpackException):
        return None
