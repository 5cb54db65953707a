"""Each position is used at most once: the table agrees with a plain dictionary through random histories, whatever peers
do, and every position is given out again until it is used."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from p2p_diloco.core import leases
from p2p_diloco.core.leases import DataSet, DataUse, Lease, Table, Tables, Use, after
from p2p_diloco.core.spans import length, taken

DATA = DataSet("train", 100, epochs=3)
RECALL = 8


def check(table: Table) -> None:
    """[0, next) is the disjoint union of used, leased and freed positions."""
    assert not leases.fault((table,))
    parts = [leases.used(table), *([lease.span] for lease in (*table.leases, *table.freed))]
    assert sum(map(length, parts)) == table.next


class History:
    """Random peers: they train on what they hold, sometimes unseen or restarted, and sometimes miss states."""

    def __init__(self, seed: int, epochs: int) -> None:
        self.rng = Random(seed)
        self.data = replace(DATA, epochs=epochs)
        self.tables: Tables = ()
        self.epoch = 0
        self.used: dict[int, str] = {}
        self.conflicts = 0
        self.life = 0
        self.seen: dict[str, Tables] = {}
        self.peers = {name: self._new(name) for name in "abcd"}

    def _new(self, name: str) -> DataUse:
        self.life += 1
        self.seen[name] = self.tables
        return DataUse(self.data, name, self.life, wants=self.rng.choice([5, 20, 30]))

    def commit(self) -> None:
        claims: list[leases.Claim] = []
        for name, use in self.peers.items():
            if self.rng.random() < 0.7:  # the newest state is merged
                self.seen[name] = self.tables
                if use.conflicts(self.tables):
                    self.conflicts += 1
                    use.drop()
            first, _ = taken(use.stock(self.seen[name]), self.rng.choice([0, 3, 10]))
            use.stepped(first)
            said = use.send()
            if leases.objection(self.tables, name, use.life, (said,)):
                continue
            if self.rng.random() < 0.8:
                claims.append((name, use.life, (said,)))
        gone = {name for name in self.peers if self.rng.random() < 0.15}
        before = self.tables
        self.epoch += 1
        self.tables = after(before, claims, gone, self.epoch, RECALL)
        for name, _, uses in claims:
            for start, stop in uses[0].used:
                for x in range(start, stop):
                    assert x not in self.used, f"{x} was used by {self.used[x]}, now by {name}"
                    self.used[x] = name
            self.peers[name].count()
            self.seen[name] = self.tables
        if self.tables:
            check(self.tables[0])
            assert {x for s in leases.used(self.tables[0]) for x in range(*s)} == set(self.used)
        for name in self.peers:
            if self.rng.random() < 0.05:
                self.peers[name] = self._new(name)


@pytest.mark.parametrize("seed", range(40))
def test_every_position_is_used_once_and_all_end(seed: int) -> None:
    """With peers that are taken for dead, restart, and miss commits, a data set of three epochs is complete after
    bounded many commits, and no position was counted twice."""
    history = History(seed, epochs=3)
    for _ in range(600):
        history.commit()
        if history.tables and leases.complete(history.tables[0]):
            break
    assert leases.complete(history.tables[0])
    assert set(history.used) == set(range(300))


@pytest.mark.parametrize("seed", range(5))
def test_without_an_end_low_positions_are_used_first(seed: int) -> None:
    """A data set without end is never complete, and no position stays unused while many others are given out."""
    history = History(seed, epochs=0)
    for _ in range(300):
        history.commit()
    table = history.tables[0]
    assert not leases.complete(table)
    assert table.next - leases.lowest(table) < 1000


def use(*spans: tuple[int, int], wants: int = 10, data: DataSet = DATA) -> Use:
    return Use(data, spans, wants)


def test_a_claim_needs_a_lease_of_the_same_life() -> None:
    """Positions of another peer, of another life, or of no one are refused; own ones, leased or freed, are not."""
    table = Table(DATA, 30, (Lease("a", 1, 0, 10, 1),), (Lease("b", 2, 10, 20, 1),))
    tables = (table,)
    assert not leases.objection(tables, "a", 1, (use((0, 10)),))
    assert not leases.objection(tables, "b", 2, (use((12, 14)),))
    assert leases.objection(tables, "a", 2, (use((0, 10)),))
    assert leases.objection(tables, "b", 2, (use((5, 15)),))
    assert leases.objection(tables, "a", 1, (use((20, 25)),))
    assert leases.objection(tables, "a", 1, (use((29, 31)),))
    assert leases.objection(tables, "a", 1, (use((0, 5), data=replace(DATA, length=7)),))
    assert leases.objection(tables, "a", 1, (use((5, 6), (3, 4)),))
    assert leases.objection(tables, "a", 1, (use(), use()))
    assert not leases.objection(tables, "a", 1, (use(data=replace(DATA, length=7)),))


def test_a_restart_frees_the_old_lease() -> None:
    """The first counted contribution of a new life frees what its earlier life held."""
    tables = after((), [("a", 1, (use(),))], (), 1, RECALL)
    (table,) = after(tables, [("a", 2, (use(),))], (), 2, RECALL)
    assert table.freed == (Lease("a", 1, 0, 10, 2),)
    assert table.leases == (Lease("a", 2, 10, 20, 2),)


def test_a_freed_range_is_spared_for_two_commits() -> None:
    """A peer taken for dead by mistake may still claim what it had; then it is granted before any new position."""
    tables = after((), [("a", 1, (use(),)), ("b", 2, (use(),))], (), 1, RECALL)
    tables = after(tables, [("b", 2, (use((10, 20)),))], ("a",), 2, RECALL)
    assert not leases.objection(tables, "a", 1, (use((0, 10)),))
    assert tables[0].leases == (Lease("b", 2, 20, 30, 2),)
    tables = after(tables, [("b", 2, (use((20, 30)),))], (), 3, RECALL)
    tables = after(tables, [("b", 2, (use((30, 40)),))], (), 4, RECALL)
    assert leases.held(tables[0], "b", 2) == ((0, 10),)
    assert leases.objection(tables, "a", 1, (use((0, 10)),))


def test_at_the_end_each_asker_gets_an_equal_part() -> None:
    """With less left than wanted, no peer gets much more than another."""
    table = Table(replace(DATA, epochs=1), 90)
    data = table.data
    claims = [(name, i, (use(wants=60, data=data),)) for i, name in enumerate("abc")]
    (table,) = after((table,), claims, (), 5, RECALL)
    assert [length([lease.span]) for lease in table.leases] == [4, 4, 2]


def test_a_lease_that_is_never_used_is_recalled_at_the_end() -> None:
    """Once all positions are given out, a live peer that makes no use of its lease loses it."""
    data = replace(DATA, epochs=1)
    tables = after((), [("a", 1, (use(wants=50, data=data),)), ("b", 2, (use(wants=50, data=data),))], (), 1, RECALL)
    tables = after(tables, [("a", 1, (use((0, 50), data=data),))], (), 2, RECALL)
    for epoch in range(3, 11):
        assert not leases.held(tables[0], "a", 1)
        tables = after(tables, [("a", 1, (use(wants=50, data=data),))], (), epoch, RECALL)
    assert leases.held(tables[0], "a", 1) == ((50, 100),)


def test_a_peer_that_wants_all_gets_a_bounded_part() -> None:
    """A peer can't hold more than some times what the others want or hold."""
    data = replace(DATA, length=10**9)
    claims = [("a", 1, (use(data=data),)), ("b", 2, (use(data=data),)), ("liar", 3, (use(wants=2**32, data=data),))]
    (table,) = after((), claims, (), 1, RECALL)
    assert length(leases.held(table, "liar", 3)) == leases.UNUSUAL * 10


def test_a_peer_that_uses_every_second_position_is_stopped() -> None:
    """Each use of a liar cuts its lease into more parts. From a number of them on, uses that would make more are
    refused; those of honest peers are not."""
    data = replace(DATA, length=10**6, epochs=0)
    liar, honest = DataUse(data, "liar", 1, wants=20_000), DataUse(data, "a", 2, wants=20_000)
    tables = after((), [(one.me, one.life, (one.send(),)) for one in (liar, honest)], (), 1, RECALL)
    refused = 0
    for epoch in range(2, 40):
        second = [(x, x + 1) for start, stop in liar.stock(tables) for x in range(start + 1, stop, 2)]
        uses = {"liar": Use(data, tuple(second[: leases.SPANS_MAX]), 20_000)}
        uses["a"] = Use(data, taken(honest.stock(tables), 500)[0], 20_000)
        lives = {"liar": 1, "a": 2}
        why = {peer: leases.objection(tables, peer, lives[peer], (one,)) for peer, one in uses.items()}
        assert not why["a"]
        refused += "too many parts" in why["liar"]
        tables = after(tables, [(p, lives[p], (uses[p],)) for p in uses if not why[p]], (), epoch, RECALL)
    assert refused
    assert len(tables[0].leases) < 1.5 * leases.ENTRIES_MAX


def test_what_is_left_in_many_parts_can_be_used() -> None:
    """What a liar leaves behind in hundreds of parts is granted in portions that one contribution can list."""
    parts = tuple(Lease("liar", 9, 2 * i, 2 * i + 1, 1) for i in range(600))
    data = replace(DATA, length=1200, epochs=1)
    tables: Tables = (Table(data, 1200, (), parts),)
    one = DataUse(data, "a", 1, wants=5000)
    for epoch in range(2, 12):
        one.stepped(one.stock(tables))
        said = one.send()
        assert not leases.objection(tables, "a", 1, (said,))
        tables = after(tables, [("a", 1, (said,))], (), epoch, RECALL)
        one.count()
    assert leases.complete(tables[0])
