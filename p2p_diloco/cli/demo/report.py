"""Describes the outcome for people: curves, a table, and sentences that explain the comparisons.

Law: pure; draws only an `Outcome`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from p2p_diloco.cli.demo.facts import Outcome, PeerOutcome, Points
from p2p_diloco.observe.figures import bytes_of, figure
from p2p_diloco.observe.plot import Curve, Moment, text_plot

PLOT_ROWS, WIDTH_MAX = 12, 110
NO_PNG = 'For a plot as PNG install matplotlib: pip install "p2p-diloco[plot]"'


def report(outcome: Outcome, moments: Sequence[Moment], width: int) -> list[str]:
    """The lines that the demo prints at its end."""
    curves = compared(outcome.swarm_curve, outcome.alone_curve)
    x_label = "held-out loss, nats a byte, by inner steps of each peer"
    width = min(width, WIDTH_MAX)
    plot = text_plot(curves, moments, outcome.steps, min(width, 78), PLOT_ROWS, x_label)
    return ["", *plot, "", *_sentences(outcome, width), "", *_table(outcome.peers), "", *_notes(outcome, width)]


def compared(swarm: Points, alone: Points) -> tuple[Curve, Curve]:
    """The two curves of held-out loss that the demo compares: the run's, and that of one peer alone."""
    return Curve("the run's global parameters", "●", swarm), Curve("one peer alone", "○", alone)


def _sentences(outcome: Outcome, width: int) -> list[str]:
    kill, newcomer = outcome.kill, outcome.newcomer
    who = f"{kill.peer}, elected to average the next round," if kill.elected else kill.peer
    usual = "" if kill.usual_round_s is None else f"; a round took {kill.usual_round_s} s as a rule"
    if newcomer.joined_s is None:
        came = "came too late: the run was over"
    else:
        came = f"in the run {newcomer.joined_s} s after its start, at outer step {newcomer.epoch};"
        came += f" contributed to {newcomer.rounds} rounds"
    better = outcome.alone_loss - outcome.swarm_loss
    gain = f"{abs(better):.3f} nats a byte {'better' if better > 0 else 'WORSE'}"
    told = {
        "held-out loss": f"the run {outcome.swarm_loss:.3f}, one peer alone {outcome.alone_loss:.3f}: {gain}",
        "rounds": f"{outcome.epochs}, of {outcome.sync_every} inner steps each",
        "kill -9": f"{who} half-way from outer step {kill.epoch} to {kill.epoch + 1}",
        "next commit": f"{kill.next_commit_s} s after the kill{usual}",
        "newcomer": f"{newcomer.peer}: {came}",
        **({} if newcomer.epoch is None else {"cost of joining": _cost(outcome)}),
        "digests equal": _digests(outcome),
    }
    return [line for title, text in told.items() for line in _wrapped(text, width, f"{title:17}", " " * 17)]


def _cost(outcome: Outcome) -> str:
    """The effect of the newcomer's join on the run's held-out loss, in words."""
    cost, when = outcome.join_cost, f"after {outcome.newcomer.peer} joined"
    if cost is None:
        return f"unknown: held-out loss was not measured both before and {when}"
    if not cost.rise:
        return f"held-out loss did not rise {when}"
    rose = f"held-out loss rose by {cost.rise:.3f} ({cost.rise / cost.before:.1%}) {when}"
    if cost.back_after is None:
        return f"{rose}, and WAS NOT BACK when the run ended"
    return f"{rose}, back after {cost.back_after} rounds"


def _digests(outcome: Outcome) -> str:
    finished = [peer for peer in outcome.peers if peer.fate == "finished"]
    if outcome.digests_equal:
        return f"yes, on {', '.join(peer.name for peer in finished)}: {outcome.digest}"
    return "NO: " + ", ".join(f"{peer.name} {peer.digest or 'unknown'}" for peer in finished)


def _table(peers: Sequence[PeerOutcome]) -> list[str]:
    lines = [("peer", "fate", "steps", "rounds", "waited", "sent", "received", "data-parallel", "fewer")]
    for peer in peers:
        line = (
            peer.name,
            peer.fate,
            figure(peer.steps, ","),
            figure(peer.rounds, "d"),
            figure(peer.waiting_s, ".1f", " s"),
            bytes_of(peer.bytes_sent, " "),
            bytes_of(peer.bytes_received, " "),
            bytes_of(peer.data_parallel_bytes, " "),
            figure(peer.data_parallel_bytes / peer.bytes_sent if peer.bytes_sent else None, ".0f", "x"),
        )
        lines.append(line)
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    aligned = [[*map(str.ljust, line[:2], widths), *map(str.rjust, line[2:], widths[2:])] for line in lines]
    return ["  ".join(cells).rstrip() for cells in aligned]


def _notes(outcome: Outcome, width: int) -> list[str]:
    founder = outcome.peers[0]
    step = bytes_of(outcome.data_parallel_bytes_per_step, " ")
    told = {
        "data-parallel": "what the same steps would have sent with an all-reduce in each of them, as a ring in the same"
        f" codec: steps · 2·P·b·(K-1)/K, with P = {outcome.parameters:,} parameters of"
        f" b = {outcome.bytes_per_parameter} bytes and K = 3 peers: {step} a step.",
        "sent, received": "all messages of the run, with the state that newcomers were given.",
        "alone": f"the same trainer, text, seed and warm start of {outcome.warm_start} steps, then {outcome.steps:,}"
        " inner steps of its own; the run has seen up to three times as much text.",
        "waited": f"{founder.start_wait_s:.1f} s of {founder.name}'s waiting were for the start of the other two.",
        "killed": "bytes and waiting as the peer published them last.",
    }
    lines = [line for title, text in told.items() for line in _wrapped(text, width, f"{title}: ", "  ")]
    where = f"{outcome.folder}/summary.json has everything measured; the logs are beside it."
    lines += ["", f"{outcome.seconds:.0f} s on {outcome.cores} cores.", where]
    return [*lines, f"{outcome.plot} has the plot." if outcome.plot else NO_PNG]


def _wrapped(text: str, width: int, title: str, indent: str) -> list[str]:
    """Break a text into lines of at most `width` characters. The first line begins with `title`, the others with
    `indent`."""
    wrapper = textwrap.TextWrapper(width, title, indent, break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(text)
