"""One fragment's log of commits, as one replica holds it: the state, the round after it, and what came too early.

Law: the data, and questions about it. What events do to it is in `leading` (the acting leader), `owning` (slices
and means), `claims` (terms), `applying` (commits), `holding` (asynchronous mode); `rounds` sorts events among them.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

from .messages import Commit, Mean, OfRound, Slice
from .revision import FOUNDED, Revision
from .roster import Roster
from .round import Phase, Round
from .rules import Rules
from .state import State, chain_at, final, relation
from .version import Version

USUAL_OF = 9
"""A usual time is the median of the last ones, this many."""
PATIENCE = 4
"""An asynchronous commit may be held up for so many usual times."""
SIGNED_KEPT = 64
"""Of so many of its last led rounds a peer remembers what term it held."""
EARLY_ROUNDS = 3
"""Of each sender, the messages of this many rounds are kept until their version is reached. While a state is fetched,
`Rules.commits_kept` are: the means of slices that are here or on their way are needed to roll these forward."""


class FragmentLog:
    """One fragment's log."""

    def __init__(self, fragment: int, rules: Rules, roster: Roster) -> None:
        self.fragment, self.rules, self.roster, self.me = fragment, rules, roster, roster.me
        self.state: State | None = None
        self.round = Round()
        self.turns = 0  # how often this peer has held to another leader, or begun a round: claims and votes tell it
        self.early: dict[tuple[type, str, int, int], OfRound] = {}  # by kind, sender, epoch and number
        self.last: list[tuple[Commit, tuple[Mean, ...]]] = []  # the newest commits, with their means
        self.signed: dict[Version, int] = {}  # versions on which this peer led a round, the newest last: its term then
        self.followers: dict[str, float] = {}  # asynchronous: which fetching peers asked for the next commit, and when
        self.misses: dict[str, deque[bool]] = {}  # by peer: of its last rounds, which ones it missed
        self.shown: dict[str, int] = {}  # by peer: the highest epoch that its messages prove
        # how long it took until half of a round's means were there (asynchronous: until a submission was counted, as
        # its author saw it, or a commit held, as its leader did); and how long whole rounds took
        self.usual: tuple[deque[float], deque[float]] = (deque(maxlen=USUAL_OF), deque(maxlen=USUAL_OF))
        self.late: set[str] = set()  # members that did not do their part, to be named in this peer's next choice
        # by newcomer and by grant: how many contributions came without slices, and until which epoch none is counted
        self.undelivered: dict[str, tuple[int, int]] = {}
        self.digests: dict[int, tuple[str, ...]] = {}  # by epoch: of the slices' tensors here
        self.fresh = False  # restored from disk, and nothing was applied since
        self.assigned: float | None = None  # asynchronous: since when this peer leads
        self.unproven = False  # the state was fetched or restored, or this process stood still: others may be ahead
        self.believed: set[str] = set()  # chains that most live holders tell

    # -- questions

    @property
    def version(self) -> Version | None:
        return None if self.state is None else self.state.version

    @property
    def held(self) -> State:
        """The state. This log must hold one."""
        assert self.state is not None
        return self.state

    @property
    def epoch(self) -> int:
        return -1 if self.state is None else self.state.version.epoch

    @property
    def phase(self) -> Phase:
        return self.round.phase

    @property
    def slices(self) -> int:
        """The number of slices."""
        return len(self.rules.fragments[self.fragment])

    @property
    def final(self) -> bool:
        return self.state is not None and final(self.state, self.rules)

    @property
    def revision_next(self) -> Revision:
        """The revision that this peer's next choice names."""
        return max(self.roster.mine.revision, FOUNDED if self.state is None else self.state.revision)

    @property
    def founding(self) -> bool:
        """Whether this is the run's first round, whose plan knows the founder alone. Slices wait for its Close, which
        gives them to all that contribute: else the founder would need memory and a link for all of them."""
        return not self.epoch

    @property
    def leads(self) -> bool:
        """Whether this peer holds the term, with or without all promises."""
        return self.state is not None and self.round.leader == self.me

    def relation(self, theirs: Version) -> str:
        """Return how a version relates to the present one, see `state.relation`."""
        return "ahead" if self.state is None else relation(self.state.version, self.state.links, theirs)

    def is_here(self, peer: str) -> bool:
        """Whether nothing shows that the peer is on another lineage of this fragment."""
        summary = self.roster.summary(peer)
        if summary is None or not summary.heads or self.state is None:
            return True
        epoch, chain = summary.heads[self.fragment]
        known = chain_at(self.state.links, epoch)
        if self.round.commit is not None and self.round.commit.version.chain == chain:
            return True  # it has applied the commit whose means are on their way here
        if known is None:
            return (
                not self.forgot(epoch)
                and summary.model.generation == self.state.version.generation
                and not self.roster.is_elsewhere(peer)
            )
        return known == chain

    def forgot(self, epoch: int) -> bool:
        """Whether this epoch is older than all that links name, so that nobody can tell which lineage it belongs to. A
        peer that is there counts as on another one: else two sides of a long split would never find that they are. In
        asynchronous mode it is usual to be far behind."""
        return self.state is not None and epoch < self.state.links[0][0] and not self.rules.asynchronous

    def grace(self) -> float:
        """Return how long an overdue part of a round is waited for, counted from when half of the parts were there."""
        halves = self.usual[0]
        usual = 2 * statistics.median(halves) if halves else 0.0
        return min(self.rules.round_timeout, max(self.rules.settle, usual))

    def holds_within(self) -> float:
        """Return how long an asynchronous commit may wait for a live peer to hold it: some times as long as usual."""
        times = self.usual[0]
        usual = PATIENCE * statistics.median(times) if times else math.inf
        return min(self.rules.confirms_within, max(self.rules.promises_within, usual))

    def usual_round(self) -> float:
        """Return the usual length of a round, as a wait for a peer that may not hold the base."""
        rounds = self.usual[1]
        return max(self.rules.settle, statistics.median(rounds) if rounds else 0.0)

    def comes(self, peer: str, now: float) -> bool:
        """Whether what this peer owes to the closed round is on its way: a transfer with it goes on. On a slow link a
        part may take longer than a grace."""
        return self._moves(peer, now) and self.may_wait(now)

    def may_wait(self, now: float) -> bool:
        """Whether a closed round may wait longer than a grace for parts that are on their way: for half of a usual
        round, so that nobody can double it. While no usual round is known, each part may take `mended_within`."""
        if self.usual[1]:
            return now - self.round.closed_at < self.usual_round() / 2
        return now - self.round.moved_at < self.rules.mended_within

    def _moves(self, peer: str, now: float) -> bool:
        return now - self.round.moving.get(peer, -math.inf) < self.rules.settle

    def gains(self, now: float) -> bool:
        """Whether means that the accepted commit lacks are on their way: a transfer goes on with a peer that has
        them, and the last mean came not long ago."""
        commit = self.round.commit
        if self.phase is not Phase.LACKING or commit is None or now - self.round.moved_at >= self.rules.fetch_again:
            return False
        return any(self._moves(peer, now) for peer in {commit.leader, *commit.owners, *self.round.asked})

    def means_of(self, key: str) -> dict[int, Mean]:
        """Return the means of a choice that are here, by number."""
        return {number: mean for (of, number), mean in self.round.means.items() if of == key}

    # -- a new version

    def offers(self, version: Version) -> bool:
        """Whether this peer makes the commit of this version itself: others took its step before this peer may."""
        commit = self.round.commit
        return self.phase is Phase.HOLDING and commit is not None and commit.version == version

    def leads_to(self, version: Version) -> bool:
        """Whether the commits that are here lead from the present version to this one."""
        commits = [self.round.commit, *(kept for kept in self.early.values() if isinstance(kept, Commit))]
        follows = {commit.base: commit.version for commit in commits if commit is not None}
        at = self.held.version
        for _ in follows:  # so often at most: a false commit may lead back to its base
            at = follows.get(at, at) if at != version else at
        return at == version

    def begin(self, state: State, now: float) -> None:
        """Make this the present state, and begin an empty round on it. If the version stays, as where a fetch is given
        up, what this peer has signed on it still binds: it numbers its Closes on, and makes no second commit."""
        again = self.round if state.version == self.version else None
        if self.round.attempt >= 0 and self.round.leader == self.me and self.state is not None:
            self.signed[self.state.version] = self.round.term
            for old in list(self.signed)[:-SIGNED_KEPT]:
                del self.signed[old]
        self.state, plan = state, state.plan
        phase = Phase.FINAL if final(state, self.rules) else Phase.COLLECTING
        asks, first = (now + self.rules.settle, self.rules.settle), plan.succession[0]
        self.round = Round(phase, now, None, *asks, 0, first, owners=plan.owners, moved_at=now)
        self.turns += 1
        if again is not None:
            self._take_up(again)
        elif state.version in self.signed:  # back here with another lineage: what was signed then binds up to its term
            self.round.term, self.round.leader = self.signed[state.version], ""
        for peer in (*plan.succession, *plan.owners):
            self.roster.name(peer)

    def _take_up(self, before: Round) -> None:
        """Take over what binds this peer from an earlier round on the same version."""
        round, commit = self.round, before.commit
        round.attempt, round.means, round.delivered = before.attempt, before.means, before.delivered
        if commit is None or commit.leader != self.me:
            return
        round.commits[self.me] = commit
        if self.rules.asynchronous:  # its named peers may hold it already
            round.term, round.leader, round.commit, round.phase = commit.term, self.me, commit, Phase.HOLDING

    def keep(self, sender: str, message: OfRound) -> None:
        """Keep a message on a version that is not reached. Each sender has equal room, and its oldest goes first."""
        number = message.number if isinstance(message, Slice | Mean) else 0
        self.early[type(message), sender, message.base.epoch, number] = message
        mine = [key for key in self.early if key[1] == sender]
        rounds = self.rules.commits_kept if self.phase is Phase.FETCHING else EARLY_ROUNDS
        if len(mine) > rounds * (2 * self.slices + 8):
            del self.early[min(mine, key=lambda key: self.early[key].base.epoch)]

    def take_early(self) -> list[tuple[str, OfRound]]:
        """Remove and return the kept messages on the present version, each with its sender; drop older ones."""
        version = self.version
        found = [(key[1], message) for key, message in self.early.items() if message.base == version]
        self.early = {key: m for key, m in self.early.items() if m.base.epoch > self.epoch}
        return found
