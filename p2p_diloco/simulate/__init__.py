"""Deterministic simulation of whole runs: a seed decides everything, so each run can be replayed."""
