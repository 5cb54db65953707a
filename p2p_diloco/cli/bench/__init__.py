"""`bench`: measures how long a whole round takes between real processes, where its time goes, and how long other
methods take.

Law: only measures. Each peer, and each member of another method, is a process of its own (`serve`). Groups of them take
turns, a round each, so that other work on the machine slows all groups equally.

    command    the whole measurement
    plan       what is measured, from the flags
    group      processes that are measured together, and their rounds
    measure    processor time and memory; the figures of all rounds
    table      figures for people and for programs
    network    machines on links of their own
    delay      the program of their switch, where packets are delayed or lost
    frames     the packets in the switch's frames
    serve      the program of a measured process; what it does is one of these four contenders:
    ours       a peer of a run          gloo    an all-reduce
    raw        bytes alone              averager    Hivemind's
"""
