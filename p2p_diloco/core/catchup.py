"""Fetching newer states, and the comparison of lineages that ends a fork.

A late join, a missed commit, a repair and a healed partition are handled alike: ask for what is newer. A small gap is
fetched from one peer, a large one gathered from several. A state that descends from the present one is taken shard by
shard. If lineages differ, the peers compare the versions of their whole models: the peer with the lower model
version takes every differing shard of the other lineage, all at once, or none.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from . import damage
from .donating import answer, tell_versions
from .events import Accept, Complaint, Effect, Fill, Note, Send
from .failures import Failures
from .gather import Gathering
from .lag import Lag
from .logs import Logs
from .messages import Fetch, Message, State, Versions
from .passing import is_ahead
from .roster import Roster
from .rules import Rules
from .state import meta_of
from .switching import Switching, came_late
from .version import ModelVersion, Version, descends, model_version


@dataclass(slots=True)
class Fetching:
    """A fetch from one peer of everything that is newer there. It ends when this replica's model version reaches
    ``target``. ``progress``: the time at which data last arrived."""

    donor: str
    target: ModelVersion
    progress: float


class CatchUp:
    """Decides when to fetch newer states, from which peers, and whether to take a state that has arrived."""

    def __init__(self, rules: Rules, logs: Logs, roster: Roster) -> None:
        self.rules, self.logs, self.roster = rules, logs, roster
        self.fetching: Fetching | None = None
        self.switching: Switching | None = None
        self.gathering: Gathering | None = None
        # by shard and version: each state being loaded, with the version held when loading began and its donor
        self.filling: dict[tuple[int, Version], tuple[State, Version | None, str]] = {}
        self.lag = Lag(rules, logs, roster)
        self.failures = Failures(rules)
        self.gathered_at: ModelVersion | None = None  # the model version at which a gathering was over last
        self.doubted: set[int] = set()  # shards whose state here is wrong: the next fetch asks for their whole states

    # -- questions

    @property
    def donor(self) -> str | None:
        """The peer from which a fetch or a change of lineage takes states now; None if neither is under way."""
        under_way = self.switching or self.fetching
        return None if under_way is None else under_way.donor

    def donors(self) -> list[str]:
        """Return the peers from which this replica is fetching states, sorted."""
        if self.donor is not None:
            return [self.donor]
        if self.gathering is None:
            return []
        return sorted({asked.donor for asked in self.gathering.asked.values()} or {self.gathering.first})

    # -- asking

    def seen(self, peer: str, theirs: ModelVersion, now: float) -> list[Effect]:
        """Handle the model version that another peer reported. If it is higher than this replica's, and no commit seems
        to be on its way, fetch from that peer."""
        if self.gathering is not None:
            return self._ask_more(now)
        mine = self.logs.model()
        if theirs <= mine or self.donor is not None or (self.failures.lately(peer, now) and self._others_ahead(peer)):
            return []
        if mine == ModelVersion():
            return self.gather(peer, theirs, now)
        if self.rules.asynchronous and not self.rules.ended(theirs, self.roster.mine.revision):
            request = self.lag.keep_up(peer, now)
            return [] if request is None else [Send(peer, request)]
        if not self.lag.lasts(peer, theirs, now):
            return []
        return self.gather(peer, theirs, now) if self.lag.is_far(theirs) else self.fetch(peer, theirs, now)

    def _others_ahead(self, peer: str) -> bool:
        mine = self.logs.model()
        return any(s.model > mine for p, s in self.roster.summaries().items() if p != peer)

    def gather(self, first: str, target: ModelVersion, now: float) -> list[Effect]:
        """Begin to fetch the whole model, shard by shard, from all peers whose model version is ``target`` or higher.
        First ask the peer ``first`` for its versions."""
        self.gathering = Gathering(self.rules, first, target, now)
        return [Send(first, Fetch(self.logs.versions(), shards=()))]

    def _ask_more(self, now: float, but: Collection[str] = ()) -> list[Effect]:
        """Request more shards from the donors that can take another request, except the donors in ``but``."""
        gathering = self.gathering
        if gathering is None or gathering.vector is None:
            return []
        if gathering.done:
            self.gathering = None
            return self._gather_again(now)
        able = {p: s for p, s in self.roster.summaries().items() if s.model >= gathering.target and p != self.roster.me}
        donors = {p: gathering.told_to_hold(p, able[p]) for p in sorted(able, key=self.failures.times)}
        if gathering.hopeless(donors):
            self.gathering = None  # every donor is gone; the next peer that is ahead starts a new gathering
        have = self.logs.versions()
        requests = gathering.ask({p: holds for p, holds in donors.items() if p not in but}, have, now)
        return [Send(donor, Fetch(have, shards=shards)) for donor, shards in requests]

    def _gather_again(self, now: float) -> list[Effect]:
        """Gather again, once at each model version, if commits are missing between the fetched states and the stored
        commits: the rounds were faster than the transfers of states. Ask the newest stored commit's author, but only if
        it says that it is ahead: after a restart it may lack that commit."""
        kept = ((log.version, log.incoming) for log in self.logs)
        late = [commit for version, early in kept if not early.reaches(version) for commit in early.commits.values()]
        donor = max(late, key=lambda commit: commit.version.epoch).aggregator if late else ""
        summary = self.roster.summary(donor)
        mine, before, self.gathered_at = self.logs.model(), self.gathered_at, self.logs.model()
        if self.rules.asynchronous or summary is None or summary.model <= mine or mine == before:
            return []
        return self.gather(donor, mine, now)

    def _too_old(self, peer: str, state: State, now: float) -> list[Effect]:
        """Handle a state that is older than the version that the gathering or the change of lineage needs: request this
        shard from another donor."""
        if self.switching is not None:
            return self._ask_another(now) if self.switching.is_in_vain(peer, state) else []
        gathering = self.gathering
        asked = None if gathering is None else gathering.asked.get(state.shard)
        if gathering is None or gathering.vector is None or asked is None or asked.donor != peer:
            return []
        holds = gathering.told_to_hold(peer, self.roster.summary(peer))
        if state.shard in holds or not came_late(state, gathering.vector[state.shard]):
            return []
        gathering.lacks(peer, state.shard)
        return self._ask_more(now)

    def fetch(self, peer: str, target: ModelVersion, now: float) -> list[Effect]:
        """Ask the peer for all that is newer than this replica's states, and for whole states of `doubted` shards."""
        if self.donor is not None:
            return []
        self.fetching = Fetching(peer, target, now)
        doubted, self.doubted = self.doubted, set()
        have = tuple(None if log.shard in doubted else log.version for log in self.logs)
        return [Send(peer, Fetch(have))]

    def doubt(self, shards: Collection[int]) -> None:
        """Record that this replica's states of these shards are wrong. The next fetch asks for these shards as whole
        states."""
        self.doubted.update(shards)
        self.fetching = None  # a fetch under way does not ask for them

    def is_loading(self, shards: Collection[int]) -> bool:
        """Whether a change of lineage is under way, or a fetched state of one of these shards is being loaded."""
        return self.switching is not None or any(shard in shards for shard, _ in self.filling)

    def moved(self, now: float) -> list[Effect]:
        """Handle a change of this replica's versions: end the fetches that are complete, and request more shards."""
        self.lag.moved()
        if self.fetching is not None and self.logs.model() >= self.fetching.target:
            self.failures.forget(self.fetching.donor)
            self.fetching = None
        if self.gathering is not None:
            self.gathering.came(self.gathering.moved(self.logs.versions()))
        return self._ask_more(now)

    def gone(self, peer: str, now: float) -> list[Effect]:
        """Handle a peer that is gone or has restarted: request from other donors what was requested from it."""
        self.lag.gone(peer)
        self.failures.forget(peer)
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
        """Called after each heartbeat interval: give up a fetch that makes no progress, and request overdue shards
        again."""
        effects = self._insist(now)
        if self.gathering is None:
            return effects
        if self.gathering.vector is None and now - self.gathering.began >= self.rules.settle:
            self.failures.add(self.gathering.first, now)
            self.gathering = None  # the first donor has not told its versions
            return effects
        slow = self.gathering.overdue(now)
        donors = {self.gathering.asked[shard].donor for shard in slow}
        for donor in donors:
            self.failures.add(donor, now)
        self.gathering.again(slow)
        return [*effects, *self._ask_more(now, but=donors), *self._ask_more(now)]

    def _insist(self, now: float) -> list[Effect]:
        """Give up a fetch that makes no progress. A change of lineage first requests its missing shards again, because
        giving up would lose the shards that have already arrived."""
        under_way = self.switching or self.fetching
        if under_way is None or now - under_way.progress < self.rules.fetch_again:
            return []
        return self._ask_another(now)

    def _ask_another(self, now: float) -> list[Effect]:
        """Request the missing shards of a change of lineage from the next donor. If there is none, or only a fetch is
        under way, give up."""
        again = None if self.switching is None else self.switching.ask_again(now)
        if again is not None:
            return [again]
        if self.donor is not None:
            self.failures.add(self.donor, now)
        self._abandon()
        return []

    # -- messages

    def received(self, sender: str, message: Message, now: float) -> list[Effect]:
        """Handle a Fetch, Versions or State message."""
        match message:
            case Fetch():
                self._give_up_damaged(sender, message, now)
                return answer(self.logs, sender, message)
            case Versions():
                return self.told(sender, message, now)
            case State():
                return self.got(sender, message, now)
        raise AssertionError(f"only Fetch, Versions and State messages are handled here, not {message}")

    def _give_up_damaged(self, donor: str, request: Fetch, now: float) -> None:
        """Give up a fetch whose donor itself requests whole states. A peer that holds a state requests them only for
        damaged shards, so this donor may lack what the fetch needs."""
        if None in request.have and self.fetching is not None and self.fetching.donor == donor:
            self.failures.add(donor, now)
            self.fetching = None

    # -- taking

    def told(self, peer: str, message: Versions, now: float) -> list[Effect]:
        """Handle the versions that a peer reported. If the lineages differ, the higher model version wins."""
        if not self.roster.asked.open(peer, now):
            return [Complaint(peer, "its versions are ignored: they were not asked for")]
        if len(message.versions) != len(self.logs):
            return []
        fork = message.forked or any(
            log.relation(v) == "fork" for log, v in zip(self.logs, message.versions, strict=True)
        )
        theirs, mine = model_version(message.versions), self.logs.model()
        if not fork:
            for log, version in zip(self.logs, message.versions, strict=True):
                if log.relation(version) == "ahead":
                    is_ahead(peer, log)
            return self._told_more(peer, message.versions, now)
        if theirs == mine:
            return []
        if theirs < mine:
            return tell_versions(self.logs, peer)
        if self.switching is not None:
            return []
        if self.failures.lately(peer, now):
            self._answered(peer)
            return []
        self._abandon()
        self.switching = Switching(self.rules, self.logs, self.roster, peer, message.versions, now)
        for log in self.logs:
            log.frozen = True
        return [self.switching.ask()]

    def _answered(self, peer: str) -> None:
        """Stop waiting for this peer: it has answered, but the answer can't be used yet. This is not recorded as a
        failure: after a failure a peer is not asked for a while, and each answer would start that time anew, without
        end. End a gathering that asks this peer, too: its overdue requests would be recorded as failures."""
        if self.fetching is not None and self.fetching.donor == peer:
            self.fetching = None
        if self.gathering is not None and (self.gathering.first == peer or self.gathering.of(peer)):
            self.gathering = None

    def _told_more(self, peer: str, versions: tuple[Version, ...], now: float) -> list[Effect]:
        """Handle the versions that a peer of the same lineage reported during a gathering: the first donor's answer, or
        a donor's answer that it holds nothing newer."""
        gathering = self.gathering
        if gathering is None:
            return []
        if gathering.vector is None and gathering.first == peer:
            gathering.begin(versions)
        holds = gathering.told_to_hold(peer, self.roster.summary(peer))
        for shard in gathering.of(peer):
            if (log := self.logs[shard]).relation(versions[shard]) in ("equal", "ancestor"):
                gathering.nothing_newer(peer, shard, log.version, holds)
        return self._ask_more(now)

    def got(self, peer: str, state: State, now: float) -> list[Effect]:
        """Handle a shard's state that arrived: load it if it belongs to the lineage that this replica changes to, or
        descends from the present state."""
        log = self.logs[state.shard]
        if not (self.roster.asked.open(peer, now) or log.expects_states_of(peer)):
            return [Complaint(peer, f"a state of shard {state.shard} is ignored: it was not asked for")]
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
        self.filling[key] = (state, log.version, peer)
        return [Fill(state, meta_of(state))]

    def filled(self, shard: int, version: Version, digest: str, now: float) -> list[Effect]:
        """Handle a fetched state that was loaded and has this digest. If the digest is right, the state becomes the
        present one, or is staged for a change of lineage."""
        state, held, donor = self.filling.pop((shard, version), (None, None, ""))
        if state is None or held != self.logs[shard].version:
            return []  # the fetch was given up, or a newer version has come: ignore the proposal
        if digest != version.digest:
            note = Note("mismatch", f"shard {shard}: a fetched state of epoch {version.epoch} has a wrong digest")
            self.failures.add(donor, now)
            self._abandon()
            return [note]
        if self.switching is not None:
            self.switching.staged[shard] = state
            return self._switch(self.switching, now)
        # the Accept drops the shard's other proposals, also where a repair leaves its version as it was
        self.filling = {key: under_way for key, under_way in self.filling.items() if key[0] != shard}
        log = self.logs[shard]
        follows = damage.mended(log, now) if version == log.version else log.adopt(state, now)
        return [Accept(((shard, digest),)), *follows]

    def _wanted(self, peer: str, state: State) -> bool:
        """Whether to load a state that has arrived. If this replica is changing to the donor's lineage, and the state
        shows that the donor has left that lineage, also give up the change."""
        if self.switching is None:
            return self._descends(state) and self._of_what_is_gathered(state)
        takes = self.switching.takes(peer, state)
        if takes is None:
            self._abandon()
        return bool(takes)

    def _of_what_is_gathered(self, state: State) -> bool:
        """Whether the state fits the gathering that is under way: it must descend from the version that the first donor
        reported. True if no gathering is under way or the first donor has reported nothing yet."""
        if self.gathering is None or self.gathering.vector is None:
            return True
        told = self.gathering.vector[state.shard]
        if came_late(state, told):
            return self.logs[state.shard].version is not None  # the state was found to descend from this version
        same_lineage = descends(state.version, state.history, told)
        if not same_lineage:
            self.gathering = None  # the sender is on another lineage than the first donor was: begin again
        return same_lineage

    def _descends(self, state: State) -> bool:
        """Whether the state may replace the shard's present state. It may if this replica holds no state of the shard,
        if the new state descends from the present one, or if both are the same version and the present tensors are
        damaged."""
        mine = self.logs[state.shard].version
        if mine is None or (self.logs[state.shard].round.damaged is not None and state.version == mine):
            return True
        return state.version != mine and descends(state.version, state.history, mine)

    def _switch(self, switching: Switching, now: float) -> list[Effect]:
        """Once all shards that differ from the donor's have arrived, replace them together: the replica is then on the
        donor's lineage. Give the change up instead if the replica's model version would not become higher."""
        if switching.missing():
            return []
        greater, staged = switching.is_greater(), switching.staged
        before = min((version.epoch for version in self.logs.versions() if version is not None), default=0)
        left = not all(self._descends(state) for state in staged.values())
        self._abandon()
        if not greater:
            return []
        effects: list[Effect] = [Accept(tuple((shard, state.version.digest) for shard, state in staged.items()))]
        if left:
            self.roster.leaves_lineage()
        for shard, state in sorted(staged.items()):
            effects += self.logs[shard].adopt(state, now)
        donor = switching.donor
        text = f"joined the lineage of {donor} and dropped this peer's own state of epoch {before}"
        # If nothing was left, there was no fork: one of the two peers only knew too little of the common lineage.
        notes = [Note("fork", text)] if left else []
        # The states taken may be outdated by now, and a round may already wait for this peer: ask for newer states.
        return [*effects, *notes, Send(donor, Fetch(self.logs.versions()))]

    def _abandon(self) -> None:
        """Give up every fetch and change of lineage that is under way."""
        self.fetching = self.gathering = self.switching = None
        self.filling.clear()
        for log in self.logs:
            log.frozen = False
