"""The API for training code: `Peer`, and the trainer's side of a peer.

Law: only this package changes the model's parameters, and `integrations.taking_part`, which shows the global ones for
an evaluation; in the training thread, inside `optimizer.step()` or a call of `Peer`. The node, in a process of its own,
does everything that concerns other peers.

    peer         the public API
    session      starts all parts of a peer in its run, in order; what an observer has read
    fitness      checks the model and its optimizers before a peer enters, and watches them while it trains
    leaving      the last exchange of a peer that leaves, and the stay of one that has trained alone
    hook         the work at each `optimizer.step()`, and merges of newer global values into the model
    schedule     when the next exchange is due
    progress     what became of the local progress: what was sent, counted and dropped
    metrics      all counters, and sums of time by part
    local        the model's parameters beside the global ones: load, carry, pseudo-gradient; `local_buffers` does
                 the same for its buffers
    extents      which part of each parameter this process holds
    devices      what differs on a GPU, and copies of values from a device to the host and back
    ranks        detects which processes are one peer, and connects them
    rank_hooks   the hooks of rank 0 and of the other ranks, also on other hosts, and their connection
    shard        this peer's part of a shared data set, all of these parts, and which positions are
                 in the local progress
    order        in which order samples come; streams read by position
    refill       gets more data for a peer that has none left; `slices` come from data nodes
    reported     what the trainer reports, and what else gets it
    inner        the inner optimizers' state on disk
    node_client  the node's process, requests to the node and its answers
    absent       the same API when no run is named
"""

from __future__ import annotations

from p2p_diloco.peer.peer import Peer as Peer

__all__ = ["Peer"]
