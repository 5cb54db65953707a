"""The process that talks to the swarm: `python -m p2p_diloco.node`, one beside each trainer.

Law: the only place where the core's effects are carried out. It owns the replica, the outer state and the
transport; the trainer's process owns the model. The two share one piece of memory (`shared`) and one line
(`channel`).

    __main__     begins and ends the process
    setup        what the peer tells its node first
    joining      finds the run or founds it
    run          what the peers of a run have agreed on
    node         the loop: an event in, its effects out, one after another
    tensor_work  effects on tensors
    outbox       messages on their way out
    inbox        messages on their way in; `wire` are their bytes
    trainer      the trainer's requests and the answers
    records      what a peer says of itself in the DHT
    saving       checkpoints
"""
