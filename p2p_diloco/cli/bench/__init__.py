"""`bench`: measures how long a whole round takes between real processes, and where its time goes. Measures other
methods in the same way.

Law: only measures. Each peer, and each member of another method, is a process of its own (`serve`). Groups of them take
turns, a round each, so that other work on the machine slows all groups equally.

    command    the whole measurement
    plan       what is measured, from the flags
    group      processes that are measured together, and their rounds
    measure    processor time and memory; the figures of all rounds
    table      figures for people and for programs
    network    simulated machines, each on a link of its own
    delay      the program of the switch between them, if packets are to be delayed or lost
    frames     the packets in the switch's frames
    serve      the program of a measured process, which runs one of these four contenders:
    ours       a peer of a run          gloo        gloo's all-reduce
    raw        a transfer of bytes      averager    Hivemind's averager
"""
