"""Swarms for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import warm
from cables import Cables
from internet import Internet, missing
from swarm import Swarm

from examples.benchmarks.network import NoNetwork


@pytest.fixture
def swarm(tmp_path: Path, nursery: warm.Nursery | None) -> Iterator[Swarm]:
    """A swarm for one test; every test checks that it leaves no process behind."""
    with Swarm(tmp_path, nursery) as made:
        yield made


@pytest.fixture(scope="module")
def shared_swarm(tmp_path_factory: pytest.TempPathFactory, nursery: warm.Nursery | None) -> Iterator[Swarm]:
    """A swarm that the tests of a module use one after another."""
    with Swarm(tmp_path_factory.mktemp("swarm"), nursery) as made:
        yield made


@pytest.fixture
def network() -> Iterator[Cables]:
    """Machines for one test, whose links can be cut and throttled."""
    try:
        made = Cables()
    except NoNetwork as error:
        pytest.skip(f"no network namespaces here: {error}")
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def internet() -> Iterator[Internet]:
    """An internet for one test."""
    if (why := missing()) is not None:
        pytest.skip(why)
    made = Internet()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def field() -> Iterator[Any]:
    """A private run of three honest nodes that train in this process, which the tests of a module use one after
    another."""
    from nodes import Field

    made = Field()
    try:
        yield made
    finally:
        made.end()
