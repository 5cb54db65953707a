"""Sinks for `peer.report`: a file of JSON lines, TensorBoard, W&B, Aim. `peer.sinks.append(...)` adds one.

Law: each sink is thin, and imports its library when the sink is made. A sink of your own is any object with the method
`write` of `Sink`. On several ranks add sinks on rank 0 alone.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from p2p_diloco.errors import UsageError
from p2p_diloco.peer.reported import Sink as Sink

Values = Mapping[str, float]


class JsonLines:
    """Appends a line to a file for each report, such as {"step": 3, "loss": 2.5, ...}. Needs no library. The file of a
    peer that trained alone is a baseline for `p2p-diloco status --baseline`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises OSError if the file can't be written."""
        self._path = Path(path)
        self._path.touch()

    def write(self, step: int, values: Values) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


class TensorBoard:
    """Writes scalars into a folder that TensorBoard shows."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._writer = _library("torch.utils.tensorboard", "tensorboard").SummaryWriter(os.fspath(folder))
        atexit.register(self._writer.close)  # it writes only now and then

    def write(self, step: int, values: Values) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)


class WandB:
    """Logs to Weights & Biases."""

    def __init__(self, **settings: Any) -> None:
        """`settings`: arguments of `wandb.init`, such as project, group (the run's id) and name (this peer's)."""
        self._run = _library("wandb").init(**settings)

    def write(self, step: int, values: Values) -> None:
        self._run.log(dict(values), step=step)


class Aim:
    """Tracks with Aim."""

    def __init__(self, **settings: Any) -> None:
        """`settings`: arguments of `aim.Run`, such as repo and experiment."""
        self._run = _library("aim").Run(**settings)

    def write(self, step: int, values: Values) -> None:
        for name, value in values.items():
            self._run.track(value, name=name, step=step)


def _library(module: str, package: str = "") -> Any:
    """Import a library.

    Raises:
        UsageError: it is not installed.
    """
    package = package or module
    try:
        return import_module(module)
    except ImportError as error:
        mend = f"run `pip install {package}`, or use JsonLines, which needs no library"
        raise UsageError(f"this sink needs {package}, which can't be imported: {error}", mend=mend) from error
