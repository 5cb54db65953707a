"""A hostile member of a simulated run: it sends anything well-formed to any peer, until it falls silent. In some runs
all others expel it instead; it then goes on sending, without any effect.

Law: it knows all that a member can know, and keeps to the limits that the node checks before a message reaches the
core. It signs in its own name and in that of an invented peer only, because nodes check every signature. Two things the
core alone can't detect, and it does not do them: it answers no question with a lineage or tensors of its own, and each
mean that it makes is right (audits find those that are not).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

from p2p_diloco.core import claims
from p2p_diloco.core import messages as msg
from p2p_diloco.core.admission import countable, unsound
from p2p_diloco.core.events import Broke, Delivered, Expelled, Received, SendFailed
from p2p_diloco.core.fragment import FragmentLog
from p2p_diloco.core.state import State, commit_of, hash_of, key_of, rooted
from p2p_diloco.core.version import ContributionId, Version
from p2p_diloco.net.interface import Refusal
from p2p_diloco.node.fields import check_place, completed

from .model import require
from .standstill import stands_still

if TYPE_CHECKING:
    from .process import Process
    from .world import World

NAME = "x0"
HUGE = 2**40
SAMPLES_MAX, INCARNATION_MAX = 2**48, 2**62
"""The greatest numbers that fit into a message."""
GHOST = "x1"
"""A peer that the hostile member invents."""
TACTICS = (
    "serve", "half", "twice", "odd", "seize", "claim", "close", "commit", "mean", "vote", "deny", "state", "ask",
    "present", "replay", "leave",
)  # fmt: skip
"""What the hostile member may do. A run draws some of these."""
DELAYS = ("serve", "half", "seize", "close", "present")
"""What a hostile member does if it only wants to make others wait: it contributes so that plans name it, and then does
only a part of what it should."""
SEEN_MAX = 64
"""So many of the newest messages that honest peers sent to it are kept, to be sent on."""


class Hostile:
    """The hostile member of one world."""

    def __init__(self, world: World) -> None:
        self.world, self.name = world, NAME
        self.rng = rng = Random(f"hostile {world.seed}")
        self.silent = False  # whether it has fallen silent or was expelled
        self.is_expelled = Random(f"expelled {world.seed}").random() < 0.4  # at the end; else it falls silent
        self.tactics = sorted(rng.sample(TACTICS, rng.randint(1, len(TACTICS))))
        self.answers = rng.random() < 0.8  # whether it answers probes
        self.votes = rng.random() < 0.5  # whether it promises terms to others
        self.owns = rng.random() < 0.5  # whether it makes the means that it owns
        self.tells = rng.random() < 0.5  # whether it answers questions about its state, with an honest peer's answer
        self.delays = rng.random() < 0.5  # whether it does nothing else than to make others wait
        if self.delays:
            self.tactics = sorted({"serve", *rng.sample(DELAYS, rng.randint(1, len(DELAYS)))})
        self.pause = rng.choice([0.1, 0.5, 2.0])  # mean seconds between two messages
        self.incarnation = rng.choice([1, 1 << 40, 2**62])
        self.sequence = 0
        self.forged = set[str]()  # chains that it made up
        self.slices: dict[tuple[int, Version, int, str], msg.Slice] = {}  # that authors sent to it
        self.readys: dict[tuple[int, Version], msg.Ready] = {}  # its own contributions
        self.seen: list[msg.Message] = []
        self.truth: list[msg.Message] = []  # answers that are true
        world.at(rng.uniform(1.0, 10.0), self._act)

    @property
    def delay(self) -> float:
        """A round waits for this member's contribution; then the leader, which this member is, does nothing; then it
        holds back a mean, a slice and a vote, each for a grace. The next leader may have to wait for all this again."""
        rules = self.world.rules
        return 2 * (rules.round_timeout + 4 * max(rules.settle, rules.promises_within))

    def fall_silent(self) -> None:
        """Stop sending, so that connections break, or be expelled by all other peers."""
        self.silent = True
        self.world.say(self.name, "is expelled" if self.is_expelled else "falls silent")
        self.world.membership.disturbed(self.world.now)
        for process in list(self.world.alive.values()):
            stands_still(self.world, process)
            if self.is_expelled:
                self.world.later(process, self.rng.uniform(0.01, 3.0), Expelled(self.name, "a lie"))
            else:
                self.world.later(process, self.rng.uniform(0.01, 0.3), Broke(self.name))

    def takes(self, sender: Process, to: str, message: msg.Message) -> bool:
        """Take a message that is for this member, and let the member answer as it likes. Return False if the message is
        for another peer."""
        if to != self.name:
            return False
        if self.silent and not self.is_expelled:
            self.world.later(sender, 0.1, SendFailed(to, message, gone=True))
            return True
        self.world.later(sender, self.rng.uniform(0.01, 0.2), Delivered(to, message))
        self.answer(sender, message)
        return True

    def _act(self) -> None:
        """Send one message to one peer or to all, and schedule the next."""
        world, rng = self.world, self.rng
        if self.silent and not self.is_expelled:
            return
        if not self.silent:
            world.membership.disturbed(world.now)
        holders = world.holders()
        if holders:
            process = world.alive[rng.choice(holders)]
            message = self.message(process, rng.choice(world.units), rng.choice(self.tactics))
            if message is not None:
                for to in [process] if rng.random() < 0.5 else list(world.alive.values()):
                    self.tell(to, message)
        world.at(rng.expovariate(1 / self.pause), self._act)

    def tell(self, to: Process, message: msg.Message) -> None:
        """Send a message to a peer."""
        self.world.at(self.rng.uniform(0.01, 0.2), lambda: self._arrives(to, message))

    def _arrives(self, to: Process, message: msg.Message) -> None:
        """Feed a message to its receiver, if that still lives."""
        if self.world.alive.get(to.name) is to:
            self.arrives(to, message)

    # -- what it hears

    def answer(self, sender: Process, message: msg.Message) -> None:
        """Answer an honest peer's message, or leave it."""
        self.seen = [*self.seen, message][-SEEN_MAX:]
        match message:
            case msg.Probe() if self.answers:
                self.tell(sender, msg.ProbeAck(self._summary(sender)))
            case msg.Slice(fragment, base, author, _, number):
                self.slices[fragment, base, number, author] = message
            case msg.Close(choice=msg.Choice()) if self.owns:
                self._serves(message)
            case msg.Claim(fragment, base, term) if self.votes:
                self.tell(sender, msg.Vote(fragment, base, term, sender.name, turn=message.turn))
            case msg.Want(fragment, base, msg.What.SLICES, numbers) if self.rng.random() < 0.5:
                self._sends_slices(sender, fragment, base, numbers)
            case msg.Ask(None) if self.tells:
                self._answers_truly(sender, self._somebody().replica.lineage.tell())
            case msg.Ask(int(fragment), ()) if self.tells:
                state = self._somebody().replica.logs[fragment].state
                self._answers_truly(sender, None if state is None else msg.Head(fragment, state))
            case msg.Commit() if self.owns:
                self.tell(sender, msg.Held(message.fragment, message.version))

    def _answers_truly(self, to: Process, answer: msg.Message | None) -> None:
        if answer is not None:
            self.truth.append(answer)
            self.seen.append(answer)
            self.tell(to, answer)

    def _is_true(self, answer: msg.Message) -> bool:
        return any(answer is one for one in self.truth)

    def _somebody(self) -> Process:
        return self.world.alive[self.rng.choice(self.world.holders() or sorted(self.world.alive))]

    def _serves(self, close: msg.Close) -> None:
        """Make the means that a Close gives to this member, as far as it has all slices; tell some peers or all."""
        for number, owner in enumerate(close.owners):
            if owner == self.name and (mean := self._mean(close, number)) is not None:
                peers = list(self.world.alive.values())
                for process in peers if self.rng.random() < 0.7 else self.rng.sample(peers, len(peers) // 2):
                    self.tell(process, mean)

    def _mean(self, close: msg.Close, number: int) -> msg.Mean | None:
        assert close.choice is not None
        parts = list[tuple[str, Any]]()
        for peer, ready in close.choice.entries:
            part = self.slices.get((close.fragment, close.base, number, peer))
            if ready.weight and peer != self.name and (part is None or part.id != ready.id):
                return None
            if ready.weight:
                parts.append((peer, 0 if part is None else part.payload))
        payload = tuple(parts)
        return msg.Mean(close.fragment, close.base, close.key, number, hash_of(payload), self.name, payload)

    # -- what it sends

    def spoils(self, message: msg.Message) -> None:
        """Check that all numbers in an honest peer's message fit into a real message. So nothing that this member has
        sent keeps the peer from sending (invariant q)."""
        match message:
            case msg.Ready(base=version, id=id):
                numbers = [(version.samples, SAMPLES_MAX), (id.incarnation, INCARNATION_MAX)]
            case msg.Commit(version=version, term=term):
                numbers = [(version.samples, SAMPLES_MAX), (term, HUGE)]
            case msg.Claim(term=term) | msg.Close(term=term) | msg.Vote(term=term):
                numbers = [(term, HUGE)]
            case msg.Probe(summary) | msg.ProbeAck(summary):
                numbers = [(summary.incarnation, INCARNATION_MAX)]
            case _:
                return
        for number, most in numbers:
            require(number <= most, "q", f"{number} does not fit into a message: {message}")

    def arrives(self, to: Process, message: msg.Message) -> None:
        """Feed a message to its receiver, unless it is a lie that the receiver must believe, because it answers a
        question. A message that answers no question may neither replace a state nor pass as another peer's commit
        (invariant q). What a node refuses does not reach its core."""
        replica = to.replica
        if (
            isinstance(message, msg.Told | msg.Head | msg.Part)
            and not self._is_true(message)
            and self._is_asked(to, message)
        ):
            return
        try:
            message = completed(message, self.world.rules)
            check_place(message, self.world.rules)
        except Refusal:
            return
        self.world.feed_alive(to, Received(self.name, message))
        heads = [fetch.head.version for fetch in replica.fetching.fetches.values() if fetch.head is not None]
        taken = [v for v in (*replica.versions, *heads) if v is not None and v.chain in self.forged]
        require(not taken, "q", f"{to.name} uses a version that was made up: {taken}")

    def _is_asked(self, to: Process, message: msg.Told | msg.Head | msg.Part) -> bool:
        replica = to.replica
        if isinstance(message, msg.Told):
            return replica.lineage.inquiry is not None and self.name in replica.lineage.inquiry.asked
        fetch = replica.fetching.fetches.get(message.fragment)
        return fetch is not None and any(peer == self.name for _, peer in fetch.questions)

    def message(self, process: Process, unit: int, tactic: str) -> msg.Message | None:
        """Make up a message of this tactic from what ``process`` holds of a unit; None: send nothing now."""
        rng, log = self.rng, process.replica.logs[unit]
        state = log.held
        match tactic:
            case "serve" | "half" | "twice":
                return self._contribute(log, tactic)
            case "odd":
                return self._odd(log)
            case "seize":
                return msg.Claim(unit, state.version, self._next_term(log))
            case "claim":
                return msg.Claim(unit, self._near(state.version), rng.choice([0, 1, 2, 3, 5, 17, HUGE]))
            case "close":
                return self._close(log)
            case "commit":
                return self._commit(log)
            case "mean":
                # with these tactics, or as a candidate, it may become the slice's owner, and this a wrong mean
                may_own = {"close", "commit", "vote"} & {*self.tactics} or self.name in state.plan.succession
                known = log.round.close is not None and not may_own
                key = log.round.close.key if known and log.round.close is not None else self._digest()
                number, payload = rng.randrange(log.slices), ((GHOST, 0),)
                owns = self.name in (log.round.owners[number], state.plan.owners[number])
                return (
                    None if owns else msg.Mean(unit, state.version, key, number, hash_of(payload), self.name, payload)
                )
            case "vote":
                leader, served = rng.choice([self.name, GHOST, *self.world.names]), self._close(log)
                term = rng.choice([0, log.round.term, self._next_term(log), HUGE])
                made = self._commit(log) if rng.random() < 0.5 else None
                return msg.Vote(unit, state.version, term, leader, served if rng.random() < 0.5 else None, made)
            case "deny":
                own = log.round.readys.get(process.name)
                id = ContributionId(self.incarnation, 1) if own is None else own.id
                key = "" if log.round.close is None else log.round.close.key
                lack = msg.Lack(unit, state.version, key, ((rng.randrange(log.slices), (process.name, GHOST)),))
                denials: list[msg.Message] = [
                    msg.Stale(unit, id, self._near(state.version)),
                    msg.Held(unit, state.version),
                    lack,
                ]
                return rng.choice(denials)
            case "state":
                return self._state(process, state)
            case "ask":
                return self._question(log)
            case "present":
                return msg.Probe(self._summary(process))
            case "replay":
                return rng.choice(self.seen) if self.seen else None
        return msg.Leave(self.incarnation, rng.random() < 0.5) if rng.random() < 0.1 else None

    def _contribute(self, log: FragmentLog, how: str) -> msg.Ready | None:
        """Contribute to the present round. half: some slices go nowhere, or are not those that were signed. twice:
        each peer gets another contribution of the same id."""
        state, rng = log.held, self.rng
        self.sequence += 1
        id = ContributionId(self.incarnation, self.sequence)
        hashes = (hash_of(0),) * log.slices
        ready = rooted(msg.Ready(log.fragment, state.version, id, id, 1.0, 5, hashes, rng.choice([5e-324, 1.0])))
        for process in list(self.world.alive.values()):
            theirs = ready
            if how == "twice":
                theirs = rooted(replace(ready, samples=rng.randint(0, 9), hashes=(hash_of(rng.random()), *hashes[1:])))
            if how != "half" or rng.random() < 0.7:
                self.tell(process, theirs)
            for number in range(log.slices):
                if how != "half" or rng.random() < 0.5:
                    wrong = how == "half" and rng.random() < 0.2
                    self._sends_slice(process, ready, number, hash_of("other") if wrong else hashes[number])
        self.readys[log.fragment, state.version] = ready
        return None

    def _sends_slice(self, to: Process, ready: msg.Ready, number: int, hash: str) -> None:
        self.tell(to, msg.Slice(ready.fragment, ready.base, self.name, ready.id, number, hash, 0))

    def _sends_slices(self, to: Process, fragment: int, base: Version, numbers: Iterable[int]) -> None:
        ready = self.readys.get((fragment, base))
        for number in numbers if ready is not None else ():
            assert ready is not None
            self._sends_slice(to, ready, number, hash_of(0))

    def _odd(self, log: FragmentLog) -> msg.Ready:
        rng = self.rng
        id = ContributionId(rng.choice([self.incarnation, 2**62, 1]), rng.choice([self.sequence, HUGE]))
        oldest = rng.choice([id, ContributionId(id.incarnation, id.sequence + 1), ContributionId(0, 0)])
        weight, samples = rng.choice([1.0, 0.0, 2.0**40, 2.0**-40]), rng.choice([0, 5, HUGE])
        hashes = rng.choice([(), (hash_of(0),) * log.slices, (hash_of(0),) * (log.slices + 1)])
        ready = msg.Ready(log.fragment, self._near(log.held.version), id, oldest, weight, samples, hashes, 2.0**50)
        return rooted(ready) if rng.random() < 0.7 else ready

    def _next_term(self, log: FragmentLog) -> int:
        """Return the next term that this member may have, as a peer knows the round."""
        line, term = claims.line(log), log.round.term
        later = range(term + 1, term + len(line) + 1)
        return next((t for t in later if line[t % len(line)] == self.name), term + len(line) + 1)

    def _choice(self, log: FragmentLog, term: int) -> msg.Choice:
        """Choose from what a peer has: perhaps not all, perhaps with an invented peer, and with whom it likes named."""
        rng, state = self.rng, log.held
        readys = {peer: ready for peer, ready in log.round.readys.items() if rng.random() < 0.8}
        if rng.random() < 0.2:
            id = ContributionId(1, self.sequence + 1)
            readys[GHOST] = rooted(msg.Ready(log.fragment, state.version, id, id, 1.0, 5, (hash_of(0),) * log.slices))
        names = [self.name, GHOST, *state.roll]
        gone = tuple(sorted(rng.sample(names, rng.randint(0, 1)))) if rng.random() < 0.3 else ()
        late = tuple(sorted(rng.sample(names, rng.randint(0, len(names))))) if rng.random() < 0.3 else ()
        successors = () if not log.rules.asynchronous else (self.name, *rng.sample(names, 1))
        return msg.Choice(self.name, term, countable(readys, state), gone, late, log.revision_next, successors)

    def _close(self, log: FragmentLog) -> msg.Close:
        state, rng = log.held, self.rng
        term = log.round.term if log.round.leader == self.name else self._next_term(log)
        choice = self._choice(log, term)
        names = [self.name, GHOST, *state.roll]
        owners = rng.choice(
            [state.plan.owners, (self.name,) * log.slices, tuple(rng.choice(names) for _ in range(log.slices))]
        )
        key = key_of(log.fragment, state.version, choice) if rng.random() < 0.9 else self._digest()
        attempt = rng.choice([0, 1, 2, 1000])
        short = rng.random() < 0.1
        return msg.Close(log.fragment, state.version, term, self.name, attempt, key, None if short else choice, owners)

    def _commit(self, log: FragmentLog) -> msg.Commit | None:
        """Commit the choice of a Close for which a peer has all means; or any other, which must be refused."""
        state, rng, close = log.held, self.rng, log.round.close
        term = log.round.term if log.round.leader == self.name else self._next_term(log)
        if close is None or close.choice is None or rng.random() < 0.2:
            close = self._close(log)
            close = replace(close, choice=self._choice(log, term)) if close.choice is None else close
        assert close.choice is not None
        means = log.means_of(close.key)
        whole = len(means) == log.slices
        if not whole and rng.random() < 0.8:
            return None
        hashes = tuple(means[n].hash if n in means else self._digest() for n in range(log.slices))
        owners = tuple(means[n].owner if n in means else self.name for n in range(log.slices))
        if whole and not unsound(close.choice, state, log.rules) and rng.random() < 0.8:
            return replace(commit_of(state, close, hashes, owners, log.rules), leader=self.name, term=term)
        v, key = state.version, close.key
        version = Version(v.generation, v.samples, v.epoch + 1, self._digest())
        return msg.Commit(log.fragment, v, version, term, self.name, key, close.choice.bare(), hashes, owners)

    def _state(self, process: Process, state: State) -> msg.Message:
        """Make up a state for which nobody asked."""
        v = state.version
        forged = Version(v.generation, v.samples + HUGE, v.epoch + self.rng.choice([0, 1, 5]), self._digest())
        links = (*state.links, (forged.epoch, forged.chain))
        match self.rng.randrange(3):
            case 0:
                versions = tuple(log.held.version for log in process.replica.logs)
                others = tuple(log.held.links for log in process.replica.logs)
                return msg.Told((forged, *versions[1:]), (links, *others[1:]))
            case 1:
                return msg.Head(state.fragment, replace(state, version=forged, links=links))
        return msg.Part(state.fragment, v, 0, None)

    def _question(self, log: FragmentLog) -> msg.Message:
        rng, version = self.rng, self._near(log.held.version)
        numbers = tuple(rng.choice([-1, 0, 1, HUGE]) for _ in range(rng.randint(0, 3)))
        what = rng.choice(list(msg.What))
        key = "" if log.round.close is None else log.round.close.key
        want = msg.Want(log.fragment, version, what, numbers, key)
        questions: list[msg.Message] = [msg.Ask(), msg.Ask(log.fragment, numbers), msg.Ask(HUGE), want]
        return rng.choice(questions)

    def _near(self, version: Version) -> Version:
        """Return ``version`` itself, or a made-up one near it."""
        rng = self.rng
        if rng.random() < 0.6:
            return version
        epoch = max(0, version.epoch + rng.choice([-1, 0, 1, 5, HUGE]))
        return Version(version.generation + rng.choice([0, 0, 1]), version.samples, epoch, self._digest())

    def _digest(self) -> str:
        digest = self.rng.randbytes(8).hex()
        self.forged.add(digest)
        return digest

    def _summary(self, process: Process) -> msg.Summary:
        """Return a Summary that may lie, but claims no greater model than ``process`` has."""
        rng, replica, number = self.rng, process.replica, process.replica.roster.mine.number
        heads = tuple((v.epoch, v.chain) for v in replica.versions if v is not None) if replica.has_state else ()
        model = replica.model
        if self.delays or rng.random() < 0.5:
            return msg.Summary(self.incarnation, "worker", True, model, heads, speed=1.0, number=number)
        sent = tuple(rng.choice([-1, epoch, HUGE]) for epoch, _ in heads)
        awaits = tuple((log.fragment, (rng.choice(self.world.names),)) for log in replica.logs[:1])
        digests = tuple(((epoch, self._digest()),) for epoch, _ in heads)
        return msg.Summary(
            self.incarnation if rng.random() < 0.95 else rng.choice([1, 2**62]),
            "worker",
            rng.random() < 0.8,
            model,
            tuple((epoch, rng.choice([chain, self._digest()])) for epoch, chain in heads),
            idle=rng.random() < 0.2,
            bandwidth=rng.choice([0.0, 1.0, 2.0**50]),
            speed=rng.choice([0.0, 1.0, 2.0**40]),
            paused=rng.random() < 0.1,
            sent=sent,
            awaits=awaits,
            digests=digests if rng.random() < 0.5 else (),
            number=number,
        )
