"""The process that talks to the swarm: `python -m p2p_diloco.node`, one beside each trainer.

Law: the only place where the core's effects are carried out. It owns the replica, the outer state and the
transport; the trainer's process owns the model. The two share one piece of memory (`shared`) and one socket
(`channel`).

    __main__       begins and ends the process
    setup          what the peer tells its node first
    entry          from that to a part in the run
    joining        finds the run or founds it
    run            what the peers of a run have agreed on
    common         what all parts of a node are made with
    participation  puts a node's parts together, and runs them side by side
    beginning      the state that a peer begins with (`restart`, `ending`)
    node           the loop: an event in, its effects out, one after another
    events         the queue of events, and the log of what the replica notes
    tensor_work    effects on tensors; `bases` keeps what a trainer measures from
    outbox         messages on their way out
    inbox          messages on their way in: before the run is known, while it is described (`describing`), and in it
                   (`run_inbox`); `wire` are their bytes, `misfit` is what can't be of this run
    trainer        the trainer's requests and the answers; `submissions` and `ledger` count for it
    local_progress what becomes of its progress at each merge
    status         what a peer says of itself; `reporting` makes it, `records` keep it in the DHT
    saving         checkpoints
    unowned        records in the DHT that every peer keeps alive: changed rates (`revising`), the end of a run (`ends`)
    plain          dataclasses as plain values
"""
