"""Which owners this peer has found to lie, which other peers have found the same, and when this peer expels them.

Law: only remembers and decides; sends and computes nothing. An owner is expelled only if this peer has found its
lie and another peer confirms it, or if no other peer could find it. If others could find the lie but none does, this
peer suspects that its own machine is faulty, and expels no peer without a confirmation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection

import msgpack

from p2p_diloco.net.signing import pack
from p2p_diloco.node.examining import Case
from p2p_diloco.node.signatures import CLOSE, COMMIT, READY, SIGNED, Statement
from p2p_diloco.node.wire import Contradicts, OfMean

PROOFS_MAX, PROOFS_BYTES = 8, 64 * 2**20
"""The most lies whose proofs are kept for newcomers, and the most bytes of their contributions; the newest proof is
kept however long it is."""
CLAIMED_MAX = 16
"""How many accusations by each peer are remembered; the oldest are forgotten first. So a peer that accuses everybody
displaces its own accusations, and no others."""


class Verdicts:
    """This peer's findings, and other peers' accusations."""

    def __init__(self, patience_s: float) -> None:
        """`patience_s`: how long others may take to confirm a finding."""
        self._patience_s = patience_s
        self._found: dict[str, Case] = {}  # by owner: findings that did not expel it yet
        self._claims: dict[str, dict[str, None]] = {}  # by accuser: the owners that it accuses, oldest first
        self._proofs: dict[str, Case] = {}  # by owner: lies that can be shown to any peer, oldest first
        self.mistaken: set[str] = set()
        """The peers that accused an owner of a lie in a mean that is right."""
        self.expelled: dict[str, str] = {}
        """The peers that were found to lie, with the lie."""
        self.doubt = ""
        """Why this peer suspects that its own machine is faulty; empty if it doesn't."""

    def finds(self, case: Case, lie: str, now: float) -> None:
        """Record a finding of this peer."""
        case.lie, case.found_at = lie, now
        if case.owner not in self.expelled:
            self._found.setdefault(case.owner, case)

    def accused(self, owner: str, by: str) -> None:
        """Record that another peer has found a lie of this owner."""
        claims = self._claims.setdefault(by, {})
        claims[owner] = None
        if len(claims) > CLAIMED_MAX:
            del claims[next(iter(claims))]

    def forget(self, known: Callable[[str], bool]) -> None:
        """Forget the accusations of peers that are not known any more. Anyone can make further identities in an open
        run."""
        self._claims = {peer: claims for peer, claims in self._claims.items() if known(peer)}

    def acquitted(self, accusers: Collection[str]) -> None:
        """Record that a mean for which these peers accused its owner is right. None of their accusations counts
        any more."""
        self.mistaken.update(accusers)
        self.forget(lambda peer: peer not in self.mistaken)

    def settle(self, able: Callable[[str], Collection[str]]) -> list[Case]:
        """Mark as expelled each owner that this peer has found to lie, if another peer has accused it, too, or no
        other peer could find its lie. Returns the means that are these lies. `able(owner)`: the other live peers that
        could."""
        settled = [case for who, case in self._found.items() if self._accused(who) or not able(who)]
        for case in settled:
            del self._found[case.owner]
            self.expelled[case.owner] = case.lie
            if case.proves:
                self._proofs[case.owner] = case
        while len(self._proofs) > 1 and (len(self._proofs) > PROOFS_MAX or self._nbytes() > PROOFS_BYTES):
            del self._proofs[next(iter(self._proofs))]
        if settled:
            self.doubt = ""
        return settled

    def overdue(self, now: float) -> list[str]:
        """The owners whose lies this peer alone has found and can prove, though others have had the time to find
        them. Findings without a proof are dropped after that time: perhaps the owner showed the contributions to
        every peer but this one, and that says nothing of this peer's machine."""
        late = [case for case in self._found.values() if now - case.found_at > self._patience_s]
        for case in late:
            if not case.proves:
                del self._found[case.owner]
        return [case.owner for case in late if case.proves]

    def finding(self, case: Case) -> bool:
        """Whether this mean is the one by which this peer found its owner to lie."""
        return case in (self._found.get(case.owner), self._proofs.get(case.owner))

    def to_tell(self) -> list[Case]:
        """The means that this peer calls lies before other peers: those of unconfirmed findings, and those whose
        proofs are kept for newcomers."""
        return [*self._found.values(), *self._proofs.values()]

    def proof(self, mean: OfMean) -> Case | None:
        """The kept proof that this mean is a lie; None if there is none."""
        return next((case for case in self._proofs.values() if case.mean == mean), None)

    def _accused(self, owner: str) -> bool:
        return any(owner in claims for claims in self._claims.values())

    def _nbytes(self) -> int:
        return sum(case.nbytes for case in self._proofs.values())


# -- two signed statements of one peer, of which an honest peer signs only one: they prove a lie to anyone, without
# tensors. A leader that starts again has forgotten what it signed. So Closes and commits are signed with a number that
# the process has drawn, and two lives of one peer don't contradict each other.

REMEMBERED_BYTES = 16 * 2**20
"""The bytes of statements that are remembered; the oldest are forgotten first."""
ABOUT = {
    READY: ("two contributions of one id", ("fragment", "id"), "root"),
    CLOSE: ("two Closes of one attempt", ("fragment", "base", "term", "attempt"), "key"),
    COMMIT: ("two commits of one term", ("fragment", "base", "term"), "key"),
}
"""By kind: what is contradicted, the fields by which two statements are about one thing, and the field that must be
equal then."""


def lie_of(found: Contradicts) -> str:
    """The lie of a peer that contradicts itself, as text."""
    return f"it signed {ABOUT[found.kind][0]} that contradict each other"


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

    def saw(self, said: Statement) -> Contradicts | None:
        """Remember a statement. Returns how it contradicts an earlier one; None if it doesn't."""
        signer, kind, statement, seal = said
        told = _read(kind, statement)
        if told is None:
            return None
        key = signer, kind, told[0]
        if (known := self._seen.get(key)) is not None:
            proof = memoryview(pack(*known, statement, seal))
            differs = contradict(kind, known[0], statement, self._token)
            return Contradicts(signer, kind, proof.nbytes, proof) if differs else None
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
    _, about, says = ABOUT[kind]
    try:
        token, life, *values = msgpack.unpackb(statement, use_list=False)
        told = dict(zip(SIGNED[kind], values, strict=True))
    except (ValueError, TypeError, msgpack.UnpackException):
        return None
    return (token, life, *(told[name] for name in about)), told[says]
