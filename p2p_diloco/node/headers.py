"""Encodes the messages of `p2p_diloco.fragments` as header bytes, and decodes them: msgpack of [protocol, token, [tag,
fields...]].

Law: any bytes give a message, a `Folded` message or a `Refusal`, and take memory by their length, whatever lengths they
claim. Payloads go beside the header, and their hashes are not in it: who receives a payload computes its hash.
`misplaced` checks a message against the run.

A choice has one short row for each contribution: the author's place in the roll of the base, sequence, weight and
samples; then only what is not as in the roll.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Union

import msgspec

from p2p_diloco.core.leases import (
    ENTRIES_MAX,
    EPOCHS_MAX,
    LENGTH_MAX,
    POSITION_MAX,
    SPANS_MAX,
    TABLES_MAX,
    WANTS_MAX,
    DataSet,
    Lease,
    Table,
    Use,
)  # fmt: skip
from p2p_diloco.core.revision import Revision
from p2p_diloco.core.rules import Rules
from p2p_diloco.core.version import ContributionId, ModelVersion, Version
from p2p_diloco.fragments import messages as m
from p2p_diloco.fragments.plan import Member, Plan, plan_after
from p2p_diloco.fragments.state import LINKS_MAX, State, founding, hash_of, rooted
from p2p_diloco.net.interface import Refusal
from p2p_diloco.net.signing import SIGNATURE_BYTES
from p2p_diloco.node.forms import (
    FLAG,
    NAMED,
    NOWHERE,
    PEER,
    About,
    Form,
    Unfit,
    Unplaced,
    digest,
    digests,
    maybe,
    number,
    octets,
    octets_to,
    pair,
    row,
    same,
    several,
    text,
    whole,
)  # fmt: skip
from p2p_diloco.node.rolls import NOBODY, Roll, Rolls

Buffer = bytes | bytearray | memoryview

PROTOCOL = 9
"""The version of the protocol. Peers of another version are refused with both numbers."""
TOKEN_BYTES = 16
CHAIN_BYTES, HASH_BYTES = 16, 32
"""Lengths of the hashes of versions, choices and tensors; and of payloads."""
SLICES_MAX, FRAGMENTS_MAX = 4096, 4096
BANDWIDTH_MAX, SPEED_MAX, WEIGHT_MAX = 2.0**50, 2.0**40, 2.0**40

# -- parts of messages

BYTES_MAX = 2**28
LENGTH = Annotated[int, msgspec.Meta(ge=0, le=BYTES_MAX)]
COUNT, CHAIN, NUMBERS = whole(), digest(CHAIN_BYTES), several(whole(SLICES_MAX), SLICES_MAX)
KEY = digest(CHAIN_BYTES, may_lack=True)
PEERS, OWNERS = several(PEER), several(PEER, SLICES_MAX)
SEAL = octets(0, SIGNATURE_BYTES)
LINKS = several(pair(COUNT, CHAIN), LINKS_MAX)
BANDWIDTH = number(BANDWIDTH_MAX)
VERSION = row(Version, {"generation": COUNT, "samples": whole(2**48), "epoch": COUNT, "digest": CHAIN})
ID = row(ContributionId, {"incarnation": whole(2**62), "sequence": COUNT})
MODEL = row(
    ModelVersion, {"generation": whole(least=-1), "samples": whole(2**62), "epochs": whole(2**62), "digest": KEY}
)
SET = row(DataSet, {"name": text(), "length": whole(LENGTH_MAX), "epochs": whole(EPOCHS_MAX), "fingerprint": text()})
SPANS = several(pair(whole(POSITION_MAX), whole(POSITION_MAX)), SPANS_MAX)
USES = several(row(Use, {"data": SET, "used": SPANS, "wants": whole(WANTS_MAX)}), TABLES_MAX)
LEASE = row(Lease, {"peer": PEER, "life": whole(2**62), "start": whole(POSITION_MAX), "stop": whole(POSITION_MAX),
                    "since": COUNT})  # fmt: skip
LEASES = several(LEASE, ENTRIES_MAX * 2)
TABLES = several(row(Table, {"data": SET, "next": whole(POSITION_MAX), "leases": LEASES, "freed": LEASES}), TABLES_MAX)
RATE = maybe(number(1e9))
REVISION = row(
    Revision,
    {"number": COUNT, "outer_lr": RATE, "outer_momentum": RATE, "proof": text(), "sync_every": maybe(COUNT),
     "min_peers": maybe(COUNT), "stop_after_epochs": maybe(COUNT), "stop_after_samples": maybe(COUNT), "saves": COUNT},
)  # fmt: skip
SUMMARY = row(
    m.Summary,
    {"incarnation": whole(2**62), "role": text(16), "eligible": FLAG, "model": MODEL,
     "heads": several(pair(COUNT, CHAIN), FRAGMENTS_MAX), "idle": FLAG, "bandwidth": BANDWIDTH, "revision": REVISION,
     "speed": number(SPEED_MAX), "paused": FLAG, "sent": several(whole(least=-1), FRAGMENTS_MAX),
     "awaits": several(pair(whole(FRAGMENTS_MAX), several(PEER, 64)), FRAGMENTS_MAX),
     "digests": several(several(pair(COUNT, CHAIN), 16), FRAGMENTS_MAX)},
)  # fmt: skip

# -- choices


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


ENTRY = row(
    Entry,
    {"peer": PEER, "sequence": COUNT, "weight": number(WEIGHT_MAX), "samples": COUNT, "link": maybe(BANDWIDTH),
     "reachable": maybe(FLAG), "incarnation": maybe(whole(2**62)), "grant": NAMED, "oldest": maybe(ID),
     "base": maybe(VERSION), "uses": USES},
)  # fmt: skip


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


LISTED = row(
    Listed,
    {"by": PEER, "term": COUNT, "entries": several(ENTRY), "gone": PEERS, "late": PEERS, "revision": REVISION,
     "successors": PEERS, "seal": SEAL, "roots": digests(CHAIN_BYTES), "hashes": octets_to(BYTES_MAX),
     "seals": octets_to(BYTES_MAX)},
)  # fmt: skip
NO_ROOT, NO_SEAL = "00" * CHAIN_BYTES, bytes(SIGNATURE_BYTES)


def _write_choice(choice: m.Choice, about: About) -> Any:
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


def _entry(peer: str, ready: m.Ready, about: About) -> Entry:
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


def _read_choice(value: Any, about: About) -> m.Choice:
    listed: Listed = LISTED.read(value, about)
    weighted = sum(entry.weight > 0 for entry in listed.entries)
    slices, left = divmod(len(listed.hashes), HASH_BYTES * max(1, weighted))
    if left or len(listed.roots) not in (0, weighted) or (slices and listed.roots):
        raise Unfit("it has other numbers of contributions and of hashes")
    if len(listed.seals) not in (0, SIGNATURE_BYTES * len(listed.entries)):
        raise Unfit("it has other numbers of contributions and of signatures")
    entries, at, size = [], 0, 2 * HASH_BYTES
    for place, entry in enumerate(listed.entries):
        hashes, root = (), ""
        if entry.weight:
            raw = listed.hashes[HASH_BYTES * slices * at : HASH_BYTES * slices * (at + 1)].hex()
            hashes = tuple([raw[start : start + size] for start in range(0, len(raw), size)])
            root = listed.roots[at] if listed.roots else hash_of(hashes) if hashes else ""
            at += 1
        seal = listed.seals[SIGNATURE_BYTES * place : SIGNATURE_BYTES * (place + 1)]
        entries.append((entry.peer, _ready(entry, about, hashes, "" if root == NO_ROOT else root, seal)))
    chosen = listed.gone, listed.late, listed.revision, listed.successors, listed.seal
    return m.Choice(listed.by, listed.term, tuple(entries), *chosen)


def _ready(entry: Entry, about: About, hashes: tuple[str, ...], root: str, seal: bytes) -> m.Ready:
    member = about.roll.members.get(entry.peer)
    own = entry.link, entry.reachable, entry.incarnation, entry.grant
    if member is not None:
        there = member.link, member.reachable, member.id.incarnation, member.grant
        own = tuple(b if a is None else a for a, b in zip(own, there, strict=True))
    link, reachable, incarnation, grant = own
    if link is None or reachable is None or incarnation is None or grant is None:
        raise Unplaced(f"its entry of {entry.peer} leaves out what no roll has")
    id = ContributionId(incarnation, entry.sequence)
    head = about.fragment, entry.base or about.base, id, entry.oldest or id, entry.weight, entry.samples, hashes
    return m.Ready(*head, link, reachable, grant, entry.uses, root, b"" if seal == NO_SEAL else seal)


CHOICE = Form(LISTED.type, _write_choice, _read_choice)

# -- states


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
    """A state. Its plan follows from it, but for the `successors` that an asynchronous leader chose."""

    version: Version
    roll: tuple[Row, ...]
    links: m.Links
    successors: tuple[str, ...]
    candidates: int
    buffered: int
    revision: Revision
    paced: tuple[int, int]
    tables: tuple[Table, ...]
    key: str
    hashes: tuple[str, ...]


ROW = row(
    Row,
    {"peer": PEER, "id": ID, "epoch": COUNT, "led": COUNT, "link": BANDWIDTH, "reachable": FLAG, "grant": NAMED,
     "gone": FLAG, "behind": pair(NAMED, COUNT, COUNT)},
)  # fmt: skip
STATED = row(
    Stated,
    {"version": VERSION, "roll": several(ROW), "links": LINKS, "successors": PEERS, "candidates": COUNT,
     "buffered": COUNT, "revision": REVISION, "paced": pair(COUNT, COUNT), "tables": TABLES, "key": KEY,
     "hashes": digests(HASH_BYTES)},
)  # fmt: skip


def _write_state(state: State, about: About) -> Any:
    rows = tuple(
        Row(peer, member.id, member.epoch, member.led, member.link, member.reachable,
            None if member.grant == peer else member.grant, member.gone, member.behind)
        for peer, member in sorted(state.roll.items())
    )  # fmt: skip
    of = state.candidates, state.buffered, state.revision, state.paced, state.tables, state.key, state.hashes
    successors = state.plan.succession[: state.plan.named] if about.rules.asynchronous else ()
    return STATED.write(Stated(state.version, rows, state.links, successors, *of), about)


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
    state = State(about.fragment, told.version, roll, Plan((), ()), told.links, told.candidates, *of)
    return replace(state, plan=_plan_of(state, told.successors, about.rules))


def _plan_of(state: State, successors: tuple[str, ...], rules: Rules) -> Plan:
    """Return the plan that follows from a state."""
    epoch, fragment, roll = state.version.epoch, state.fragment, state.roll
    if not epoch:
        founder = min(roll)
        return founding(fragment, state.version, founder, len(rules.fragments[fragment])).plan
    counted = [peer for peer, member in roll.items() if member.epoch == epoch]
    if not rules.asynchronous and not counted:
        raise Unfit("its roll names nobody whom the last commit counts")
    return plan_after(rules, fragment, epoch, roll, counted, state.candidates, successors)


# -- messages

ROUND: dict[str, Form] = {"fragment": COUNT, "base": VERSION}
CLOSE: dict[str, Form] = {
    **ROUND, "term": COUNT, "holder": PEER, "attempt": COUNT, "key": CHAIN,
    "choice": maybe(CHOICE), "owners": OWNERS, "seal": SEAL,
}  # fmt: skip
COMMIT: dict[str, Form] = {
    **ROUND, "version": VERSION, "term": COUNT, "leader": PEER, "key": CHAIN, "choice": CHOICE,
    "hashes": digests(HASH_BYTES), "owners": OWNERS, "seal": SEAL,
}  # fmt: skip
KINDS: dict[type[Any], dict[str, Form]] = {
    m.Probe: {"summary": SUMMARY},
    m.ProbeAck: {"summary": SUMMARY},
    m.Leave: {"incarnation": whole(2**62), "died": FLAG},
    m.Ready: {
        **ROUND, "id": ID, "oldest": ID, "weight": number(WEIGHT_MAX), "samples": COUNT,
        "hashes": digests(HASH_BYTES), "link": BANDWIDTH, "reachable": FLAG, "grant": NAMED, "uses": USES,
        "seal": SEAL,
    },
    m.Slice: {**ROUND, "author": PEER, "id": ID, "number": COUNT},
    m.Close: CLOSE,
    m.Mean: {**ROUND, "key": CHAIN, "number": COUNT, "owner": PEER, "seal": SEAL},
    m.Lack: {**ROUND, "key": CHAIN, "missing": several(pair(COUNT, PEERS), SLICES_MAX)},
    m.Commit: COMMIT,
    m.Want: {**ROUND, "what": Form(m.What, same, same), "numbers": NUMBERS, "key": KEY},
    m.Claim: {**ROUND, "term": COUNT},
    m.Vote: {**ROUND, "term": COUNT, "holder": PEER, "served": maybe(row(m.Close, CLOSE)),
             "commit": maybe(row(m.Commit, COMMIT))},
    m.Held: {"fragment": COUNT, "version": VERSION},
    m.Stale: {"fragment": COUNT, "id": ID, "version": VERSION},
    m.Ask: {"fragment": maybe(COUNT), "numbers": NUMBERS},
    m.Told: {"versions": several(VERSION, FRAGMENTS_MAX), "links": several(LINKS, FRAGMENTS_MAX), "fresh": FLAG},
    m.Head: {"fragment": COUNT, "state": Form(STATED.type, _write_state, _read_state),
             "digests": digests(CHAIN_BYTES)},
    m.Part: {"fragment": COUNT, "version": VERSION, "number": COUNT},
}  # fmt: skip
"""The fields of each message that are written. Payloads and their hashes, and roots, are not."""
FORMS = {kind: row(kind, forms, tag) for tag, (kind, forms) in enumerate(KINDS.items())}
BY_ROLL = (m.Close, m.Commit, m.Vote, m.Lack)
"""Messages that name peers by their places in the roll of their base."""

_OF_STRUCT = {form.type: (kind, form) for kind, form in FORMS.items()}
_BODY = msgspec.msgpack.Decoder(Union[tuple(form.type for form in FORMS.values())])  # noqa: UP007
_ENCODER = msgspec.msgpack.Encoder()


class Envelope(msgspec.Struct, array_like=True, frozen=True):
    """A header. `body`: the message, or the length of a message that comes as the payload."""

    protocol: int
    token: bytes = b""
    body: msgspec.Raw = msgspec.Raw(b"\xc0")


@dataclass(frozen=True, slots=True)
class Folded:
    """A message that names peers by their places in the roll of a version that this peer doesn't have yet."""

    fragment: int
    base: Version
    body: Any

    def read(self, about: About, rolls: Rolls) -> m.Message | Folded:
        """As `unpack`."""
        return _read(self.body, about, rolls)


LONG = 16 * 1024
"""A message longer than this comes as a payload, for which transports have other limits."""


def pack(message: m.Message, about: About, token: bytes) -> tuple[bytes, bytes | None]:
    """Encode a message: the header and, if it is long, the payload. Another payload of the message is sent beside the
    header. `about.roll`: that of the message's base; empty if it isn't known, then peers are spelled out."""
    body = _ENCODER.encode(FORMS[type(message)].write(message, _known(message, about)))
    long = len(body) > LONG
    header = _ENCODER.encode([PROTOCOL, token, len(body) if long else msgspec.Raw(body)])
    return header, body if long else None


def _known(message: m.Message, about: About) -> About:
    fragment, base = getattr(message, "fragment", None) or 0, getattr(message, "base", NOWHERE)
    return replace(about, fragment=fragment, base=base, roll=about.roll if isinstance(message, BY_ROLL) else NOBODY)


def opened(header: bytes, token: bytes) -> memoryview | int:
    """Open a header: returns the message's bytes, for `unpack`, or the length of the payload that has them.

    Raises:
        Refusal: another protocol, or another run (settings, model).
    """
    try:
        envelope = msgspec.msgpack.decode(header, type=Envelope)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Refusal(f"the header can't be read ({error})") from None
    if envelope.protocol != PROTOCOL:
        raise Refusal(f"this peer uses protocol {PROTOCOL}, but the message uses protocol {envelope.protocol}")
    if envelope.token != token:
        raise Refusal("wrong run token: the sender has another run id, other settings or another model")
    body = memoryview(envelope.body)
    if body[:1] and (body[0] & 0xF0 == 0x90 or body[0] in (0xDC, 0xDD)):
        return body
    try:
        return int(msgspec.msgpack.decode(body, type=LENGTH))
    except msgspec.MsgspecError as error:
        raise Refusal(f"the header has neither a message nor the length of one ({error})") from None


def unpack(body: Buffer, about: About, rolls: Rolls) -> m.Message | Folded:
    """Decode a message; `about.peer` is its sender. The message has no payload.

    Raises:
        Refusal: the bytes are no message, or one of its fields can't be used.
    """
    try:
        struct = _BODY.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Refusal(f"the message can't be read: {error}") from None
    return _read(struct, about, rolls)


def _read(struct: Any, about: About, rolls: Rolls) -> m.Message | Folded:
    kind, form = _OF_STRUCT[type(struct)]
    about = replace(about, fragment=getattr(struct, "fragment", None) or 0)
    if about.fragment >= len(about.rules.fragments):
        raise Refusal(f"the {kind.__name__} message is about fragment {about.fragment}, which the run does not have")
    roll: Roll | None = NOBODY
    try:
        if hasattr(struct, "base"):
            about = replace(about, base=VERSION.read(struct.base, about))
        if kind in BY_ROLL:
            roll = rolls.of(about.fragment, about.base)
            about = replace(about, roll=roll or NOBODY)
        message: m.Message = form.read(struct, about)
    except Unfit as error:
        if roll is None and isinstance(error, Unplaced):
            return Folded(about.fragment, about.base, struct)
        raise Refusal(f"the {kind.__name__} message can't be used: {error}") from None
    return rooted(message) if isinstance(message, m.Ready) and message.hashes else message
