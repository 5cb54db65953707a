"""How a choice is written: one short row for each contribution, and all hashes and signatures in a row of bytes each.

Law: pure. An entry has the author's place in the roll of the base, sequence, weight and samples; then only what is not
as in the roll.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from p2p_diloco.core.leases import Use
from p2p_diloco.core.revision import Revision
from p2p_diloco.core.version import ContributionId, Version
from p2p_diloco.fragments.messages import Choice, Ready
from p2p_diloco.fragments.state import hash_of
from p2p_diloco.net.signing import SIGNATURE_BYTES
from p2p_diloco.node import forms as f
from p2p_diloco.node.fields import CHAIN_BYTES, DIGESTS, FIELDS, HASH_BYTES, LIFE, LINK, VERSION, written
from p2p_diloco.node.forms import About, Form, Unfit, Unplaced


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


ENTRY = written(
    Entry, link=f.maybe(LINK), reachable=f.maybe(f.FLAG), incarnation=f.maybe(LIFE),
    oldest=f.maybe(FIELDS["oldest"]), base=f.maybe(VERSION),
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


BLOB = f.octets_to(2**28)
LISTED = written(Listed, entries=f.several(ENTRY), roots=DIGESTS, hashes=BLOB, seals=BLOB)
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


CHOICE = Form(LISTED.type, _write_choice, _read_choice)
