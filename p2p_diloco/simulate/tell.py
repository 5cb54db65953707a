"""Events and effects in short words, for a reader who follows a simulated world line by line."""

from __future__ import annotations

from p2p_diloco.core.events import (
    Accept,
    Applied,
    Apply,
    Average,
    Averaged,
    Closed,
    Contribute,
    Damaged,
    Delivered,
    Discovered,
    Effect,
    Event,
    Fill,
    Filled,
    Found,
    Load,
    Measured,
    Moving,
    Note,
    Progress,
    Received,
    Release,
    Restore,
    Revised,
    Send,
    SendFailed,
)
from p2p_diloco.core.messages import (
    Commit,
    Contribution,
    Fetch,
    Held,
    Message,
    Outdated,
    Probe,
    ProbeAck,
    Promise,
    Stale,
    State,
    Summary,
    TakeOver,
    Versions,
    Want,
)
from p2p_diloco.core.version import ContributionId, Version


def tell(what: Event | Effect) -> str:
    """One line of what came into a replica or went out of it."""
    match what:
        case Received(sender, message):
            return f"← {sender}: {_message(message)}"
        case Send(to, message):
            return f"→ {to}: {_message(message)}"
        case Delivered(to, message):
            return f"{to} has got: {_message(message)}"
        case SendFailed(to, message, gone):
            return f"{to} {'is gone' if gone else 'has not got'}: {_message(message)}"
        case Closed(peer):
            return f"the link to {peer} broke"
        case Moving(peer):
            return f"a transfer with {peer} goes on"
        case Discovered(peer):
            return f"hears of {peer}"
        case Measured(bandwidth):
            return f"measures a bandwidth of {bandwidth:.3g}"
        case Progress(step_time_s):
            return f"made an inner step, {step_time_s:.2f} s"
        case Contribute(shards, weight):
            return f"contributes {weight:g} steps to {_shards(shards)}"
        case Average(shard, base, contributions):
            return f"averages {', '.join(peer for peer, _ in contributions) or 'nothing'} on {_at(shard, base)}"
        case Averaged(shard, base, digest):
            return f"averaged on {_at(shard, base)}, reached {digest[:6]}"
        case Damaged(shard, base):
            return f"finds {_at(shard, base)} damaged"
        case Apply(commit):
            return f"applies {_commit(commit)}"
        case Applied(shard, base, digest):
            return f"applied on {_at(shard, base)}, reached {digest[:6]}"
        case Fill(state):
            return f"fills in {_at(state.shard, state.version)}"
        case Filled(shard, version, digest):
            return f"filled in {_at(shard, version)}, reached {digest[:6]}"
        case Accept(proposals):
            return f"accepts {', '.join(f'shard {shard} {digest[:6]}' for shard, digest in proposals)}"
        case Load(shards, due):
            merged = ", ".join(f"{_at(one.shard, one.version)} {one.carry.value}" for one in shards)
            return f"merges {merged or 'nothing'}; due: {_shards(due)}"
        case Release(sent):
            return "the exchange is over" if sent else "the exchange never began"
        case Found(generation):
            return f"founds generation {generation}"
        case Restore(states):
            return f"restores {', '.join(_at(state.shard, state.version) for state in states)}"
        case Revised(revision):
            return f"hears of {revision}"
        case Note(kind, text):
            return f"notes {kind}: {text}"
        case _:
            return type(what).__name__


def _message(message: Message) -> str:
    match message:
        case Probe(summary) | ProbeAck(summary):
            return f"{type(message).__name__} {_summary(summary)}"
        case Contribution(shard, base, id, oldest, weight):
            rides = f" with {_id(oldest)} on" if oldest != id else ""
            return f"Contribution {_id(id)}{rides} to {_at(shard, base)}, {weight:g} steps"
        case Commit():
            return _commit(message)
        case State(shard, version):
            return f"State {_at(shard, version)}"
        case Fetch(have, whole, shards):
            what = "what you have" if shards == () else _shards(shards) if shards else "all"
            return f"Fetch {'whole ' if whole else ''}{what} beyond {', '.join(map(_version, have))}"
        case Versions(versions, forked):
            return f"Versions {'forked ' if forked else ''}{', '.join(map(_version, versions))}"
        case TakeOver(shard, base, term) | Promise(shard, base, term):
            return f"{type(message).__name__} term {term} of {_at(shard, base)}"
        case Outdated(shard, base, term, holder):
            return f"Outdated: {holder} has term {term} of {_at(shard, base)}"
        case Want(shard, base):
            return f"Want {_at(shard, base)}"
        case Held(shard, version):
            return f"Held {_at(shard, version)}"
        case Stale(shard, id, version):
            return f"Stale {_id(id)} at {_at(shard, version)}"
        case _:
            return type(message).__name__


def _commit(commit: Commit) -> str:
    counted = ", ".join(f"{counted.peer} {_id(counted.id)}" for counted in commit.contributions)
    step = f"{_at(commit.shard, commit.base)} → {_version(commit.version)}"
    plan = f"next {','.join(commit.plan.group)} at {','.join(commit.plan.succession)}"
    revised = f" at revision {commit.revision.number}" if commit.revision.number else ""
    return f"Commit {step} by {commit.aggregator} of {counted or 'nothing'}{revised}; {plan}"


def _summary(summary: Summary) -> str:
    epochs = ",".join(map(str, summary.epochs)) or "no state"
    return f"at {epochs}{', idle' if summary.idle else ''}"


def _shards(shards: tuple[int, ...]) -> str:
    return f"shards {', '.join(map(str, shards))}" if shards else "nothing"


def _at(shard: int, version: Version) -> str:
    return f"shard {shard} {_version(version)}"


def _version(version: Version | None) -> str:
    if version is None:
        return "nothing"
    return f"e{version.epoch}/{version.samples}/{version.digest[:6]}"


def _id(id: ContributionId) -> str:
    return f"#{id.incarnation % 10000:04d}.{id.sequence}"
