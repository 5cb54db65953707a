"""The fields of messages in headers: which of them name peers and hashes, how great and how long they may be, and the
short forms of choices and states.

Law: a field of one name and type is the same everywhere, unless `headers` says so. Payloads and their hashes, and
roots, are not written: who receives the payload computes them. An entry of a choice has the author's place in the roll
of the base, sequence, weight and samples; then only what is not as in the roll. The most that a donor can lie about a
plan is which members are candidates that missed many commits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

from msgspec import Meta

from p2p_diloco.core import leases
from p2p_diloco.core.leases import Table, Use
from p2p_diloco.core.messages import Choice, Links, Ready
from p2p_diloco.core.plan import SPARE_EPOCHS, Member, Plan, plan_after
from p2p_diloco.core.revision import Revision
from p2p_diloco.core.rules import Rules
from p2p_diloco.core.state import State, founding, hash_of
from p2p_diloco.core.version import ContributionId, ModelVersion, Version
from p2p_diloco.net.signing import SIGNATURE_BYTES
from p2p_diloco.node import forms as f
from p2p_diloco.node.forms import About, Form, Unfit, Unplaced

CHAIN_BYTES, HASH_BYTES = 16, 32
"""Lengths of the hashes of versions, choices and tensors; and of payloads."""
PEERS = frozenset(
    [
        "holder",
        "leader",
        "author",
        "owner",
        "by",
        "peer",
        "gone",
        "late",
        "successors",
        "owners",
        "missing",
        "awaits",
        "behind",
    ]
)
"""The fields whose text names peers."""
CHAINS = {"key", "digest", "links", "heads", "digests"}
"""The fields whose text is a hash of a version, a choice or tensors."""
MOST: dict[str, float] = {
    "incarnation": 2**62, "life": 2**62, "samples": 2**48, "start": leases.POSITION_MAX, "stop": leases.POSITION_MAX,
    "next": leases.POSITION_MAX, "used": leases.POSITION_MAX, "epochs": leases.EPOCHS_MAX, "wants": leases.WANTS_MAX,
    "length": leases.LENGTH_MAX, "weight": 2.0**40, "speed": 2.0**40, "outer_lr": 1e9, "outer_momentum": 1e9,
}  # fmt: skip
"""The greatest numbers: by field, else 2**40 and, with a fraction, 2**50."""
LONGEST = {
    "owners": 4096, "numbers": 4096, "missing": 4096, "awaits": 4096, "sent": 4096, "heads": 4096, "links": 4096,
    "used": leases.SPANS_MAX, "uses": leases.TABLES_MAX, "tables": leases.TABLES_MAX, "leases": 2 * leases.ENTRIES_MAX,
    "freed": 2 * leases.ENTRIES_MAX,
}  # fmt: skip
"""The longest lists, by field."""


def _scalar(hint: Any, name: str) -> Form:
    if hint is int:
        return f.whole(int(MOST.get(name, 2**40)))
    if hint is float:
        return f.number(MOST.get(name, 2.0**50))
    if hint is str and name in PEERS:
        return f.PEER
    if hint is str and name in CHAINS:
        return f.digest(CHAIN_BYTES)
    return Form(Annotated[str, Meta(max_length=f.TEXT_MAX)] if hint is str else hint)


SEAL, HASHES, DIGESTS = f.octets(0, SIGNATURE_BYTES), f.digests(HASH_BYTES), f.digests(CHAIN_BYTES)
OWN: dict[Any, Form] = {
    "grant": f.NAMED, "behind": f.pair(f.NAMED, f.whole(2**40), f.whole(2**40)), "seal": SEAL, "hashes": HASHES,
    "sent": f.several(f.whole(2**40, least=-1)),
}  # fmt: skip
"""The forms of certain types, and of fields by name."""
FORMS = f.Forms(_scalar, OWN, left_out=("payload", "hash", "root"), most=LONGEST)
VERSION = FORMS.of(Version)
OWN[ModelVersion] = FORMS.row(
    ModelVersion, generation=f.whole(2**40, least=-1), samples=f.whole(2**62), epochs=f.whole(2**62)
)


# -- choices: one short row for each contribution, and all hashes and signatures in a row of bytes each


@dataclass(frozen=True, slots=True)
class Entry:
    """One contribution of a choice. `link`, `reachable`, `incarnation`, `grant`: None if as in the roll. `oldest`,
    `base`: None if they are the id and the message's base."""

    peer: str
    sequence: int
    weight: float
    samples: int
    link: float | None = None
    reachable: bool | None = None
    incarnation: int | None = None
    grant: str | None = ""
    oldest: ContributionId | None = None
    base: Version | None = None
    uses: tuple[Use, ...] = ()


@dataclass(frozen=True, slots=True)
class Listed:
    """A choice. For the contributions with a weight in order: `roots` has the hash of each, or `hashes` those of all
    its slices. `seals`: of all contributions in order. Each of the three may be empty."""

    by: str
    term: int
    entries: tuple[Entry, ...]
    gone: tuple[str, ...]
    late: tuple[str, ...]
    revision: Revision
    successors: tuple[str, ...]
    seal: bytes
    roots: tuple[str, ...]
    hashes: bytes
    seals: bytes


LISTED = FORMS.row(Listed, roots=DIGESTS, hashes=Form(bytes))
NO_ROOT, NO_SEAL = "00" * CHAIN_BYTES, bytes(SIGNATURE_BYTES)


def _write_choice(choice: Choice, about: About) -> Any:
    readys = [ready for _, ready in choice.entries]
    weighted = [ready for ready in readys if ready.weight]
    whole = any(ready.hashes for ready in weighted)
    roots = () if whole or not any(ready.root for ready in weighted) else [ready.root or NO_ROOT for ready in weighted]
    listed = Listed(
        choice.by, choice.term, tuple(_entry(peer, ready, about) for peer, ready in choice.entries), choice.gone,
        choice.late, choice.revision, choice.successors, choice.seal, tuple(roots),
        bytes.fromhex("".join("".join(ready.hashes) for ready in weighted)),
        b"".join(ready.seal or NO_SEAL for ready in readys) if any(ready.seal for ready in readys) else b"",
    )  # fmt: skip
    return LISTED.write(listed, about)


def _entry(peer: str, ready: Ready, about: About) -> Entry:
    member, oldest = about.roll.members.get(peer), None if ready.oldest == ready.id else ready.oldest
    base = None if ready.base == about.base else ready.base
    head = peer, ready.id.sequence, ready.weight, ready.samples
    if member is None:
        own = ready.link, ready.reachable, ready.id.incarnation, ready.grant
        return Entry(*head, *own, oldest, base, ready.uses)
    link = None if ready.link == member.link else ready.link
    reachable = None if ready.reachable == member.reachable else ready.reachable
    incarnation = None if ready.id.incarnation == member.id.incarnation else ready.id.incarnation
    grant = None if ready.grant == member.grant else ready.grant
    return Entry(*head, link, reachable, incarnation, grant, oldest, base, ready.uses)


def _read_choice(value: Any, about: About) -> Choice:
    listed: Listed = LISTED.read(value, about)
    weighted = sum(entry.weight > 0 for entry in listed.entries)
    slices, left = divmod(len(listed.hashes), HASH_BYTES * max(1, weighted))
    if left or len(listed.roots) not in (0, weighted) or (slices and listed.roots):
        raise Unfit("it has other numbers of contributions and of hashes")
    if len(listed.seals) not in (0, SIGNATURE_BYTES * len(listed.entries)):
        raise Unfit("it has other numbers of contributions and of signatures")
    entries, at, size = [], 0, 2 * HASH_BYTES
    for place, entry in enumerate(listed.entries):
        hashes: tuple[str, ...] = ()
        root = ""
        if entry.weight:
            raw = listed.hashes[HASH_BYTES * slices * at : HASH_BYTES * slices * (at + 1)].hex()
            hashes = tuple([raw[start : start + size] for start in range(0, len(raw), size)])
            root = listed.roots[at] if listed.roots else hash_of(hashes) if hashes else ""
            at += 1
        seal = listed.seals[SIGNATURE_BYTES * place : SIGNATURE_BYTES * (place + 1)]
        entries.append((entry.peer, _ready(entry, about, hashes, "" if root == NO_ROOT else root, seal)))
    chosen = listed.gone, listed.late, listed.revision, listed.successors, listed.seal
    return Choice(listed.by, listed.term, tuple(entries), *chosen)


def _ready(entry: Entry, about: About, hashes: tuple[str, ...], root: str, seal: bytes) -> Ready:
    member = about.roll.members.get(entry.peer)
    link, reachable, incarnation, grant = entry.link, entry.reachable, entry.incarnation, entry.grant
    if member is not None:
        link = member.link if link is None else link
        reachable = member.reachable if reachable is None else reachable
        incarnation = member.id.incarnation if incarnation is None else incarnation
        grant = member.grant if grant is None else grant
    if link is None or reachable is None or incarnation is None or grant is None:
        raise Unplaced(f"its entry of {entry.peer} leaves out what no roll has")
    id = ContributionId(incarnation, entry.sequence)
    head = about.fragment, entry.base or about.base, id, entry.oldest or id, entry.weight, entry.samples, hashes
    return Ready(*head, link, reachable, grant, entry.uses, root, b"" if seal == NO_SEAL else seal)


CHOICE = OWN[Choice] = Form(LISTED.type, _write_choice, _read_choice)


# -- states: one row for each member of the roll, and no plan, because that follows from the roll


@dataclass(frozen=True, slots=True)
class Row:
    """A member of a told roll. `grant`: None if it is the member itself."""

    peer: str
    id: ContributionId
    epoch: int
    led: int
    link: float = 0.0
    reachable: bool = True
    grant: str | None = None
    gone: bool = False
    behind: tuple[str, int, int] = ("", 0, 0)


@dataclass(frozen=True, slots=True)
class Stated:
    """A state. Its plan follows from its roll and from `candidates`: the least number of candidates before that gives
    this plan; and from the `successors` that an asynchronous leader chose."""

    version: Version
    roll: tuple[Row, ...]
    links: Links
    successors: tuple[str, ...]
    candidates: int
    buffered: int
    revision: Revision
    paced: tuple[int, int]
    tables: tuple[Table, ...]
    key: str
    hashes: tuple[str, ...]


STATED = FORMS.row(Stated)


def _write_state(state: State, about: About) -> Any:
    rows = tuple(
        Row(peer, member.id, member.epoch, member.led, member.link, member.reachable,
            None if member.grant == peer else member.grant, member.gone, member.behind)
        for peer, member in sorted(state.roll.items())
    )  # fmt: skip
    line = state.plan.succession
    missed = max((state.version.epoch - state.roll[peer].epoch for peer in line if peer in state.roll), default=0)
    of = max(0, missed - SPARE_EPOCHS), state.buffered, state.revision, state.paced, state.tables, state.key
    successors = line[: state.plan.named] if about.rules.asynchronous else ()
    return STATED.write(Stated(state.version, rows, state.links, successors, *of, state.hashes), about)


def _read_state(value: Any, about: About) -> State:
    told: Stated = STATED.read(value, about)
    roll = {
        row.peer: Member(row.id, row.epoch, row.led, row.link, row.reachable,
                         row.peer if row.grant is None else row.grant, row.gone, row.behind)
        for row in told.roll
    }  # fmt: skip
    if not roll or len(roll) != len(told.roll):
        raise Unfit("its roll is empty, or names a member twice")
    of = told.buffered, told.revision, told.paced, told.tables, told.key, told.hashes
    state = State(about.fragment, told.version, roll, Plan((), ()), told.links, *of)
    return replace(state, plan=_plan_of(state, told, about.rules))


def _plan_of(state: State, told: Stated, rules: Rules) -> Plan:
    """Return the plan that follows from a state."""
    epoch, fragment, roll = state.version.epoch, state.fragment, state.roll
    if not epoch:
        founder = min(roll)
        return founding(fragment, state.version, founder, len(rules.fragments[fragment])).plan
    counted = [peer for peer, member in roll.items() if member.epoch == epoch]
    if not rules.asynchronous and not counted:
        raise Unfit("its roll names nobody whom the last commit counts")
    return plan_after(rules, fragment, epoch, roll, counted, told.candidates, told.successors)


STATE = OWN[State] = Form(STATED.type, _write_state, _read_state)
