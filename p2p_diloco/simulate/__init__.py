"""Deterministic simulation of whole runs: a seed decides everything, and replays."""
