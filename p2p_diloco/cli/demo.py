"""`demo`: lets peers on this machine train together, while one of them is killed and another joins.

Law: does what a user would do by hand. It starts `bootstrap`, `join` and `status`, kills one process, and knows of a
run only what these commands print and log. Times are seconds since 1970 by this machine's clock.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple, TypeVar

import typer
from rich.console import Console, RenderableType
from rich.table import Table

from p2p_diloco.cli.processes import Child, Children, Lines, module
from p2p_diloco.errors import ConfigError, P2PDilocoError
from p2p_diloco.interrupts import Interrupts, exit_code
from p2p_diloco.observe.figures import bytes_of, figure
from p2p_diloco.observe.plot import Curve, Moment, Plot
from p2p_diloco.settings import flag, make_writable_folder

T = TypeVar("T")
Row = Mapping[str, Any]
"""A line of a peer's log: one inner step or one evaluation."""
RUN_ID, FIRST, NEWCOMER, ALONE = "demo", ("alice", "bob", "carol"), "dave", "alone"
SYNC_EVERY, WARM_START, CODEC, BYTES_OF_A_PARAMETER = 20, 100, "bf16", 2
TITLE = "Three peers in one run, and one peer alone"
NO_PNG = 'there is no PNG without matplotlib; for one: pip install "p2p-diloco[plot]"'
WHOLE_STEPS = {"start_peers": 1, "outer_lr": 1, "outer_momentum": 0, "codec": "fp32", "num_shards": 1, "pause_s": 0}
"""In a run of one peer, an outer step with these settings takes over what the peer has trained: it trains alone."""
LOOK_EVERY_S, LINE_EVERY_S, PATIENCE_S = 0.1, 10.0, 180.0
"""Seconds between two looks at the processes, between two lines of progress, and after which the demo gives up if
nothing happens: a slow machine imports torch in a minute."""


class Script(NamedTuple):
    """The demo's numbers. They were chosen by measurement: with them the run ends at a lower loss than one peer alone.
    Both have a warm start; without it the difference would be lost in the noise.

    epochs: outer steps of the whole run. kill_at: the outer step after which a peer is killed. pause_s: seconds to
    sleep in each inner step, because a fast machine would finish the run before the newcomer has imported torch.
    """

    epochs: int
    kill_at: int
    pause_s: float


FULL, QUICK = Script(epochs=60, kill_at=15, pause_s=0.03), Script(epochs=20, kill_at=3, pause_s=0.04)


def demo(out: Path | None, *, as_json: bool, quick: bool) -> int:
    """Play the demo and print its outcome. Returns the exit code: 1 if the peers' digests differ at the end.

    Raises:
        ConfigError: the folder can't be used. P2PDilocoError: a process failed, or nothing happened for long.
    """
    folder = out or Path(time.strftime("demo-%Y%m%d-%H%M%S"))
    make_writable_folder(folder, key="--out")
    if any(folder.iterdir()):
        raise ConfigError("is not empty", key="--out", value=folder, mend="name a new folder")
    try:
        with Interrupts(), Children(folder) as children:
            stage = Stage(QUICK if quick else FULL, children)
            outcome = stage.play()
    except KeyboardInterrupt as interrupt:
        sys.stderr.write(f"p2p-diloco: interrupted; what was written is in {folder}\n")
        return exit_code(interrupt)
    curves = Curve("the run", "●", outcome["swarm_curve"]), Curve("one peer alone", "○", outcome["alone_curve"])
    plot = Plot(
        TITLE, "inner steps of each peer", "held-out loss (nats a byte)", 0, outcome["steps"], curves, stage.moments
    )
    with contextlib.suppress(ImportError):  # without matplotlib there is only the plot as text
        plot.png(folder / "losses.png")
        outcome["plot"] = str(folder / "losses.png")
    text = json.dumps(outcome, ensure_ascii=False)
    (folder / "summary.json").write_text(text + "\n", encoding="utf-8")
    if as_json:
        typer.echo(text)
    else:
        console = Console(markup=False, highlight=False)
        console.print("", *plot.text(min(console.width, 78), 12), "", *report(outcome), sep="\n")
    return 0 if outcome["digests_equal"] else 1


# -- the story


@dataclass(slots=True)
class Player:
    """A training process, the rows of its log, and its status as `p2p-diloco status --json` printed it last."""

    name: str
    child: Child
    log: Lines
    rows: list[Row] = field(default_factory=list)
    told: dict[str, Any] = field(default_factory=dict)

    @property
    def trains(self) -> bool:
        return not self.child.killed and self.child.status is None


class Stage:
    """The demo's processes, and what has happened to them."""

    def __init__(self, script: Script, children: Children) -> None:
        self.script, self.children, self.folder = script, children, children.folder
        self.players: dict[str, Player] = {}
        self.moments: list[Moment] = []
        self._began = self._news_at = self._line_at = time.monotonic()
        self._snapshots = Lines(self.folder / "status.out")

    def play(self) -> dict[str, Any]:
        """Play the whole demo. Returns its outcome, still without a plot."""
        bootstrap = self._start("bootstrap")
        address = self.until(bootstrap.printed.new, "the bootstrap's address")[0]["maddrs"][0]
        self.tell(f"the bootstrap listens at {address}")
        founds = {"sync_every": SYNC_EVERY, "stop_after_epochs": self.script.epochs, "warm_start": WARM_START}
        alone = self._join(ALONE, address, **{**founds, **WHOLE_STEPS})
        name, *others = FIRST
        founder = self._join(name, address, **founds, start_peers=len(FIRST), codec=CODEC)
        self._start("status", "--initial-peers", address, "--run-id", RUN_ID, "--interval", "1")
        self.tell(f"{name} makes {WARM_START} steps as a warm start, then founds the run")
        self.until(lambda: founder.rows, f"{name} to found the run")
        self.tell(f"{name} has founded the run; {' and '.join(others)} join with the bootstrap's address")
        for other in others:
            self._join(other, address)
        self.until(lambda: all(peer.rows and peer.rows[-1]["epoch"] for peer in self.peers), "the first outer step")
        self.tell(f"all {len(FIRST)} train: {SYNC_EVERY} inner steps each, then an outer step together")
        self.tell(f"to watch them: p2p-diloco status --initial-peers {address} --run-id {RUN_ID}")
        kill, newcomer = self._kill(), self._replace(address)
        self.until(lambda: not any(peer.trains for peer in self.peers), "the end of the run")
        self.tell(f"the run has ended for all, after {self.epoch} outer steps")
        self.until(lambda: not alone.trains, "the peer alone")
        self._look()
        return self._outcome(alone, kill, newcomer)

    def _kill(self) -> dict[str, Any]:
        """Kill a peer that is to average a part of the next round, when all peers have made half of the round's steps.
        Then wait until the survivors have made that round's commit."""
        victim = self.until(self._doomed, f"outer step {self.script.kill_at} and the name of an aggregator")
        epoch, survivors = self.epoch, [peer for peer in self.peers if peer is not victim]
        killed_at = victim.child.kill()
        self.moments.append(Moment(victim.rows[-1]["global_step"], f"{victim.name} killed"))
        self.tell(f"kill -9 {victim.child.process.pid}: {victim.name} is dead, due to average in round {epoch + 1}")
        times = list(commit_times(survivors[0].rows).values())
        usual_s = round(median(later - earlier for earlier, later in pairwise(times)), 2)
        rows_of = [peer.rows for peer in survivors]
        took_s = self.until(lambda: next_commit_s(rows_of, epoch, killed_at), "the survivors' next commit")
        names = " and ".join(peer.name for peer in survivors)
        self.tell(f"{names} made the next commit {took_s} s after the kill (usual round: {usual_s} s)")
        return {"peer": victim.name, "epoch": epoch, "next_commit_s": took_s, "usual_round_s": usual_s}

    def _doomed(self) -> Player | None:
        """The peer to kill, if the kill is due: one whose status says that it averages a part of the model."""
        half_way = SYNC_EVERY * (max(self.epoch, self.script.kill_at) + 0.5)
        if any(peer.rows[-1]["global_step"] < half_way for peer in self.peers):
            return None
        told = [peer for peer in self.peers if peer.trains and peer.told.get("epoch") == self.epoch]
        return next((peer for peer in told if peer.told["aggregates"]), None)

    def _replace(self, address: str) -> dict[str, Any]:
        """Start a new peer with the bootstrap's address, and wait until it is in the run."""
        others, newcomer = self.peers, self._join(NEWCOMER, address)
        self.tell(f"{NEWCOMER} is started with the bootstrap's address, and nothing else")
        self.until(lambda: newcomer.rows or not any(peer.trains for peer in others), f"{NEWCOMER} to join")
        if not newcomer.rows:
            newcomer.child.kill()
            self.tell(f"{NEWCOMER} came too late: the run is over")
            return {"peer": NEWCOMER, "epoch": None, "joined_s": None}
        first = newcomer.rows[0]
        epoch, joined_s = first["epoch"], round(first["time"] - newcomer.child.started_at, 2)
        self.moments.append(Moment(first["global_step"], f"{NEWCOMER} joined"))
        self.tell(f"{NEWCOMER} is in the run at outer step {epoch}, {joined_s} s after its start")
        return {"peer": NEWCOMER, "epoch": epoch, "joined_s": joined_s}

    def _outcome(self, alone: Player, kill: dict[str, Any], newcomer: dict[str, Any]) -> dict[str, Any]:
        parameters = alone.child.printed.new()[-1]["parameters"]
        # a ring: a reduce-scatter and an all-gather, (K-1)/K of the parameters each (Patarasuk and Yuan 2009)
        step_bytes = round(2 * parameters * BYTES_OF_A_PARAMETER * (len(FIRST) - 1) / len(FIRST))
        peers = [outcome_of(peer, step_bytes) for peer in self.peers]
        digests = {peer["digest"] for peer in peers if peer["fate"] == "finished"}
        swarm_curve, alone_curve = held_out(peer.rows for peer in self.peers), held_out([alone.rows])
        return {
            "schema_version": 2, "seconds": round(time.monotonic() - self._began, 1), "cores": os.cpu_count(),
            "sync_every": SYNC_EVERY, "epochs": self.epoch, "steps": self.script.epochs * SYNC_EVERY,
            "warm_start": WARM_START, "parameters": parameters, "bytes_per_parameter": BYTES_OF_A_PARAMETER,
            "data_parallel_bytes_per_step": step_bytes, "peers": peers, "kill": kill, "newcomer": newcomer,
            "digests_equal": len(digests) == 1 and "" not in digests,
            "swarm_loss": swarm_curve[-1][1], "alone_loss": alone_curve[-1][1],
            "swarm_curve": swarm_curve, "alone_curve": alone_curve, "folder": str(self.folder), "plot": None,
        }  # fmt: skip

    # -- processes, and what is known of them

    def _start(self, command: str, *words: str) -> Child:
        return self.children.start(command, module("p2p_diloco", command, *words, "--json", "--logs", "plain"))

    def _join(self, name: str, address: str, **settings: object) -> Player:
        log, run_id = self.folder / f"{name}.jsonl", ALONE if name == ALONE else RUN_ID
        told = {"name": name, "run_id": run_id, "log_path": log, "pause_s": self.script.pause_s, "threads": 1}
        told |= {"eval_every_epochs": 2, **settings}
        flags = [part for key, value in told.items() for part in (flag(key), str(value))]
        join = module("p2p_diloco", "join", "--initial-peers", address, "--summary-json", "--logs", "plain", *flags)
        polite = ["nice", "-n", "10"] if name == ALONE else []  # the run gets the processor first
        self.players[name] = Player(name, self.children.start(name, [*polite, *join]), Lines(log))
        return self.players[name]

    @property
    def peers(self) -> list[Player]:
        """The peers of the run in the order of their start."""
        return [player for player in self.players.values() if player.name != ALONE]

    @property
    def epoch(self) -> int:
        """The highest number of outer steps that any peer has seen."""
        seen: list[int] = [peer.rows[-1]["epoch"] for peer in self.peers if peer.rows]
        return max([0, *seen])

    def tell(self, text: str) -> None:
        """Write a sentence to stderr, with the time since the demo's start."""
        self._line_at = time.monotonic()
        minutes, seconds = divmod(int(self._line_at - self._began), 60)
        typer.echo(f"{minutes}:{seconds:02} {text}", err=True)

    def until(self, condition: Callable[[], T | None], what: str) -> T:
        """Wait until `condition` returns something true, and return that. `what`: what is waited for.

        Raises:
            P2PDilocoError: a process failed, or nothing happened for `PATIENCE_S`.
        """
        self._news_at = time.monotonic()
        while True:
            self._look()
            if found := condition():
                return found
            if time.monotonic() - self._news_at > PATIENCE_S:
                mend = f"see the logs in {self.folder}"
                raise P2PDilocoError(f"nothing has happened for {PATIENCE_S:g} s while waiting for {what}", mend=mend)
            if time.monotonic() - self._line_at > LINE_EVERY_S:
                steps = ", ".join(f"{it.name} {steps_of(it.rows)}" for it in self.players.values() if it.trains)
                self.tell(f"outer step {self.epoch} of {self.script.epochs}; inner steps: {steps}")
            time.sleep(LOOK_EVERY_S)

    def _look(self) -> None:
        """Read what the processes have written since the last look."""
        for child in self.children.all:
            if child.status and not child.killed:
                wrong = f"{child.name} ended with status {child.status} ({child.last_words()})"
                raise P2PDilocoError(wrong, mend=f"its log is {child.log}")
        for player in self.players.values():
            if new := player.log.new():
                player.rows += new
                self._news_at = time.monotonic()
        for peer in (peer for snapshot in self._snapshots.new() for peer in snapshot["peers"]):
            if peer["name"] in self.players:
                self.players[peer["name"]].told = peer


# -- formulas


def outcome_of(player: Player, step_bytes: int) -> dict[str, Any]:
    """The outcome of a peer, from the summary that it printed. For a killed peer, from what it published last."""
    summary, steps = next(iter(player.child.printed.new()[-1:]), {}), steps_of(player.rows)
    known = {**player.told, "rounds": len(commit_times(player.rows)), "digest": "", **summary}
    fate = "finished" if summary.get("stopped") == "finished" else "killed" if player.rows else "late"
    own = {"name": player.name, "fate": fate, "steps": steps, "data_parallel_bytes": steps * step_bytes}
    return own | {key: known.get(key) for key in ("rounds", "waiting_s", "bytes_sent", "bytes_received", "digest")}


def steps_of(rows: Sequence[Row]) -> int:
    """How many inner steps a peer has made."""
    return int(rows[-1]["step"]) if rows else 0


def commit_times(rows: Iterable[Row]) -> dict[int, float]:
    """The time at which a peer first saw each epoch. The epoch in which it entered the run is left out."""
    first: dict[int, float] = {}
    for row in rows:
        first.setdefault(row["epoch"], row["time"])
    return dict(list(first.items())[1:])


def next_commit_s(rows_of: Iterable[Iterable[Row]], epoch: int, since: float) -> float | None:
    """Seconds from `since` until each of these peers had seen an epoch above `epoch`. None while one of them has
    not."""
    times = [[when for seen, when in commit_times(rows).items() if seen > epoch] for rows in rows_of]
    return round(max(later[0] for later in times) - since, 2) if all(times) else None


def held_out(rows_of: Iterable[Iterable[Row]]) -> tuple[tuple[float, float], ...]:
    """The held-out loss by inner steps of one peer: after each outer step the mean of what the peers measured. They
    hold the same global parameters, so their values agree."""
    found: dict[int, list[float]] = {}
    for row in (row for rows in rows_of for row in rows if row["val_loss"] is not None):
        found.setdefault(row["epoch"], []).append(row["val_loss"])
    return tuple((float(SYNC_EVERY * epoch), fmean(losses)) for epoch, losses in sorted(found.items()))


# -- the report

REPORT = """\
held-out loss|the run {swarm_loss:.3f}, one peer alone {alone_loss:.3f}: {gain}
rounds|{epochs}, of {sync_every} inner steps each
kill -9|{kill[peer]}, due to average a part of the next round, half-way from outer step {kill[epoch]}
next commit|{kill[next_commit_s]} s after the kill; usual round: {kill[usual_round_s]} s
newcomer|{newcomer[peer]}: {came}
digests equal|{equal}
"""
NOTES = """
data-parallel: what as many steps send with an all-reduce in each, a ring of {first} peers in {codec}: {whole} a step \
for {parameters:,} parameters. sent, received: all messages, with the state that newcomers were given; of a killed \
peer, as it published them last. waited: {name}, too, for the others to start. alone: the same trainer, text, seed and \
warm start of {warm_start} steps; the run has seen up to three times as much text.

{seconds:.0f} s on {cores} cores. {folder}/summary.json has all figures.
The plot: {png}"""


def report(outcome: Mapping[str, Any]) -> Iterator[RenderableType]:
    """What the demo prints below its plot."""
    better, late = outcome["alone_loss"] - outcome["swarm_loss"], outcome["newcomer"]
    came = f"in the run {late['joined_s']} s after its start, at outer step {late['epoch']}; contributed to"
    came += f" {outcome['peers'][-1]['rounds']} rounds"
    ended = {peer["name"]: peer["digest"] for peer in outcome["peers"] if peer["fate"] == "finished"}
    equal = f"yes, on {', '.join(ended)}: {next(iter(ended.values()), '')}"
    told = REPORT.format(
        **outcome,
        gain=f"{abs(better):.3f} nats a byte {'better' if better > 0 else 'WORSE'}",
        came="came too late: the run was over" if late["epoch"] is None else came,
        equal=equal if outcome["digests_equal"] else f"NO: {ended}",
    )
    findings = Table.grid(padding=(0, 2, 0, 0))
    for line in told.splitlines():
        findings.add_row(*line.split("|", 1))
    peers = Table("peer", "fate", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("steps", "rounds", "waited", "sent", "received", "data-parallel", "fewer"):
        peers.add_column(title, justify="right", no_wrap=True)
    for peer in outcome["peers"]:
        sent, whole = peer["bytes_sent"], peer["data_parallel_bytes"]
        amounts = [bytes_of(amount, " ") for amount in (sent, peer["bytes_received"], whole)]
        waited, fewer = figure(peer["waiting_s"], ".1f", " s"), figure(whole / sent if sent else None, ".0f", "x")
        peers.add_row(peer["name"], peer["fate"], f"{peer['steps']:,}", str(peer["rounds"]), waited, *amounts, fewer)
    whole, png = bytes_of(outcome["data_parallel_bytes_per_step"], " "), outcome["plot"] or NO_PNG
    notes = NOTES.format(**outcome, first=len(FIRST), codec=CODEC, whole=whole, name=FIRST[0], png=png)
    yield from (findings, "", peers, notes)
