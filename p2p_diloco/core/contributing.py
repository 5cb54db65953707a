"""What this peer's trainer has merged, which shards its present exchange sends, and what it should contribute next.

Law: one exchange is under way at a time, and a contribution is made on the version that was merged last. `shard`
decides what happens to a contribution in the log, `carry` what progress is kept for a later one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from .carry import Carried
from .events import Contribute, Effect, Load, Loaded, Release
from .lending import weight_of, with_uses
from .lives import incarnation_after
from .logs import Logs, PerShard
from .messages import Contribution
from .rules import Rules
from .schedule import fragment_by_log
from .shard import ShardLog
from .state import grown_from
from .submitting import Submitting
from .synchronous import SynchronousLog
from .version import ContributionId, Version, digest_of


class Contributing:
    """This peer's own trainer as the core sees it: merges, contributions, and the exchange under way."""

    def __init__(self, me: str, rules: Rules, logs: Logs, incarnation: int) -> None:
        self.me, self.rules, self.logs = me, rules, logs
        self.incarnation, self.sequence = incarnation, 0
        self.carried = [Carried() for _ in logs]
        self.flight: dict[int, Version] | None = None  # the shards of the exchange under way, with their bases
        self.to_land: deque[int] = deque()  # the same shards as a queue; a shard whose wait is over goes to the end
        # fragment → different epochs of its shards; the trainer no longer waits for these to become equal
        self.tolerated: dict[int, tuple[int, ...]] = {}
        self.turn = 0  # asynchronous: number of contributions so far; it selects the fragment that is due
        self.left = PerShard(logs, self._leaves_behind)

    # -- questions

    @property
    def next_id(self) -> ContributionId:
        """The id of the next contribution, unless this peer's incarnation is raised before then."""
        return ContributionId(self.incarnation, self.sequence + 1)

    @property
    def merged(self) -> tuple[int, str]:
        """The (epoch, digest) of the state that the trainer merged last. The digest is empty if the shards of a
        fragment are at different epochs, because such a mixture is no state of the run. (0, "") if none was."""
        bases = [carried.base for carried in self.carried]
        versions = [base for base in bases if base is not None]
        if not versions or len(versions) < len(bases):
            return 0, ""
        even = all(len({versions[s].epoch for s in shards}) == 1 for shards in self.rules.fragments)
        whole = even or self.rules.asynchronous or self.logs.ended
        return min(v.epoch for v in versions), digest_of(v.digest for v in versions) if whole else ""

    @property
    def merged_samples(self) -> int:
        """How many samples are counted in the state that the trainer merged last: the lowest number over all shards."""
        return min((carried.base.samples if carried.base is not None else 0) for carried in self.carried)

    @property
    def left_behind(self) -> bool:
        """Whether the present state of any shard does not descend from the version that the trainer merged last."""
        return bool(self.left.now())

    def _leaves_behind(self, log: ShardLog) -> bool | None:
        """Return True if the shard's present state does not descend from the version that the trainer merged last; else
        None."""
        base = self.carried[log.shard].base
        return None if log.state is None or base is None or grown_from(log.state, base) else True

    def counted(self, shard: int) -> ContributionId | None:
        """Return the id of this peer's last contribution that the shard's state counts; None if it counts none."""
        state = self.logs[shard].state
        return None if state is None else state.counted.get(self.me)

    def behind(self, shards: Sequence[int]) -> list[int | None]:
        """In asynchronous mode, return the staleness of this peer's last submission to each of these shards; None for a
        shard that did not count it."""
        return [own.behind for shard in shards if isinstance(own := self.logs[shard].own, Submitting)]

    def uncounted(self, shards: Sequence[int]) -> list[str]:
        """In asynchronous mode, return why some of these shards did not count this peer's last submission."""
        own = (self.logs[shard].own for shard in shards)
        return sorted({sent.uncounted for sent in own if isinstance(sent, Submitting)} - {""})

    # -- merging

    @property
    def uneven(self) -> bool:
        """Whether a merge should wait because the shards of a fragment are at different epochs. It should not wait if
        an earlier merge has already waited because of the same epochs (a repaired shard stays ahead for a whole round),
        or if a shard at the lowest epoch waits for this trainer's contribution."""
        if self.rules.asynchronous or self.flight is not None or not self.logs.whole:
            return False
        return any(
            self.tolerated.get(fragment) != epochs and not self._is_awaited(fragment, epochs[0])
            for fragment, epochs in self.logs.uneven().items()
        )

    def _is_awaited(self, fragment: int, epoch: int) -> bool:
        """Whether any shard of this fragment, at this epoch, waits for this peer's contribution."""
        logs = (self.logs.look_at(shard) for shard in self.rules.fragments[fragment])
        at_epoch = (log for log in logs if log.version is not None and log.version.epoch == epoch)
        return any(isinstance(log, SynchronousLog) and log.awaits_me for log in at_epoch)

    def tolerate(self) -> None:
        """Record which fragments now have shards at different epochs, and which epochs. The trainer no longer waits for
        these epochs to become equal."""
        self.tolerated = self.logs.uneven()

    def merge(self) -> Load:
        """Return the answer to the trainer's Merge: which shards to merge now, and which to contribute to next."""
        if self.flight is not None or not self.logs.whole:
            return Load((), ())
        loads = []
        for log, carried in zip(self.logs, self.carried, strict=True):
            # a refused contribution is carried or dropped even if nothing newer has arrived since the last merge
            own, news = log.own, log.version != carried.base or log.own.refusals > 0
            if log.state is not None and news and own.loads(log.state, carried.base):
                carried.sends, own.refusals = carried.sends + own.refusals, 0
                kin, given_up = not self._leaves_behind(log), own.gives_up(carried)
                carry = carried.merge(log.state.version, self.counted(log.shard), kin=kin, given_up=given_up)
                loads.append(Loaded(log.shard, log.state.version, carry))
        due = self.due()
        for shard in due:
            self.logs[shard].withdraw()
        return Load(tuple(loads), due)

    def due(self) -> tuple[int, ...]:
        """Return the shards to which the trainer should contribute next."""
        if self.rules.asynchronous:
            return self._due_in_turn()
        lowest = self._lowest()
        if lowest is None:
            return ()
        return tuple(s for s in self.rules.fragments[lowest[0]] if self._stands_at(self.logs[s]) == lowest)

    def _lowest(self) -> tuple[int, int] | None:
        """Return (fragment, epoch) of the shards that are due next: those shards of the fragment that are at this
        epoch. None if the run has ended."""
        epochs = self.logs.open_epochs()
        fragment = fragment_by_log(epochs)
        epoch = None if fragment is None else epochs[fragment]
        return None if fragment is None or epoch is None else (fragment, epoch)

    @staticmethod
    def _stands_at(log: ShardLog) -> tuple[int, int] | None:
        """Return (fragment, epoch) of a shard; None if this replica holds no state of the shard, or the run has ended
        for it."""
        return None if log.version is None or log.final else (log.fragment, log.version.epoch)

    def _due_in_turn(self) -> tuple[int, ...]:
        """In asynchronous mode, return the shards of the fragment whose turn it is. Turns are counted, because epochs
        do not tell to which fragments this peer has contributed."""
        count = len(self.rules.fragments)
        for fragment in range(self.turn, self.turn + count):
            if due := tuple(s for s in self.rules.fragments[fragment % count] if not self.logs[s].final):
                return due
        return ()

    # -- sending

    def contribute(self, event: Contribute, now: float) -> list[Effect]:
        """Send the trainer's pseudo-gradients to the aggregators of their shards."""
        if self.rules.asynchronous:
            return self._submit(event, now)
        self.sequence += 1
        id = ContributionId(self.incarnation, self.sequence)
        flight: dict[int, Version] = {}
        effects: list[Effect] = []
        for shard, payload in zip(event.shards, event.payloads, strict=True):
            log, carried = self.logs[shard], self.carried[shard]
            oldest = carried.send(id)
            if log.version is None or log.version != carried.base:
                # the base changed while the pseudo-gradient was computed: the progress is carried, as if not counted
                continue
            flight[shard], carried.sends = log.version, carried.sends + 1
            mine = Contribution(shard, log.version, id, oldest, event.weight, event.samples, payload)
            effects += log.contribute(with_uses(mine, event, self.rules), now)
        if not flight:
            return [Release(sent=False)]
        self._take_off(flight)
        return effects

    def _submit(self, event: Contribute, now: float) -> list[Effect]:
        """In asynchronous mode, send the trainer's pseudo-gradients as submissions. Each one has weight 1, unless
        it is empty in a run with data, and can be counted on any later version of its lineage."""
        self.sequence, self.turn = self.sequence + 1, self.turn + 1
        id = ContributionId(self.incarnation, self.sequence)
        bases, effects = dict[int, Version](), list[Effect]()
        for shard, payload in zip(event.shards, event.payloads, strict=True):
            log, carried = self.logs[shard], self.carried[shard]
            assert isinstance(log.own, Submitting)
            oldest = carried.send(id)
            base = log.own.base_of(log.state, carried.base, carried.oldest_base)
            if base is not None:
                bases[shard] = carried.oldest_base = base  # the next submission names this base if this one is refused
                mine = Contribution(shard, base, id, oldest, weight_of(event), event.samples, payload)
                effects += log.contribute(with_uses(mine, event, self.rules), now)
        self._take_off(bases)
        return effects if bases else [Release(sent=False)]

    def _take_off(self, flight: dict[int, Version]) -> None:
        """Record the exchange that now begins: its shards, with the base of each."""
        self.flight, self.to_land = flight or None, deque(flight)

    # -- what follows

    def landed(self) -> bool:
        """Return whether the exchange that was under way has just ended. If so, record that none is under way."""
        if self.flight is None or self._flying(self.flight):
            return False
        self.flight = None
        return True

    def _flying(self, flight: dict[int, Version]) -> bool:
        """Whether the exchange under way still waits for one of its shards. After a fork another fragment may have
        become due: the wait ends then, too, and the trainer goes on with that fragment. A commit may still count the
        contribution that is under way. If none does, the next contribution carries its progress."""
        lowest = self._lowest()
        for _ in flight:
            log = self.logs[self.to_land[0]]
            due = lowest is not None and self._stands_at(log) == lowest
            if log.own.goes_on(log.state, flight[log.shard], due):
                return True
            self.to_land.rotate(-1)
        return False

    def left_out(self, shard: int, base: Version) -> bool:
        """Return whether this shard is due, but not part of the exchange under way, because it has joined another
        lineage. If so, end the exchange: else peers could wait for each other without end, each in another shard."""
        log, flight = self.logs[shard], self.flight
        if flight is None or log.version != base or flight.get(shard) == base or self._stands_at(log) != self._lowest():
            return False
        self.flight = None
        return True

    def renew_incarnation(self, shards: Iterable[int]) -> None:
        """Raise this peer's incarnation if one of these shards counts a contribution with a higher id than this peer
        has used. New contributions with lower ids would never be counted."""
        for shard in shards:
            counted = self.counted(shard)
            if counted is not None and counted > ContributionId(self.incarnation, self.sequence):
                self.incarnation, self.sequence = incarnation_after(counted.incarnation, self.incarnation), 0
