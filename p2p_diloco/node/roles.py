"""What the members of a private run may send, by the role in their invitation.

Law: pure: a role and a message give a reason for refusal, or none. A run's settings change only by what its founder has
signed (`revising`), whatever a member's role is.
"""

from __future__ import annotations

from p2p_diloco.core import messages as m
from p2p_diloco.node.wire import Describe, GetSlice, ListSlices, NodeMessage, Nudge, SliceBytes, SliceList


def forbidden(role: str | None, message: NodeMessage | m.Message) -> str:
    """The reason why a peer of this role may not send the message; empty if it may.

    A worker may send everything. An aggregator may neither contribute, nor nudge, nor say that it is a worker, nor get
    or serve data of data nodes. An observer may only ask for the run's description and states, and say that it leaves.
    `role`: None in an open run, where every peer may send everything; empty for a peer that is no member.
    """
    match role, message:
        case (None | "worker", _) | ("observer", Describe() | m.Ask() | m.Leave()):
            return ""
        case "aggregator", m.Ready(weight=0.0):
            return ""
        case (
            "aggregator",
            m.Ready() | m.Slice() | Nudge() | ListSlices() | SliceList() | GetSlice() | SliceBytes(),
        ):
            return f"an aggregator's invitation allows no {type(message).__name__}"
        case "aggregator", m.Probe(summary) | m.ProbeAck(summary) if summary.role != "aggregator":
            return "the peer's invitation lets it aggregate, and not train; start it with --role aggregator"
        case "aggregator", _:
            return ""
        case "observer", _:
            return f"an observer's invitation allows no {type(message).__name__}"
    return "not a member of this run"
