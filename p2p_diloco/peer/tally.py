"""How many steps and samples a peer has trained, sent and lost, shard by shard.

Law: whole numbers of steps and samples; nothing is exchanged or measured here. Where no samples are reported, a step
counts as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from p2p_diloco.config import RunConfig
from p2p_diloco.core.events import Carry
from p2p_diloco.errors import ConfigError
from p2p_diloco.tensors.layout import Layout
from p2p_diloco.tensors.mean import WEIGHT_MIN


@dataclass(frozen=True, slots=True)
class Sent:
    """What went into one sending of some shards: its weight, its samples, after which inner step it left, and what had
    been sent of each shard before it."""

    shards: Sequence[int]
    weight: float
    samples: int
    at_step: int
    before: tuple[tuple[int, int], ...]


class Tally:
    """Totals since the start, and per shard what they were at its last sending."""

    def __init__(self, config: RunConfig, layout: Layout) -> None:
        self.steps = 0
        self.samples = 0
        """Reported."""
        self.sent_at = 0
        """The inner step after which something was sent last, also if that exchange never began."""
        self._weighting = config.weighting
        self._shares = [shard.numel / layout.numel for shard in layout.shards]
        self._at_sending = [(0, 0)] * len(layout.shards)  # steps and samples at each shard's last sending
        self._uncounted = [0] * len(layout.shards)  # samples whose progress was sent, and is counted by no commit yet
        self._dropped = 0.0

    @property
    def dropped_samples(self) -> int:
        """Samples whose progress was given up, by the share of the model that lost it."""
        return round(self._dropped)

    @property
    def samples_per_step(self) -> float:
        """The mean over all steps; 1 where no samples are reported."""
        return self.samples / self.steps if self.samples and self.steps else 1.0

    def idle_since_sending(self, shard: int) -> bool:
        """Whether no step was made since the shard was last sent."""
        return self._at_sending[shard][0] == self.steps

    # -- what happens

    def send(self, shards: Sequence[int]) -> Sent:
        """Count the progress of these shards as sent.

        Raises:
            ConfigError: it is to be weighed by samples, and none were reported.
        """
        before = tuple(self._at_sending[shard] for shard in shards)
        steps = min(self.steps - steps for steps, _ in before)
        samples = min(self.samples - samples for _, samples in before)
        weight = self._weight(steps, samples, min(self._uncounted[shard] for shard in shards))
        sent = Sent(shards, weight, samples or steps, self.steps, before)
        self.sent_at = self.steps
        for shard in shards:
            self._at_sending[shard] = self.steps, self.samples
            self._uncounted[shard] += sent.samples
        return sent

    def unsend(self, sent: Sent) -> None:
        """Take that back: the exchange never began."""
        for shard, before in zip(sent.shards, sent.before, strict=True):
            self._at_sending[shard] = before
            self._uncounted[shard] -= sent.samples

    def merged(self, shard: int, carry: Carry) -> None:
        """A newer value of the shard was merged with this carry."""
        if carry is Carry.DROP:
            self._dropped += self._shares[shard] * self._uncounted[shard]
        if carry in (Carry.DROP, Carry.SUBTRACT):
            self._uncounted[shard] = 0

    def overwritten(self, shard: int, share: float) -> None:
        """That share of the progress since the shard's last sending is lost."""
        self._dropped += self._shares[shard] * share * self._since(shard)

    def give_up(self) -> None:
        """All progress that no commit counts is lost."""
        for shard, share in enumerate(self._shares):
            self._dropped += share * (self._since(shard) + self._uncounted[shard])
            self._at_sending[shard], self._uncounted[shard] = (self.steps, self.samples), 0

    # -- inside

    def _since(self, shard: int) -> int:
        steps, samples = self._at_sending[shard]
        return self.samples - samples or self.steps - steps

    def _weight(self, steps: int, samples: int, carried: int) -> float:
        """`carried`: samples whose progress was sent before, and is sent again for no commit counts it."""
        if not steps and not carried:
            return WEIGHT_MIN  # nothing was trained: the mean is not to be diluted by that
        match self._weighting:
            case "steps":
                return float(max(1, steps))
            case "uniform":
                return 1.0
            case "samples":
                if steps and not samples:
                    raise ConfigError(
                        "needs to be told the samples of each step",
                        key="weighting",
                        value="samples",
                        mend="call peer.report(samples=...) before optimizer.step()",
                    )
                return float(samples or carried)
