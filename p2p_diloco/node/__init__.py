"""The node: the process that talks to the other peers. One runs beside each trainer (`python -m p2p_diloco.node`).

Law: only here are the core's effects carried out. It owns the replica, the outer state and the transport; the trainer's
process owns the model. The two share one piece of memory (`shared`, which has the first message, too) and one socket
(`channel`).

    __main__       starts and ends the process
    swarm          opens the transport; in a private run, as a member
    joining        finds the run or founds it
    run            the settings and the layout that the peers of a run agree on
    common         the values that all parts of a node share, with the queue of events, and the log of notes
    participation  all steps from the first message to the end; makes a node's parts, and runs them concurrently
    beginning      the state that a peer starts with, and when training may start (`run_end`)
    node           the loop: an event in, its effects out, one after another
    slice_work     effects on tensors, and the bases of pseudo-gradients; it encodes contributions
    outbox         outgoing messages
    inbox          incoming messages: before the run is known, while it is described (`joining`), and in it
                   (`run_inbox`); refusals and limits
    headers        messages as bytes, in the forms that `forms` makes of their types and `fields` limits; `wire` has the
                   messages of nodes
    signatures     what peers sign, and whether it is signed
    auditing       audits of other peers' means (`examining`, `verdicts`)
    trainer        the trainer's requests and their answers; `ledger` keeps its counters
    status         the status of a peer; `reporting` makes it, `records` publishes it in the DHT
    saving         checkpoints
    history        the events and effects of this peer's core, on disk
    metrics, otlp  the status for Prometheus and OpenTelemetry
    alike          warns of two peers that contribute the same
    observing      what an observer does instead: it reads states; `exporting` writes them as a model
    data_node      a process that serves files to peers
    board          records of a run in the DHT: its settings, and changed ones (`run_record`), its end (`run_end`),
                   statuses (`records`), losses (`curves`), data nodes (`fetching`), revoked invitations
                   and that it is private (`privacy`)
"""
