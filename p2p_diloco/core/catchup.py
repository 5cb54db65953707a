"""Catching up with a newer state, and the one comparison that ends a fork.

Late join, a missed commit, repair and a healed partition are the same thing: ask for what is newer. Little is asked of
one peer, much is gathered from several. A state that descends from mine is taken shard by shard. Lineages that differ
are compared once, as whole models; the lesser side takes every differing shard of the greater, all at once, or none.
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
    """One fetch from one peer, of all that is newer there; ``progress``: when something came last."""

    donor: str
    target: ModelVersion
    progress: float


class CatchUp:
    def __init__(self, rules: Rules, logs: Logs, roster: Roster) -> None:
        self.rules, self.logs, self.roster = rules, logs, roster
        self.fetching: Fetching | None = None
        self.switching: Switching | None = None
        self.gathering: Gathering | None = None
        self.filling: dict[tuple[int, Version], tuple[State, Version | None]] = {}  # with what was held then
        self.lag = Lag(rules, logs, roster)
        self.doubted: set[int] = set()  # shards whose state here is wrong: the next fetch asks for them whole

    # -- questions

    @property
    def donor(self) -> str | None:
        """The peer of which all that is newer was asked, or its lineage."""
        under_way = self.switching or self.fetching
        return None if under_way is None else under_way.donor

    def donors(self) -> list[str]:
        """The peers from which a state is coming, sorted."""
        if self.donor is not None:
            return [self.donor]
        if self.gathering is None:
            return []
        return sorted({asked.donor for asked in self.gathering.asked.values()} or {self.gathering.first})

    # -- asking

    def seen(self, peer: str, theirs: ModelVersion, now: float) -> list[Effect]:
        """A peer says what it holds: fetch it if it is ahead and no commit brings this replica there by itself."""
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
        """Fetch shard by shard from all that hold as much as the first; it tells what, to begin with."""
        self.gathering = Gathering(self.rules, first, target, now)
        return [Send(first, Fetch(self.logs.versions(), shards=()))]

    def _ask_more(self, now: float, but: Collection[str] = ()) -> list[Effect]:
        """Ask the donors that have room for more, but not those in ``but``."""
        gathering = self.gathering
        if gathering is None or gathering.vector is None:
            return []
        if gathering.done:
            self.gathering = None
            return self._gather_again(now)
        able = {p: s for p, s in self.roster.summaries().items() if s.model >= gathering.target}
        donors = {p: gathering.told_to_hold(p, s.epochs) for p, s in able.items() if p != self.roster.me}
        if gathering.hopeless(donors):
            self.gathering = None  # the peers that held so much are gone; the next one seen ahead begins anew
        have = self.logs.versions()
        requests = gathering.ask({p: holds for p, holds in donors.items() if p not in but}, have, now)
        return [Send(donor, Fetch(have, shards=shards)) for donor, shards in requests]

    def _gather_again(self, now: float) -> list[Effect]:
        """All was gathered, but rounds were faster than the states came: commits between them and the commits that
        were kept are missing, and none of them will come any more."""
        kept = ((log.version, log.incoming.commits) for log in self.logs)
        late = [commit for version, commits in kept if version not in commits for commit in commits.values()]
        donor = max(late, key=lambda commit: commit.version.epoch).aggregator if late else ""
        summary = self.roster.summary(donor)
        if self.rules.asynchronous or summary is None or donor == self.roster.me:
            return []
        return self.gather(donor, self.logs.model(), now)

    def _too_old(self, peer: str, state: State, now: float) -> list[Effect]:
        """A state that was asked of a peer and can't be taken: another may hold what was told."""
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
        """Ask the peer for what is newer; where this replica's own state is in doubt, for the whole state."""
        if self.donor is not None:
            return []
        self.fetching = Fetching(peer, target, now)
        doubted, self.doubted = self.doubted, set()
        have = tuple(None if log.shard in doubted else log.version for log in self.logs)
        return [Send(peer, Fetch(have))]

    def doubt(self, shards: Collection[int]) -> None:
        """This replica's own state of these shards is wrong: the next fetch asks for them whole."""
        self.doubted.update(shards)
        self.fetching = None  # whatever it was, the answer would not mend this

    def is_fetching(self, shards: Collection[int]) -> bool:
        """Whether a fetch is under way, or one of these shards has come and is being filled in."""
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
        """The peer died or can't be reached: what it held may be gone, and is asked of another."""
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
        """Give up a fetch in which nothing moves; ask again for shards that don't come."""
        effects = self._insist(now)
        if self.gathering is None:
            return effects
        if self.gathering.vector is None and now - self.gathering.began >= self.rules.settle:
            self.gathering = None  # the first has not told
            return effects
        slow = self.gathering.overdue(now)
        donors = {self.gathering.asked[shard].donor for shard in slow}
        self.gathering.again(slow)
        return [*effects, *self._ask_more(now, but=donors), *self._ask_more(now)]

    def _insist(self, now: float) -> list[Effect]:
        """A fetch in which nothing moves is given up; a change of lineage not before what is missing was asked for
        again: what is staged is not lost."""
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
        """A message of catching up."""
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
        """A peer's versions: if the lineages differ, the greater whole model wins."""
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
        """The first donor of a gathering tells what it holds; or any, that it has nothing newer of what was asked."""
        gathering = self.gathering
        if gathering is None:
            return []
        if gathering.vector is None and gathering.first == peer:
            gathering.begin(versions)
        nothing = [s for s in gathering.of(peer) if self.logs[s].relation(versions[s]) in ("equal", "ancestor")]
        gathering.came(nothing)
        return self._ask_more(now)

    def got(self, peer: str, state: State, now: float) -> list[Effect]:
        """A shard's state: fill it in, if it belongs to the lineage being taken or descends from what is held."""
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
        """A fetched state has been filled in: check it and make it the present one, or stage it."""
        state, held = self.filling.pop((shard, version), (None, None))
        if state is None or held != self.logs[shard].version:
            return []  # given up, or overtaken: the proposal is void
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
        """A newcomer takes nothing that does not descend from what the first donor told."""
        if self.gathering is None or self.gathering.vector is None:
            return True
        told = self.gathering.vector[state.shard]
        if came_late(state, told):
            return self.logs[state.shard].version is not None  # from which it descends
        same_lineage = descends(state.version, state.history, told)
        if not same_lineage:
            self.gathering = None  # a lineage has been left: begin anew
        return same_lineage

    def _descends(self, state: State) -> bool:
        """Whether it may take the place of what is held: it is newer, or the same undamaged."""
        mine = self.logs[state.shard].version
        if mine is None or (self.logs[state.shard].round.damaged is not None and state.version == mine):
            return True
        return state.version != mine and descends(state.version, state.history, mine)

    def _switch(self, switching: Switching, now: float) -> list[Effect]:
        """Change over to the other lineage once every shard that differs is there."""
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
        text = f"joined the lineage of {donor}; left behind a state of {before.epochs} epochs"
        # What was taken is as old as the donor's word, and the others may wait for this peer by now: ask for the rest.
        return [*effects, Note("fork", text), Send(donor, Fetch(self.logs.versions()))]

    def _abandon(self) -> None:
        self.fetching = self.gathering = self.switching = None
        self.filling.clear()
        for log in self.logs:
            log.frozen = False
