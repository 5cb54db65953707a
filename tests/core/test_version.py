"""Versions and incarnations: the orders that decide forks and lives."""

from __future__ import annotations

from p2p_diloco.core.version import (
    SALT_BITS,
    ContributionId,
    ModelVersion,
    Version,
    incarnation,
    incarnation_after,
    model_version,
)


def test_the_generation_outranks_the_samples_and_these_the_epoch() -> None:
    """A deliberate new generation beats any amount of training; more samples beat more outer steps. So it is for whole
    models."""
    falling = [Version(1, 0, 0, "a"), Version(0, 9, 1, "a"), Version(0, 8, 7, "a"), Version(0, 8, 6, "b")]
    falling.append(Version(0, 8, 6, "a"))
    assert sorted(falling, reverse=True) == falling
    models = [ModelVersion(1, 0, 0, "a"), ModelVersion(0, 9, 1, "a"), ModelVersion(0, 8, 7, "b")]
    models += [ModelVersion(0, 8, 7, "a"), ModelVersion(0, 0, 0, ""), ModelVersion()]
    assert sorted(models, reverse=True) == models
    assert ContributionId(1, 99) < ContributionId(2, 1) < ContributionId(2, 2)  # lives, then contributions of one


def test_holding_nothing_is_less_than_the_founding_state() -> None:
    """Otherwise a newcomer would never fetch epoch 0."""
    assert model_version([Version(0, 0, 0, "x")]) > ModelVersion()


def test_a_model_sums_its_fragments() -> None:
    """Samples and epochs add up over the fragments; the digest stands for the exact vector."""
    one, two = Version(2, 30, 3, "x"), Version(2, 20, 4, "y")
    model = model_version([one, two])
    assert (model.generation, model.samples, model.epochs) == (2, 50, 7)
    assert model.digest == "774e67b827b166dab06ea0cd4d7c48cf"
    assert model_version([two, one]).digest != model.digest


def test_an_incarnation_grows_with_the_clock() -> None:
    """A later millisecond gives a greater one with any salt; the salt separates two lives of the same millisecond."""
    top = (1 << SALT_BITS) - 1
    assert incarnation(1000, top) < incarnation(1001, 0)
    assert incarnation(1000, 3) == (1000 << 20) + 3
    assert SALT_BITS == 20


def test_an_incarnation_whose_clock_is_behind_rises_above_the_counted_one() -> None:
    """It becomes the least greater number with its own salt: two lives that rise above the same one differ."""
    counted = incarnation(5000, 17)
    for own in (incarnation(10, 4), incarnation(5000, 4), incarnation(5000, 17)):
        risen = incarnation_after(counted, own)
        assert risen > counted
        assert risen == incarnation(5001, own % (1 << 20))
    assert incarnation_after(counted, incarnation(1, 1)) != incarnation_after(counted, incarnation(1, 2))
    even = incarnation(5001, 17)
    assert incarnation_after(even, incarnation(1, 4)) == incarnation(5002, 4)  # only the salt of the own number stays
