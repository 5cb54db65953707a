"""The protocol as pure state machines: they take events and return effects.

Standard library only; no clock, no randomness, no I/O, no logging.

    replica                 the one door: an event in, its effects out
    events, messages        what comes in and goes out; what replicas say to each other
    version, state          names of states; a fragment's state as a value, and the next one
    revision, rules         settings that change; the run's rules and timeouts
    fragment, round         one fragment's log, and the data of its present round
    rounds                  sorts messages by base and phase
    exchange, carry         this peer's contribution; what a state says of it
    training                what this peer's trainer does
    leading, closing        the leader; when it may close a round
    owning                  the owner of slices
    claims, waits           who may write a commit; live peers that are waited for too long
    applying, admission     from a commit to the next state; what a contribution and a commit may say
    plan                    who leads and owns; the election of the asynchronous mode
    holding                 asynchronous mode
    lineage, fetching       whom to believe about newer states; how they come
    digests                 damaged memory
    roster, presence        what is known of other peers; what follows when they come, go or change
    leases, spans           which data is used and leased; sets of positions
    pace, schedule          how many inner steps; which fragment is due
    outlook                 what this replica waits for, as text
"""
