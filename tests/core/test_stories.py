"""Stories of a few peers, told in docs/decisions/0085: rounds, deaths, delays."""

from __future__ import annotations

import pytest

from p2p_diloco.core import claims, leading, outlook
from p2p_diloco.core import events as e
from p2p_diloco.core.messages import Claim, Close, Commit, Mean, Message, Ready, Slice, Told, Vote, Want, What
from p2p_diloco.core.round import Phase
from tests.core.sabotage import fails_if
from tests.core.world import LOST, World, rules


def test_a_quiet_round() -> None:
    """Three peers train round after round: everybody is counted in each, all hold equal tensors, no step is lost, and
    each leads in its turn."""
    world = World("ABC", epoch=3)
    led = set()
    for epoch in range(3, 9):
        world.reach(epoch)
        led.add(world.line[0])
        assert {member.epoch for member in world.peers["A"].state().roll.values()} == {epoch}
    assert led == {"A", "B", "C"}
    assert not world.sent(Claim)
    assert all(not peer.complaints() for peer in world.peers.values())
    world.check()


def test_the_founder_does_not_compute_the_first_round_alone() -> None:
    """The founding names A alone. B and C hold their slices back until A's Close says who owns them: A would need
    memory for all slices of all."""
    world = World("ABC", rules(slices=6, start_peers=3), epoch=1)
    means, slices = world.sent(Mean), [part for part in world.sent(Slice, to="A") if part.base.epoch == 0]
    assert {mean.owner for mean in means if mean.base.epoch == 0} == set("ABC")
    assert len(slices) == 2 * 2  # of B and C each, those that A owns
    came = [(type(m), at) for at, sender, _, m in world.delivered if sender == "A" and isinstance(m, Close | Slice)]
    first = dict(reversed(came))
    assert first[Slice] == first[Close], "A's own slices wait for something after its Close"


def test_who_owns_nothing_is_told_that_the_first_round_is_closed() -> None:
    """B can't be dialled, so A owns all slices, as its founding says. B must hear so: it holds its slices back."""
    world = World("AB", rules(slices=6, start_peers=2))
    world.handle("B", e.Reachable(False))
    world.reach(1)
    assert {mean.owner for mean in world.sent(Mean) if mean.base.epoch == 0} == {"A"}
    assert world.peers["A"].state().roll["B"].epoch == 1
    assert not [want for want in world.sent(Want, to="B") if want.what is What.SLICES], "A had to ask for them"


def test_the_leader_dies_after_one_peer_got_its_commit() -> None:
    """B makes the commit, sends it to C, and dies; C lacks a mean that only A has. A claims, C tells the commit, and
    both reach the version that B made."""
    world = World("ABC", epoch=3)
    b = world.line[0]
    a, c = sorted({"A", "B", "C"} - {b})
    slow = [number for number, owner in enumerate(world.peers[a].state().plan.owners) if owner == b]
    assert slow

    def rule(sender: str, to: str, message: Message) -> float | None:
        if sender == b and isinstance(message, Mean) and to == c and message.base.epoch == 3:
            return LOST  # C never gets B's means from B
        if sender == b and isinstance(message, Commit) and message.base.epoch == 3:
            if to == a:
                return LOST
            world.after(0.05, lambda: world.kill(b))
        return None

    world.rules_of_net.append(rule)
    world.reach(4, b)
    made = world.peers[b].state().version
    world.reach(4, a + c)
    assert world.peers[a].state().version == world.peers[c].state().version == made
    world.check()
    world.reach(6, a + c)
    world.check()


@fails_if(
    leading._may_work, "if peer in log.round.excluded", "return True\n    if peer in log.round.excluded", Commit, 0, 0
)
@pytest.mark.parametrize("kind", [Ready, Slice, Close, Mean, Commit])
@pytest.mark.parametrize("seen", [0, 2])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_anybody_may_die_at_any_message(kind: type, seen: int, place: int) -> None:
    """Whoever dies, after whatever message: the others commit soon, agree, and lose none of their steps."""
    world = World("ABCD", epoch=3)
    victim = world.line[place]
    world.dies_at(victim, kind, seen)
    others = "".join(sorted(set("ABCD") - {victim}))
    world.reach(6, others, seconds=60)
    world.kill(victim)
    world.reach(9, others, seconds=60)
    world.check()
    assert all(log.phase is not Phase.FETCHING for name in others for log in world.peers[name].replica.logs)


@fails_if(claims.told_choice, "return next((choice for", "return None and next((choice for", Commit, 6.0)
@pytest.mark.parametrize("late", [0.5, 4.0])
@pytest.mark.parametrize("kind", [Ready, Slice, Close, Mean, Commit, Claim, Vote])
def test_a_delay_alone_makes_no_fork(kind: type, late: float) -> None:
    """Messages of one kind of one peer are late, again and again: all stay on one lineage."""
    world = World("ABC", epoch=2)
    world.rules_of_net.append(lambda s, t, m: late if s == "B" and isinstance(m, kind) else None)
    world.run(60)
    heads = [world.peers[name].state() for name in "ABC"]
    low = min(state.version.epoch for state in heads)
    assert low >= 5, world.tell()
    assert len({dict(state.links)[low] for state in heads}) == 1
    assert all(not world.peers[name].notes("fork") for name in "ABC")
    world.check()


def test_a_newcomer_is_counted_from_its_second_round() -> None:
    """D joins in the middle of a round, fetches the state from all donors, and is soon counted in each round."""
    world = World("ABC", epoch=3)
    world.run(1.0)
    world.join("D")
    world.reach(5, "D")
    world.reach(8)
    assert world.peers["A"].state().roll["D"].epoch == world.peers["A"].epoch
    world.check()


def test_means_are_kept_until_all_hold_their_commit() -> None:
    """While C lacks the commit, A and B keep its means, which are as long as what a peer sends in a round. Once C has
    it, they let go of them, though the next round has not begun."""
    world = World("ABC", trains_s=30.0, epoch=1)
    world.rules_of_net.append(lambda s, t, m: LOST if t == "C" and isinstance(m, Commit | Mean | Told) else None)
    world.reach(2, "AB")
    last = {name: world.log(name).last[-1] for name in "AB"}
    world.run(10.0)
    assert world.peers["C"].epoch == 1
    assert all(world.log(name).last[-1] == last[name] for name in "AB")
    assert all(last[name][1] for name in "AB")
    world.rules_of_net.clear()
    world.reach(2)
    world.run(5.0)
    assert [peer.epoch for peer in world.peers.values()] == [2, 2, 2]
    assert [world.log(name).last for name in "AB"] == [[(last[name][0], ())] for name in "AB"]


def test_the_many_win_when_a_cut_heals() -> None:
    """A cut leaves one fast peer alone and three together. When it heals, the three win, however far the one came."""
    world = World("ABCD", rules(min_peers=1, round_timeout=10.0), epoch=3)
    world.peers["A"].trains_s = 1.0
    world.cut("A", "BCD")
    world.run(60)
    assert world.peers["A"].epoch > world.peers["B"].epoch > 3
    majority = world.peers["B"].state()
    world.cuts.clear()
    world.run(60)
    for name in "ABCD":
        assert dict(world.peers[name].state().links)[majority.version.epoch] == majority.version.chain
    assert world.peers["A"].notes("fork")
    world.check()


def test_everybody_says_for_whom_the_leader_waits() -> None:
    """C trains for three times as long as A and B. A user who looks at any of them sees that it is C."""
    world = World("ABC", epoch=3)
    world.peers["C"].trains_s = 12.0
    told = set[str]()
    for _ in range(120):
        world.run(0.5)
        told |= {outlook.waiting(peer.replica) for peer in world.peers.values()}
    assert {"waiting for the contributions of C", "waiting for a commit from A, which waits for C"} <= told


def test_who_only_aggregates_is_no_contribution_that_status_counts() -> None:
    """A and B train, C aggregates. C sends a Ready, too, so that rounds know it."""
    world = World("AB")
    world.join("C", role="aggregator")
    world.peers["B"].trains_s = 6.0
    seen = set[tuple[int, int]]()
    while world.now < 60.0:
        world.run(0.5)
        found = (outlook.round_now(peer.replica) for peer in world.peers.values())
        seen |= {(came, expected) for _, came, expected in filter(None, found)}
    assert seen <= {(1, 1), (1, 2), (2, 2)}
    assert (1, 2) in seen
