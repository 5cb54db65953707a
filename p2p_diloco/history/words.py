"""Events and effects in plain words: one line for each.

A version is written `epoch 3 (b6e5f6)`, with the first letters of its chain. A contribution is written `#0042.3`: the
third of an incarnation whose last four digits are 0042.
"""

from __future__ import annotations

from collections.abc import Iterable

from p2p_diloco.core import events as e
from p2p_diloco.core import messages as m
from p2p_diloco.core.leases import WEIGHT_MIN
from p2p_diloco.core.version import Version


def tell(what: e.Event | e.Effect) -> str:
    """Return one line of text about an event that a replica receives or an effect that it returns."""
    match what:
        case e.Received(sender, message):
            return f"hears from {sender}: {_message(message)}"
        case e.Delivered(to, message):
            return f"{to} has received: {_message(message)}"
        case e.SendFailed(to, message, gone):
            return f"{to} {'is gone' if gone else 'does not answer'}, not delivered: {_message(message)}"
        case e.Closed(peer):
            return f"loses its connection to {peer}"
        case e.Moving(peer):
            return f"sees a transfer with {peer} go on"
        case e.Discovered(peer):
            return f"finds {peer} in the DHT"
        case e.Granted(peer):
            return f"learns by which invitation {peer} is in the run"
        case e.Measured(bandwidth):
            return f"measures a bandwidth of {bandwidth:.3g}"
        case e.Reachable(reachable):
            return f"finds that others {'can' if reachable else 'cannot'} dial it"
        case e.Stepped(step_time_s):
            return f"makes an inner step of {step_time_s:.2f} s"
        case e.Pause(paused):
            return "pauses training" if paused else "resumes training"
        case e.Merge():
            return "asks for newer states"
        case e.Contribute(fragment, weight):
            return f"has made {_steps(weight)} for fragment {fragment}"
        case e.Averaged(fragment, base, number=number):
            return f"has the mean of slice {number} on {_at(fragment, base)}"
        case e.Applied(fragment, _, version):
            return f"has made the outer step to {_at(fragment, version)}"
        case e.Filled(fragment, version, number):
            return f"has loaded slice {number} of {_at(fragment, version)}"
        case e.Rolled(fragment, version, number):
            return f"has brought slice {number} to {_at(fragment, version)}"
        case e.Digested(fragment, version):
            return f"has the digests of {_at(fragment, version)}"
        case e.Damaged(fragment, version, numbers):
            return f"finds {_slices(numbers)} of {_at(fragment, version)} damaged"
        case e.Found(generation):
            return f"founds the run, generation {generation}"
        case e.Restore(states):
            return f"restores {', '.join(_at(state.fragment, state.version) for state in states)}"
        case e.Revised(revision):
            return f"learns of {revision}"
        case e.Expelled(peer, reason):
            return f"expels {peer}: {reason}"
        case e.Depart():
            return "leaves the run"
        case e.Wakeup():
            return "wakes up"
        case _:
            return _effect(what)


def _effect(effect: e.Effect) -> str:
    match effect:
        case e.Send(to, message):
            return f"sends {to} {_message(message)}"
        case e.Average(fragment, base, _, number, slices):
            return f"averages slice {number} of {_names(part.author for _, part in slices)} on {_at(fragment, base)}"
        case e.Apply(commit):
            return f"applies the commit of {_at(commit.fragment, commit.version)}"
        case e.Fill(fragment, version, number):
            return f"loads slice {number} of {_at(fragment, version)}"
        case e.Roll(commit, mean):
            return f"brings slice {mean.number} to {_at(commit.fragment, commit.version)}"
        case e.Accept(proposals, numbers):
            if numbers is not None:
                return f"repairs {_slices(numbers)} of {', '.join(_at(*one) for one in proposals)}"
            return f"moves {', '.join(f'fragment {of} to {_version(version)}' for of, version in proposals)}"
        case e.Keep(fragment, numbers):
            return f"keeps {_slices(numbers)} of fragment {fragment} as they are: nobody else has them"
        case e.Load(fragments, due):
            merged = "; ".join(map(_loaded, fragments)) or "nothing"
            return f"merges {merged}; due: {'nothing' if due is None else f'fragment {due}'}"
        case e.Sent(fragment, id):
            return f"calls its contribution to fragment {fragment} {id}"
        case e.Release(sent):
            return "ends the exchange" if sent else "breaks off the exchange: a base has changed"
        case e.Start():
            return "holds all fragments: training may begin"
        case e.Changed():
            return "has a newer state for its trainer"
        case e.Finished():
            return "reaches the end of the run"
        case e.Note(kind, text):
            return f"notes {kind}: {text}"
        case e.Died(peer, _, cause):
            return f"counts a death of {peer}: {cause}"
        case e.Complaint(peer, why):
            return f"complains of {peer}: {why}"


def _message(message: m.Message) -> str:
    match message:
        case m.Probe(summary):
            return f"a probe, {_summary(summary)}"
        case m.ProbeAck(summary):
            return f"an answer to a probe, {_summary(summary)}"
        case m.Leave(died=died):
            return "that its trainer has died" if died else "that it leaves"
        case m.Ready(fragment, base, id, oldest, weight):
            rides = f" with the progress since {oldest}" if oldest != id else ""
            return f"contribution {id}{rides} to {_at(fragment, base)}: {_steps(weight)}"
        case m.Slice(fragment, base, author, id, number):
            return f"slice {number} of contribution {id} of {author} to {_at(fragment, base)}"
        case m.Close(fragment, base, term, choice=choice, owners=owners):
            chosen = f"its choice {_chosen(choice)}" if choice else f"the owners {_names(dict.fromkeys(owners))}"
            return f"{chosen} on {_at(fragment, base)}{_term(term)}"
        case m.Mean(fragment, base, number=number):
            return f"the mean of slice {number} on {_at(fragment, base)}"
        case m.Lack(fragment, base, _, missing):
            lacked = "; ".join(f"{number} of {_names(peers)}" for number, peers in missing)
            return f"that it lacks slices on {_at(fragment, base)}: {lacked or 'none'}"
        case m.Commit(fragment, base, version, term, choice=choice):
            revision = f" at revision {choice.revision.number}" if choice.revision.number else ""
            step = f"{_at(fragment, version)} on ({base.digest[:6]}){revision}{_term(term)}"
            return f"the commit of {step}: {_chosen(choice)}"
        case m.Want(fragment, base, what, numbers):
            of = f" {_slices(numbers)}" if numbers else ""
            return f"a request for {what.value}{of} of {_at(fragment, base)}"
        case m.Claim(fragment, base, term):
            return f"a claim on {_at(fragment, base)}, term {term}"
        case m.Vote(fragment, base, term, holder):
            return f"its vote for {holder} on {_at(fragment, base)}, term {term}"
        case m.Held(fragment, version):
            return f"that it holds {_at(fragment, version)}"
        case m.Stale(fragment, id, version):
            return f"a refusal: {id} is too stale for {_at(fragment, version)}"
        case m.Ask(None):
            return "a question for its versions"
        case m.Ask(fragment, numbers):
            return f"a request for {_slices(numbers) if numbers else 'the state'} of fragment {fragment}"
        case m.Told(versions):
            return f"its versions: {', '.join(f'{_version(one)} of {one.samples} samples' for one in versions)}"
        case m.Head(_, state):
            return f"the state of {_at(state.fragment, state.version)}"
        case m.Part(fragment, version, number):
            return f"slice {number} of {_at(fragment, version)}"


def _summary(summary: m.Summary) -> str:
    epochs = f"at epoch {', '.join(map(str, summary.epochs))}" if summary.heads else "without a state"
    return f"{epochs}{', idle' if summary.idle else ''}{'' if summary.eligible else ', private'}"


def _chosen(choice: m.Choice) -> str:
    return _names(f"{peer} {ready.id}" for peer, ready in choice.entries)


def _loaded(loaded: e.Loaded) -> str:
    counted = f", which counts {loaded.counted}" if loaded.counted else ""
    return f"{_at(loaded.fragment, loaded.version)}{counted if loaded.kin else ', of another lineage'}"


def _names(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"


def _term(term: int) -> str:
    return f", term {term}" if term else ""


def _steps(weight: float) -> str:
    """Return a number of steps with its unit."""
    if weight <= WEIGHT_MIN:
        return "no further step"
    return f"{weight:g} step{'' if weight == 1 else 's'}"


def _slices(numbers: tuple[int, ...]) -> str:
    return f"slice{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"


def _at(fragment: int, version: Version) -> str:
    """Return a fragment and its version as text."""
    return f"fragment {fragment} {_version(version)}"


def _version(version: Version) -> str:
    return f"epoch {version.epoch} ({version.digest[:6]})"
