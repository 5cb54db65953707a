"""Events and effects in plain words: one line for each.

A version is written `epoch 3 (b6e5f6)`, with the first letters of its digest. A contribution is written `#0042.3`: the
third of an incarnation whose last four digits are 0042. A commit ends with the peers that may aggregate the next
commit, in order.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from operator import attrgetter

from p2p_diloco.core import events, messages
from p2p_diloco.core.leases import WEIGHT_MIN
from p2p_diloco.core.version import Version

CARRIED = {
    events.Carry.KEEP: "keeps its progress",
    events.Carry.SUBTRACT: "its contribution is counted",
    events.Carry.LEFT: "drops its progress, because its lineage has lost",
    events.Carry.SINCE: "drops what came after its contribution, because its lineage has lost",
    events.Carry.PART: "drops its progress, because an older contribution is counted",
    events.Carry.OLD: "drops its progress, because it was sent or refused too often",
}


def tell(what: events.Event | events.Effect) -> str:
    """Return one line of text about an event that a replica receives or an effect that it returns."""
    match what:
        case events.Received(sender, message):
            return f"hears from {sender}: {_message(message)}"
        case events.Delivered(to, message):
            return f"{to} has received: {_message(message)}"
        case events.SendFailed(to, message, gone):
            return f"{to} {'is gone' if gone else 'does not answer'}, not delivered: {_message(message)}"
        case events.Closed(peer):
            return f"loses its connection to {peer}"
        case events.Moving(peer):
            return f"sees a transfer with {peer} go on"
        case events.Discovered(peer):
            return f"finds {peer} in the DHT"
        case events.Granted(peer, grant):
            return f"learns that {peer} is here by the grant {grant[:6]}"
        case events.Measured(bandwidth):
            return f"measures a bandwidth of {bandwidth:.3g}"
        case events.Reachable(reachable):
            return f"finds that others {'can' if reachable else 'cannot'} dial it"
        case events.Stepped(step_time_s):
            return f"makes an inner step of {step_time_s:.2f} s"
        case events.Pause(paused):
            return "pauses training" if paused else "resumes training"
        case events.Merge():
            return "asks for newer states"
        case events.Contribute(shards, weight):
            return f"has made {_steps(weight)} for {_shards(shards)}"
        case events.Averaged(shard, base, digest=digest) | events.Applied(shard, base, digest):
            return f"has made the outer step from {_at(shard, base)}, reaching ({digest[:6]})"
        case events.Filled(shard, version, digest):
            return f"has loaded {_at(shard, version)}, reaching ({digest[:6]})"
        case events.Damaged(shard, base):
            return f"finds {_at(shard, base)} damaged"
        case events.Found(generation):
            return f"founds the run, generation {generation}"
        case events.Restore(states):
            return f"restores {', '.join(_at(state.shard, state.version) for state in states)}"
        case events.Revised(revision):
            return f"learns of {revision}"
        case events.Expelled(peer, reason):
            return f"expels {peer}: {reason}"
        case events.Depart():
            return "leaves the run"
        case events.Wakeup():
            return "wakes up"
        case _:
            return _effect(what)


def _effect(effect: events.Effect) -> str:
    match effect:
        case events.Send(to, message):
            return f"sends {to} {_message(message)}"
        case events.Average(shard, base, contributions):
            return f"averages {_names(peer for peer, _ in contributions)} on {_at(shard, base)}"
        case events.Apply(commit):
            return f"applies the commit of {_at(commit.shard, commit.version)}"
        case events.Fill(state):
            return f"loads {_at(state.shard, state.version)}"
        case events.Accept(proposals):
            return f"moves {', '.join(f'shard {shard} to ({digest[:6]})' for shard, digest in proposals)}"
        case events.Load(shards, due):
            merged = [
                f"{' and '.join(_at(one.shard, one.version) for one in same)}, {CARRIED[carry]}"
                for carry, same in groupby(shards, attrgetter("carry"))
            ]
            return f"merges {'; '.join(merged) or 'nothing'}; due: {_shards(due)}"
        case events.Release(sent):
            return "ends the exchange" if sent else "breaks off the exchange: a base has changed"
        case events.Ready():
            return "holds all shards: training may begin"
        case events.Changed():
            return "has a newer state for its trainer"
        case events.Finished():
            return "reaches the end of the run"
        case events.Note(kind, text):
            return f"notes {kind}: {text}"
        case events.Died(peer, _, cause):
            return f"counts a death of {peer}: {cause}"
        case events.Complaint(peer, why):
            return f"complains of {peer}: {why}"


def _message(message: messages.Message) -> str:
    match message:
        case messages.Probe(summary):
            return f"a probe, {_summary(summary)}"
        case messages.ProbeAck(summary):
            return f"an answer to a probe, {_summary(summary)}"
        case messages.Leave(died=died):
            return "that its trainer has died" if died else "that it leaves"
        case messages.Contribution(shard, base, id, oldest, weight):
            rides = f" with the progress since {oldest}" if oldest != id else ""
            return f"contribution {id}{rides} to {_at(shard, base)}: {_steps(weight)}"
        case messages.Commit(shard, base, version, contributions=contributions):
            counted = _names(f"{one.peer} {one.id}" for one in contributions)
            revision = f" at revision {message.revision.number}" if message.revision.number else ""
            step = f"{_at(shard, version)} on ({base.digest[:6]}){revision}"
            return f"the commit of {step}: {counted}; next: {_names(message.plan.succession)}"
        case messages.State(shard, version):
            return f"the state of {_at(shard, version)}"
        case messages.Fetch(have, whole, shards):
            if shards == ():
                return "a request for its versions"
            held = f"(holding {_versions(have)})"
            return f"a request for {_shards(shards) if shards else 'all shards'} {'whole' if whole else held}"
        case messages.Versions(versions, forked):
            return f"its versions{', which are forked' if forked else ''}: {_versions(versions)}"
        case messages.TakeOver(shard, base, term):
            return f"a claim on {_at(shard, base)}, term {term}"
        case messages.Promise(shard, base, term):
            return f"the promise of {_at(shard, base)}, term {term}"
        case messages.Outdated(shard, base, term, holder):
            return f"a refusal: {holder} holds term {term} of {_at(shard, base)}"
        case messages.Want(shard, base):
            return f"a request for a contribution to {_at(shard, base)}"
        case messages.Held(shard, version):
            return f"that it holds {_at(shard, version)}"
        case messages.Stale(shard, id, version):
            return f"a refusal: {id} is too stale for {_at(shard, version)}"


def _summary(summary: messages.Summary) -> str:
    epochs = f"at epoch {', '.join(map(str, summary.epochs))}" if summary.epochs else "without a state"
    return f"{epochs}{', idle' if summary.idle else ''}{'' if summary.eligible else ', private'}"


def _names(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"


def _steps(weight: float) -> str:
    """Return a number of steps with its unit."""
    if weight <= WEIGHT_MIN:
        return "no further step"
    return f"{weight:g} step{'' if weight == 1 else 's'}"


def _shards(shards: tuple[int, ...]) -> str:
    return f"shard {', '.join(map(str, shards))}" if shards else "nothing"


def _at(shard: int, version: Version) -> str:
    """Return a shard and its version as text."""
    return f"shard {shard} {_version(version)}"


def _versions(versions: tuple[Version | None, ...]) -> str:
    return ", ".join(f"{_version(one)} of {one.samples} samples" if one else "nothing" for one in versions)


def _version(version: Version) -> str:
    return f"epoch {version.epoch} ({version.digest[:6]})"
