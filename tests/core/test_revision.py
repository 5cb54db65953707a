"""Revisions: their order, what a signature covers, and what follows a longer H."""

from __future__ import annotations

from dataclasses import replace

from p2p_diloco.core.revision import FOUNDED, Revision
from p2p_diloco.core.rules import Rules

FIRST = Revision(1, 0.5, 0.9, "signed")
SECOND = Revision(2, 0.3, 0.0, "signed")


def test_revisions_are_ordered_by_number_and_values_not_by_proof() -> None:
    """The higher number wins; of equal numbers the greater values win, on every peer alike."""
    assert FOUNDED < FIRST < SECOND
    assert max(Revision(1, 0.5, 0.9), Revision(1, 0.7, 0.0)) == Revision(1, 0.7, 0.0)
    assert Revision(1, 0.5, 0.9, "x") == Revision(1, 0.5, 0.9, "y")
    assert FOUNDED.rates is None
    assert FIRST.rates == (0.5, 0.9)


def test_what_was_signed_and_saved_before_stays_valid() -> None:
    """A revision of the rates alone has the bytes that it had when revisions changed only rates. A revision of anything
    else differs from it, and names all that it changes."""
    assert FIRST.covered == (1, 0.5, 0.9)
    others = [
        replace(FIRST, **{name: 3}) for name in ("sync_every", "min_peers", "stop_after_epochs", "stop_after_samples")
    ]
    others += [replace(FIRST, saves=1), replace(FIRST, stop_after_epochs=0), replace(FIRST, stop_after_samples=0)]
    assert len({revision.covered for revision in (FIRST, *others)}) == len(others) + 1
    assert replace(FIRST, stop_after_epochs=0).changed == {
        "outer_lr": 0.5, "outer_momentum": 0.9, "stop_after_epochs": None
    }  # fmt: skip


def test_a_longer_h_allows_heavier_contributions() -> None:
    """The limits of a contribution follow H, so none of a longer round is refused; a shorter H changes no limit."""
    rules = Rules(run="r", fragments=((0,),), sync_every=10, weight_max=100.0, samples_max=100)
    longer, shorter = Revision(1, sync_every=30), Revision(1, sync_every=1)
    assert [rules.fits(300.0, 300, revision) for revision in (FOUNDED, longer, shorter)] == [False, True, False]
    assert rules.fits(100.0, 100, shorter)
