"""What a run will cost and whether it pays, computed before anything is started.

Law: pure arithmetic on numbers that the user gives; no I/O, no clock and no torch. docs/planning.md compares it with
measurements.

    exchange    the time and bytes of this package's exchange
    forecast    a run's utilisation, hours and bytes, beside data-parallel training and one peer alone; the host
                memory that a peer needs
    advice      the H, fragments, codec and pace for a wanted utilisation, and warnings about the settings
"""
