"""`bench`: how long a whole round takes between real processes, where its time goes, and what else could do it.

Law: measures, and changes nothing. Each peer, and each counterpart of it, is a process of its own (`serve`); they take
turns, a round each, so that other work on the machine slows all of them alike.

    command    the whole measurement
    plan       what is measured, from the flags
    group      processes that are measured together, and their rounds
    measure    processor time and memory; the figures of all rounds
    table      figures for people and for programs
    network    machines on links of their own
    serve      the program of a measured process; what it does is one of:
    ours       a peer of a run          gloo    an all-reduce
    raw        bytes alone              averager    Hivemind's
"""
