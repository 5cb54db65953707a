"""What may be in the fields of messages: how great numbers may be, how long texts and lists; what a receiver works out
by itself; and which messages can't belong to the run.

Law: pure. A payload and its hash are not written: who receives the payload computes the hash. A state's plan is not
believed, but computed from its roll. The most that a donor can lie about a plan is which members are candidates that
missed many commits.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cache
from typing import Annotated, Any, TypeVar, Union, get_args

import msgspec
from msgspec import Meta

from p2p_diloco.core import leases
from p2p_diloco.core import messages as m
from p2p_diloco.core.leases import WEIGHT_MIN, fault
from p2p_diloco.core.plan import SPARE_EPOCHS, plan_after
from p2p_diloco.core.rules import Rules
from p2p_diloco.core.state import State, founding, key_of, rooted
from p2p_diloco.core.version import Version
from p2p_diloco.net.interface import Refusal
from p2p_diloco.node.forms import Forms
from p2p_diloco.node.wire import NodeMessage

CHAIN_DIGITS, HASH_DIGITS = 32, 64
"""The hexadecimal digits of the hashes of versions, choices and tensors; and of payloads."""
HEXADECIMAL = {
    "key": CHAIN_DIGITS, "chain": CHAIN_DIGITS, "digest": CHAIN_DIGITS, "links": CHAIN_DIGITS, "heads": CHAIN_DIGITS,
    "digests": CHAIN_DIGITS, "root": CHAIN_DIGITS, "hashes": HASH_DIGITS, "hash": HASH_DIGITS,
}  # fmt: skip
"""The fields whose text is a hash, or empty."""
COUNT_MAX = 2**40
MOST: dict[str, float] = {
    "incarnation": 2**62, "life": 2**62, "samples": 2**48, "stop_after_samples": 2**48,
    "start": leases.POSITION_MAX, "stop": leases.POSITION_MAX,
    "next": leases.POSITION_MAX, "used": leases.POSITION_MAX, "epochs": leases.EPOCHS_MAX, "wants": leases.WANTS_MAX,
    "length": leases.LENGTH_MAX, "weight": 2.0**40, "speed": 2.0**40, "outer_lr": 1e9, "outer_momentum": 1e9,
    "ModelVersion.samples": 2**62, "ModelVersion.epochs": 2**62,
}  # fmt: skip
"""The greatest numbers: by field, else COUNT_MAX and, with a fraction, 2**50."""
LEAST = {"ModelVersion.generation": -1, "Summary.sent": -1}
"""The least whole numbers, else 0."""
LONGEST = {
    "owners": 4096, "numbers": 4096, "missing": 4096, "awaits": 4096, "sent": 4096, "heads": 4096, "links": 4096,
    "used": leases.SPANS_MAX, "uses": leases.TABLES_MAX, "tables": leases.TABLES_MAX, "leases": 2 * leases.ENTRIES_MAX,
    "freed": 2 * leases.ENTRIES_MAX,
}  # fmt: skip
"""The longest lists, by field."""
ITEMS_MAX = 12_000
"""The longest list of another field: a roll has at most so many members."""
TEXT_MAX, SEAL_MAX = 1024, 128
PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]*\Z"
"""Text without control characters and without marks that turn its direction: whoever prints a name from another peer
gives his terminal no commands."""

T = TypeVar("T")


def _scalar(hint: Any, field: str) -> Any:
    name = field.partition(".")[2]
    if hint is int:
        return Annotated[int, Meta(ge=LEAST.get(field, 0), le=int(MOST.get(field, MOST.get(name, COUNT_MAX))))]
    if hint is float:
        return Annotated[float, Meta(ge=0.0, le=MOST.get(name, 2.0**50))]
    if hint is str and name in HEXADECIMAL:
        return Annotated[str, Meta(pattern=rf"^([0-9a-f]{{{HEXADECIMAL[name]}}})?\Z")]
    if hint is bytes:
        return Annotated[bytes, Meta(max_length=SEAL_MAX)]
    return Annotated[str, Meta(max_length=TEXT_MAX, pattern=PRINTABLE)] if hint is str else hint


def _listed(item: Any, field: str) -> Any:
    return Annotated[tuple[item, ...], Meta(max_length=LONGEST.get(field.partition(".")[2], ITEMS_MAX))]


KINDS = (*get_args(m.Message), *get_args(NodeMessage))
"""All messages."""
MESSAGE: Any = Union[KINDS]  # noqa: UP007
FORMS = Forms(_scalar, {"payload", "Slice.hash", "Mean.hash"}, KINDS, _listed)
FORMS.of(MESSAGE)


_encoder = msgspec.msgpack.Encoder()


@cache
def _decoder(kind: Hashable) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(FORMS.of(kind))


def encoded(value: object) -> bytes:
    """Encode a message, or what is in one."""
    return _encoder.encode(FORMS.write(value))


def decoded(content: bytes | bytearray | memoryview, kind: type[T]) -> T:
    """Decode a value of this kind; of messages, `kind` is a union. Raises Refusal for anything else."""
    try:
        found: T = FORMS.read(_decoder(kind).decode(content))  # type: ignore[arg-type]
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Refusal(f"it can't be read: {error}") from None
    return found


# -- what a receiver works out by itself


def completed(message: Any, rules: Rules) -> Any:
    """A message of the run that was decoded, with the roots of its contributions and the plan of its state.

    Raises:
        Refusal: its fragment can't be of the run, or its state of the fragment.
    """
    fragment = getattr(message, "fragment", None)
    if fragment is not None and fragment >= len(rules.fragments):
        raise Refusal(f"the run has no fragment {fragment}")
    match message:
        case m.Ready(hashes=hashes) if hashes:
            return rooted(message)
        case m.Close(choice=m.Choice() as choice) | m.Commit(choice=m.Choice() as choice):
            if any(ready.fragment != fragment for _, ready in choice.entries):
                raise Refusal("it lists contributions to another fragment")
            entries = tuple((peer, completed(ready, rules)) for peer, ready in choice.entries)
            return replace(message, choice=replace(choice, entries=entries))
        case m.Vote(served=served, commit=commit):
            return replace(message, served=completed(served, rules), commit=completed(commit, rules))
        case m.Head(state=state):
            return replace(message, state=planned(state, message.fragment, rules))
    return message


def planned(state: State, fragment: int, rules: Rules) -> State:
    """The state of a fragment that was decoded, with the plan that follows from its roll. Of the told plan only this is
    believed: how long ago a candidate was counted, and whom an asynchronous leader chose.

    Raises:
        Refusal: it is of another fragment, or its roll names nobody who could lead.
    """
    epoch, roll, told = state.version.epoch, dict(sorted(state.roll.items())), state.plan
    counted = [peer for peer, member in roll.items() if member.epoch == epoch]
    if state.fragment != fragment:
        raise Refusal("its state is of another fragment")
    if not roll:
        raise Refusal("its roll is empty")
    if epoch and not rules.asynchronous and not counted:
        raise Refusal("its roll names nobody whom the last commit counts")
    if not epoch:
        plan = founding(fragment, state.version, min(roll), len(rules.fragments[fragment])).plan
    else:
        missed = max((epoch - roll[peer].epoch for peer in told.succession if peer in roll), default=0)
        successors = told.succession[: told.named] if rules.asynchronous else ()
        plan = plan_after(rules, fragment, epoch, roll, counted, max(0, missed - SPARE_EPOCHS), successors)
    return replace(state, roll=roll, plan=plan)


# -- what can't belong to the run


def check_place(message: m.Message, rules: Rules) -> None:
    """Raises Refusal if a message can't belong to the run. Each number by itself was checked when the message was
    decoded; the core judges commits by the state before them."""
    fragments, fragment = len(rules.fragments), getattr(message, "fragment", None)
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
