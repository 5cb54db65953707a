"""The protocol as pure state machines: they take events and return effects.

Standard library only; no clock, no randomness, no I/O, no logging.
"""
