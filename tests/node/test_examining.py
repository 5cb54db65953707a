"""Contact: since when a peer was live without a break."""

from __future__ import annotations

import math

from p2p_diloco.node.examining import Contact


def test_a_peer_that_was_missing_once_counts_anew() -> None:
    contact = Contact(1.0)
    for now, alive in enumerate(["ab", "ab", "a", "ab"]):
        contact.look(alive, float(now))
    assert (contact.since("a"), contact.since("b"), contact.since("c")) == (0.0, 3.0, math.inf)


def test_a_suspension_of_this_process_is_a_break_with_all() -> None:
    contact = Contact(1.0)
    for now in (0.0, 1.0, 2.9):  # as late as a busy machine
        contact.look("a", now)
    assert contact.since("a") == 0.0
    contact.look("a", 60.0)
    assert contact.since("a") == 60.0
