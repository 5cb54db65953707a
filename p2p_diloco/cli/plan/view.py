"""Shows a forecast: lines of text for people, an object for programs, and the curves of a plot.

Law: only shows what `planning` computes. Data go to stdout, progress to stderr.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import Any

import typer

from p2p_diloco.cli.plan.inputs import Asked, Question, question
from p2p_diloco.errors import ConfigError, UsageError, reason
from p2p_diloco.observe.figures import bytes_of
from p2p_diloco.observe.plot import Curve, Moment, Plot
from p2p_diloco.planning.forecast import Course, Forecast

SETTINGS = ("sync_every", "num_fragments", "overlap_steps", "codec", "reply_codec", "pace", "outer_momentum")
POINTS, ROWS = 60, 8
DECADES = 2
"""The curves cover this many powers of ten below and above the bandwidth of the slowest link."""
WIDTH = 80
"""Columns of the output if it is not a terminal."""


def answer(
    asked: Asked, settings: Mapping[str, object], config_file: Path | None, png: Path | None, *, as_json: bool
) -> None:
    """Print the forecast and the advice.

    Raises:
        UsageError, ConfigError: an input is missing or can't be used. NoBootstrapReached: no peer of the run answers.
    """
    asks = question(asked, settings, config_file)
    if png is not None:
        try:
            plot_of(asks).png(png)
        except ImportError:
            mend = "install it: pip install 'p2p-diloco[plot]', or leave --png out"
            raise UsageError("needs matplotlib, which isn't installed", key="--png", value=png, mend=mend) from None
        except (OSError, ValueError) as error:
            why = reason(error) if isinstance(error, OSError) else str(error)
            raise ConfigError(f"can't be written ({why})", key="--png", value=png, mend="name another file") from None
        typer.echo(f"wrote {png}", err=True)
    if as_json:
        typer.echo(json.dumps(as_object(asks), indent=2))
    else:
        width = get_terminal_size((WIDTH, 0)).columns if sys.stdout.isatty() else WIDTH
        typer.echo("\n".join(drawn(asks, width)))


def as_object(question: Question) -> dict[str, Any]:
    """The forecast as one JSON object; docs/planning.md describes every field."""
    forecast, names = question.forecast, question.names
    return {
        "schema_version": 1,
        "params": forecast.params,
        "settings": {key: forecast.run.to_wire()[key] for key in SETTINGS},
        "machines": [
            {
                "name": name,
                "link_mbit": 8e-6 * each.link if forecast.peers > 1 else None,
                "latency_s": each.latency_s,
                "step_s": each.step_s,
            }
            for name, each in zip(names, forecast.machines, strict=True)
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
            "sent_bytes_each": [forecast.run.num_fragments * each for each in forecast.exchange.sent],
        },
        "memory_bytes": forecast.memory._asdict(),
        "ways": {key: _way(course, question.tokens) for key, course in forecast.ways.items()},
        "advice": asdict(question.advice),
    }


def _way(course: Course, tokens: int | None) -> dict[str, Any]:
    told = {
        "utilisation": course.utilisation,
        "units_per_second": course.units_per_second,
        "sent_bytes_per_unit": course.sent_per_unit,
    }
    if tokens is not None:
        told |= {"hours": course.seconds(tokens) / 3600, "sent_bytes": course.sent(tokens)}
    return told


def _unit(forecast: Forecast) -> str:
    return "step" if forecast.tokens_per_step is None else "token"


# -- for people


def drawn(question: Question, width: int) -> Iterator[str]:
    """The whole answer, in lines of at most `width` columns."""
    forecast, advice = question.forecast, question.advice
    yield headline(question)
    yield from (f"  {note}" for note in question.notes)
    yield ""
    yield from _columns(_figures(question))
    yield ""
    yield verdict(forecast)
    if forecast.peers == 1:  # it makes no exchanges
        return
    yield f"\nFor {100 * advice.wanted:g}% utilisation"
    choices = [
        (one.codec, one.reply_codec, f"{one.bytes_each:.2f}", duration(one.exchange_s), f"{one.sync_every:,}")
        for one in advice.codecs
    ]
    yield from _columns([("codec", "reply_codec", "bytes a parameter", "exchange", "smallest H"), *choices])
    marked = [("•", line) for line in advices(question)] + [("!", line) for line in advice.warnings]
    for mark, line in marked:
        yield fill(line, width - 1, initial_indent=f"  {mark} ", subsequent_indent="    ", break_on_hyphens=False)
    yield ""
    yield from plot_of(question).text(min(width - 1, 78), ROWS)


def headline(question: Question) -> str:
    """A line that says what is forecast."""
    forecast, run, machines = question.forecast, question.forecast.run, question.forecast.machines
    codecs, links = forecast.exchange.codecs, [8e-6 * each.link for each in machines]
    parts = [f"{_size(forecast.params)} parameters, {forecast.peers} peer{'s' * (forecast.peers > 1)}"]
    if forecast.peers > 1:
        parts.append(" to ".join(dict.fromkeys(map(mbit, (min(links), max(links))))))
    if forecast.peers > 1 and any(each.latency_s for each in machines):
        parts.append(_span([1e3 * each.latency_s for each in machines], " ms"))
    parts += [_span([each.step_s for each in machines], " s a step"), f"H={run.sync_every}", codecs.codec]
    parts += [f"means in {codecs.reply}"] * (codecs.reply != codecs.codec)
    parts += [f"{run.num_fragments} fragments"] * (run.num_fragments > 1)
    parts += [f"overlap {run.overlap_steps}"] * (run.overlap_steps > 0)
    return ", ".join([*parts, *["paced by time"] * (run.pace == "time")])


def _span(values: Sequence[float], unit: str) -> str:
    low, high = min(values), max(values)
    return f"{low:.3g}{unit}" if low == high else f"{low:.3g} to {high:.3g}{unit}"


def _figures(question: Question) -> Iterator[tuple[str, ...]]:
    """The rows of the table: the figures of the run beside those of the two other ways to train."""
    forecast, tokens = question.forecast, question.tokens
    units, unit = forecast.units, f"{_unit(forecast)}s"

    def each(title: str, shown: Callable[[Course], str]) -> tuple[str, ...]:
        return (title, *map(shown, forecast.ways.values()))

    yield "", "this run", "data-parallel", "one alone"
    yield each("utilisation", lambda way: f"{way.utilisation:.1%}")
    yield each(f"{unit} an hour, all peers", lambda way: _size(3600 * way.units_per_second))
    yield each(f"{unit} of a round: a peer sends", lambda way: _sent(way, units))
    yield each(f"{'':{len(unit)}}             take", lambda way: duration(way.seconds(units)))
    yield "a round: training", duration(forecast.training_s)
    yield "         standing still", duration(forecast.stall_s)
    yield "         exchange", duration(forecast.exchange_s)
    if tokens is not None:
        yield each(f"{_size(tokens)} tokens take", lambda way: duration(way.seconds(tokens)))
        yield each("         a peer sends", lambda way: _sent(way, tokens))
    yield "memory: trainer, no activations", bytes_of(forecast.memory.trainer, " ")
    yield "        node", bytes_of(forecast.memory.node, " ")


def _sent(course: Course, units: float) -> str:
    return bytes_of(course.sent(units), " ") if course.sent_per_unit else "-"


def _columns(rows: Iterator[tuple[str, ...]] | Sequence[tuple[str, ...]]) -> Iterator[str]:
    """A table with its titles underlined. The first column is aligned to the left, the others to the right."""
    head, *body = rows
    widths = [max(len(row[column]) for row in (head, *body) if column < len(row)) for column in range(len(head))]
    for row in (head, tuple("─" * width for width in widths), *body):
        cells = [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=False)]
        yield "   ".join([f"{row[0]:<{widths[0]}}", *cells])


def verdict(forecast: Forecast) -> str:
    """A sentence that says whether the run pays."""
    gain = forecast.course.units_per_second / forecast.alone.units_per_second
    if forecast.peers == 1:
        return "One peer alone exchanges nothing."
    if gain <= 1:
        return f"It does not pay as it is: the fastest peer alone does {1 / gain:.1f} times as much."
    best = sum(1 / each.step_s for each in forecast.machines) * min(each.step_s for each in forecast.machines)
    return f"Together {gain:.2f} times as much as the fastest peer alone, of {best:.2f} possible."


def advices(question: Question) -> Iterator[str]:
    """The advice as sentences, for two peers or more."""
    run, advice, how = question.forecast.run, question.advice, question.advice.streaming
    if question.forecast.utilisation >= advice.wanted:
        yield f"H={run.sync_every} is enough: the smallest that suffices is {advice.sync_every:,}."
    else:
        least, costs = min(advice.codecs, key=lambda one: one.sync_every), ""
        enough = f"--sync-every {advice.sync_every} suffices"
        if least.sync_every < advice.sync_every:
            enough += f", or --codec {least.codec} --reply-codec {least.reply_codec} --sync-every {least.sync_every}"
            costs = "; 4 bits cost at most 0.3 % of the loss where it was measured"
        yield f"{enough}. A longer H learns less from a token{costs}."
        yield (
            f"Or let training go on meanwhile: --sync-every {how.sync_every} --num-fragments {how.num_fragments} "
            f"--overlap-steps {how.overlap_steps} ({how.utilisation:.1%}). An overlap of a quarter of H cost 0.3 to "
            "1.1 % of the loss where it was measured."
        )
    if (most := advice.sync_every_most) is not None:
        yield f"These tokens allow H={most:,} at most, for {run.rounds_wanted:.0f} outer steps or more."
    if (held := advice.held_back) is not None:
        why, name = "link" if held.by_link else "speed", question.names[held.peer]
        yield f"{name} holds the others back by its {why}: without it they do {held.gain:.2f} times as much."
    alike = "The machines are alike: synchronous rounds of equal steps fit (--pace steps)."
    unlike = "The machines are of unlike speed: with --pace time no peer waits for a slower one."
    yield (unlike if advice.pace == "time" else alike) + " --mode async is for speeds that change within a round."


def plot_of(question: Question) -> Plot:
    """Curves of utilisation by the bandwidth of the slowest link in Mbit/s, of this run and of data-parallel training,
    with a mark at the user's slowest link."""
    here = 8e-6 * min(each.link for each in question.forecast.machines)
    low, high = here / 10**DECADES, here * 10**DECADES
    links = [low * (high / low) ** (point / POINTS) for point in range(POINTS + 1)]
    on = [(each, question.forecast.on_links(each * 1e6 / 8)) for each in links]
    run = Curve("this run", "●", tuple((x, each.utilisation) for x, each in on))
    other = Curve("data-parallel", "○", tuple((x, each.data_parallel.utilisation) for x, each in on))
    title, x_label = headline(question).replace(", H=", "\nH="), "bandwidth of the slowest link, Mbit/s"
    yours = Moment(here, f"yours: {mbit(here)}")
    return Plot(title, x_label, "utilisation", low, high, (run, other), (yours,), log_x=True)


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
