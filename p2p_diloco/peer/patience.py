"""Waits until an exchange is over, with a deadline in the two cases that have one.

Law: an exchange of a run that goes on is waited for without a limit. There is a deadline only while a new run waits
for its `start_peers`, and while this peer leaves.
"""

from __future__ import annotations

import logging
import math
import time

from p2p_diloco.config import RunConfig
from p2p_diloco.errors import GaveUpWaiting
from p2p_diloco.node.channel import Message
from p2p_diloco.peer.node_client import NodeClient

log = logging.getLogger("p2p_diloco")


class Patience:
    """How long one trainer waits for its exchanges."""

    def __init__(self, node: NodeClient, config: RunConfig, wait_timeout_s: float) -> None:
        """`wait_timeout_s`: the longest time to wait until a run has its `start_peers`."""
        self._node, self._start_peers, self._wait_timeout_s = node, config.start_peers, wait_timeout_s
        self._leave_s, self._leave_by = math.inf, math.inf

    def leave_within(self, seconds: float) -> None:
        """Record that this peer leaves: give up any wait once this many seconds have passed from now, and log as a
        warning what the wait is for."""
        self._leave_s, self._leave_by = seconds, time.monotonic() + seconds
        self._node.say = lambda text: log.warning("leaving: %s; for %g s at most, ^C skips this", text, seconds)

    def hurry(self, seconds: float) -> None:
        """From now on, wait at most this many seconds for an answer of the node, because the program is to end soon."""
        self._node.answer_s = seconds

    def until_over(self, request: int) -> Message:
        """Wait until the exchange with this request's number is over. Returns the node's answer.

        Raises:
            GaveUpWaiting: it is not over in time.
        """
        starting = self._start_peers > 1 and self._node.memory.epoch == 0
        for_start_s, for_leave_s = self._wait_timeout_s if starting else math.inf, self._leave_by - time.monotonic()
        release = self._node.wait_for("release", n=request, timeout_s=min(for_start_s, for_leave_s))
        if release is not None:
            return release
        few = f"fewer than start_peers={self._start_peers} peers take part"
        if for_leave_s < for_start_s:
            why = few if starting else "the last exchange is not over"
            mend = "raise it, or call force_sync() earlier"
            raise GaveUpWaiting(f"has passed, and {why}", key="exit_timeout", value=f"{self._leave_s:g}", mend=mend)
        mend = "start the others, or lower start_peers"
        raise GaveUpWaiting(f"has passed, and {few}", key="wait_timeout", value=self._wait_timeout_s, mend=mend)
