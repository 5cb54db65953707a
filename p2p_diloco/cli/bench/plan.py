"""What is to be measured: the flags of `bench`, read and found fit.

Law: values and their limits; nothing is started or looked up here.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from p2p_diloco.cli.demo.facts import ring_bytes
from p2p_diloco.config import RunConfig
from p2p_diloco.errors import UsageError

WARM_UP = 2
"""Rounds before those that count: connections are made in them, and memory is touched for the first time."""
RAW, GLOO, AVERAGER = BESIDE = ("raw", "gloo", "averager")
"""What may be measured beside a run."""
WIDTHS = {GLOO: {"fp32": 4, "bf16": 2}, AVERAGER: {"fp32": 4, "fp16": 2}}
"""Bytes of an element on each one's wires."""
MEMORY = {"": (4e8, 36), RAW: (2e8, 5), GLOO: (3e8, 52), AVERAGER: (4e8, 64)}
"""What a peer of each takes, as it was measured: bytes, and bytes for each parameter; "" is the run itself."""
SHARD_ELEMENTS = 2**20
STATE_WIDTH = 8
"""Bytes of a parameter's state: its value, and its momentum."""
PEERS_MAX = 32
PARAMETERS_MAX = 10**10
RATE_B_S = 5e6
"""Bytes a second that all peers of one machine move together at the very least; else a round is given up."""
_SIZES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}
_RATES = {"kbit": 1e-3, "mbit": 1.0, "gbit": 1e3}


@dataclass(frozen=True, slots=True)
class Plan:
    """One measurement. `links_mbit`: what each peer's link carries each way; nothing: loopback. A round is `steps`
    inner steps (0: one for each fragment) of `step_s` seconds; `overlap`: how many of them an exchange has. `direct`:
    whether payloads go over direct connections.
    """

    peers: int
    parameters: int
    codec: str
    fragments: int
    rounds: int
    links_mbit: tuple[float, ...]
    beside: tuple[str, ...]
    steps: int = 0
    step_s: float = 0.0
    overlap: int = 0
    direct: bool = True

    @classmethod
    def of(
        cls,
        peers: int,
        parameters: str,
        codec: str,
        fragments: int,
        rounds: int,
        link: str | None,
        beside: str,
        steps: int | None = None,
        step_s: float = 0.0,
        overlap: int = 0,
        direct: bool = True,
    ) -> Plan:
        """The plan that the flags describe.

        Raises:
            UsageError: a flag can't be read. ConfigError: a setting can't be used.
        """
        for key, value, least, most in (
            ("--peers", peers, 2, PEERS_MAX),
            ("--fragments", fragments, 1, 1000),
            ("--rounds", rounds, 1, 10_000),
            ("--steps", fragments if steps is None else steps, fragments, 100_000),
            ("--step-time", step_s, 0, 60),
            ("--overlap", overlap, 0, 100_000),
        ):
            if not least <= value <= most:
                raise UsageError(f"must be {least} to {most}", key=key, value=value, mend=f"choose e.g. {least}")
        numel = count_of(parameters)
        if numel < fragments:
            mend = "choose more parameters or fewer fragments"
            raise UsageError("are fewer than --fragments", key="--parameters", value=parameters, mend=mend)
        links = () if link is None else links_of(link, peers)
        if (steps or step_s or overlap) and names_of(beside):
            mend = "measure it alone, with --beside none"
            raise UsageError("exchange only, and don't train", key="--beside", value=beside, mend=mend)
        plan = cls(peers, numel, codec, fragments, rounds, links, names_of(beside), steps or 0, step_s, overlap, direct)
        plan.config()
        return plan

    def config(self, peers: int | None = None) -> RunConfig:
        """The settings of a run that is measured: one inner step for each fragment, every peer in every round, and
        nobody taken for dead or idle while others have their turn.
        """
        peers = peers or self.peers
        return RunConfig(
            sync_every=self.steps or self.fragments,
            num_fragments=self.fragments,
            overlap_steps=self.overlap,
            codec=self.codec,  # type: ignore[arg-type]  # it is judged there
            min_peers=peers,
            start_peers=peers,
            heartbeat_timeout=max(60.0, self.round_s_max),
            round_timeout=2 * max(60.0, self.round_s_max),
        )

    @property
    def share(self) -> float:
        """Of each vector that is averaged what one peer sends: to each other one its part."""
        return (self.peers - 1) / self.peers

    def reduced_bytes(self, name: str, wire: str) -> int:
        """Bytes that a peer sends in an all-reduce of the whole model: parts to be added, then sums."""
        return ring_bytes(self.parameters, WIDTHS[name][wire], self.peers)

    def optimum_s(self, sent_bytes: int) -> float | None:
        """The least time that the links allow a round in which peers send so many bytes each, were all equal; shares of
        the reduction as `core.shares` reckons them. None on loopback.
        """
        if not self.links_mbit:
            return None
        vector_bits = 8 * sent_bytes / (2 * self.share)
        together = 2 * (self.peers - 1) / sum(self.links_mbit)
        return vector_bits / 1e6 * max(1 / min(self.links_mbit), together)

    @property
    def fetch_s(self) -> float:
        """How long it may take until all have the state that one of them founds the run with."""
        slowest = min(self.links_mbit, default=math.inf)
        return 1.5 * (self.peers - 1) * 8 * STATE_WIDTH * self.parameters / 1e6 / slowest

    @property
    def memory_bytes(self) -> int:
        """What all processes take together, about."""
        each = [MEMORY[name] for name in ("", *self.beside)]
        return round(self.peers * sum(fixed + by_parameter * self.parameters for fixed, by_parameter in each))

    @property
    def round_s_max(self) -> float:
        """How long a round may take before it is given up."""
        all_bytes = 2 * 4 * self.parameters * self.peers
        link_b_s = min(self.links_mbit) * 1e6 / 8 if self.links_mbit else RATE_B_S
        training_s = (self.steps or self.fragments) * self.step_s
        return 60.0 + all_bytes / RATE_B_S + 10 * all_bytes / self.peers / link_b_s + 2 * training_s


def count_of(text: str) -> int:
    """A number of parameters: 25M, 100k, 1.5b, 1000.

    Raises:
        UsageError: it can't be read, or is out of bounds.
    """
    read = re.fullmatch(r"(\d+(?:\.\d+)?)([kmbg]?)", text.strip().lower().replace("_", ""))
    count = 0 if read is None else round(float(read[1]) * _SIZES[read[2]])
    if not 1 <= count <= PARAMETERS_MAX:
        mend = "write e.g. 25M, 100k or 1000"
        raise UsageError("is no number of parameters", key="--parameters", value=text, mend=mend)
    return count


def links_of(text: str, peers: int) -> tuple[float, ...]:
    """What each peer's link carries, in Mbit/s: one speed for all, or one for each, with commas.

    Raises:
        UsageError: a speed can't be read, or they are not as many as the peers.
    """
    links = tuple(mbit_of(each) for each in text.split(","))
    if len(links) not in (1, peers):
        mend = f"give one for all, or {peers} with commas"
        raise UsageError(f"gives {len(links)} speeds for {peers} peers", key="--link", value=text, mend=mend)
    return links if len(links) == peers else links * peers


def mbit_of(text: str) -> float:
    """What a link carries, in Mbit/s: 100mbit, 1gbit, 500kbit.

    Raises:
        UsageError: it can't be read.
    """
    read = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text.strip().lower())
    rate = 0.0 if read is None else float(read[1]) * _RATES[read[2]]
    if rate < 0.01:
        raise UsageError("is no speed of a link", key="--link", value=text, mend="write e.g. 100mbit, 1gbit or 500kbit")
    return rate


def names_of(text: str) -> tuple[str, ...]:
    """What is measured beside, in one order whatever the order of the flag; "none" or nothing: nothing.

    Raises:
        UsageError: a name is not known.
    """
    given = [name for name in re.split(r"[\s,]+", text.strip().lower()) if name not in ("", "none")]
    for name in given:
        if name not in BESIDE:
            mend = f"choose among {', '.join(BESIDE)}, or none"
            raise UsageError(f"names {name!r}, which is not known", key="--beside", value=text, mend=mend)
    return tuple(name for name in BESIDE if name in given)
