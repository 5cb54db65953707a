"""The fields of messages in headers: which of them name peers and hashes, how great and how long they may be, and the
short forms of choices and states; and which messages can't belong to the run.

Law: a field of one name and type is the same everywhere, unless `headers` says so. Payloads and their hashes, and
roots, are not written: who receives the payload computes them. The most that a donor can lie about a plan is which
members are candidates that missed many commits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from msgspec import Meta

from p2p_diloco.core import leases
from p2p_diloco.core import messages as m
from p2p_diloco.core.leases import WEIGHT_MIN, fault
from p2p_diloco.core.messages import Choice, Ready
from p2p_diloco.core.plan import SPARE_EPOCHS, Plan, plan_after
from p2p_diloco.core.rules import Rules
from p2p_diloco.core.state import State, founding, key_of, rooted
from p2p_diloco.core.version import ModelVersion, Version
from p2p_diloco.net.interface import Refusal
from p2p_diloco.net.signing import SIGNATURE_BYTES
from p2p_diloco.node import forms as f
from p2p_diloco.node.forms import About, Form

CHAIN_BYTES, HASH_BYTES = 16, 32
"""Lengths of the hashes of versions, choices and tensors; and of payloads."""
PEERS = {
    "leader", "author", "owner", "by", "peer", "gone", "late", "successors", "owners", "missing", "awaits",
    "demoted",
}  # fmt: skip
"""The fields whose text names peers."""
CHAINS = {"key", "chain", "digest", "links", "heads", "digests"}
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
    "grant": f.PEER, "demoted": f.pair(f.PEER, f.whole(2**40), f.whole(2**40)), "seal": SEAL, "hashes": HASHES,
    "sent": f.several(f.whole(2**40, least=-1)),
}  # fmt: skip
"""The forms of certain types, and of fields by name."""
FORMS = f.Forms(_scalar, OWN, left_out=("payload", "hash", "root"), most=LONGEST)
VERSION = FORMS.of(Version)
OWN[ModelVersion] = FORMS.row(
    ModelVersion, generation=f.whole(2**40, least=-1), samples=f.whole(2**62), epochs=f.whole(2**62)
)


# -- choices: fragment and base of their contributions are the message's, unless said

FRAGMENT = Form(None, lambda fragment, about: None, lambda value, about: about.fragment)
BASE = Form(
    VERSION.type | None,
    lambda base, about: None if base == about.base else VERSION.write(base, about),
    lambda value, about: about.base if value is None else VERSION.read(value, about),
)
ENTRY = f.pair(f.PEER, FORMS.row(Ready, fragment=FRAGMENT, base=BASE, root=f.digest(CHAIN_BYTES)))


def _read_entry(value: Any, about: About) -> tuple[str, Ready]:
    peer, ready = ENTRY.read(value, about)
    return peer, rooted(ready) if ready.hashes else ready


CHOICE = OWN[Choice] = FORMS.row(Choice, entries=f.several(replace(ENTRY, read=_read_entry)))


# -- states: no plan, because that follows from the roll and from two values more: the least number of candidates before
# that gives this plan, and the successors that an asynchronous leader chose

BARE = FORMS.row(
    State,
    fragment=FRAGMENT,
    plan=Form(None, lambda plan, about: None, lambda value, about: Plan((), ())),
)
PEERS_OF = f.several(f.PEER)


def _write_state(state: State, about: About) -> Any:
    line = state.plan.succession
    missed = max((state.version.epoch - state.roll[peer].epoch for peer in line if peer in state.roll), default=0)
    successors = line[: state.plan.named] if about.rules.asynchronous else ()
    return [BARE.write(state, about), max(0, missed - SPARE_EPOCHS), PEERS_OF.write(successors, about)]


def _read_state(value: Any, about: About) -> State:
    bare, candidates, successors = value
    state: State = BARE.read(bare, about)
    rules, epoch, fragment, roll = about.rules, state.version.epoch, about.fragment, dict(sorted(state.roll.items()))
    if not roll:
        raise Refusal("its roll is empty")
    counted = [peer for peer, member in roll.items() if member.epoch == epoch]
    if epoch and not rules.asynchronous and not counted:
        raise Refusal("its roll names nobody whom the last commit counts")
    if not epoch:
        plan = founding(fragment, state.version, min(roll), len(rules.fragments[fragment])).plan
    else:
        plan = plan_after(rules, fragment, epoch, roll, counted, candidates, PEERS_OF.read(successors, about))
    return replace(state, roll=roll, plan=plan)


STATE = OWN[State] = Form(f.pair(BARE, f.whole(2**40), PEERS_OF).type, _write_state, _read_state)


# -- what can't belong to the run


def check_place(message: m.Message, rules: Rules) -> None:
    """Raises Refusal if a message can't belong to the run. Each number by itself was checked when the message was
    decoded; the core judges commits by the state before them."""
    fragments, fragment = len(rules.fragments), getattr(message, "fragment", None)
    if fragment is not None and not 0 <= fragment < fragments:
        raise Refusal(f"the run has no fragment {fragment}")
    slices = 0 if fragment is None else len(rules.fragments[fragment])
    match message:
        case m.Probe(summary) | m.ProbeAck(summary):
            _check_summary(summary, fragments)
        case m.Ready():
            _check_ready(message, slices)
        case m.Slice(number=number) | m.Mean(number=number) | m.Part(number=number):
            _check_numbers([number], slices)
        case m.Want(numbers=numbers) | m.Ask(fragment=int(), numbers=numbers):
            _check_numbers(numbers, slices)
        case m.Ask(numbers=numbers) if numbers:
            raise Refusal("it asks for slices of no fragment")
        case m.Lack(missing=missing):
            _check_numbers([number for number, _ in missing], slices)
        case m.Close():
            _check_close(message, slices)
        case m.Vote(served=served, commit=commit):
            for part in (served, commit):
                if part is not None and (part.fragment, part.base) != (fragment, message.base):
                    raise Refusal("it tells of another round than its own")
            if served is not None:
                if served.choice is None:
                    raise Refusal("it tells of a Close without a choice")
                _check_close(served, slices)
        case m.Told(versions=versions, links=links):
            if len(versions) != fragments or len(links) != fragments:
                raise Refusal(f"it lists {len(versions)} fragments, the run has {fragments}")
            for version, line in zip(versions, links, strict=True):
                _check_links(version, line)
        case m.Head(state=state, digests=digests):
            if len(digests) not in (0, slices):
                raise Refusal(f"it lists {len(digests)} slices, the fragment has {slices}")
            _check_state(state, slices)


def _check_numbers(numbers: Sequence[int], slices: int) -> None:
    for number in numbers:
        if not 0 <= number < slices:
            raise Refusal(f"the fragment has no slice {number}")


def _check_summary(summary: m.Summary, fragments: int) -> None:
    for listed in (summary.heads, summary.sent, summary.digests):
        if len(listed) not in (0, fragments):
            raise Refusal(f"it lists {len(listed)} fragments, the run has {fragments}")
    if any(fragment >= fragments for fragment, _ in summary.awaits):
        raise Refusal("it awaits peers for a fragment that the run doesn't have")
    if summary.role not in ("worker", "aggregator"):
        raise Refusal(f"the role {summary.role!r} is unknown")


def _check_ready(ready: m.Ready, slices: int) -> None:
    if len(ready.hashes) != (slices if ready.weight else 0):
        raise Refusal(f"it has the hashes of {len(ready.hashes)} slices, the fragment has {slices}")
    if 0 < ready.weight < WEIGHT_MIN:
        raise Refusal("its weight is out of range")


def _check_close(close: m.Close, slices: int) -> None:
    if len(close.owners) != slices:
        raise Refusal(f"it lists the owners of {len(close.owners)} slices, the fragment has {slices}")
    if close.choice is None:
        return
    names = [peer for peer, _ in close.choice.entries]
    if names != sorted(set(names)):
        raise Refusal("its contributions are not sorted, or one peer has two")
    for _, ready in close.choice.entries:
        _check_ready(ready, slices)
    if key_of(close.fragment, close.base, close.choice) != close.key:
        raise Refusal("its key is not that of its choice")


def _check_links(version: Version, links: m.Links) -> None:
    epochs = [epoch for epoch, _ in links]
    if not links or epochs != sorted(set(epochs)) or links[-1] != (version.epoch, version.chain):
        raise Refusal("its links don't lead to its version")


def _check_state(state: State, slices: int) -> None:
    if len(state.hashes) not in (0, slices):
        raise Refusal(f"its last commit has {len(state.hashes)} means, the fragment has {slices} slices")
    if not 0 <= state.paced[0] <= state.version.epoch:
        raise Refusal("its count of inner steps has values that can't be used")
    _check_links(state.version, state.links)
    if why := fault(state.tables):
        raise Refusal(why)
