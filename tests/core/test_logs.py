"""The logs of all shards: their counts equal a full count, and an event reads only the logs that it concerns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest

from p2p_diloco.core.attendance import Attendance
from p2p_diloco.core.events import Averaged, Contribute, Delivered, Event, Merge, Received, Restore, Stepped
from p2p_diloco.core.logs import Logs, PerShard
from p2p_diloco.core.messages import Commit, Contribution, Held, Plan, Probe, Promise, State, Summary
from p2p_diloco.core.revision import FOUNDED, Revision
from p2p_diloco.core.roster import Roster
from p2p_diloco.core.rules import Rules
from p2p_diloco.core.shard import ShardLog
from p2p_diloco.core.synchronous import SynchronousLog
from p2p_diloco.core.version import ContributionId, ModelVersion, Version, model_version
from tests.core.conftest import dies

RULES = Rules(run="run", fragments=((0, 2), (1, 3, 4)), stop_after_epochs=4)
FRAGMENT_OF = (0, 1, 0, 1, 1)
ANY = Contribution(0, Version(0, 0, 0, ""), ContributionId(1, 1), ContributionId(1, 1), 1.0, 1)
NEXT = Commit(0, Version(0, 0, 0, ""), Version(0, 1, 1, ""), 0, "a", (), Plan((), ("a",)))


def five() -> Logs:
    """The logs of five shards in two fragments, which end after four epochs."""
    roster = Roster("a", RULES, Summary(1, "worker", True, ModelVersion(), (), idle=False))
    attendance = [Attendance(fragment, RULES, roster) for fragment in range(len(RULES.fragments))]
    return Logs(RULES, [SynchronousLog(shard, RULES, roster, attendance[f]) for shard, f in enumerate(FRAGMENT_OF)])


def reach(
    log: ShardLog, epoch: int, samples: int | None = None, generation: int = 0, revision: Revision = FOUNDED
) -> None:
    version = Version(generation, 10 * epoch if samples is None else samples, epoch, f"{log.shard}d{epoch}")
    log.state = State(log.shard, version, 0, Plan((), ("a",)), {}, {}, revision=revision)


def test_counts_agree_with_a_look_at_each_log() -> None:
    """Whichever shards change, in any order, forward or to another lineage."""
    rng, logs = Random(7), five()
    plain: list[ShardLog] = list(logs)
    for _ in range(400):
        for shard in rng.choices(range(5), k=rng.randint(0, 3)):
            log = logs[shard]
            for waiting in (log.round.inbox, log.incoming.early):
                waiting.clear()
                waiting.update(dict.fromkeys(rng.sample("abc", k=rng.randint(0, 3)), ANY))
            log.incoming.commits = dict.fromkeys([Version(0, 0, epoch, "") for epoch in range(rng.randint(0, 2))], NEXT)
            revision = rng.choice([FOUNDED, Revision(1, 0.5, 0.9), Revision(2, 0.7, 0.0)])
            if rng.random() < 0.1:
                log.state = None
            else:
                reach(log, rng.randint(0, 5), rng.randint(0, 50), rng.randint(0, 1), revision)
        versions = tuple(log.version for log in plain)
        assert logs.versions() == versions
        held = [version for version in versions if version is not None]
        assert logs.whole == (len(held) == 5)
        assert logs.ended == all(log.final for log in plain)
        assert logs.revision == min(FOUNDED if log.state is None else log.state.revision for log in plain)
        waiting = [len({*log.round.inbox} - {"a"}) + len(log.incoming) for log in plain]
        assert logs.collected == sum(waiting)
        assert logs.model() == (model_version(held) if logs.whole else ModelVersion())
        by_fragment = [[log for log in plain if log.version is not None and log.fragment == f] for f in (0, 1)]
        lowest = [[log.version.epoch for log in some if log.version is not None] for some in by_fragment]
        if logs.whole:
            assert logs.epochs() == tuple(map(min, lowest))
        still = [[log.version.epoch for log in some if log.version and not log.final] for some in by_fragment]
        assert logs.open_epochs() == [min(epochs, default=None) for epochs in still]
        assert logs.even == (logs.whole and all(len(set(epochs)) <= 1 for epochs in still))


def test_a_log_may_change_after_a_question() -> None:
    """Its log stays dirty until the event is over; a question during the event sees the present value."""
    logs = five()
    log = logs[3]
    reach(log, 1)
    assert logs.versions()[3] == log.version
    reach(log, 2)
    assert logs.versions()[3] == log.version
    assert logs.moved() == [3]


def test_moved_lists_the_shards_whose_version_has_changed_since_the_last_event() -> None:
    """In shard order. A shard that returned to its version has not changed."""
    logs = five()
    for shard in (4, 1):
        reach(logs[shard], 1)
    assert logs.moved() == [1, 4]
    assert logs.moved() == []
    reach(logs[1], 2)
    reach(logs[1], 1)
    reach(logs[0], 1)
    assert logs.moved() == [0]


def test_a_slice_is_taken_like_each_of_its_logs() -> None:
    logs = five()
    logs.moved()
    for log in logs[1:3]:
        reach(log, 1)
    assert logs.moved() == [1, 2]


def test_a_kept_answer_is_asked_again_of_the_logs_that_were_taken() -> None:
    """At first for all logs, and again after `forget`."""
    asked, logs = list[int](), five()

    def epoch(log: ShardLog) -> int | None:
        asked.append(log.shard)
        return None if log.version is None else log.version.epoch

    kept = PerShard(logs, epoch)
    assert kept.now() == {}
    assert sorted(asked) == [0, 1, 2, 3, 4]
    asked.clear()
    reach(logs[2], 7)
    assert kept.now() == {2: 7}
    assert kept.now() == {2: 7}
    assert asked == [2]
    logs[2].state = None
    assert kept.now() == {}
    kept.forget()
    asked.clear()
    kept.now()
    assert sorted(asked) == [0, 1, 2, 3, 4]


def test_the_next_wakeup_follows_the_roster_though_no_log_was_taken(peer: Any) -> None:
    """A claimant waits for promises only while the peers that owe them are alive."""
    a = peer("a", group="abc", round_timeout=0.5)
    for name in "bc":
        a.hear(name, a.contribution(a.held))
    ends = a.replica.next_wakeup()
    assert ends == a.replica.logs[0].waits.deadline < a.replica.next_tick
    a.replica.logs[0].lead.promised_by = set()
    assert a.replica.next_wakeup() == a.replica.next_tick
    for name in "bc":
        dies(a.replica.roster, name)
    assert a.replica.next_wakeup() == ends


def test_a_count_of_an_earlier_life_raises_the_incarnation_whichever_shard_came_first(peer: Any, life: int) -> None:
    """Also if that shard arrived while others were missing."""
    n = peer("a", epoch=None, group="a", fragments=((0, 1),))
    n.feed(Restore((n.state(0, 1, counted=(("a", ContributionId(life + 9, 4)),)),)))
    assert n.replica.own.incarnation == life
    n.feed(Restore((n.state(1, 1),)))
    assert n.replica.own.incarnation > life + 9


# -- what an event costs


class Visits:
    """Counts how often anything of a log is read while ``count`` runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen, self.counting, plain = 0, False, ShardLog.__getattribute__

        def read(log: ShardLog, name: str) -> Any:
            self.seen += self.counting
            return plain(log, name)

        monkeypatch.setattr(ShardLog, "__getattribute__", read)

    def count(self, run: Callable[[], Any]) -> int:
        self.seen, self.counting = 0, True
        run()
        self.counting = False
        return self.seen


def round_of_one(p: Any, shards: int) -> list[Event]:
    """One shard's round, as its aggregator sees it, with other events in between; all shards are exchanged."""
    for shard in range(shards):
        p.hear("b", Promise(shard, p.held, 0))  # asynchronous: asked of all, after a restart
    p.feed(Stepped(0.5))
    p.feed(Merge())
    p.feed(Contribute(tuple(range(shards)), weight=2.0, samples=5, payloads=("Δ",) * shards))
    last = shards - 1
    base, version = p.held, p.version(2, "new", samples=p.held.samples + 5)
    commit = Commit(last, base, version, 0, "a", (), p.plan("ab"))
    return [
        Received("b", p.contribution(base, shard=last)),
        Averaged(last, base, 1, "new", "mean"),
        Received("b", Held(last, version)),
        Delivered("b", commit),
        Stepped(0.5),
        Delivered("b", Probe(p.about())),
    ]


def happen(p: Any, event: Event) -> None:
    """Feed an event, and ask all that a node asks after each."""
    p.feed(event)
    replica = p.replica
    assert replica.has_state
    assert replica.epoch == 1
    assert replica.revision == FOUNDED
    assert not replica.own.left_behind
    assert len(replica.versions) == len(replica.logs)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_event_costs_the_same_however_many_shards_there_are(
    mode: str, peer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replica, its next wakeup and a node's questions read only the logs that the event concerns."""
    visits, spent = Visits(monkeypatch), list[list[int]]()
    for shards in (6, 60):
        p = peer("a", group="ab", mode=mode, fragments=(tuple(range(shards)),))
        events = round_of_one(p, shards)
        happen(p, Stepped(0.5))
        spent.append([visits.count(partial(happen, p, event)) for event in events])
        assert p.replica.versions[-1].digest == "new", "the shard's round is over"
    assert spent[0] == spent[1]
    assert max(spent[0]) > 0
