"""What to change for a wanted utilisation, and which settings are known to train badly.

Law: each piece of advice is computed from forecasts, or names what was measured (docs/results.md). Advice is sentences
for people; the numbers in it are fields as well.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace

from p2p_diloco.config.run import OVERLAP_MAX
from p2p_diloco.planning.exchange import Codecs
from p2p_diloco.planning.forecast import Forecast

CODECS = (("bf16", None), ("int8", None), ("int4", None), ("int4", "int4"))
"""The codecs that are compared: (codec, reply_codec). 4 bits cost no more than 0.3 % of the loss in any measurement."""
SYNC_EVERY_MAX = 2**50
FRAGMENTS_MAX = 16
"""The most fragments that are tried. From `OVERLAP_MAX` on, the overlaps of a round can cover all of H, not more."""
LIKE = 1.1
"""Peers whose step times differ by at most this factor are alike."""
HELPS = 1.02
"""A peer holds the others back if they do at least this many times as much without it as with it."""


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """What the run would be with other codecs. `exchange_s`: seconds of a round's exchanges, hidden or not."""

    codec: str
    reply_codec: str
    bytes_each: float
    """Bytes of a parameter, contribution and mean together."""
    exchange_s: float
    sync_every: int
    """The smallest H for the wanted utilisation."""


@dataclass(frozen=True, slots=True)
class HeldBack:
    """A peer without which the others would do more: `gain` times as much. `peer`: its number among the machines."""

    peer: int
    gain: float
    by_link: bool
    """True: its link is the reason; False: its speed."""


@dataclass(frozen=True, slots=True)
class Streaming:
    """Fragments and overlap for a wanted utilisation."""

    sync_every: int
    num_fragments: int
    overlap_steps: int
    utilisation: float


@dataclass(frozen=True, slots=True)
class Advice:
    """All advice for a forecast. `wanted`: the wanted utilisation; `sync_every`: the smallest H that reaches it, if all
    other settings stay."""

    wanted: float
    sync_every: int
    sync_every_most: int | None
    """The greatest H with which the tokens to train on make enough rounds; None: their number is unknown."""
    streaming: Streaming
    codecs: tuple[CodecChoice, ...]
    held_back: HeldBack | None
    pace: str
    """steps or time: the pace that fits the machines."""
    warnings: tuple[str, ...]


def advise(forecast: Forecast, wanted: float, tokens: float | None) -> Advice:
    """All advice. `wanted`: the wanted utilisation; `tokens`: how many all peers together train on; None: unknown."""
    codecs = tuple(_choice(forecast, wanted, codec, reply) for codec, reply in CODECS)
    slow, fast = max(m.step_s for m in forecast.machines), min(m.step_s for m in forecast.machines)
    return Advice(
        wanted,
        smallest_sync_every(forecast, wanted),
        None if tokens is None else greatest_sync_every(forecast, tokens),
        smallest_streaming(forecast, wanted),
        codecs,
        held_back(forecast),
        "time" if slow > LIKE * fast else "steps",
        tuple(forecast.run.doubts(None if tokens is None else tokens / forecast.units)),
    )


def smallest_sync_every(forecast: Forecast, wanted: float) -> int:
    """The smallest H, a multiple of the fragments, that reaches the utilisation u, `wanted`. A round's stall doesn't
    depend on H, so H follows from it: H ≥ stall · u / (1 − u) / step. No fragment has fewer than `overlap_steps`."""
    fragments = forecast.run.num_fragments
    at_least = max(1, forecast.run.overlap_steps)
    needed = wanted / (1 - wanted) * forecast.stall_s / forecast.pace_s
    return fragments * max(at_least, math.ceil(needed / fragments - 1e-9))


def greatest_sync_every(forecast: Forecast, tokens: float) -> int:
    """The greatest H with which this many tokens make enough rounds: `RunConfig.rounds_wanted`."""
    of_a_step = forecast.units / forecast.run.sync_every
    return max(1, math.floor(tokens / of_a_step / forecast.run.rounds_wanted + 1e-9))


def smallest_streaming(forecast: Forecast, wanted: float) -> Streaming:
    """The smallest number of fragments that reaches the utilisation with the present H and an overlap of at most a
    quarter of H, and the shortest such overlap. If no number does: `OVERLAP_MAX` fragments, whose overlaps can cover
    all of H, and the smallest H with which they do."""
    steps, whole = forecast.run.sync_every, forecast.params
    for fragments in (n for n in range(1, min(steps, whole, FRAGMENTS_MAX) + 1) if steps % n == 0):
        if (found := _streaming(forecast, wanted, steps, fragments)) is not None:
            return found
    fragments = min(OVERLAP_MAX, whole)
    longer = range(fragments, SYNC_EVERY_MAX, fragments)
    enough = bisect_left(longer, True, key=lambda steps: _streaming(forecast, wanted, steps, fragments) is not None)
    found = _streaming(forecast, wanted, longer[enough], fragments)
    assert found is not None, "with a long H any link suffices"
    return found


def _streaming(forecast: Forecast, wanted: float, steps: int, fragments: int) -> Streaming | None:
    """The shortest overlap that reaches the utilisation with H = `steps` and these fragments; None: none does."""
    plain = {"overlap_steps": 0, "merge": "mix", "merge_alpha": None}
    waits = forecast.changed(sync_every=steps, num_fragments=fragments, **plain)
    open_s = waits.training_s * (1 - wanted) / wanted / fragments - waits.exchange.own_s
    needed = max(0, math.ceil((waits.exchange.hideable_s - open_s) / forecast.pace_s - 1e-9))
    if open_s < 0 or needed > min(steps // fragments, steps // OVERLAP_MAX):
        return None
    return Streaming(steps, fragments, needed, waits.changed(overlap_steps=needed).utilisation)


def held_back(forecast: Forecast) -> HeldBack | None:
    """Of the peer on the slowest link, the slowest peer and the most distant one: that without which the others would
    do most. None if they would do less than `HELPS` times as much, or if there are fewer than three peers."""
    if forecast.peers < 3:
        return None
    now, each = forecast.course.units_per_second, forecast.machines
    worst_by = (lambda peer: -each[peer].link, lambda peer: each[peer].step_s, lambda peer: each[peer].latency_s)
    suspects = dict.fromkeys(max(range(forecast.peers), key=worse) for worse in worst_by)
    gains = {peer: forecast.without(peer).course.units_per_second / now for peer in suspects}
    worst = max(gains, key=lambda peer: gains[peer])
    if gains[worst] < HELPS:
        return None
    rest = forecast.without(worst).machines
    quick = _rate(forecast, worst, step_s=max(each.step_s for each in rest))
    wide = _rate(forecast, worst, link=min(each.link for each in rest))
    return HeldBack(worst, gains[worst], by_link=wide >= quick)


def _rate(forecast: Forecast, peer: int, **better: float) -> float:
    """The run's units a second if the peer number `peer` had the values `better` (a link or a speed)."""
    machines = list(forecast.machines)
    machines[peer] = replace(machines[peer], **better)
    return replace(forecast, machines=machines).course.units_per_second


def _choice(forecast: Forecast, wanted: float, codec: str, reply: str | None) -> CodecChoice:
    other, codecs = forecast.changed(codec=codec, reply_codec=reply, rounding="nearest"), Codecs.of(codec, reply)
    return CodecChoice(*codecs, codecs.width, other.exchange_s, smallest_sync_every(other, wanted))
