"""What training code sees: `Peer`.

Law: the model's parameters are touched here alone, by the thread that trains, inside the optimizer's hook;
whatever concerns the swarm is the node's, in a process of its own.

    peer         the public surface
    session      a peer in its run: everything is started, in order
    hook         what happens at `optimizer.step()`
    rhythm       when the next exchange is due
    merging      newer global values into the model
    times        where the time goes; `metrics`: all counters
    local        the model's parameters beside the global ones: load, carry, pseudo-gradient
    extents      which part of each parameter this process holds
    staging      how its values get from a device to the host and back
    ranks        several processes that are one peer: found out, and joined
    rank0        rank 0 of them
    rank_n       another rank; `rank_link` is between the two
    inner        the inner optimizers' state on disk
    node_client  the conversation with the node
    process      the node's process: started and ended
    absent       the same surface when no run is named
"""

from __future__ import annotations

from p2p_diloco.peer.peer import Peer as Peer

__all__ = ["Peer"]
