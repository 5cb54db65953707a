"""The plan of a measurement, made from the flags of `bench` and checked.

Law: holds values and their limits; starts nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from p2p_diloco.config import RunConfig
from p2p_diloco.errors import UsageError
from p2p_diloco.observe.figures import RATES, TIMES, number

WARM_UP = 2
"""Rounds before those that are measured. In them connections are made, and memory is used for the first time."""
RAW, GLOO, AVERAGER = BESIDE = ("raw", "gloo", "averager")
"""The other methods that may be measured beside a run."""
WIDTHS = {GLOO: {"fp32": 4, "bf16": 2}, AVERAGER: {"fp32": 4, "fp16": 2}}
"""Bytes of an element on the wire, for each method and number format."""
MEMORY = {"": (4e8, 36), RAW: (2e8, 5), GLOO: (3e8, 52), AVERAGER: (4e8, 64)}
"""Memory of one peer of each method, as measured: a fixed number of bytes, and further bytes for each parameter. "" is
the run itself."""
STATE_WIDTH = 8
"""Bytes of a parameter's state: its value and its momentum."""
CPU = "cpu"
PEERS_MAX = 32
SLOWEST_MBIT = 0.01
RATE_B_S = 5e6
"""The deadline of a round assumes that all peers on one machine together transfer at least this many bytes a second."""
_PARTS = {"%": 1e-2}
RTT_S_MAX, LOSS_MAX = 2.0, 0.2


class Links(NamedTuple):
    """The fields of `Plan` that --link sets."""

    links_mbit: tuple[float, ...] = ()
    rtt_s: float = 0.0
    loss: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """One measurement. `links_mbit`: the bandwidth of each peer's link in each direction; empty: loopback. `rtt_s`: the
    round trip time that the switch adds between any two peers; `loss`: the fraction of packets that it loses. A round
    has `steps` inner steps (0: one for each fragment), each with the work of `step_s` seconds; `overlap`: the inner
    steps made during an exchange. `direct`: whether payloads go over direct connections. `device`: the device of the
    peers' models. `beside`: the other methods to measure. `rounds`: the rounds to measure, after `WARM_UP` others.
    `tensors`: the parameter tensors of the model.

    Raises:
        UsageError: a flag is out of bounds. ConfigError: a setting can't be used.
    """

    peers: int
    parameters: int
    codec: str
    fragments: int
    rounds: int
    links_mbit: tuple[float, ...] = ()
    beside: tuple[str, ...] = ()
    steps: int = 0
    step_s: float = 0.0
    overlap: int = 0
    direct: bool = True
    rtt_s: float = 0.0
    loss: float = 0.0
    device: str = CPU
    tensors: int = 100

    def __post_init__(self) -> None:
        for key, value, least, most in (
            ("--peers", self.peers, 2, PEERS_MAX),
            ("--fragments", self.fragments, 1, 1000),
            ("--rounds", self.rounds, 1, 10_000),
            ("--steps", self.steps or self.fragments, self.fragments, 100_000),
            ("--step-time", self.step_s, 0, 60),
            ("--overlap", self.overlap, 0, 100_000),
            ("--tensors", self.tensors, 1, 100_000),
        ):
            if not least <= value <= most:
                raise UsageError(f"must be {least} to {most}", key=key, value=value, mend=f"choose e.g. {least}")
        if self.tensors < self.fragments:
            mend = "choose more tensors or fewer fragments"
            raise UsageError("are fewer than --fragments", key="--tensors", value=self.tensors, mend=mend)
        if self.parameters < self.tensors:
            mend = "choose more parameters or fewer tensors"
            raise UsageError("are fewer than --tensors", key="--parameters", value=self.parameters, mend=mend)
        if self.beside and (self.steps or self.step_s or self.overlap):
            wrong, mend = "can't be measured with --steps, --step-time or --overlap", "leave it out"
            raise UsageError(wrong, key="--beside", value=self.beside, mend=mend)
        if self.beside and self.device != CPU:
            wrong, mend = f"is measured on the CPU alone, and --device is {self.device}", "leave it out"
            raise UsageError(wrong, key="--beside", value=self.beside, mend=mend)
        if len(self.links_mbit) not in (0, self.peers):
            count, mend = len(self.links_mbit), f"give one for all, or {self.peers} with commas"
            raise UsageError(f"gives {count} speeds for {self.peers} peers", key="--link", mend=mend)
        self.config()

    def config(self) -> RunConfig:
        """The settings of the measured run. Every round needs every peer. The timeouts are long, so that no peer counts
        as dead or idle while other groups play their rounds."""
        patience_s = max(60.0, self.round_s_max)
        return RunConfig(
            sync_every=self.steps or self.fragments,
            num_fragments=self.fragments,
            overlap_steps=self.overlap,
            codec=self.codec,  # type: ignore[arg-type]  # it is checked there
            min_peers=self.peers,
            start_peers=self.peers,
            heartbeat_timeout=patience_s,
            round_timeout=2 * patience_s,
        )

    @property
    def share(self) -> float:
        """The fraction of a vector that each of K peers sends when all of them average it: 1/K to each of the K − 1
        other peers."""
        return (self.peers - 1) / self.peers

    def wires(self, kind: str) -> Sequence[str]:
        """The number formats in which the method `kind` is measured."""
        if kind == AVERAGER:
            return ["fp32" if self.codec == "fp32" else "fp16"]  # Hivemind sends bf16 as fp32
        return list(WIDTHS.get(kind, ["libp2p"]))

    def reduced_bytes(self, name: str, wire: str) -> int:
        """The bytes that a peer sends in an all-reduce of the whole model. It first sends values, which other peers add
        up, and then sums."""
        return round(2 * self.share * self.parameters * WIDTHS[name][wire])

    def optimum_s(self, sent_bytes: int) -> float | None:
        """The least time in seconds that a round can take on these links; None on loopback. `sent_bytes`: bytes that
        each peer would send on equal links. On unequal links, peers share the reduction as in `core.plan`."""
        if not self.links_mbit:
            return None
        vector_bits = 8 * sent_bytes / (2 * self.share)
        together = 2 * (self.peers - 1) / sum(self.links_mbit)
        return vector_bits / 1e6 * max(1 / min(self.links_mbit), together)

    @property
    def fetch_s(self) -> float:
        """The seconds that all other peers have to fetch the founder's state at the same time."""
        slowest = min(self.links_mbit, default=math.inf)
        return 1.5 * (self.peers - 1) * 8 * STATE_WIDTH * self.parameters / 1e6 / slowest

    @property
    def memory_bytes(self) -> int:
        """The estimated memory of all processes together."""
        each = [MEMORY[name] for name in ("", *self.beside)]
        return round(self.peers * sum(fixed + by_parameter * self.parameters for fixed, by_parameter in each))

    @property
    def round_s_max(self) -> float:
        """The seconds after which a round that has not ended counts as failed."""
        all_bytes = 2 * 4 * self.parameters * self.peers
        link_b_s = min(self.links_mbit) * 1e6 / 8 if self.links_mbit else RATE_B_S
        training_s = (self.steps or self.fragments) * self.step_s
        return 60.0 + all_bytes / RATE_B_S + 10 * all_bytes / self.peers / link_b_s + 2 * training_s


def links_of(text: str | None, peers: int) -> Links:
    """Parse RATE[:DELAY[:LOSS]], such as 1gbit, 100mbit:80ms, 100mbit:80ms:0.4% or, with a rate for each peer,
    100mbit,100mbit,20mbit:80ms. None gives no links.

    Raises:
        UsageError: a part can't be read.
    """
    if text is None:
        return Links()
    rates, *more = text.split(":")
    mbit = tuple(number(each, RATES) or 0.0 for each in rates.split(","))
    if any(each < SLOWEST_MBIT for each in mbit):
        raise UsageError("is no speed of a link", key="--link", value=text, mend="write e.g. 100mbit, 1gbit or 500kbit")
    rtt_s = (number(more[0], TIMES) if more else None) or 0.0
    if more and not 0 < rtt_s <= RTT_S_MAX:
        wrong = f"has no round trip time of at most {RTT_S_MAX:g} s after its first colon"
        mend = "write e.g. 100mbit:80ms, or 100mbit,20mbit:80ms: one time for any two machines, after all speeds"
        raise UsageError(wrong, key="--link", value=text, mend=mend)
    loss = (number(more[1], _PARTS) if more[1:] else None) or 0.0
    if more[2:] or (more[1:] and not 0 < loss <= LOSS_MAX):
        wrong = f"has no loss of at most {LOSS_MAX:.0%} after its second colon"
        raise UsageError(wrong, key="--link", value=text, mend="write e.g. 100mbit:80ms:0.4%")
    return Links(mbit * peers if len(mbit) == 1 else mbit, rtt_s, loss)


def names_of(text: str) -> tuple[str, ...]:
    """Parse the names of the methods to measure beside the run. The result has a fixed order; it is empty for "none" or
    an empty text.

    Raises:
        UsageError: a name is not known.
    """
    given = [name for name in re.split(r"[\s,]+", text.strip().lower()) if name not in ("", "none")]
    for name in given:
        if name not in BESIDE:
            mend = f"choose among {', '.join(BESIDE)}, or none"
            raise UsageError(f"names {name!r}, which is not known", key="--beside", value=text, mend=mend)
    return tuple(name for name in BESIDE if name in given)
