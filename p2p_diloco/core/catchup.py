"""Catching up with a newer state, and the comparison of lineages that ends a fork.

A late join, a missed commit, a repair and a healed partition are handled alike: ask for what is newer. A small gap is
fetched from one peer, a large one gathered from several. A state that descends from the present one is taken shard by
shard. Lineages that differ are compared once, as whole models: the lesser side takes every differing shard of the
greater one, all at once, or none.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from .donating import answer, tell_versions
from .events import Accept, Effect, Fill, Note, Send
from .gather import Gathering
from .lag import Lag
from .logs import Logs
from .messages import Fetch, Message, State, Versions
from .roster import Roster
from .rules import Rules
from .state import meta_of
from .switching import Switching, came_late
from .version import ModelVersion, Version, descends, model_version


@dataclass(slots=True)
class Fetching:
    """A fetch of everything newer from one peer; ``progress``: when something last arrived."""

    donor: str
    target: ModelVersion
    progress: float


class CatchUp:
    def __init__(self, rules: Rules, logs: Logs, roster: Roster) -> None:
        self.rules, self.logs, self.roster = rules, logs, roster
        self.fetching: Fetching | None = None
        self.switching: Switching | None = None
        self.gathering: Gathering | None = None
        # with the version held when it began
        self.filling: dict[tuple[int, Version], tuple[State, Version | None]] = {}
        self.lag = Lag(rules, logs, roster)
        self.doubted: set[int] = set()  # shards whose state here is wrong: the next fetch asks for them whole

    # -- questions

    @property
    def donor(self) -> str | None:
        """The one peer from which a fetch or a change of lineage is under way."""
        under_way = self.switching or self.fetching
        return None if under_way is None else under_way.donor

    def donors(self) -> list[str]:
        """The peers from which a state is being fetched, sorted."""
        if self.donor is not None:
            return [self.donor]
        if self.gathering is None:
            return []
        return sorted({asked.donor for asked in self.gathering.asked.values()} or {self.gathering.first})

    # -- asking

    def seen(self, peer: str, theirs: ModelVersion, now: float) -> list[Effect]:
        """Another peer has told its model's version: fetch from it if it is ahead and no commit seems to be on its
        way."""
        if self.gathering is not None:
            return self._ask_more(now)
        mine = self.logs.model()
        if theirs <= mine or self.donor is not None:
            return []
        if mine == ModelVersion():
            return self.gather(peer, theirs, now)
        if self.rules.asynchronous and not self.rules.ended(theirs):
            request = self.lag.keep_up(peer, now)
            return [] if request is None else [Send(peer, request)]
        if not self.lag.lasts(peer, theirs, now):
            return []
        return self.gather(peer, theirs, now) if self.lag.is_far(theirs) else self.fetch(peer, theirs, now)

    def gather(self, first: str, target: ModelVersion, now: float) -> list[Effect]:
        """Fetch shard by shard from every peer that holds as much as ``first``; ask ``first`` for its versions to
        begin."""
        self.gathering = Gathering(self.rules, first, target, now)
        return [Send(first, Fetch(self.logs.versions(), shards=()))]

    def _ask_more(self, now: float, but: Collection[str] = ()) -> list[Effect]:
        """Ask donors that have room for more shards, except those in ``but``."""
        gathering = self.gathering
        if gathering is None or gathering.vector is None:
            return []
        if gathering.done:
            self.gathering = None
            return self._gather_again(now)
        able = {p: s for p, s in self.roster.summaries().items() if s.model >= gathering.target}
        donors = {p: gathering.told_to_hold(p, s.epochs) for p, s in able.items() if p != self.roster.me}
        if gathering.hopeless(donors):
            self.gathering = None  # every donor is gone; the next peer seen ahead starts a new gathering
        have = self.logs.versions()
        requests = gathering.ask({p: holds for p, holds in donors.items() if p not in but}, have, now)
        return [Send(donor, Fetch(have, shards=shards)) for donor, shards in requests]

    def _gather_again(self, now: float) -> list[Effect]:
        """After a gathering: if commits between the fetched states and the kept commits are missing, gather again. They
        will not arrive any more, because the rounds were faster than the states."""
        kept = ((log.version, log.incoming.commits) for log in self.logs)
        late = [commit for version, commits in kept if version not in commits for commit in commits.values()]
        donor = max(late, key=lambda commit: commit.version.epoch).aggregator if late else ""
        summary = self.roster.summary(donor)
        if self.rules.asynchronous or summary is None or donor == self.roster.me:
            return []
        return self.gather(donor, self.logs.model(), now)

    def _too_old(self, peer: str, state: State, now: float) -> list[Effect]:
        """A donor sent a state older than the one told: ask another donor for this shard."""
        gathering = self.gathering
        asked = None if gathering is None else gathering.asked.get(state.shard)
        if gathering is None or gathering.vector is None or asked is None or asked.donor != peer:
            return []
        summary = self.roster.summary(peer)
        holds = gathering.told_to_hold(peer, () if summary is None else summary.epochs)
        if state.shard in holds or not came_late(state, gathering.vector[state.shard]):
            return []
        gathering.lacks(peer, state.shard)
        return self._ask_more(now)

    def fetch(self, peer: str, target: ModelVersion, now: float) -> list[Effect]:
        """Ask the peer for everything newer, and for the whole state of doubted shards."""
        if self.donor is not None:
            return []
        self.fetching = Fetching(peer, target, now)
        doubted, self.doubted = self.doubted, set()
        have = tuple(None if log.shard in doubted else log.version for log in self.logs)
        return [Send(peer, Fetch(have))]

    def doubt(self, shards: Collection[int]) -> None:
        """This replica's state of these shards is wrong: the next fetch asks for them whole."""
        self.doubted.update(shards)
        self.fetching = None  # the answer to a fetch under way would not mend this

    def is_fetching(self, shards: Collection[int]) -> bool:
        """Whether a fetch is under way, or the fetched state of one of these shards is being filled in."""
        return self.donor is not None or any(shard in shards for shard, _ in self.filling)

    def moved(self, now: float) -> list[Effect]:
        """This replica's versions have changed."""
        self.lag.moved()
        if self.fetching is not None and self.logs.model() >= self.fetching.target:
            self.fetching = None
        if self.gathering is not None:
            self.gathering.came(self.gathering.moved(self.logs.versions()))
        return self._ask_more(now)

    def gone(self, peer: str, now: float) -> list[Effect]:
        """The peer died or can't be reached: ask another donor for what was asked of it."""
        self.lag.gone(peer)
        if self.donor == peer:
            self._abandon()
        if self.gathering is None:
            return []
        if self.gathering.vector is None and self.gathering.first == peer:
            self.gathering = None
            return []
        if self.gathering.told_by == peer:
            self.gathering.told_by = None
        self.gathering.again(self.gathering.of(peer))
        return self._ask_more(now, but=[peer])

    def tick(self, now: float) -> list[Effect]:
        """Give up a fetch that makes no progress; ask again for overdue shards."""
        effects = self._insist(now)
        if self.gathering is None:
            return effects
        if self.gathering.vector is None and now - self.gathering.began >= self.rules.settle:
            self.gathering = None  # the first donor has not told its versions
            return effects
        slow = self.gathering.overdue(now)
        donors = {self.gathering.asked[shard].donor for shard in slow}
        self.gathering.again(slow)
        return [*effects, *self._ask_more(now, but=donors), *self._ask_more(now)]

    def _insist(self, now: float) -> list[Effect]:
        """Give up a fetch that makes no progress. A change of lineage first asks again for its missing shards, because
        the staged ones would be lost."""
        under_way = self.switching or self.fetching
        if under_way is None or now - under_way.progress < self.rules.fetch_again:
            return []
        again = None if self.switching is None else self.switching.ask_again(now)
        if again is None:
            self._abandon()
            return []
        return [again]

    # -- messages

    def received(self, sender: str, message: Message, now: float) -> list[Effect]:
        """Handle a message of catching up."""
        match message:
            case Fetch():
                return answer(self.logs, sender, message)
            case Versions():
                return self.told(sender, message, now)
            case State():
                return self.got(sender, message, now)
        raise AssertionError(f"no such message: {message}")

    # -- taking

    def told(self, peer: str, message: Versions, now: float) -> list[Effect]:
        """A peer told its versions: if the lineages differ, the greater whole model wins."""
        if len(message.versions) != len(self.logs):
            return []
        fork = message.forked or any(
            log.relation(v) == "fork" for log, v in zip(self.logs, message.versions, strict=True)
        )
        theirs, mine = model_version(message.versions), self.logs.model()
        if not fork:
            return self._told_more(peer, message.versions, now)
        if theirs == mine:
            return []
        if theirs < mine:
            return tell_versions(self.logs, peer)
        if self.switching is not None:
            return []
        self._abandon()
        self.switching = Switching(self.rules, self.logs, self.roster, peer, message.versions, now)
        for log in self.logs:
            log.frozen = True
        return [self.switching.ask()]

    def _told_more(self, peer: str, versions: tuple[Version, ...], now: float) -> list[Effect]:
        """Versions without a fork: the first donor's answer to a gathering, or an answer that nothing newer is held."""
        gathering = self.gathering
        if gathering is None:
            return []
        if gathering.vector is None and gathering.first == peer:
            gathering.begin(versions)
        nothing = [s for s in gathering.of(peer) if self.logs[s].relation(versions[s]) in ("equal", "ancestor")]
        gathering.came(nothing)
        return self._ask_more(now)

    def got(self, peer: str, state: State, now: float) -> list[Effect]:
        """A shard's state arrived: fill it in if it belongs to the lineage being taken or descends from the present
        state."""
        key = (state.shard, state.version)
        staged = None if self.switching is None else self.switching.staged.get(state.shard)
        known = key in self.filling or (staged is not None and staged.version == state.version)
        if known:
            return []
        if not self._wanted(peer, state):
            return self._too_old(peer, state, now)
        if staged is None and self.switching is not None:
            self.switching.touch(peer, now)
        if self.fetching is not None and peer == self.fetching.donor:
            self.fetching.progress = now
        self.filling[key] = (state, self.logs[state.shard].version)
        return [Fill(state, meta_of(state))]

    def filled(self, shard: int, version: Version, digest: str, now: float) -> list[Effect]:
        """A fetched state was filled in: check its digest, then make it the present state or stage it."""
        state, held = self.filling.pop((shard, version), (None, None))
        if state is None or held != self.logs[shard].version:
            return []  # given up or overtaken meanwhile: ignore the proposal
        if digest != version.digest:
            note = Note("mismatch", f"shard {shard}: a fetched state of epoch {version.epoch} has another digest")
            self._abandon()
            return [note]
        if self.switching is not None:
            self.switching.staged[shard] = state
            return self._switch(self.switching, now)
        log = self.logs[shard]
        follows = log.mended(now) if version == log.version else log.adopt(state, now)
        return [Accept(((shard, digest),)), *follows]

    def _wanted(self, peer: str, state: State) -> bool:
        if self.switching is None:
            return self._descends(state) and self._of_what_is_gathered(state)
        takes = self.switching.takes(peer, state)
        if takes is None:
            self._abandon()
        return bool(takes)

    def _of_what_is_gathered(self, state: State) -> bool:
        """Whether a gathering may take this state: it must descend from what the first donor told."""
        if self.gathering is None or self.gathering.vector is None:
            return True
        told = self.gathering.vector[state.shard]
        if came_late(state, told):
            return self.logs[state.shard].version is not None  # the state that it descends from
        same_lineage = descends(state.version, state.history, told)
        if not same_lineage:
            self.gathering = None  # this replica left its lineage: begin again
        return same_lineage

    def _descends(self, state: State) -> bool:
        """Whether the state may replace the present one: it is newer, or the same version undamaged."""
        mine = self.logs[state.shard].version
        if mine is None or (self.logs[state.shard].round.damaged is not None and state.version == mine):
            return True
        return state.version != mine and descends(state.version, state.history, mine)

    def _switch(self, switching: Switching, now: float) -> list[Effect]:
        """Change to the other lineage once every differing shard is staged."""
        if switching.missing():
            return []
        greater, before, staged = switching.is_greater(), self.logs.model(), switching.staged
        self._abandon()
        if not greater:
            return []
        effects: list[Effect] = [Accept(tuple((shard, state.version.digest) for shard, state in staged.items()))]
        for shard, state in sorted(staged.items()):
            effects += self.logs[shard].adopt(state, now)
        donor = switching.donor
        text = f"joined the lineage of {donor}; dropped its own state of {before.epochs} epochs"
        # What was taken is as old as the donor's word, and the others may wait for this peer by now: ask for the rest.
        return [*effects, Note("fork", text), Send(donor, Fetch(self.logs.versions()))]

    def _abandon(self) -> None:
        self.fetching = self.gathering = self.switching = None
        self.filling.clear()
        for log in self.logs:
            log.frozen = False
