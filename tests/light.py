"""`p2p-diloco` as bootstrap/requirements.txt installs it: every other library can't be imported.

`python -m tests.light status --help` is `p2p-diloco status --help` in such an install.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from types import ModuleType

from packaging.requirements import Requirement

REQUIREMENTS = Path(__file__).parents[1] / "bootstrap" / "requirements.txt"
WITHOUT_THEIRS = ("hivemind", "p2p-diloco")
"""What is installed with `--no-deps`."""


def name_of(requirement: str) -> str:
    """A package's name as registries compare it."""
    return re.sub(r"[-_.]+", "-", Requirement(requirement).name).lower()


def named() -> list[str]:
    """The lines of bootstrap/requirements.txt that name a package."""
    lines = REQUIREMENTS.read_text().splitlines()
    return [line for line in lines if line and not line.startswith(("#", "-c "))]


def needed_by(package: str) -> list[str]:
    """What a package needs on this machine, without its extras."""
    wanted = [Requirement(one) for one in requires(package) or ()]
    return [str(one) for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]


def installed() -> set[str]:
    """The names of all packages that the small install has."""
    found, more = set(WITHOUT_THEIRS), [*named()]
    while more:
        requirement = Requirement(more.pop())
        name = name_of(str(requirement))
        if name not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found.add(name)
            more += needed_by(name)
    return found


class LeftOut(MetaPathFinder):
    """Finds no module of any other package than the given ones."""

    def __init__(self, packages: set[str]) -> None:
        self.modules = {
            module
            for module, homes in packages_distributions().items()
            if not packages & {name_of(home) for home in homes}
        }

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in self.modules:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return None


def leave_out() -> None:
    """Let this process import only what the small install has."""
    for name in [*_loaded_here()]:
        del sys.modules[name]
    sys.meta_path.insert(0, LeftOut(installed()))


def _loaded_here() -> Iterator[str]:
    return (name for name in sys.modules if name.partition(".")[0] == "packaging")


if __name__ == "__main__":
    leave_out()
    from p2p_diloco.cli import main

    main()
