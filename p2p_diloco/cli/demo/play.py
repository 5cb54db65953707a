"""The demo's plot: who is started when, who is killed, and what comes of it.

Law: acts by starting and killing processes, as a user would by hand; what is measured is for `facts`.
"""

from __future__ import annotations

import os
from typing import Any

from p2p_diloco.cli.demo import cast
from p2p_diloco.cli.demo.cast import CODEC, Player
from p2p_diloco.cli.demo.facts import (
    BYTES_OF_A_PARAMETER,
    SCHEMA_VERSION,
    KillOutcome,
    NewcomerOutcome,
    Outcome,
    PeerOutcome,
    commit_times,
    join_cost,
    next_commit_s,
    ring_bytes,
    start_wait_s,
    usual_round_s,
)
from p2p_diloco.cli.demo.stage import Stage
from p2p_diloco.observe.plot import Moment

FIRST, NEWCOMER, ALONE = ("alice", "bob", "carol"), "dave", "alone"
UNKNOWN_FOR_EPOCHS = 4
"""So many outer steps later than planned somebody is killed though the next aggregator isn't known."""


def play(stage: Stage) -> Outcome:
    """The whole demo; its outcome, with no plot yet.

    Raises:
        P2PDilocoError: a process failed, or nothing happened for long. Interrupted: a signal came.
    """
    address = _open(stage)
    _gather(stage, address)
    kill = _kill(stage)
    joined = _replace(stage, address)
    _finish(stage)
    return _outcome(stage, kill, joined)


def _open(stage: Stage) -> str:
    """A bootstrap, and beside it the peer that trains alone; the bootstrap's address."""
    seed = cast.bootstrap(stage.children)
    stage.services.append(seed)
    stage.alone = cast.alone(stage.children, stage.script, ALONE)
    printed: list[str] = []

    def listens() -> bool:
        printed.extend(address for line in seed.printed.new() for address in line["maddrs"])
        return bool(printed)

    stage.until(listens, "the bootstrap's address")
    stage.tell(f"the bootstrap listens at {printed[0]}")
    return printed[0]


def _gather(stage: Stage, address: str) -> None:
    """The founder, and once it is in, the others at once: whoever comes first founds the run."""
    name, *others = FIRST
    founder = cast.founder(stage.children, stage.script, name, address, len(FIRST))
    stage.players.append(founder)
    stage.observer = cast.observer(stage.children, address)
    stage.services.append(stage.observer)
    stage.tell(f"{name} makes {stage.script.warm_start} steps as a warm start, then founds the run")
    stage.until(lambda: bool(founder.rows), f"{name} to found the run")
    stage.tell(f"{name} has founded the run; {' and '.join(others)} join with the bootstrap's address")
    stage.players += [cast.joiner(stage.children, stage.script, other, address) for other in others]
    stage.until(lambda: all(player.epoch >= 1 for player in stage.players), "the first outer step")
    stage.tell(f"all {len(FIRST)} train: {stage.script.sync_every} inner steps each, then an outer step together")


def _kill(stage: Stage) -> KillOutcome:
    """SIGKILL to whoever is to average the next round, half-way to it, and the wait for that round's commit."""
    script, victim = stage.script, stage.players[1]

    def half_way() -> bool:
        epochs = {player.epoch for player in stage.players}
        steps = min(player.steps_since for player in stage.players)
        return len(epochs) == 1 and min(epochs) >= script.kill_at and steps >= script.sync_every // 2

    def ready() -> bool:
        known = stage.averages_next(stage.epoch) is not None
        return half_way() and (known or stage.epoch >= script.kill_at + UNKNOWN_FOR_EPOCHS)

    stage.until(ready, f"outer step {script.kill_at}")
    epoch, elected = stage.epoch, stage.averages_next(stage.epoch)
    victim = next((player for player in stage.players if player.name == elected), victim)
    survivors = [player for player in stage.players if player is not victim]
    victim.killed = True
    killed_at = victim.child.kill()
    stage.moments.append(Moment(victim.rows[-1].global_step, f"{victim.name} killed"))
    why = "" if elected is None else f", elected to average round {epoch + 1}"
    stage.tell(f"kill -9 {victim.child.process.pid}: {victim.name} is dead{why}")
    after: list[float] = []

    def committed() -> bool:
        found = next_commit_s((player.rows for player in survivors), epoch, killed_at)
        after.extend([] if found is None else [found])
        return found is not None

    stage.until(committed, "the survivors' next commit")
    usual = usual_round_s(survivors[0].rows, killed_at)
    compare = "" if usual is None else f" (usual round: {usual} s)"
    names = " and ".join(player.name for player in survivors)
    stage.tell(f"{names} made the next commit {after[0]} s after the kill{compare}")
    return KillOutcome(victim.name, epoch, elected is not None, after[0], usual)


def _replace(stage: Stage, address: str) -> NewcomerOutcome:
    """A new peer with the bootstrap's address, and the wait until it is in the run."""
    newcomer = cast.joiner(stage.children, stage.script, NEWCOMER, address)
    stage.players.append(newcomer)
    stage.tell(f"{NEWCOMER} is started with the bootstrap's address, and nothing else")
    others = stage.players[:-1]
    stage.until(lambda: bool(newcomer.rows) or not any(player.trains for player in others), f"{NEWCOMER} to join")
    if not newcomer.rows:
        newcomer.killed = True
        newcomer.child.kill()
        stage.tell(f"{NEWCOMER} came too late: the run is over")
        return NewcomerOutcome(NEWCOMER, None, None, 0)
    first = newcomer.rows[0]
    joined_s = round(first.time - newcomer.child.started_at, 2)
    stage.moments.append(Moment(first.global_step, f"{NEWCOMER} joined"))
    stage.tell(f"{NEWCOMER} is in the run at outer step {first.epoch}, {joined_s} s after its start")
    return NewcomerOutcome(NEWCOMER, first.epoch, joined_s, 0)


def _finish(stage: Stage) -> None:
    """The end of the run, for all at once, and that of the peer alone."""
    stage.until(lambda: not any(player.trains for player in stage.players), "the end of the run")
    stage.tell(f"the run has ended for all, after {stage.epoch} outer steps")
    alone = stage.alone
    assert alone is not None
    if alone.trains:
        stage.tell(f"one peer alone still has {stage.script.steps - alone.steps:,} of its steps to make")
    stage.until(lambda: not alone.trains, "the peer alone")
    stage.until(lambda: True, "the last lines")


def _outcome(stage: Stage, kill: KillOutcome, newcomer: NewcomerOutcome) -> Outcome:
    script, alone = stage.script, stage.alone
    assert alone is not None
    summaries = {player.name: player.summary() for player in [*stage.players, alone]}
    parameters = summaries[ALONE]["parameters"]
    step_bytes = ring_bytes(parameters, BYTES_OF_A_PARAMETER[CODEC], len(FIRST))
    peers = tuple(_peer(stage, player, summaries[player.name], step_bytes) for player in stage.players)
    finished = [peer for peer in peers if peer.fate == "finished"]
    digests = {peer.digest for peer in finished}
    equal = len(digests) == 1 and "" not in digests
    swarm, single = stage.curves()
    last = next(peer for peer in peers if peer.name == newcomer.peer)
    return Outcome(
        schema_version=SCHEMA_VERSION,
        seconds=round(stage.elapsed_s, 1),
        cores=os.cpu_count(),
        sync_every=script.sync_every,
        epochs=stage.epoch,
        parameters=parameters,
        bytes_per_parameter=BYTES_OF_A_PARAMETER[CODEC],
        data_parallel_bytes_per_step=step_bytes,
        peers=peers,
        digest=min(digests) if equal else "",
        digests_equal=equal,
        kill=kill,
        newcomer=NewcomerOutcome(newcomer.peer, newcomer.epoch, newcomer.joined_s, last.rounds or 0),
        join_cost=None if newcomer.epoch is None else join_cost(stage.losses(), newcomer.epoch),
        steps=script.steps,
        warm_start=script.warm_start,
        swarm_loss=swarm.points[-1][1],
        alone_loss=single.points[-1][1],
        swarm_curve=swarm.points,
        alone_curve=single.points,
        folder=str(stage.children.folder),
        plot=None,
    )


def _peer(stage: Stage, player: Player, summary: dict[str, Any], step_bytes: int) -> PeerOutcome:
    """What became of a peer: by its own summary, or if it was killed by its last words in the DHT."""
    seen = stage.seen(player.name)
    known = {**{key: seen.get(key) for key in ("waiting_s", "bytes_sent", "bytes_received")}, **summary}
    fate = "finished" if summary.get("stopped") == "finished" else "killed" if player.rows else "late"
    rounds = summary.get("rounds", len(commit_times(player.rows)))
    return PeerOutcome(
        name=player.name,
        fate=fate,
        steps=player.steps,
        rounds=rounds,
        waiting_s=known["waiting_s"],
        start_wait_s=start_wait_s(player.rows, stage.script.sync_every),
        bytes_sent=known["bytes_sent"],
        bytes_received=known["bytes_received"],
        data_parallel_bytes=player.steps * step_bytes,
        digest=str(summary.get("digest", "")),
    )
