"""One entry of a history: an event that a peer's replica was told, and the effects that it answered; and both in words.

Law: plain data and its text. Histories of real peers and of simulated ones are lists of entries, so both are told by
the same code. A version is written `epoch 3 (b6e5f6)`, with the first letters of its chain. A contribution is written
`#0042.3`: the third of an incarnation whose last four digits are 0042.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from p2p_diloco.core import events as e
from p2p_diloco.core import messages as m
from p2p_diloco.core.leases import WEIGHT_MIN
from p2p_diloco.core.version import Version


@dataclass(frozen=True, slots=True)
class Entry:
    """An event with its effects. `what`: the event, or a text for what is no event of a replica, such as a death.
    `time`: in seconds since a moment that all entries of a list share."""

    time: float
    peer: str
    what: e.Event | str
    effects: tuple[e.Effect, ...] = ()

    def lines(self) -> Iterator[str]:
        """The entry as text: one line for the event, and one for each effect."""
        said = self.what if isinstance(self.what, str) else tell(self.what)
        yield f"{self.time:9.3f} {self.peer} {said}"
        for effect in self.effects:
            yield f"{self.time:9.3f} {self.peer}     {tell(effect)}"


def lines(entries: Iterable[Entry]) -> list[str]:
    """All entries as text."""
    return [line for entry in entries for line in entry.lines()]


def tell(what: e.Event | e.Effect | m.Message) -> str:
    """One line of text about an event, an effect or a message."""
    words = WORDS[type(what)]
    return words if isinstance(words, str) else words(what)


WORDS: Mapping[type, str | Callable[[Any], str]] = {
    # events
    e.Received: lambda it: f"hears from {it.sender}: {tell(it.message)}",
    e.Delivered: lambda it: f"{it.to} has received: {tell(it.message)}",
    e.SendFailed: lambda it: (
        f"{it.to} {'is gone' if it.gone else 'does not answer'}, not delivered: {tell(it.message)}"
    ),
    e.Closed: lambda it: f"loses its connection to {it.peer}",
    e.Moving: lambda it: f"sees a transfer with {it.peer} go on",
    e.Discovered: lambda it: f"finds {it.peer} in the DHT",
    e.Granted: lambda it: f"learns by which invitation {it.peer} is in the run",
    e.Measured: lambda it: f"measures a bandwidth of {it.bandwidth:.3g}",
    e.Reachable: lambda it: f"finds that others {'can' if it.reachable else 'cannot'} dial it",
    e.Stepped: lambda it: f"makes an inner step of {it.step_time_s:.2f} s",
    e.Pause: lambda it: "pauses training" if it.paused else "resumes training",
    e.Merge: "asks for newer states",
    e.Contribute: lambda it: f"has made {_steps(it.weight)} for fragment {it.fragment}",
    e.Averaged: lambda it: f"has the mean of slice {it.number} on {_place(it)}",
    e.Applied: lambda it: f"has made the outer step to {_place(it)}",
    e.Filled: lambda it: f"has loaded slice {it.number} of {_place(it)}",
    e.Rolled: lambda it: f"has brought slice {it.number} to {_place(it)}",
    e.Digested: lambda it: f"has the digests of {_place(it)}",
    e.Damaged: lambda it: f"finds {_slices(it.numbers)} of {_place(it)} damaged",
    e.Found: lambda it: f"founds the run, generation {it.generation}",
    e.Restore: lambda it: f"restores {', '.join(_at(state.fragment, state.version) for state in it.states)}",
    e.Revised: lambda it: f"learns of {it.revision}",
    e.Expelled: lambda it: f"expels {it.peer}: {it.reason}",
    e.Depart: "leaves the run",
    e.Wakeup: "wakes up",
    # effects
    e.Send: lambda it: f"sends {it.to} {tell(it.message)}",
    e.Average: lambda it: (
        f"averages slice {it.number} of {_names(part.author for _, part in it.slices)} on {_at(it.fragment, it.base)}"
    ),
    e.Apply: lambda it: f"applies the commit of {_at(it.commit.fragment, it.commit.version)}",
    e.Fill: lambda it: f"loads slice {it.number} of {_place(it)}",
    e.Roll: lambda it: f"brings slice {it.mean.number} to {_at(it.commit.fragment, it.commit.version)}",
    e.Accept: lambda it: (
        f"moves {', '.join(f'fragment {of} to {_version(version)}' for of, version in it.proposals)}"
        if it.numbers is None
        else f"repairs {_slices(it.numbers)} of {', '.join(_at(*one) for one in it.proposals)}"
    ),
    e.Keep: lambda it: f"keeps {_slices(it.numbers)} of fragment {it.fragment} as they are: nobody else has them",
    e.Load: lambda it: (
        f"merges {'; '.join(map(_loaded, it.fragments)) or 'nothing'}; "
        f"due: {'nothing' if it.due is None else f'fragment {it.due}'}"
    ),
    e.Release: lambda it: "ends the exchange" if it.sent else "breaks off the exchange: a base has changed",
    e.Start: "holds all fragments: training may begin",
    e.Changed: "has a newer state for its trainer",
    e.Finished: "reaches the end of the run",
    e.Note: lambda it: f"notes {it.kind}: {it.text}",
    e.Died: lambda it: f"counts a death of {it.peer}: {it.cause}",
    e.Complaint: lambda it: f"complains of {it.peer}: {it.why}",
    # messages
    m.Probe: lambda it: f"a probe, {_summary(it.summary)}",
    m.ProbeAck: lambda it: f"an answer to a probe, {_summary(it.summary)}",
    m.Leave: lambda it: "that its trainer has died" if it.died else "that it leaves",
    m.Ready: lambda it: (
        f"contribution {it.id}{f' with the progress since {it.oldest}' if it.oldest != it.id else ''} to "
        f"{_at(it.fragment, it.base)}: {_steps(it.weight)}"
    ),
    m.Slice: lambda it: f"slice {it.number} of contribution {it.id} of {it.author} to {_place(it)}",
    m.Close: lambda it: (
        (f"its choice {_chosen(it.choice)}" if it.choice else f"the owners {_names(dict.fromkeys(it.owners))}")
        + f" on {_at(it.fragment, it.base)}{_term(it.term)}"
    ),
    m.Mean: lambda it: f"the mean of slice {it.number} on {_place(it)}",
    m.Lack: lambda it: (
        f"that it lacks slices on {_at(it.fragment, it.base)}: "
        f"{'; '.join(f'{number} of {_names(peers)}' for number, peers in it.missing) or 'none'}"
    ),
    m.Commit: lambda it: (
        f"the commit of {_at(it.fragment, it.version)} on ({it.base.digest[:6]})"
        f"{f' at revision {it.choice.revision.number}' if it.choice.revision.number else ''}{_term(it.term)}: "
        f"{_chosen(it.choice)}"
    ),
    m.Want: lambda it: (
        f"a request for {it.what.value}{f' {_slices(it.numbers)}' if it.numbers else ''} of {_at(it.fragment, it.base)}"
    ),
    m.Claim: lambda it: f"a claim on {_place(it)}, term {it.term}",
    m.Vote: lambda it: f"its vote for {it.holder} on {_place(it)}, term {it.term}",
    m.Held: lambda it: f"that it holds {_place(it)}",
    m.Stale: lambda it: f"a refusal: {it.id} is too stale for {_place(it)}",
    m.Ask: lambda it: (
        "a question for its versions"
        if it.fragment is None
        else f"a request for {_slices(it.numbers) if it.numbers else 'the state'} of fragment {it.fragment}"
    ),
    m.Told: lambda it: f"its versions: {', '.join(f'{_version(one)} of {one.samples} samples' for one in it.versions)}",
    m.Head: lambda it: f"the state of {_at(it.state.fragment, it.state.version)}",
    m.Part: lambda it: f"slice {it.number} of {_place(it)}",
}
"""What is told of each kind of event, effect and message."""


def _summary(summary: m.Summary) -> str:
    epochs = f"at epoch {', '.join(map(str, summary.epochs))}" if summary.heads else "without a state"
    return f"{epochs}{', idle' if summary.idle else ''}{'' if summary.eligible else ', private'}"


def _chosen(choice: m.Choice) -> str:
    return _names(f"{peer} {ready.id}" for peer, ready in choice.entries)


def _loaded(loaded: e.Loaded) -> str:
    counted = f", which counts {loaded.counted}" if loaded.counted else ""
    dropped = f"; other progress is dropped: {loaded.outcome.dropped}" if loaded.outcome.dropped else ""
    return f"{_at(loaded.fragment, loaded.version)}{counted}{dropped}"


def _names(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"


def _term(term: int) -> str:
    return f", term {term}" if term else ""


def _steps(weight: float) -> str:
    return "no further step" if weight <= WEIGHT_MIN else f"{weight:g} step{'' if weight == 1 else 's'}"


def _slices(numbers: tuple[int, ...]) -> str:
    return f"slice{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"


def _place(it: Any) -> str:
    return _at(it.fragment, it.version if hasattr(it, "version") else it.base)


def _at(fragment: int, version: Version) -> str:
    return f"fragment {fragment} {_version(version)}"


def _version(version: Version) -> str:
    return f"epoch {version.epoch} ({version.digest[:6]})"
