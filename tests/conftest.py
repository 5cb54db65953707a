"""What all tests share.

Hypothesis judges properties here, not the speed of the machine: on a busy one neither a slow example nor
slow drawing of examples is a fault of the code."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")

# A shell that starts pytest in the background has it, and so every process it starts, ignore ^C and hang-ups.
for number, plain in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, plain)
