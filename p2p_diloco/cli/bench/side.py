"""A measured process's side: commands come as lines of JSON on stdin, news go out as lines of JSON on stdout.

Law: one command at a time, answered by one line. A process ends when its stdin does, so that none outlives whoever
started it.

    make    build what is measured             → ready, with what others need to know
    meet    who the others are (raw alone)     → met
    train   a fixed pseudo-gradient            → trained
    round   one whole round                    → round, with what it took
    end     leave                              (the process ends)
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

Answers = Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]]
"""For each command what carries it out; what it gives is said."""

SAID = {"make": "ready", "meet": "met", "train": "trained", "round": "round"}


def options() -> dict[str, Any]:
    """What this process was started with."""
    given: dict[str, Any] = json.loads(sys.argv[1])
    return given


def say(what: str, **values: Any) -> None:
    """A line for whoever started us."""
    sys.stdout.write(json.dumps({"what": what, **values}) + "\n")
    sys.stdout.flush()


def serve(answers: Answers) -> None:
    """Carry out commands until told to end."""
    say("idle")
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "end":
            return
        say(SAID[command["do"]], **answers[command["do"]](command))


class Clock:
    """How long the parts of a round took, in seconds; a part may come several times."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What happens meanwhile is a part of this name."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - began

    def round(self, took_s: float | None = None, **values: Any) -> dict[str, Any]:
        """What is said of a round: by default its parts make the whole. Begins anew."""
        parts, self.parts = self.parts, {}
        return {"took_s": sum(parts.values()) if took_s is None else took_s, "parts": parts, **values}
