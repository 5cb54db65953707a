"""The trainer's side of an observer: asks the node for the run's newest state, and loads it into the model.

Law: the model changes only in `refresh` and when the peer enters, in the calling thread.
"""

from __future__ import annotations

from torch import Tensor

from p2p_diloco import errors
from p2p_diloco.errors import NodeDied
from p2p_diloco.node.channel import Message
from p2p_diloco.peer.local import LocalModel
from p2p_diloco.peer.metrics import Standing
from p2p_diloco.peer.node_client import NodeClient
from p2p_diloco.peer.progress import LOAD


class Following:
    """What an observer has read of its run."""

    def __init__(self, node: NodeClient, parameters: LocalModel, first: Message, within_s: float) -> None:
        """`first`: the node's message that the first state is in the shared memory. `within_s`: deadline for the node's
        answer; the node answers when it has a state, or has given up."""
        self._node, self._parameters, self._within_s = node, parameters, within_s
        self.standing = Standing()
        """The epoch and the digest of the state that was read last, and whether it is the run's last one."""
        self._load(first)

    def refresh(self) -> bool:
        """Read the newest complete state into the model. Returns whether it is newer than the state that was read
        before.

        Raises:
            GaveUpWaiting: no peer sent a state in time. Refused: the run has ended, and no peer has its last state. A
                later call may succeed.
        """
        with self._node.turn():
            n = self._node.request("refresh")
            answer = self._node.wait_for("refreshed", n=n, timeout_s=self._within_s)
        if answer is None:
            raise NodeDied(f"the node did not answer within {self._within_s:g} s", mend="see its log above")
        if (error := answer.get("error")) is not None:
            raise errors.from_wire(error)
        self._load(answer)
        return bool(answer["came"])

    def global_values(self) -> dict[str, Tensor]:
        """A copy of the global parameters that were read last, by name."""
        return self._parameters.global_values()

    def _load(self, told: Message) -> None:
        self._parameters.merge(dict.fromkeys(self._parameters.shards, LOAD))
        self.standing = Standing(told["epoch"], told["digest"], told["finished"])
