"""Audits: now and then a peer computes the mean of another peer's commit again, from the commit's contributions.

Law: a peer draws by lot, when it applies a commit, whether it audits the commit; no other peer can know the result. The
contributions come from the aggregator or from any peer that has them, because their authors' seals prove them. The mean
depends on the contributions alone, bit for bit, so a different mean proves to every peer that the aggregator lies, and
no vote is needed. A live aggregator that shows no peer its commit's contributions is found to lie, too.

    an auditor      draws the lot; asks the aggregator, and then all others   Audit
    a peer asked    gives the contributions, or audits the commit itself      Copy, for each contribution
    a wrong mean    the auditor tells all others, now and when they join      Accusation
    each of them    audits the commit itself, tells the others, expels the aggregator once another peer finds the lie
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from random import SystemRandom

from p2p_diloco.core.events import Average, Averaged, Expelled
from p2p_diloco.core.lending import counted as counted_of
from p2p_diloco.core.messages import Commit
from p2p_diloco.net.interface import Refusal, Unreachable
from p2p_diloco.node import wire
from p2p_diloco.node.allowance import Budget
from p2p_diloco.node.cases import Case, Cases, Key
from p2p_diloco.node.common import Common
from p2p_diloco.node.examining import LOOK, Examiner
from p2p_diloco.node.inbox import group_of, no_grant
from p2p_diloco.node.outbox import Outcome
from p2p_diloco.node.seals import is_digest_of
from p2p_diloco.node.verdicts import PROOFS_MAX, Verdicts
from p2p_diloco.node.wire import Accusation, Audit, Copy
from p2p_diloco.tensors.mean import WEIGHT_MAX, WEIGHT_MIN

SILENT = 3
"""How long an auditor waits for the next copy, in `heartbeat_timeout`s, besides the time that a transfer may take."""
JOIN, KEEP = 1.5, 4
"""JOIN: the greatest age of a commit that this peer audits at another peer's request. KEEP: how long commits are kept;
their contributions, half as long. Both are multiples of an auditor's wait for the next copy."""
PATIENCE = 4
"""How long others may take to find the same lie, as a multiple of an auditor's wait for the next copy."""
USUAL = 24
"""The number of shards of a fragment for which `audit_rate` holds. With fewer shards an aggregator makes fewer commits
in a round, and the model is small, so each commit is audited more often."""
AT_ONCE = 2
"""The most audits at a time; others wait. The audits that other peers wait for have a queue of their own: else an
accusation would wait behind audits by lot whose aggregator shows nothing, and the accusers split off meanwhile."""
FAVOURS_AT_ONCE, FAVOUR_EVERY_S = 4, 60.0
"""How many favours the peers of one grant (in an open run: each peer) may ask of this one at once, and in how many
seconds they may ask for one more. A favour is an audit of a third peer's commit, or copies sent once more. A peer that
audits by lot seldom needs one."""
STRANGERS_MAX = 16
"""An accusation is refused if its commit counts more contributions than this peer knows peers, by more than this
number: the copies of the contributions take memory until the audit is over."""

log = logging.getLogger(__name__)

EXPELLED = "this peer has expelled the sender"
"""The beginning of the refusal of an expelled peer's messages."""


class Audits:
    """Seals this peer's commits, audits those of other peers, and answers their audits. If `audit_rate` is 0, it
    does nothing. `grant_of`: as of `RunInbox`."""

    def __init__(self, common: Common, grant_of: Callable[[str], Hashable | None] = no_grant) -> None:
        self._grant_of = grant_of
        self._work, self._outbox, self._events = common.work, common.outbox, common.events
        self._roster, self._seals, self._token = common.replica.roster, common.seals, common.run.token
        self._logs, self._refusals, self._event_log = common.replica.logs, common.refusals, common.event_log
        fewest = min(map(len, common.run.rules.fragments))
        self._me, self._rate = common.transport.peer_id, common.run.config.audit_rate * max(1.0, USUAL / fewest)
        longest = max(map(self._work.nbytes_of_contribution, range(common.run.rules.shards)))
        silent_s = SILENT * common.run.config.heartbeat_timeout
        self._wait_s = silent_s + common.transport.limits.transfer_timeout_s(longest)
        self._cases = Cases(self._me, KEEP * self._wait_s)
        self._examiner = Examiner(common, self._cases, self._wait_s)
        self._lot, self._clock = SystemRandom(), asyncio.get_running_loop().time
        self._by_lot: asyncio.Queue[Case] = asyncio.Queue()
        self._wanted: asyncio.Queue[Case] = asyncio.Queue()  # other peers wait for these
        # commits that others call lies, and that this peer never saw or has forgotten
        self._alleged: dict[Key, Case] = {}
        self._verdicts, self._favours = Verdicts(PATIENCE * self._wait_s), Budget(FAVOURS_AT_ONCE, FAVOUR_EVERY_S)
        self._told = set[tuple[Key, str, int]]()  # each accusation, with the peer that got it and its incarnation

    @property
    def audited(self) -> int:
        """How many commits this peer has computed again."""
        return self._examiner.examined

    @property
    def expelled(self) -> dict[str, str]:
        """The peers that this peer has expelled, each with its lie."""
        return self._verdicts.expelled

    @property
    def doubt(self) -> str:
        """Why this peer considers its own machine faulty; empty if it doesn't."""
        return self._verdicts.doubt

    # -- what the loop tells

    def made(self, effect: Average, averaged: Averaged) -> Averaged:
        """Seal this peer's own commit, keep its contributions, and return `averaged` with the seal."""
        if not self._rate:
            return averaged
        shard, mine = effect.shard, self._me
        parts = [
            (peer, replace(c, seal=self._seals.of_contribution(c)) if peer == mine else c)
            for peer, c in effect.contributions
        ]
        listed = [(counted_of(peer, c), c.seal) for peer, c in parts]
        sealed = self._seals.of_commit(shard, effect.base, averaged.digest, listed, averaged.payload)
        # the trainer will overwrite the memory of this peer's own contribution
        copies = {peer: memoryview(bytes(c.payload)) if peer == mine else c.payload for peer, c in parts}
        counted, epoch = tuple(counted for counted, _ in listed), effect.base.epoch + 1
        nbytes = len(parts) * self._work.nbytes_of_contribution(shard)
        base = effect.base.digest
        self._cases.expect(Case(shard, base, averaged.digest, epoch, mine, counted, sealed, nbytes, copies=copies))
        return replace(averaged, seal=sealed.pack())

    def applied(self, commit: Commit) -> None:
        """Remember another peer's commit, whose outer step was computed here, and draw by lot whether to audit it."""
        sealed = self._seals.read(commit) if self._rate else None
        if sealed is None:
            return
        shard, base, version, counted = commit.shard, commit.base.digest, commit.version, commit.contributions
        chosen = (
            bool(counted) and not self.doubt and self._lot.random() * max(1, len(self._roster.alive())) < self._rate
        )
        nbytes = len(counted) * self._work.nbytes_of_contribution(shard)
        self._cases.expect(
            Case(shard, base, version.digest, version.epoch, commit.aggregator, counted, sealed, nbytes, chosen)
        )

    def accepted(self, proposals: Iterable[tuple[int, str]]) -> None:
        """Handle accepted versions of shards, each given as (shard, digest). If the lot fell on the commit that made
        one, audit that commit."""
        for key in proposals:
            case = self._cases.appended(key, self._clock())
            if case is not None and case.chosen:
                self._begin(case)

    # -- what others ask and answer

    def asked(self, sender: str, audit: Audit) -> None:
        """Handle another peer's request for a commit's contributions. If this peer doesn't have them, it gets them by
        an audit of its own, and then sends them.

        Raises:
            Refusal: this peer has no contributions of the commit and can't get them, or the commit is too old, or this
                peer audits another one for the sender, or has done so too often.
        """
        case = self._case((audit.shard, audit.digest))
        if case is None or (case.missing() and (case.over or case.aggregator == self._me)):
            raise Refusal("the contributions of this commit are not kept here")
        if not case.missing():
            self._give(sender, case)
            return
        if self._is_old(case):
            raise Refusal("this commit is too old to be audited")
        if any(other.missing() and sender in other.askers for other in self._cases if other is not case):
            raise Refusal("this peer audits another commit at the sender's request")
        if not case.begun and not self._is_favoured(sender):
            raise Refusal("this peer has audited many commits for the sender, or others with its invitation, lately")
        case.askers.add(sender)
        self._begin(case)

    def _is_favoured(self, peer: str) -> bool:
        """Take a favour from what the peer, with all others of its grant, may ask; False if there is none left."""
        return self._favours.takes(group_of(peer, self._grant_of), 1.0, self._clock())

    def _case(self, key: Key) -> Case | None:
        """What is known of a commit; None if nothing is."""
        return self._alleged.get(key) or self._verdicts.proof(key) or self._cases.get(key)

    def _is_old(self, case: Case) -> bool:
        return self._clock() - case.since > JOIN * self._wait_s

    def _give(self, to: str, case: Case) -> None:
        """Send a commit's copies to a peer, but a second time only after a copy got lost or the peer restarted."""

        def answered(outcome: Outcome) -> None:
            if isinstance(outcome, Unreachable):
                case.given[to] = True

        lacks = case.given.get(to)
        if lacks is None or (lacks and self._is_favoured(to)):
            case.given[to] = False
            for author, payload in case.copies.items():
                self._outbox.put(to, wire.pack(Copy(case.shard, case.digest, author), self._token), payload, answered)

    def expects(self, copy: Copy) -> bool:
        """Whether this peer has asked for this copy. Another peer may have sent the copy already."""
        case = self._case((copy.shard, copy.digest))
        return case is not None and case.asked and any(counted.peer == copy.author for counted in case.counted)

    def take(self, copy: Copy) -> None:
        """Take a copy that this peer has asked for.

        Raises:
            Refusal: the bytes aren't those that the author sealed.
        """
        case = self._case((copy.shard, copy.digest))
        if case is None or case.over or copy.author not in case.missing():
            return
        seal = next(seal for counted, seal in case.seals() if counted.peer == copy.author)
        if not is_digest_of(seal, copy.payload):
            raise Refusal("the copy isn't what its author sealed")
        case.copies[copy.author] = copy.payload
        self._examiner.came.set()

    # -- accusations

    def accused(self, sender: str, said: Accusation) -> None:
        """Handle another peer's accusation: audit the commit, unless it was audited here before.

        Raises:
            Refusal: the accused aggregator didn't make the commit, or the sender accuses too many, or has accused
                another one wrongly before.
        """
        verdicts, key = self._verdicts, (said.shard, said.digest)
        if said.aggregator in (self._me, sender) or said.aggregator in self.expelled or not self._rate:
            return
        if sender in verdicts.mistaken:
            raise Refusal("an earlier accusation by the sender was refused, so no more are heard")
        verdicts.accused(said.aggregator, sender)
        case = self._alleged.get(key) or self._cases.get(key)
        if case is None or (self._is_old(case) and not case.begun) or (case.over and case.missing()):
            if not said.shown or not self._concerns(said):
                self._settle()
                return
            if sum(sender in c.accusers and not c.over for c in self._alleged.values()) >= PROOFS_MAX:
                raise Refusal("the sender accuses too many commits at a time")
            case = self._alleged[key] = self._read(said)
        case.accusers.add(sender)
        self._begin(case)
        if case.right:
            self._acquit(case, "the commit is right")
        self._settle()

    def _concerns(self, said: Accusation) -> bool:
        """Whether this peer knows the aggregator, or holds a state that grew from the commit. Otherwise peers could
        invent aggregators and their lies without end."""
        state = self._logs.look_at(said.shard).state
        return self._roster.known(said.aggregator) or (
            state is not None and state.history.get(said.epoch) == said.digest
        )

    def _read(self, said: Accusation) -> Case:
        """Make an accused commit's case. Raises Refusal if the accused aggregator can't have made this commit."""
        shard, counted = said.shard, said.counted
        sealed = self._seals.opened(shard, said.epoch - 1, said.base, said.digest, said.aggregator, counted, said.seal)
        state = self._logs.look_at(shard).state
        known = len(self._roster.members) + (0 if state is None else len(state.counted))
        if len(counted) > known + STRANGERS_MAX:
            raise Refusal("the commit counts more peers than the run can have")
        if sealed is None or not counted or not all(WEIGHT_MIN <= c.weight <= WEIGHT_MAX for c in counted):
            raise Refusal("this is no commit that the accused aggregator made")
        nbytes, now = len(counted) * self._work.nbytes_of_contribution(shard), self._clock()
        return Case(shard, said.base, said.digest, said.epoch, said.aggregator, counted, sealed, nbytes, since=now)

    def _acquit(self, case: Case, why: str) -> None:
        """Refuse the accusations of this commit, and ignore its accusers from now on: their machines are faulty, or
        they lie."""
        for peer in case.accusers:
            self._refusals.count(peer, f"its accusation of {case.aggregator} is refused: {why}")
        self._verdicts.acquitted(case.accusers)
        case.accusers.clear()

    def _tell(self) -> None:
        """Send this peer's accusations to each live peer that holds a state, each accusation once in a life of that
        peer."""
        roster, to_tell = self._roster, self._verdicts.to_tell()
        lives = {p: s.incarnation for p in roster.alive() if (s := roster.summary(p)) is not None and s.epochs}
        told = {(case.key, peer, life) for case in to_tell for peer, life in lives.items() if peer != case.aggregator}
        for case in to_tell:
            of = case.shard, case.base, case.epoch, case.digest, case.aggregator, case.counted
            header = wire.pack(Accusation(*of, case.sealed.pack(), case.proves), self._token)
            for key, peer, _ in sorted(told - self._told):
                if key == case.key:
                    case.given |= {peer: True} if peer in case.given else {}
                    self._outbox.put(peer, header)
        self._told = told

    def _settle(self) -> None:
        """Tell others which lies this peer found. Expel the aggregators whose lies another peer found too, or no other
        peer could find. If others could have confirmed a lie, and none has in time, doubt this peer's own machine."""
        verdicts, now, able = self._verdicts, self._clock(), self._roster.holds_state
        self._tell()
        others = {peer for peer in self._roster.alive() if able(peer)} - verdicts.mistaken
        for finding in verdicts.settle(lambda aggregator: others - {aggregator}):
            self._events.post(Expelled(finding.case.aggregator, finding.lie))
        if (alone := verdicts.overdue(now)) and not self.doubt:
            verdicts.doubt = (
                "this peer's results differ from all others': memory or arithmetic is faulty, or all others lie. No "
                f"other peer confirms the lies that this peer found in commits of {', '.join(alone)}"
            )
            mend = "This peer now expels no peer and audits nothing. Test this machine's memory, then restart the peer"
            log.error("%s. %s", self._event_log.named(verdicts.doubt), mend)
            self._event_log.note("doubt", verdicts.doubt)

    # -- audits

    async def serve(self) -> None:
        """Audit the commits that are due, until cancelled."""
        due = (self._by_lot, self._wanted)
        await asyncio.gather(*(self._audit_in_turn(queue) for queue in due for _ in range(AT_ONCE)), self._tend())

    async def _tend(self) -> None:
        """Now and then, forget old commits, and tell newcomers which peers were expelled."""
        while True:
            await asyncio.sleep(LOOK * self._wait_s)
            now = self._clock()
            self._examiner.contact.look(self._roster.alive(), now)
            self._cases.forget(now)
            old = [key for key, case in self._alleged.items() if case.over and now - case.since > KEEP * self._wait_s]
            for key in old:
                del self._alleged[key]
            self._verdicts.forget(self._roster.known)
            self._settle()

    def _begin(self, case: Case) -> None:
        wanted = bool(case.askers or case.accusers)
        if wanted and not case.wanted:  # it may be in the other queue, too
            self._wanted.put_nowait(case)
        elif not case.begun:
            self._by_lot.put_nowait(case)
        case.begun, case.wanted = True, case.wanted or wanted

    async def _audit_in_turn(self, due: asyncio.Queue[Case]) -> None:
        while True:
            case = await due.get()
            if case.taken:
                continue
            case.taken = True
            if not case.wanted and (self.doubt or not self._examiner.is_young(case)):
                case.over = True  # after a wait behind other audits, its contributions may be gone
                continue
            lie = await self._examiner.lie(case)
            case.over = True
            if not case.missing():
                for asker in case.askers:
                    self._give(asker, case)
            if self.doubt:
                continue
            if lie:
                self._verdicts.finds(case, lie, self._clock())
                self._settle()
                if self._alleged.get(case.key) is case and not self._verdicts.finding(case):
                    case.copies = {}  # one lie of each aggregator is enough to show
            elif self._alleged.get(case.key) is case:
                self._acquit(case, "the commit is right" if case.right else "the contributions were not shown")
                case.copies = {}
            elif case.right:
                self._acquit(case, "the commit is right")
