"""The bytes and the time of one exchange, as this package makes it.

Law: formulas over the figures of docs/performance.md. docs/planning.md says how well they fit.

K peers exchange a fragment of n parameters in S slices. A contribution to all of it has P bytes in `codec`, all means
have R bytes in `reply_codec`. Peer i has a link of b_i bytes a second in each direction, and owns the share s_i, as
`core.plan` divides it, in whole slices. Each slice's owner gets K − 1 contributions and sends as many means, so peer i
    sends     (1 − s_i) P + (K − 1) s_i R,       receives  (1 − s_i) R + (K − 1) s_i P
and its link is busy for the longer of the two, with headers (HEADERS), at b_i. The means are there when the last of
these has happened for every peer, with r_i the round trip time to the most distant other peer:
    its link is done         busy_i · u + r_i / 2
    its last mean comes      (1 − s_i) P / b_i · u + r_i + the last slice of each other owner, received at b_i
    its node is done         NODE_S bytes sent + encoding + r_i / 2
Means of early slices travel while later contributions do, so half of the round trip is hidden, unless a peer
owns nothing. The factor u, 1 or more: TCP shares a link unevenly among K − 1 connections, and the exchange waits
for the slowest of them. `net.tcp` evens them out once it has measured the link, which takes some seconds.

r_i, for what the leader says (which contributions count, and the commit), SLICE_S for each slice, STEP_S for each
parameter (the outer step) and OWN_S for each parameter (pseudo-gradient and merge, in which training always stands
still) are added. Not modelled: lost packets, processors that several peers share, TCP's start on new connections,
copies to and from a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from p2p_diloco.core.plan import fast_enough, rooms
from p2p_diloco.tensors.partition import SLICES_MAX, spread

WIRE_BYTES: Mapping[str, float] = {
    "fp32": 4,
    "bf16": 2,
    "fp16": 2,
    "int8": 1 + 2 / 128,
    "int4": 0.5 + 2 / 128,
    "e3m0": 0.5 + 2 / 128,
    "topk": 4 / 64,
}
"""Bytes of a parameter on the wire, by codec."""
ENCODE_S: Mapping[str, float] = {"fp16": 0.4e-9, "int8": 5.3e-9, "int4": 6.6e-9, "e3m0": 10.0e-9, "topk": 14.2e-9}
"""Processor seconds to encode a parameter and to keep its error (docs/measurements.md). Other codecs take none."""
FEEDS_BACK = ("int8", "int4", "e3m0", "topk")
"""Codecs whose error the sender keeps. With them, means are sent in bf16 unless `reply_codec` is set."""
HEADERS = 1514 / 1448 * 1.02
"""Bytes on an Ethernet link for each byte of a TCP payload. The links are full in both directions, so 2 % (fitted) go
to acknowledgements of what comes the other way."""
NODE_S = 5.0e-9
"""The node's processor seconds for each byte that it sends: 4.7 to 5.7 s a GB were measured."""
SLICE_S = 1e-3
"""Seconds for each slice: 1 to 2 ms of processor time were measured, a part of which is hidden."""
STEP_S = 5.2e-9
"""Seconds for each parameter of the outer step: for 25 million parameters 0.13 s were measured."""
OWN_S = 3.2e-9
"""Seconds for each parameter: for 25 million parameters the pseudo-gradient took 0.045 s, and the merge 0.035 s."""
UNEVEN, PACED = 0.3, 0.015
"""u is 1 + UNEVEN (1 − 2 / K) while the links are not measured, and 1 + PACED (K − 2) afterwards. Both numbers are
fitted to measured rounds."""
PACED_AFTER_S, PACED_BELOW = 1.5, float(2**25)
"""Links are measured in exchanges of PACED_AFTER_S (K − 1) seconds and more (fitted), and only up to PACED_BELOW bytes
a second (`net.tcp.SLOW`)."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A peer's machine. `link`: bytes a second in the slower direction; `latency_s`: seconds, such that the round trip
    time between two peers is the mean of their two values; `step_s`: seconds of an inner step."""

    link: float
    latency_s: float = 0.0
    step_s: float = 1.0


class Codecs(NamedTuple):
    """The codecs of contributions (`codec`) and of means (`reply`)."""

    codec: str = "bf16"
    reply: str = "bf16"

    @classmethod
    def of(cls, codec: str, reply: str | None = None) -> Codecs:
        """The codecs of a run with these settings. `reply` None: the codec that a run uses if no reply_codec is set."""
        return cls(codec, reply or ("bf16" if codec in FEEDS_BACK else codec))

    @property
    def width(self) -> float:
        """Bytes of a parameter's contribution and mean together."""
        return WIRE_BYTES[self.codec] + WIRE_BYTES[self.reply]


@dataclass(frozen=True, slots=True)
class Exchange:
    """The exchange of one fragment between machines. `sent`: the bytes that each peer sends, without headers."""

    codecs: Codecs
    slices: int
    """S: how many slices the fragment has, by the rule of docs/math.md."""
    sent: tuple[float, ...]
    mean_sent: float
    """The bytes sent by a peer, in the mean over all peers. Slices are whole, so the busiest may send a little more."""
    hideable_s: float
    """Seconds of the exchange that overlap can hide behind training."""
    own_s: float
    """Seconds of the exchange in which training always stands still: pseudo-gradient and merge."""

    @property
    def seconds(self) -> float:
        """From the end of an inner step until the result is in the models of all peers."""
        return self.hideable_s + self.own_s


def of_model(params: int, fragments: int, machines: Sequence[Machine], codecs: Codecs) -> Exchange:
    """The exchange of one of `fragments` equally long fragments of a model with `params` parameters."""
    numel, peers = -(-params // fragments), len(machines)
    slices = spread(numel, 1 + max(0, SLICES_MAX - fragments) // fragments)
    links = {f"{number:04}": machine.link for number, machine in enumerate(machines)}
    owned = rooms(slices, links, fast_enough(links))
    part = tuple(owned.get(name, 0) / slices for name in links)
    contributions, commits = numel * WIRE_BYTES[codecs.codec], numel * WIRE_BYTES[codecs.reply]
    sent = tuple((1 - s) * contributions + (peers - 1) * s * commits for s in part)
    received = tuple((1 - s) * commits + (peers - 1) * s * contributions for s in part)
    mean_sent = (peers - 1) / peers * numel * codecs.width
    if peers == 1:
        return Exchange(codecs, slices, sent, mean_sent, 0.0, 0.0)
    busy = [HEADERS * max(both) / m.link for m, both in zip(machines, zip(sent, received, strict=True), strict=True)]
    paced = max(busy) >= PACED_AFTER_S * (peers - 1) and max(m.link for m in machines) <= PACED_BELOW
    uneven = 1 + PACED * (peers - 2) if paced else 1 + UNEVEN * (1 - 2 / peers)
    ends, aggregators = [], sum(share > 0 for share in part)
    for number, (machine, rtt_s) in enumerate(zip(machines, round_trips(machines), strict=True)):
        others = aggregators - (part[number] > 0)
        last_s = HEADERS * min(others, slices) / slices * commits / machine.link
        to_send_s = HEADERS * (1 - part[number]) * contributions / machine.link
        node_s = NODE_S * sent[number] + ENCODE_S.get(codecs.codec, 0.0) * numel
        link_s = busy[number] * uneven
        means_s = max(link_s + rtt_s / 2, to_send_s * uneven + rtt_s + last_s, node_s + rtt_s / 2)
        ends.append(means_s + rtt_s)
    hideable_s = max(ends) + SLICE_S * slices + STEP_S * numel
    return Exchange(codecs, slices, sent, mean_sent, hideable_s, OWN_S * numel)


def round_trips(machines: Sequence[Machine]) -> list[float]:
    """The round trip time from each peer to the most distant other one."""
    second, first = sorted(machine.latency_s for machine in machines)[-2:]
    return [(own + (second if own == first else first)) / 2 for own in (machine.latency_s for machine in machines)]


def data_parallel(params: int, machines: Sequence[Machine], width: float) -> tuple[float, float]:
    """The bytes that a peer sends in an all-reduce of the gradients (`width` bytes each), and the seconds that this
    takes. It is a ring all-reduce: no other sends less (Patarasuk and Yuan 2009). The slowest link sets its pace. Its
    2 (K − 1) transfers follow one another, and each takes half a round trip between the two most distant peers."""
    peers = len(machines)
    if peers < 2:
        return 0.0, 0.0
    sent = 2 * (peers - 1) / peers * params * width
    pair = sorted(machine.latency_s for machine in machines)[-2:]
    return sent, HEADERS * sent / min(machine.link for machine in machines) + (peers - 1) * sum(pair) / 2
