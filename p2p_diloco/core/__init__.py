"""The protocol, pure: state machines that turn events into effects.

Standard library only; no clock, no randomness, no I/O, no logging.
"""
