"""Draws a forecast: tables, curves and advice for people, and an object for programs.

Law: only shows what `planning` computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from textwrap import fill
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from p2p_diloco.cli.plan.inputs import Question
from p2p_diloco.observe.figures import bytes_of
from p2p_diloco.observe.plot import Curve, Moment, text_plot
from p2p_diloco.planning.advice import Advice
from p2p_diloco.planning.exchange import Machine
from p2p_diloco.planning.forecast import Course, Forecast

SCHEMA_VERSION = 1
Figures = dict[str, Any]
POINTS = 60
DECADES = 2
"""The curves go so many powers of ten below and above the links' bandwidth."""
ROWS = 8


def as_object(question: Question, advice: Advice) -> Figures:
    """The forecast as one JSON object; docs/planning.md describes every field."""
    forecast, tokens = question.forecast, question.tokens
    exchange = forecast.exchange
    return {
        "schema_version": SCHEMA_VERSION,
        "params": forecast.params,
        "settings": {key: forecast.run.to_wire()[key] for key in SETTINGS},
        "machines": [
            {"name": name, "link_mbit": _link_mbit(forecast, each), "latency_s": each.latency_s, "step_s": each.step_s}
            for name, each in zip(question.names, forecast.machines, strict=True)
        ],
        "notes": list(question.notes),
        "unit": _unit(forecast),
        "round": {
            "steps": list(forecast.steps),
            "training_s": forecast.training_s,
            "exchange_s": forecast.exchange_s,
            "stall_s": forecast.stall_s,
            "round_s": forecast.round_s,
            "sent_bytes_per_peer": forecast.sent,
            "sent_bytes_each": [forecast.run.num_fragments * each for each in exchange.sent],
        },
        "memory_bytes": forecast.memory._asdict(),
        "ways": {key: _way(course, tokens) for key, course in _ways(forecast).items()},
        "advice": asdict(advice),
    }


SETTINGS = ("sync_every", "num_fragments", "overlap_steps", "codec", "reply_codec", "pace", "outer_momentum")


def _way(course: Course, tokens: int | None) -> Figures:
    told = {
        "utilisation": course.utilisation,
        "units_per_second": course.units_per_second,
        "sent_bytes_per_unit": course.sent_per_unit,
    }
    if tokens is not None:
        told |= {"hours": course.seconds(tokens) / 3600, "sent_bytes": course.sent(tokens)}
    return told


def _ways(forecast: Forecast) -> dict[str, Course]:
    return {"run": forecast.course, "data_parallel": forecast.data_parallel, "alone": forecast.alone}


def _unit(forecast: Forecast) -> str:
    return "step" if forecast.tokens_per_step is None else "token"


def _link_mbit(forecast: Forecast, machine: Machine) -> float | None:
    """None: the peer is alone, and nothing is sent."""
    return 8e-6 * machine.link if forecast.peers > 1 else None


# -- for people


def drawn(question: Question, advice: Advice, width: int) -> RenderableType:
    """The whole answer, at most `width` columns wide."""
    forecast = question.forecast
    return Group(
        Text(headline(question), "bold"),
        *(Text(f"  {note}", "dim") for note in question.notes),
        Text(),
        _round_table(question),
        Text(),
        Text(verdict(forecast), "bold green" if _gain(forecast) > 1 else "bold red"),
        *(_of_exchanges(question, advice, width) if forecast.peers > 1 else ()),
    )


def _of_exchanges(question: Question, advice: Advice, width: int) -> Iterator[RenderableType]:
    """What is said of exchanges: a peer that is alone makes none."""
    forecast = question.forecast
    yield Text()
    yield Text(f"For {100 * advice.wanted:g}% utilisation", "bold")
    yield _codec_table(forecast, advice)
    yield from (_bullet("•", line, width) for line in advices(question, advice))
    yield from (_bullet("!", line, width, "yellow") for line in advice.warnings)
    yield Text()
    yield Text("Utilisation by the bandwidth of " + ("the links" if _equal(forecast) else "the slowest link"), "bold")
    yield from (Text(line, no_wrap=True) for line in plot(forecast, min(width - 1, 78)))


def _bullet(mark: str, line: str, width: int, style: str = "") -> Text:
    first, others = f"  {mark} ", "    "
    text = fill(line, width - 1, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)
    return Text(text, style)


def headline(question: Question) -> str:
    """A line that says what is forecast."""
    forecast, run = question.forecast, question.forecast.run
    peers = f"{forecast.peers} peer{'s' * (forecast.peers > 1)}"
    parts = [f"{_size(forecast.params)} parameters, {peers}", _speeds(forecast)]
    codecs = forecast.exchange.codecs
    parts += [f"H={run.sync_every}", codecs.codec]
    if codecs.reply != codecs.codec:
        parts.append(f"means in {codecs.reply}")
    if run.num_fragments > 1:
        parts.append(f"{run.num_fragments} fragments")
    if run.overlap_steps:
        parts.append(f"overlap {run.overlap_steps}")
    return ", ".join([*parts, *(["paced by time"] if run.pace == "time" else [])])


def _speeds(forecast: Forecast) -> str:
    machines = forecast.machines
    speeds = [8e-6 * each.link for each in machines]
    links = " to ".join(dict.fromkeys(map(mbit, (min(speeds), max(speeds)))))
    delays = _span([1e3 * each.latency_s for each in machines], " ms")
    steps = _span([each.step_s for each in machines], " s a step")
    if forecast.peers == 1:
        return steps
    return ", ".join([links, *([delays] if any(each.latency_s for each in machines) else []), steps])


def _span(values: Sequence[float], unit: str) -> str:
    low, high = min(values), max(values)
    return f"{low:.3g}{unit}" if low == high else f"{low:.3g} to {high:.3g}{unit}"


def _equal(forecast: Forecast) -> bool:
    return len({each.link for each in forecast.machines}) == 1


def _round_table(question: Question) -> Table:
    """The figures of the run beside the two other ways to train."""
    forecast, tokens = question.forecast, question.tokens
    ways, units, unit = list(_ways(forecast).values()), forecast.units, f"{_unit(forecast)}s"

    def each(title: str, shown: Callable[[Course], str]) -> tuple[str, ...]:
        return (title, *map(shown, ways))

    rows = [
        each("utilisation", lambda way: f"{way.utilisation:.1%}"),
        each(f"{unit} an hour, all peers", lambda way: _size(3600 * way.units_per_second)),
        each(f"{unit} of a round: a peer sends", lambda way: _sent(way, units)),
        each(f"{'':{len(unit)}}             take", lambda way: duration(way.seconds(units))),
        ("a round: training", duration(forecast.training_s)),
        ("         standing still", duration(forecast.stall_s)),
        ("         exchange", duration(forecast.exchange_s)),
    ]
    if tokens is not None:
        rows.append(each(f"{_size(tokens)} tokens take", lambda way: duration(way.seconds(tokens))))
        rows.append(each("         a peer sends", lambda way: _sent(way, tokens)))
    rows.append(("memory: trainer, no activations", bytes_of(forecast.memory.trainer, " ")))
    rows.append(("        node", bytes_of(forecast.memory.node, " ")))
    table = _table("", "this run", "data-parallel", "one alone")
    for row in rows:
        table.add_row(*row)
    return table


def _sent(course: Course, units: float) -> str:
    return bytes_of(course.sent(units), " ") if course.sent_per_unit else "-"


def _table(*titles: str) -> Table:
    table = Table(pad_edge=False, padding=(0, 2, 0, 0), box=SIMPLE_HEAD, show_edge=False)
    for number, title in enumerate(titles):
        table.add_column(title, justify="right" if number else "left", no_wrap=True)
    return table


def _gain(forecast: Forecast) -> float:
    return forecast.course.units_per_second / forecast.alone.units_per_second


def verdict(forecast: Forecast) -> str:
    """Whether it pays, in a sentence."""
    gain = _gain(forecast)
    if forecast.peers == 1:
        return "One peer alone exchanges nothing."
    if gain <= 1:
        return f"It does not pay as it is: the fastest peer alone does {1 / gain:.1f} times as much."
    best = sum(1 / each.step_s for each in forecast.machines) * min(each.step_s for each in forecast.machines)
    return f"Together {gain:.2f} times as much as the fastest peer alone, of {best:.2f} possible."


def _codec_table(forecast: Forecast, advice: Advice) -> Table:
    table = _table("codec", "reply_codec", "bytes a parameter", "exchange", "smallest H")
    for one in advice.codecs:
        table.add_row(
            one.codec, one.reply_codec, f"{one.bytes_each:.2f}", duration(one.exchange_s), f"{one.sync_every:,}"
        )
    return table


def advices(question: Question, advice: Advice) -> list[str]:
    """The advice as sentences."""
    forecast, run = question.forecast, question.forecast.run
    found = [f"H={run.sync_every} is enough: the smallest that suffices is {advice.sync_every:,}."]
    if forecast.utilisation < advice.wanted:
        least = min(advice.codecs, key=lambda one: one.sync_every)
        found = [f"--sync-every {advice.sync_every} suffices. A longer H learns less from a token."]
        if least.sync_every < advice.sync_every:
            found[0] = (
                f"--sync-every {advice.sync_every} suffices, or --codec {least.codec} --reply-codec "
                f"{least.reply_codec} --sync-every {least.sync_every}. A longer H learns less from a token; 4 bits "
                "cost at most 0.3 % of the loss where it was measured."
            )
        how = advice.streaming
        found.append(
            f"Or let training go on meanwhile: --sync-every {how.sync_every} --num-fragments {how.num_fragments} "
            f"--overlap-steps {how.overlap_steps} ({how.utilisation:.1%}). An overlap of a quarter of H cost 0.3 % of "
            "the loss where it was measured."
        )
    if (most := advice.sync_every_most) is not None:
        found.append(f"These tokens allow H={most:,} at most, for {run.rounds_wanted:.0f} outer steps or more.")
    if (held := advice.held_back) is not None:
        why, name = "link" if held.by_link else "speed", question.names[held.peer]
        found.append(f"{name} holds the others back by its {why}: without it they do {held.gain:.2f} times as much.")
    found.append(
        "The machines are of unlike speed: with --pace time no peer waits for a slower one."
        if advice.pace == "time"
        else "The machines are alike: synchronous rounds of equal steps fit (--pace steps)."
    )
    if forecast.peers > 1:
        found[-1] += " --mode async is for speeds that change within a round."
    return found


def plot(forecast: Forecast, width: int) -> list[str]:
    """Curves of utilisation, as lines of text."""
    curves, moments, ends = curves_of(forecast)
    shown = [Curve(c.label, c.mark, tuple((math.log10(x / ends[0]), y) for x, y in c.points)) for c in curves]
    marks = [Moment(math.log10(each.x / ends[0]), each.label) for each in moments]
    named = (mbit(ends[0]), mbit(ends[1]))
    return text_plot(shown, marks, math.log10(ends[1] / ends[0]), width, ROWS, "bandwidth", ends=named)


def curves_of(forecast: Forecast) -> tuple[list[Curve], list[Moment], tuple[float, float]]:
    """Utilisation by the bandwidth of the slowest link in Mbit/s, of this run and of data-parallel training; where the
    user's link is; and the least and the greatest bandwidth."""
    here = 8e-6 * min(each.link for each in forecast.machines)
    low, high = here / 10**DECADES, here * 10**DECADES
    links = [low * (high / low) ** (point / POINTS) for point in range(POINTS + 1)]
    on = [forecast.on_links(each * 1e6 / 8) for each in links]
    run = Curve("this run", "●", tuple((x, each.utilisation) for x, each in zip(links, on, strict=True)))
    other = tuple((x, each.data_parallel.utilisation) for x, each in zip(links, on, strict=True))
    return [run, Curve("data-parallel", "○", other)], [Moment(here, f"yours: {mbit(here)}")], (low, high)


def mbit(value: float) -> str:
    """A bandwidth as text."""
    return f"{value / 1e3:.3g} Gbit/s" if value >= 1e3 else f"{value:.3g} Mbit/s"


def duration(seconds: float) -> str:
    """A time as text, in the largest unit of which there are two or more."""
    for unit, name in ((365.25 * 86400, "years"), (86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:,.1f} {name}"
    return f"{seconds:.3g} s"


def _size(count: float) -> str:
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:.4g}{name}"
    return f"{count:.3g}"
