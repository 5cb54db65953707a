"""Deterministic simulation of whole runs. A seed decides everything, so each simulated run (a *world*) can be
replayed."""
