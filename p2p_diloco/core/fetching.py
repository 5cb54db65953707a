"""Fetching a fragment's newer state, slice by slice, from several donors at once; and repairing damaged slices.

Law: slices are adopted when all of them are at one version, never a mixture. Donors move on meanwhile and keep nothing
of the past, so each Part names its version, and a staged slice is rolled forward by itself with the commits that come.
Another lineage is adopted with all fragments at once. A repair is the same, beside the rounds, with the own state as
head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from . import holding
from .admission import objection
from .events import Accept, Complaint, Effect, Fill, Filled, Keep, Note, Roll, Rolled, Send
from .fragment import FragmentLog
from .messages import Ask, Commit, Head, Mean, Part, Want, What
from .roster import Roster
from .round import Phase
from .rules import Rules
from .state import State, append, chain_at, is_sound
from .version import Version

HEAD = -1
"""Stands in place of a slice's number for the head: the state without its tensors."""
VAIN_TIMES = 4
"""A newcomer that has a part of a state waits so many times as long for the rest, before it asks others."""


def part_of(log: FragmentLog, number: int) -> Head | Part:
    """Return the head of the present state, or a slice of it, for a peer that fetches it."""
    if number != HEAD:
        return Part(log.fragment, log.held.version, number)
    return Head(log.fragment, log.held, log.digests.get(log.epoch, ()))


@dataclass(slots=True)
class Fetch:
    """One fragment on its way. ``head``: the state that its slices will have, None until a donor has told it;
    ``head_at``: since when; ``path``: by epoch, the commit that follows it and the state before it. ``staged``: the
    version of each slice here, and since when; ``busy``: by slice, the version that tensor work under way leads to.
    ``asked``: by slice (HEAD: the head), whom, and when; ``questions``: all that was ever asked, because an answer may
    take long; ``sources``: who sent each slice. ``repair``: only ``numbers`` are fetched, and rounds go on;
    ``near_at``: when a donor last was at a version that can be rolled. ``wanted``: in asynchronous mode, when the
    commit that follows an epoch (number -1), or a slice's mean of it, was asked for. ``heard_at``: when one of those
    asked last sent a slice, or a part of one. ``most``: the most slices that were here, and since when."""

    fragment: int
    donors: tuple[str, ...]
    numbers: tuple[int, ...]
    near_at: float
    heard_at: float
    repair: bool = False
    head: State | None = None
    head_at: float = 0.0
    digests: tuple[str, ...] = ()
    path: dict[int, tuple[Commit, State, tuple[Mean, ...]]] = field(default_factory=dict)
    staged: dict[int, tuple[Version, float]] = field(default_factory=dict)
    busy: dict[int, Version] = field(default_factory=dict)
    asked: dict[int, tuple[str, float]] = field(default_factory=dict)
    sources: dict[int, str] = field(default_factory=dict)
    questions: set[tuple[int, str]] = field(default_factory=set)
    most: tuple[int, float] = (0, float("-inf"))
    wanted: dict[tuple[int, int], float] = field(default_factory=dict)

    @property
    def those_asked(self) -> set[str]:
        return {peer for _, peer in self.questions}

    @property
    def done(self) -> bool:
        head = self.head
        if head is None or self.busy:
            return False
        return all(n in self.staged and self.staged[n][0] == head.version for n in self.numbers)


class Fetching:
    """All fetches of this replica."""

    def __init__(self, rules: Rules, logs: Sequence[FragmentLog], roster: Roster) -> None:
        self.rules, self.logs, self.roster = rules, logs, roster
        self.fetches: dict[int, Fetch] = {}
        self.together = False  # another lineage: nothing is adopted until all is here
        self.damaged: dict[int, tuple[int, ...]] = {}  # by fragment: until these slices are replaced
        self.unsent: set[tuple[str, int, int]] = set()  # what did not leave: to whom, fragment, and number or HEAD
        self.starved: list[Version | None] = []  # what was held when nothing of a newer state came

    @property
    def starves(self) -> bool:
        """Whether nothing of a newer state comes to this peer, though others are asked for it. No round should wait for
        a contribution of it."""
        return self.starved == [log.version for log in self.logs]

    @property
    def under_way(self) -> bool:
        """Whether a newer state is on its way; not a repair."""
        return any(not fetch.repair for fetch in self.fetches.values())

    @property
    def grew_at(self) -> float:
        """When there were last more slices here than before; long ago, if none has come."""
        return max((fetch.most[1] for fetch in self.fetches.values()), default=float("-inf"))

    @property
    def rounds_since(self) -> int:
        """How many rounds are known to have ended since the first head came of a state that is on its way."""
        return max((len(fetch.path) for fetch in self.fetches.values() if not fetch.repair), default=0)

    def repaired(self, fragment: int) -> tuple[int, ...]:
        """Return the slices of this fragment that are damaged here: they are sent once they are replaced."""
        return self.damaged.get(fragment, ())

    def begin(self, fragments: Sequence[int], donors: Sequence[str], now: float, *, together: bool) -> list[Effect]:
        """Begin to fetch these fragments. Their rounds end here."""
        self.together = together
        effects: list[Effect] = []
        for fragment in fragments:
            log = self.logs[fragment]
            log.round.phase = Phase.FETCHING
            self.fetches[fragment] = Fetch(fragment, tuple(donors), tuple(range(log.slices)), now, now)
            effects += self._ask(self.fetches[fragment], now)
        return effects

    def repair(self, log: FragmentLog, numbers: Sequence[int], donors: Sequence[str], now: float) -> list[Effect]:
        """Begin to fetch slices of the present version that are damaged here, beside the rounds; unless the whole
        fragment is on its way. More of them may be found while some are fetched."""
        known = self.repaired(log.fragment)
        found = tuple(number for number in numbers if number not in known)
        if log.state is None or not found:
            return []
        self.damaged[log.fragment] = (*known, *found)
        fetch = self.fetches.get(log.fragment)
        if fetch is None:
            fetch = Fetch(log.fragment, tuple(donors), (), now, now, repair=True, head=log.state)
            self.fetches[log.fragment] = fetch
        elif not fetch.repair:
            return []
        fetch.numbers = (*fetch.numbers, *found)
        text = f"{len(found)} slices of fragment {log.fragment} are fetched again"
        return [Note("repair", text), *self._ask(fetch, now)]

    # -- asking

    def _able(self, fetch: Fetch, now: float) -> list[str]:
        """Return the donors that can be asked now, those that failed least first."""
        known = [peer for peer in fetch.donors if self.roster.holds_state(peer) and not self._has_left(fetch, peer)]
        near = [peer for peer in (known if fetch.repair else self.roster.holders()) if self._is_near(fetch, peer)]
        if near:
            fetch.near_at = now
        elif fetch.repair and now - fetch.near_at > self.rules.dead_after:
            return []  # they may wait for this peer's own slices, which it doesn't send before the repair
        donors = near if near and not fetch.repair else known
        donors.sort(key=lambda peer: (self.roster.peers[peer].failed[0], peer))
        return [peer for peer in donors if now >= self.roster.peers[peer].failed[1]] or donors

    def _is_near(self, fetch: Fetch, peer: str) -> bool:
        """Whether the peer's Summary names the head's version, or the one before it, or one that may follow."""
        summary, head = self.roster.summary(peer), fetch.head
        if summary is None or not summary.heads or head is None:
            return False
        epoch, chain = summary.heads[fetch.fragment]
        known = chain_at(head.links, epoch) == chain if epoch <= head.version.epoch else peer in fetch.donors
        return known and epoch >= head.version.epoch - 1

    def _has_left(self, fetch: Fetch, peer: str) -> bool:
        """Whether the peer's Summary names another lineage than the head's: it has gone over to that meanwhile."""
        summary, head = self.roster.summary(peer), fetch.head
        if summary is None or not summary.heads or head is None:
            return False
        epoch, chain = summary.heads[fetch.fragment]
        return epoch <= head.version.epoch and chain_at(head.links, epoch) not in (None, chain)

    def _ask(self, fetch: Fetch, now: float) -> list[Effect]:
        donors = self._able(fetch, now)
        if not donors:
            return []
        if fetch.head is None:
            if HEAD in fetch.asked:
                return []
            self._asks(fetch, donors[0], (HEAD,), now)
            return [Send(donors[0], Ask(fetch.fragment))]
        left = [n for n in fetch.numbers if n not in fetch.staged and n not in fetch.asked and n not in fetch.busy]
        effects: list[Effect] = []
        for donor in donors:
            room = self.rules.fetch_window - sum(peer == donor for peer, _ in fetch.asked.values())
            numbers, left = left[: max(0, room)], left[max(0, room) :]
            self._asks(fetch, donor, numbers, now)
            effects += [Send(donor, Ask(fetch.fragment, tuple(numbers)))] if numbers else []
        return effects

    def _asks(self, fetch: Fetch, donor: str, numbers: Sequence[int], now: float) -> None:
        fetch.asked |= dict.fromkeys(numbers, (donor, now))
        fetch.questions |= {(number, donor) for number in numbers}

    def unasked(self, donor: str, fragment: int, numbers: Sequence[int], now: float) -> None:
        """Handle a question that did not arrive: it is asked at the next tick, of another donor if there is one."""
        self.roster.fails(donor, now)
        if (fetch := self.fetches.get(fragment)) is not None:
            of_this = {n for n in numbers or (HEAD,) if fetch.asked.get(n, ("",))[0] == donor}
            fetch.asked = {n: asked for n, asked in fetch.asked.items() if n not in of_this}

    # -- what comes

    def headed(self, sender: str, message: Head, now: float) -> list[Effect]:
        """Handle the state that a donor told."""
        fetch = self.fetches.get(message.fragment)
        if fetch is None:
            return []
        if (HEAD, sender) not in fetch.questions or message.state.fragment != message.fragment:
            return [Complaint(sender, "its state was not asked for")]
        fetch.asked.pop(HEAD, None)
        if not is_sound(message.state):
            self.roster.fails(sender, now)
            return [Complaint(sender, "its state does not have the chain of its version"), *self._ask(fetch, now)]
        held = self.logs[message.fragment].version
        if not self.together and held is not None and message.state.version.epoch <= held.epoch:
            self.roster.fails(sender, now)  # this donor is no further than this peer
            return self._ask(fetch, now)
        if fetch.head is None or message.state.version.epoch > fetch.head.version.epoch:
            fetch.head, fetch.head_at, fetch.digests = message.state, now, message.digests
        return self._go_on(fetch, now)

    def part(self, sender: str, message: Part, now: float) -> list[Effect]:
        """Handle a slice: stage it."""
        fetch = self.fetches.get(message.fragment)
        if fetch is None or message.number in fetch.busy or message.number in fetch.staged:
            return []
        if (message.number, sender) not in fetch.questions:
            return [Complaint(sender, "its slice was not asked for")]
        fetch.asked.pop(message.number, None)
        fetch.busy[message.number] = message.version
        self._hears(sender, now)
        fetch.sources[message.number] = sender
        return [Fill(message.fragment, message.version, message.number, message.payload)]

    def filled(self, done: Filled, now: float) -> list[Effect]:
        """Handle a staged slice. One at the head's own version must have the digest that the donor of the head told."""
        fetch = self.fetches.get(done.fragment)
        if fetch is None or fetch.busy.get(done.number) != done.version:  # else it is of an earlier fetch
            return []
        del fetch.busy[done.number]
        source = fetch.sources[done.number]
        same = fetch.head is not None and fetch.head.version == done.version and bool(fetch.digests)
        if same and fetch.digests[done.number] != done.digest:
            self.roster.fails(source, now)
            fetch.head = fetch.head if fetch.repair else None  # which of the two is wrong, nobody knows yet
            return [
                Complaint(source, f"its slice {done.number} is not the one of this version"),
                *self._ask(fetch, now),
            ]
        fetch.staged[done.number] = done.version, now
        if len(fetch.staged) > fetch.most[0]:
            fetch.most = len(fetch.staged), now
        self.roster.delivers(source)
        effects: list[Effect] = []
        if fetch.head is not None and done.version.epoch > fetch.head.version.epoch and not fetch.repair:
            effects += self._advance(fetch, now)
            # in asynchronous mode the next commit is asked for already
            waits = self.rules.asynchronous and now - fetch.head_at <= self.rules.settle
            if done.version.epoch > fetch.head.version.epoch and not waits and HEAD not in fetch.asked:
                self._asks(fetch, source, (HEAD,), now)
                effects.append(Send(source, Ask(fetch.fragment)))
        return effects + self._go_on(fetch, now)

    def rolled(self, done: Rolled, now: float) -> list[Effect]:
        """Handle a slice that was rolled forward."""
        fetch = self.fetches.get(done.fragment)
        if fetch is None or fetch.busy.get(done.number) != done.version:
            return []
        del fetch.busy[done.number]
        fetch.staged[done.number] = done.version, now
        return self._go_on(fetch, now)

    def came(self, fragment: int, now: float) -> list[Effect]:
        """Handle a message that was kept for a fragment that is being fetched: it may be a commit or a mean."""
        fetch = self.fetches.get(fragment)
        if fetch is None or fetch.repair:
            return []
        self._make_room(fetch)
        return self._go_on(fetch, now)

    def _make_room(self, fetch: Fetch) -> None:
        """Drop the means that no slice will need: those on versions before the head, of slices that are neither here
        nor on their way. A slice that is asked for next may still come at the head's version. Without a head the means
        of one round are kept: a donor could withhold it for long."""
        early, near = self.logs[fetch.fragment].early, {*fetch.staged, *fetch.busy, *fetch.asked}
        means = [(key, kept) for key, kept in early.items() if isinstance(kept, Mean)]
        newest = max((kept.base.epoch for _, kept in means), default=0)
        head = newest if fetch.head is None else fetch.head.version.epoch
        for key, kept in means:
            if kept.number not in near and kept.base.epoch < head:
                del early[key]

    def stepped(self, log: FragmentLog, before: State, now: float) -> list[Effect]:
        """Handle an outer step of a fragment that is being repaired: staged slices follow."""
        fetch = self.fetches.get(log.fragment)
        if fetch is None or not fetch.repair or not log.last:
            return []
        commit, means = log.last[-1]
        fetch.path[commit.base.epoch] = commit, before, means
        fetch.head = log.state
        return self._go_on(fetch, now)

    # -- rolling forward

    def _wants(self, fetch: Fetch, number: int, base: Version, donors: Sequence[str], now: float) -> list[Effect]:
        """Ask for the commit on this base (number -1: whoever has none yet sends it once it has), or for a slice's mean
        of it. In asynchronous mode commits go to the named peers alone; without them slices that come from moving
        donors would never meet at one version."""
        asked = fetch.wanted.get((number, base.epoch), float("-inf"))
        if not self.rules.asynchronous or now - asked < self.rules.settle:
            return []
        fetch.wanted[number, base.epoch] = now
        what, numbers = (What.NEXT, ()) if number < 0 else (What.MEANS, (number,))
        return [Send(donor, Want(fetch.fragment, base, what, numbers)) for donor in sorted(donors)]

    def _go_on(self, fetch: Fetch, now: float) -> list[Effect]:
        follows = [] if fetch.repair else self._advance(fetch, now)
        return [*follows, *self._roll(fetch, now), *self._ask(fetch, now)]

    def _advance(self, fetch: Fetch, now: float) -> list[Effect]:
        """Let the head follow the commits that were kept: the outer steps that others took meanwhile. This peer can't
        know who holds the term, so a commit must come from a donor, or be by the leader that the plan names. The means
        of slices on their way are asked for at once: nobody keeps them for as long as a slow slice takes."""
        log, wants = self.logs[fetch.fragment], list[Effect]()
        while fetch.head is not None:
            head = fetch.head
            early = ((key[1], m) for key, m in log.early.items() if isinstance(m, Commit) and m.base == head.version)
            able = {*fetch.donors, *head.plan.succession[:1]}
            sound = ((p, c) for p, c in early if p in able and not objection(c, head, self.rules, None, log.me))
            sender, commit = next(sound, ("", None))
            if commit is None:  # a short fetch needs no commit
                lasts = fetch.path or now > fetch.head_at
                return wants + (self._wants(fetch, -1, head.version, fetch.donors, now) if lasts else [])
            fetch.path[head.version.epoch] = commit, head, ()
            fetch.head, fetch.digests = append(head, commit.choice, commit.key, commit.hashes, self.rules), ()
            fetch.head_at = now
            for number in sorted({*fetch.asked, *fetch.busy, *fetch.staged} - {HEAD}) if commit.hashes else ():
                wants += self._wants(fetch, number, commit.base, (sender,), now)
        return wants

    def _roll(self, fetch: Fetch, now: float) -> Iterator[Effect]:
        """Roll each staged slice that is behind the head; one that can't be is asked for again."""
        for number, (version, since) in list(fetch.staged.items()):
            if fetch.head is None or number in fetch.busy:
                continue
            if version == fetch.head.version:
                fetch.staged[number] = version, now  # it lacks nothing yet
                continue
            commit, before, means = fetch.path.get(version.epoch, (None, None, ()))
            if commit is None or before is None or commit.base != version:
                if version.epoch < fetch.head.version.epoch or now - since > self.rules.settle:
                    del fetch.staged[number]
                    self.roster.fails(fetch.sources[number], now)  # its slices are of no use: others first
                continue
            mean = self._mean(fetch, commit, number, means) if commit.hashes else None
            if not commit.hashes:  # it counts nothing: the tensors stay
                fetch.staged[number] = commit.version, since
            elif mean is not None:
                fetch.busy[number] = commit.version
                yield Roll(commit, mean, before.buffered, len(before.plan.succession))
            elif now - since > self.rules.fetch_again or self._has_passed(fetch, commit, number):
                del fetch.staged[number]
            else:
                yield from self._wants(fetch, number, version, (fetch.sources[number],), now)

    def _has_passed(self, fetch: Fetch, commit: Commit, number: int) -> bool:
        """Whether a slice's mean of this commit was missed: its owner has since sent one of a round after the next."""
        kept = (m for m in self.logs[fetch.fragment].early.values() if isinstance(m, Mean))
        return any(m.owner == commit.owners[number] and m.base.epoch > commit.base.epoch + 1 for m in kept)

    def _mean(self, fetch: Fetch, commit: Commit, number: int, means: tuple[Mean, ...]) -> Mean | None:
        kept = (m for m in self.logs[fetch.fragment].early.values() if isinstance(m, Mean) and m.number == number)
        fits = (mean for mean in (*means, *kept) if mean.number == number and mean.hash == commit.hashes[number])
        return next((mean for mean in fits if mean.key == commit.key), None)

    # -- the end

    def adopt(self, now: float) -> list[Effect]:
        """Adopt what is complete: each fragment by itself, or all at once where the lineage changes."""
        done = [fetch for fetch in self.fetches.values() if fetch.done and self._fits(fetch)]
        repairs = [fetch for fetch in done if fetch.repair]
        whole = [fetch for fetch in done if not fetch.repair]
        if self.together and len(whole) < sum(not fetch.repair for fetch in self.fetches.values()):
            whole = []
        effects: list[Effect] = []
        for fetch in repairs:
            assert fetch.head is not None
            del self.fetches[fetch.fragment], self.damaged[fetch.fragment]
            self.logs[fetch.fragment].digests = {}  # those of the damage say nothing any more
            effects.append(Accept(((fetch.fragment, fetch.head.version),), fetch.numbers, staged=True))
        if whole:
            heads = [fetch.head for fetch in whole if fetch.head is not None]
            effects.append(Accept(tuple((head.fragment, head.version) for head in heads), staged=True))
            for head in heads:
                del self.fetches[head.fragment]
                self.adopted(head, now)
        return effects

    def _fits(self, fetch: Fetch) -> bool:
        """Whether nothing is in the way: a repair waits for the end of a step."""
        log = self.logs[fetch.fragment]
        return not fetch.repair or (log.phase is not Phase.APPLYING and log.state == fetch.head)

    def adopted(self, head: State, now: float) -> None:
        """Make a fetched or restored state the present one."""
        log = self.logs[head.fragment]
        if log.state is not None and log.relation(head.version) == "fork":
            log.shown, log.misses = {}, {}
        log.last, log.fresh, log.digests = [], False, {}
        self.damaged.pop(head.fragment, None)
        before, log.unproven = log.round, True
        log.begin(head, now)
        if self.rules.asynchronous:
            holding.carry_over(log, before)

    def tick(self, now: float) -> list[Effect]:
        """Ask again what makes no progress; give up a fetch whose donors are all gone."""
        ready = sorted((to, f, n) for to, f, n in self.unsent if self.roster.live(to) and n not in self.repaired(f))
        self.unsent = {(to, f, n) for to, f, n in self.unsent if n in self.repaired(f)}
        effects: list[Effect] = [Send(to, part_of(self.logs[f], n)) for to, f, n in ready]
        effects += self._starve(now)
        in_vain = [fetch for fetch in self.fetches.values() if self._is_vain(fetch, now)]
        if in_vain and self.together:  # another lineage is adopted whole, or not at all
            in_vain = [fetch for fetch in self.fetches.values() if not fetch.repair]
        for fetch in list(self.fetches.values()):
            for number, (donor, when) in list(fetch.asked.items()):
                if now - when >= self.rules.fetch_again or not self.roster.live(donor):
                    self.roster.fails(donor, now)
                    del fetch.asked[number]
                    if fetch.repair:  # it may repair the same slice, and wait for this peer's
                        fetch.donors = tuple(peer for peer in fetch.donors if peer != donor)
            vain = fetch in in_vain
            if vain or not self._able(fetch, now):
                del self.fetches[fetch.fragment]
                effects += [*(self._doubt(fetch, now) if vain else []), *self._give_up(fetch, now)]
                continue
            effects += self._go_on(fetch, now)
        return effects

    def _hears(self, peer: str, now: float) -> None:
        for fetch in self.fetches.values():
            if peer in fetch.those_asked:
                fetch.heard_at = now

    def _starve(self, now: float) -> list[Effect]:
        """Notice that nothing of a newer state has come for long."""
        silent = [f for f in self.fetches.values() if not f.repair and now - f.heard_at >= 2 * self.rules.fetch_again]
        if not silent or self.starves:
            return []
        self.starved = [log.version for log in self.logs]
        of = ", ".join(sorted({peer for fetch in silent for peer in fetch.those_asked}))
        text = (
            f"nothing of the state that {of} told has come for {2 * self.rules.fetch_again:g} s, so no round waits for "
            "this peer: if short messages pass and long ones don't, a tunnel or router on the way drops long packets"
        )
        return [Note("starved", text)]

    def _is_vain(self, fetch: Fetch, now: float) -> bool:
        """Whether nobody sends anything of a newer state, though each that was asked had its time. A member that says
        that it is ahead, and sends nothing, would stop all others. A newcomer goes on if it knows of nobody else, and
        for longer if a part of the state is here."""
        newer = self.logs[fetch.fragment].state is not None
        times = 1 if newer or not (fetch.staged or fetch.busy) else VAIN_TIMES
        if fetch.repair or now - fetch.heard_at < times * (1 + len(fetch.those_asked)) * self.rules.fetch_again:
            return False
        return newer or bool({*self.roster.holders()} - {*fetch.donors})

    def _doubt(self, fetch: Fetch, now: float) -> list[Effect]:
        for peer in fetch.those_asked:
            self.roster.doubt(peer, now)
        why = "it says that it is ahead, and has sent nothing of its state"
        return [Complaint(peer, why) for peer in sorted(fetch.those_asked)]

    def _give_up(self, fetch: Fetch, now: float) -> list[Effect]:
        log, damaged = self.logs[fetch.fragment], self.damaged.pop(fetch.fragment, ())
        if fetch.repair:
            kept = Note("repair", f"nobody else holds fragment {log.fragment}: what is here stays")
            return [kept, Keep(fetch.fragment, fetch.numbers)]
        if log.state is None:
            log.round.phase = Phase.EMPTY
            return []
        log.begin(log.state, now)
        return self.repair(log, damaged, [peer for peer in self.roster.holders() if log.is_here(peer)], now)

    def forgive(self, now: float) -> None:
        """Let each wait begin again: this process was suspended, so nobody has had its time."""
        for fetch in self.fetches.values():
            fetch.near_at = fetch.heard_at = now
            fetch.asked = {n: (donor, now) for n, (donor, _) in fetch.asked.items()}

    def moves(self, peer: str, now: float) -> None:
        """Handle progress of a transfer: what this peer was asked for has time, and is not asked for again. On a slow
        link means come long after the commit."""
        self._hears(peer, now)
        for fetch in self.fetches.values():
            fetch.asked = {n: (donor, now if donor == peer else when) for n, (donor, when) in fetch.asked.items()}
            for number, (version, _) in fetch.staged.items():
                commit, *_ = fetch.path.get(version.epoch, (None,))
                if commit is not None and peer in (commit.owners[number], fetch.sources[number]):
                    fetch.staged[number] = version, now
                    fetch.wanted[number, version.epoch] = now
