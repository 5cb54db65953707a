"""Plays the demo's scenes: which peer is started when, which one is killed, and how the others go on.

Law: only starts and kills processes, as a user would by hand. The measurements are computed in `facts`.
"""

from __future__ import annotations

import os
from dataclasses import replace

from p2p_diloco.cli.demo.facts import (
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
from p2p_diloco.cli.demo.stage import RUN_ID, Player, Script, Stage
from p2p_diloco.observe.plot import Moment

FULL, QUICK = Script(epochs=60, kill_at=15), Script(epochs=20, kill_at=3, pause_s=0.04)
FIRST, NEWCOMER, ALONE = ("alice", "bob", "carol"), "dave", "alone"
CODEC, BYTES_OF_A_PARAMETER = "bf16", 2
UNKNOWN_FOR_EPOCHS = 4
"""The outer steps for which the kill is put off while the next aggregator is unknown."""


def play(stage: Stage) -> Outcome:
    """Play the whole demo. Returns its outcome, still without a plot.

    Raises:
        P2PDilocoError: a process failed, or nothing happened for long.
    """
    alone = stage.start_alone(ALONE)
    address = _open(stage)
    _gather(stage, address)
    kill = _kill(stage)
    newcomer = _replace(stage, address)
    _finish(stage, alone)
    return _outcome(stage, alone, kill, newcomer)


def _open(stage: Stage) -> str:
    """Start a bootstrap. Returns its address."""
    bootstrap = stage.start_service("bootstrap")
    (printed,) = stage.until(lambda: bootstrap.printed.new() or None, "the bootstrap's address")
    address = str(printed["maddrs"][0])
    stage.tell(f"the bootstrap listens at {address}")
    return address


def _gather(stage: Stage, address: str) -> None:
    """Start the first peer, which founds the run. Once that peer is in the run, start the others."""
    script, (name, *others) = stage.script, FIRST
    settings = {"start_peers": len(FIRST), "codec": CODEC, "warm_start": script.warm_start}
    founder = stage.start_peer(name, address, **script.run, **settings)
    stage.start_service("status", "--initial-peers", address, "--run-id", RUN_ID, "--interval", "1")
    stage.tell(f"{name} makes {script.warm_start} steps as a warm start, then founds the run")
    stage.until(lambda: bool(founder.rows), f"{name} to found the run")
    stage.tell(f"{name} has founded the run; {' and '.join(others)} join with the bootstrap's address")
    for other in others:
        stage.start_peer(other, address)
    stage.until(lambda: all(peer.epoch >= 1 for peer in stage.peers), "the first outer step")
    stage.tell(f"all {len(FIRST)} train: {script.sync_every} inner steps each, then an outer step together")


def _kill(stage: Stage) -> KillOutcome:
    """Kill the peer that is elected to average the next round, when all peers have made half of the round's steps. Then
    wait until the survivors have made that round's commit."""
    stage.until(lambda: _half_way(stage), f"outer step {stage.script.kill_at}")
    epoch, elected = stage.epoch, stage.averages_next(stage.epoch)
    victim = next((peer for peer in stage.peers if peer.name == elected), stage.peers[1])
    survivors = [peer for peer in stage.peers if peer is not victim]
    killed_at = victim.child.kill()
    stage.moments.append(Moment(victim.rows[-1].global_step, f"{victim.name} killed"))
    why = "" if elected is None else f", elected to average round {epoch + 1}"
    stage.tell(f"kill -9 {victim.child.process.pid}: {victim.name} is dead{why}")

    took_s = stage.until(
        lambda: next_commit_s((peer.rows for peer in survivors), epoch, killed_at), "the survivors' next commit"
    )
    usual_s = usual_round_s(survivors[0].rows, killed_at)
    compare = "" if usual_s is None else f" (usual round: {usual_s} s)"
    names = " and ".join(peer.name for peer in survivors)
    stage.tell(f"{names} made the next commit {took_s} s after the kill{compare}")
    return KillOutcome(victim.name, epoch, elected is not None, took_s, usual_s)


def _half_way(stage: Stage) -> bool:
    """Whether the kill is due: the planned epoch is reached, all peers have made half of the next round's steps, and
    the round's aggregator is known. If the aggregator stays unknown, the kill is due `UNKNOWN_FOR_EPOCHS` outer steps
    later."""
    epochs, steps = {peer.epoch for peer in stage.peers}, min(peer.steps_since for peer in stage.peers)
    known = stage.averages_next(stage.epoch) is not None
    due = stage.script.kill_at + (0 if known else UNKNOWN_FOR_EPOCHS)
    return len(epochs) == 1 and stage.epoch >= due and steps >= stage.script.sync_every // 2


def _replace(stage: Stage, address: str) -> NewcomerOutcome:
    """Start a new peer with the bootstrap's address, and wait until it is in the run. Its number of rounds is filled in
    at the demo's end."""
    others = stage.peers
    newcomer = stage.start_peer(NEWCOMER, address)
    stage.tell(f"{NEWCOMER} is started with the bootstrap's address, and nothing else")
    stage.until(lambda: bool(newcomer.rows) or not any(peer.trains for peer in others), f"{NEWCOMER} to join")
    if not newcomer.rows:
        newcomer.child.kill()
        stage.tell(f"{NEWCOMER} came too late: the run is over")
        return NewcomerOutcome(NEWCOMER, None, None, 0)
    first = newcomer.rows[0]
    joined_s = round(first.time - newcomer.child.started_at, 2)
    stage.moments.append(Moment(first.global_step, f"{NEWCOMER} joined"))
    stage.tell(f"{NEWCOMER} is in the run at outer step {first.epoch}, {joined_s} s after its start")
    return NewcomerOutcome(NEWCOMER, first.epoch, joined_s, 0)


def _finish(stage: Stage, alone: Player) -> None:
    """Wait until the run has ended on all peers, and the peer that trains alone has ended too."""
    stage.until(lambda: not any(peer.trains for peer in stage.peers), "the end of the run")
    stage.tell(f"the run has ended for all, after {stage.epoch} outer steps")
    if alone.trains:
        stage.tell(f"one peer alone still has {stage.script.steps - alone.steps:,} of its steps to make")
    stage.until(lambda: not alone.trains, "the peer alone")
    stage.until(lambda: True, "the last lines")


def _outcome(stage: Stage, alone: Player, kill: KillOutcome, newcomer: NewcomerOutcome) -> Outcome:
    script = stage.script
    parameters = alone.child.printed.new()[-1]["parameters"]
    step_bytes = ring_bytes(parameters, BYTES_OF_A_PARAMETER, len(FIRST))
    peers = tuple(_peer(peer, script, step_bytes) for peer in stage.peers)
    digests = {peer.digest for peer in peers if peer.fate == "finished"}
    equal = len(digests) == 1 and "" not in digests
    swarm, single = stage.curves()
    return Outcome(
        schema_version=SCHEMA_VERSION,
        seconds=round(stage.elapsed_s, 1),
        cores=os.cpu_count(),
        sync_every=script.sync_every,
        epochs=stage.epoch,
        parameters=parameters,
        bytes_per_parameter=BYTES_OF_A_PARAMETER,
        data_parallel_bytes_per_step=step_bytes,
        peers=peers,
        digest=min(digests) if equal else "",
        digests_equal=equal,
        kill=kill,
        newcomer=replace(newcomer, rounds=peers[-1].rounds or 0),
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


def _peer(player: Player, script: Script, step_bytes: int) -> PeerOutcome:
    """The outcome of a peer, from the summary that it printed. For a killed peer, from the figures that it published
    last."""
    printed = player.child.printed.new()
    summary = printed[-1] if printed else {}
    known = {**player.told, **summary}
    return PeerOutcome(
        name=player.name,
        fate="finished" if summary.get("stopped") == "finished" else "killed" if player.rows else "late",
        steps=player.steps,
        rounds=summary.get("rounds", len(commit_times(player.rows))),
        waiting_s=known.get("waiting_s"),
        start_wait_s=start_wait_s(player.rows, script.sync_every),
        bytes_sent=known.get("bytes_sent"),
        bytes_received=known.get("bytes_received"),
        data_parallel_bytes=player.steps * step_bytes,
        digest=str(summary.get("digest", "")),
    )
