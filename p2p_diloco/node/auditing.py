"""Audits: now and then a peer computes another peer's mean again, from the contributions that it averages.

Law: a peer draws by lot, when it applies a commit, which of the commit's means it audits; no other peer can know the
result. The contributions come from the mean's owner or from any peer that has them, because their authors have signed
them. The mean depends on them alone, bit for bit, so a different mean under the owner's signature proves to every peer
that the owner lies, and no vote is needed. A live owner that shows no peer what it averaged is found to lie, too.

    an auditor      draws the lot; asks the owner, and then all others        Audit
    a peer asked    gives the contributions, or audits the mean itself        Copy, for each contribution
    a wrong mean    the auditor tells all others, now and when they join      Accusation
    each of them    audits the mean itself, tells the others, expels the owner once another peer finds the lie

Two statements that contradict each other under one peer's signatures prove a lie, too, and expel at once: Contradicts.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from random import SystemRandom

from p2p_diloco.core.events import Apply, Average, Averaged, Expelled
from p2p_diloco.core.messages import Choice, Mean
from p2p_diloco.core.state import chain_at, key_of, rooted
from p2p_diloco.core.version import Version
from p2p_diloco.net.interface import Refusal
from p2p_diloco.net.shares import Budget
from p2p_diloco.net.signing import octets, unpack
from p2p_diloco.node.common import Common
from p2p_diloco.node.examining import LOOK, Case, Cases, Examiner
from p2p_diloco.node.fields import HASH_DIGITS, decoded, encoded
from p2p_diloco.node.headers import packed
from p2p_diloco.node.inbox import group_of
from p2p_diloco.node.signatures import Statement, hash_of
from p2p_diloco.node.verdicts import PROOFS_MAX, Remembered, Verdicts, contradict, lie_of
from p2p_diloco.node.wire import Accusation, Audit, Contradicts, Copy, OfMean
from p2p_diloco.tensors.mean import WEIGHT_MAX, WEIGHT_MIN

SILENT = 3
"""How long an auditor waits for the next copy, in `heartbeat_timeout`s, besides the time that a transfer may take."""
JOIN, KEEP = 1.5, 4
"""JOIN: the greatest age of a commit whose means this peer audits at another peer's request. KEEP: how long means are
kept; their contributions, half as long. Both are multiples of an auditor's wait for the next copy."""
PATIENCE = 4
"""How long others may take to find the same lie, as a multiple of an auditor's wait for the next copy."""
USUAL = 24
"""The number of slices of a fragment for which `audit_rate` holds. With fewer slices an owner makes fewer means in a
round, and the model is small, so each mean is audited more often."""
AT_ONCE = 2
"""The most audits at a time; others wait. The audits that other peers wait for have a queue of their own: else an
accusation would wait behind audits by lot whose owner shows nothing, and the accusers split off meanwhile."""
FAVOURS_AT_ONCE, FAVOUR_EVERY_S = 4, 60.0
"""How many favours the peers of one grant (in an open run: each peer) may ask of this one at once, and in how many
seconds they may ask for one more. A favour is an audit of a third peer's mean, or copies sent once more. A peer that
audits by lot seldom needs one."""
STRANGERS_MAX = 16
"""An accusation is refused if its choice counts more contributions than this peer knows peers, by more than this
number: the copies of the contributions take memory until the audit is over."""
TOLD_BYTES_MAX = 2**21
"""The longest choice in an accusation, and the longest contradiction."""

log = logging.getLogger(__name__)

EXPELLED = "this peer has expelled the sender"
"""The beginning of the refusal of an expelled peer's messages."""


class Audits:
    """Audits other peers' means, and answers their audits. If `audit_rate` is 0, it does nothing."""

    def __init__(self, common: Common) -> None:
        self._inbox, self._signatures = common.inbox, common.signatures
        self._work, self._outbox, self._events = common.work, common.outbox, common.events
        self._replica, self._token = common.replica, common.run.token
        self._roster, self._refusals, self._event_log = self._replica.roster, common.refusals, common.event_log
        self._rules, config = common.run.rules, common.run.config
        fewest = min(map(len, self._rules.fragments))
        self._me, self._rate = common.transport.peer_id, config.audit_rate * max(1.0, USUAL / fewest)
        longest = max(map(self._work.nbytes_of_contribution, range(self._rules.slices)))
        self._wait_s = SILENT * config.heartbeat_timeout + common.transport.limits.transfer_timeout_s(longest)
        self._cases = Cases(self._me, KEEP * self._wait_s)
        self._examiner = Examiner(common, self._cases, self._wait_s)
        self._lot, self._clock = SystemRandom(), asyncio.get_running_loop().time
        self._by_lot: asyncio.Queue[Case] = asyncio.Queue()
        self._wanted: asyncio.Queue[Case] = asyncio.Queue()  # other peers wait for these
        # means that others call lies, and whose commits this peer never saw or has forgotten
        self._alleged: dict[OfMean, Case] = {}
        self.verdicts, self._favours = Verdicts(PATIENCE * self._wait_s), Budget(FAVOURS_AT_ONCE, 1 / FAVOUR_EVERY_S)
        # each accusation, and each peer that contradicts itself, with the peer that was told and its incarnation
        self._told = set[tuple[OfMean | str, str, int]]()
        self._statements, self._contradictions = Remembered(self._token), dict[str, Contradicts]()
        if self._rate:
            self._signatures.saw = self._saw

    # -- what the loop tells

    def made(self, effect: Average, averaged: Averaged) -> None:
        """Keep what this peer's own mean was computed from."""
        if not self._rate or effect.choice is None:
            return
        mean = OfMean(effect.fragment, effect.key, effect.number, self._me, averaged.hash)
        case = self._case_of(mean, effect.base, averaged.seal, effect.choice.bare())
        # this peer's own contribution is signed only when it is sent
        signed = ((peer, self._signatures.signed(r) if peer == self._me else r) for peer, r in effect.choice.entries)
        case.readys = dict(signed)
        case.copies = {part.author: part.payload for _, part in effect.slices}
        self._cases.made(case, self._clock())

    def applied(self, effect: Apply) -> None:
        """Remember the means of a commit that was applied here, and draw by lot which of them to audit."""
        if not self._rate:
            return
        commit, chance = effect.commit, self._rate / max(1, len(self._roster.alive()))
        means = [
            self._case_of(OfMean(m.fragment, m.key, m.number, m.owner, m.hash), m.base, m.seal, commit.choice)
            for m in effect.means
        ]
        for case in self._cases.applied(commit.fragment, commit.key, means, self._clock()):
            if not self.verdicts.doubt and self._lot.random() < chance:
                self._begin(case)

    def _case_of(self, mean: OfMean, base: Version, seal: bytes, choice: Choice) -> Case:
        index = self._rules.fragments[mean.fragment][mean.number]
        weighted = sum(ready.weight > 0 for _, ready in choice.entries)
        return Case(mean, base, seal, choice, weighted * self._work.nbytes_of_contribution(index))

    # -- what others ask and answer

    def asked(self, sender: str, audit: Audit) -> None:
        """Handle another peer's request for the contributions to a mean. If this peer doesn't have them, it gets them
        by an audit of its own, and then sends them.

        Raises:
            Refusal: this peer has no contributions to the mean and can't get them, or the commit is too old, or this
                peer audits another mean for the sender, or has done so too often.
        """
        case = self._case(audit.mean)
        if case is None or (case.missing() and (case.over or case.owner == self._me)):
            raise Refusal("the contributions to this mean are not kept here")
        if not case.missing():
            self._give(sender, case)
            return
        if self._is_old(case):
            raise Refusal("this mean is too old to be audited")
        if any(other.missing() and sender in other.askers for other in self._cases if other is not case):
            raise Refusal("this peer audits another mean at the sender's request")
        if not case.begun and not self._is_favoured(sender):
            raise Refusal("this peer has audited many means for the sender, or others with its invitation, lately")
        case.askers.add(sender)
        self._begin(case)

    def _is_favoured(self, peer: str) -> bool:
        """Take a favour from what the peer, with all others of its grant, may ask; False if there is none left."""
        return self._favours.takes(group_of(peer, self._inbox.grant_of), 1.0, self._clock())

    def _case(self, mean: OfMean) -> Case | None:
        """What is known of a mean; None if nothing is."""
        return self._alleged.get(mean) or self.verdicts.proof(mean) or self._cases.get(mean)

    def _is_old(self, case: Case) -> bool:
        return self._clock() - case.since > JOIN * self._wait_s

    def _give(self, to: str, case: Case) -> None:
        """Send the copies for a mean to a peer. In one life of the peer, a second time is a favour."""
        if to not in case.given or self._is_favoured(to):
            case.given.add(to)
            for author, payload in case.copies.items():
                ready = case.readys[author]
                header = packed(Copy(case.mean, author, ready.seal), self._token)
                body = memoryview("".join(ready.hashes).encode() + bytes(payload))
                self._outbox.put(to, header, body)

    def nbytes(self, message: Audit | Copy | Accusation | Contradicts) -> int:
        """The length in bytes of a message's payload.

        Raises:
            Refusal: the run has no such slice, this peer did not ask for the copy, or what is told is too long.
        """
        if isinstance(message, Accusation | Contradicts) and not 0 <= message.nbytes <= TOLD_BYTES_MAX:
            raise Refusal(f"it has {message.nbytes} bytes, at most {TOLD_BYTES_MAX} are allowed")
        if isinstance(message, Contradicts):
            return message.nbytes
        mean, fragments = message.mean, self._rules.fragments
        if not (0 <= mean.fragment < len(fragments) and 0 <= mean.number < len(fragments[mean.fragment])):
            raise Refusal(f"the run has no slice {mean.number} of fragment {mean.fragment}")
        match message:
            case Copy():
                case = self._case(mean)  # another peer may have sent the copy already
                if case is None or not case.asked or message.author not in dict(case.counted):
                    raise Refusal("this peer did not ask for this copy")
                slices = fragments[mean.fragment]
                return HASH_DIGITS * len(slices) + self._work.nbytes_of_contribution(slices[mean.number])
            case Accusation(nbytes=nbytes):
                return nbytes
        return 0

    def take(self, copy: Copy) -> None:
        """Take a copy that this peer has asked for.

        Raises:
            Refusal: its author has not signed these bytes for the mean's choice.
        """
        case = self._case(copy.mean)
        if case is None or case.over or copy.author not in case.missing():
            return
        length = HASH_DIGITS * len(self._rules.fragments[copy.mean.fragment])
        hashes, payload = bytes(copy.payload[:length]).decode("ascii", "replace"), copy.payload[length:]
        told = tuple(hashes[at : at + HASH_DIGITS] for at in range(0, length, HASH_DIGITS))
        entry = dict(case.counted)[copy.author]
        ready = rooted(replace(entry, hashes=told, seal=copy.seal))
        if ready.root != entry.root or hash_of(payload) != told[copy.mean.number]:
            raise Refusal("the copy isn't what its author signed")
        self._signatures.check(copy.author, ready)
        case.readys[copy.author], case.copies[copy.author] = ready, payload
        self._examiner.came.set()

    # -- accusations

    def accused(self, sender: str, said: Accusation) -> None:
        """Handle another peer's accusation: audit the mean, unless it was audited here before.

        Raises:
            Refusal: the accused owner didn't sign the mean, or the sender accuses too many, or has accused another
                one wrongly before.
        """
        verdicts, mean = self.verdicts, said.mean
        if mean.owner in (self._me, sender) or mean.owner in self.verdicts.expelled or not self._rate:
            return
        if sender in verdicts.mistaken:
            raise Refusal("an earlier accusation by the sender was refused, so no more are heard")
        verdicts.accused(mean.owner, sender)
        case = self._alleged.get(mean) or self._cases.get(mean)
        if case is None or (self._is_old(case) and not case.begun) or (case.over and case.missing()):
            if said.payload is None or not self._concerns(said):
                self._settle()
                return
            if sum(sender in c.accusers and not c.over for c in self._alleged.values()) >= PROOFS_MAX:
                raise Refusal("the sender accuses too many owners at a time")
            case = self._alleged[mean] = self._read(said)
        case.accusers.add(sender)
        self._begin(case)
        if case.right:
            self._acquit(case, "the mean is right")
        self._settle()

    # -- contradictions

    def _saw(self, said: Statement) -> None:
        """Remember what another peer has signed. If it contradicts what that peer signed before, expel the peer."""
        if said[0] != self._me and (found := self._statements.saw(said)) is not None:
            self._proven(found)

    def shown(self, message: Contradicts) -> None:
        """Handle two statements that another peer has been shown to have signed.

        Raises:
            Refusal: they prove nothing.
        """
        try:
            first, seal, second, other = map(octets, unpack(message.payload, 4))
            signed = [
                self._signatures.holds((message.peer, message.kind, *said)) for said in ((first, seal), (second, other))
            ]
            proves = all(signed) and contradict(message.kind, first, second, self._token)
        except ValueError:
            proves = False
        if not proves:
            raise Refusal("these statements prove no lie")
        if self._rate and message.peer != self._me:
            self._proven(message)

    def _proven(self, found: Contradicts) -> None:
        """Expel a peer that has contradicted itself, and tell all others, now and when they join."""
        if found.peer in self.verdicts.expelled:
            return
        self.verdicts.expelled[found.peer] = lie_of(found)
        self._contradictions[found.peer] = found
        if len(self._contradictions) > PROOFS_MAX:
            del self._contradictions[next(iter(self._contradictions))]
        self._events.post(Expelled(found.peer, lie_of(found)))
        self._tell()

    def _concerns(self, said: Accusation) -> bool:
        """Whether this peer knows the owner, or holds a state that grew from the mean's base. Otherwise peers could
        invent owners and their lies without end."""
        state = self._replica.logs[said.mean.fragment].state
        grew = state is not None and chain_at(state.links, said.base.epoch) == said.base.chain
        return said.mean.owner in self._roster.peers or grew

    def _read(self, said: Accusation) -> Case:
        """Make an accused mean's case. Raises Refusal if the accused owner can't have made this mean."""
        mean, of = said.mean, Refusal("this is no mean that the accused owner made")
        try:
            choice = decoded(said.payload, Choice)
        except Refusal:
            raise of from None
        if key_of(mean.fragment, said.base, choice) != mean.key:
            raise of
        signed = Mean(mean.fragment, said.base, mean.key, mean.number, mean.hash, mean.owner, seal=said.seal)
        self._signatures.check(mean.owner, signed)
        state = self._replica.logs[mean.fragment].state
        known = len(self._roster.peers) + (0 if state is None else len(state.roll))
        case = self._case_of(mean, said.base, said.seal, choice)
        if len(choice.entries) > known + STRANGERS_MAX:
            raise Refusal("the mean counts more peers than the run can have")
        if not case.counted or not all(WEIGHT_MIN <= ready.weight <= WEIGHT_MAX for _, ready in case.counted):
            raise of
        case.since = self._clock()
        return case

    def _acquit(self, case: Case, why: str) -> None:
        """Refuse the accusations of this mean, and ignore its accusers from now on: their machines are faulty, or
        they lie."""
        for peer in case.accusers:
            self._refusals.count(peer, f"its accusation of {case.owner} is refused: {why}")
        self.verdicts.acquitted(case.accusers)
        case.accusers.clear()

    def _tell(self) -> None:
        """Send this peer's accusations to each live peer that holds a state, each accusation once in a life of that
        peer."""
        roster, to_tell = self._roster, self.verdicts.to_tell()
        lives = {p: s.incarnation for p in roster.alive() if (s := roster.summary(p)) is not None and s.heads}
        told: set[tuple[OfMean | str, str, int]] = {(of, p, n) for of in self._contradictions for p, n in lives.items()}
        for liar, peer in sorted((of, p) for of, p, _ in told - self._told if isinstance(of, str)):
            shown = self._contradictions[liar]
            self._outbox.put(peer, packed(shown, self._token), shown.payload)
        told |= {(case.mean, peer, life) for case in to_tell for peer, life in lives.items() if peer != case.owner}
        for case in to_tell:
            proof = memoryview(encoded(case.choice)) if case.proves else None
            said = Accusation(case.mean, case.base, case.seal, 0 if proof is None else proof.nbytes)
            header = packed(said, self._token)
            for peer in sorted(peer for mean, peer, _ in told - self._told if mean == case.mean):
                case.given.discard(peer)
                self._outbox.put(peer, header, proof)
        self._told = told

    def _settle(self) -> None:
        """Tell others which lies this peer found. Expel the owners whose lies another peer found too, or no other
        peer could find. If others could have confirmed a lie, and none has in time, doubt this peer's own machine."""
        verdicts, now, able = self.verdicts, self._clock(), self._roster.holds_state
        self._tell()
        others = {peer for peer in self._roster.alive() if able(peer)} - verdicts.mistaken
        for case in verdicts.settle(lambda owner: others - {owner}):
            self._events.post(Expelled(case.owner, case.lie))
        if (alone := verdicts.overdue(now)) and not self.verdicts.doubt:
            verdicts.doubt = (
                "this peer's results differ from all others': memory or arithmetic is faulty, or all others lie. No "
                f"other peer confirms the lies that this peer found in means of {', '.join(alone)}"
            )
            mend = "This peer now expels no peer and audits nothing. Test this machine's memory, then restart the peer"
            log.error("%s. %s", self._event_log.named(verdicts.doubt), mend)
            self._event_log.note("doubt", verdicts.doubt)

    # -- audits

    async def serve(self) -> None:
        """Audit the means that are due, until cancelled."""
        due = (self._by_lot, self._wanted)
        await asyncio.gather(*(self._audit_in_turn(queue) for queue in due for _ in range(AT_ONCE)), self._tend())

    async def _tend(self) -> None:
        """Now and then, forget old means, and tell newcomers which peers were expelled."""
        while True:
            await asyncio.sleep(LOOK * self._wait_s)
            now = self._clock()
            self._examiner.contact.look(self._roster.alive(), now)
            self._cases.forget(now)
            old = [mean for mean, case in self._alleged.items() if case.over and now - case.since > KEEP * self._wait_s]
            for mean in old:
                del self._alleged[mean]
            self.verdicts.forget(lambda peer: peer in self._roster.peers)
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
            if not case.wanted and (self.verdicts.doubt or not self._examiner.is_young(case)):
                case.over = True  # after a wait behind other audits, its contributions may be gone
                continue
            lie = await self._examiner.lie(case)
            case.over = True
            if not case.missing():
                for asker in case.askers:
                    self._give(asker, case)
            if self.verdicts.doubt:
                continue
            if lie:
                self.verdicts.finds(case, lie, self._clock())
                self._settle()
                if self._alleged.get(case.mean) is case and not self.verdicts.finding(case):
                    case.copies = {}  # one lie of each owner is enough to show
            elif self._alleged.get(case.mean) is case:
                self._acquit(case, "the mean is right" if case.right else "the contributions were not shown")
                case.copies = {}
            elif case.right:
                self._acquit(case, "the mean is right")
