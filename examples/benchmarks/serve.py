"""`python -m examples.benchmarks.serve KIND PLAN OPTIONS`: one measured process. It runs the contender that the module
KIND defines.

Law: commands come as lines of JSON on stdin, and each is answered by one line of JSON on stdout. The process ends when
its stdin ends, so that it never outlives the command that started it.
"""

from __future__ import annotations

import json
import logging
import sys
from contextlib import ExitStack
from importlib import import_module

from examples.benchmarks.member import Member
from examples.benchmarks.plan import Plan


def serve(member: Member) -> None:
    """Carry out the commands that arrive on stdin, until stdin ends."""
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(member, command.pop("do"))(**command)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    kind, plan, asked = sys.argv[1], Plan(**json.loads(sys.argv[2])), json.loads(sys.argv[3])
    with ExitStack() as leaving:
        serve(import_module(f"examples.benchmarks.{kind}").Contender(plan, asked, leaving))
