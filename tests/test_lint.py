"""Style and types are tests like any other, so that one command decides whether a change may be merged."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_ruff_finds_nothing() -> None:
    """Every rule that pyproject.toml selects holds everywhere."""
    result = run("ruff", "check", "--no-cache", ".")
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_code_is_formatted() -> None:
    """`make format` formats it."""
    result = run("ruff", "format", "--no-cache", "--check", ".")
    assert result.returncode == 0, result.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_mypy_finds_nothing(types: Callable[[float], tuple[int, str]]) -> None:
    """The whole package is typed, strictly."""
    status, told = types(550)
    assert status == 0, told
