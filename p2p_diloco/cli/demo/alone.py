"""`python -m p2p_diloco.cli.demo.alone RUN TRAINER`: runs the built-in trainer in no run, for comparison with a run.

Law: gets all settings as two JSON objects, and decides nothing. It runs at low priority, so that the demo's run gets
the processor first.
"""

from __future__ import annotations

import json
import os
import sys

from p2p_diloco.cli.logs import set_up_logs
from p2p_diloco.trainer.config import TrainerConfig

LESS_URGENT = 10

if __name__ == "__main__":
    os.nice(LESS_URGENT)
    set_up_logs("plain")
    from p2p_diloco.trainer.train import main

    sys.exit(main(json.loads(sys.argv[1]), None, TrainerConfig.model_validate(json.loads(sys.argv[2]))))
