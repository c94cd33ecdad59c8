"""The child of `run_child`: `python -m baton.runtime.child.child_main MODULE:NAME PAYLOAD DEADLINE_S`."""

import faulthandler
import importlib
import json
import math
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

ALARM_AFTER_S = 5
"""Time after the deadline at which the child ends itself, because its parent has not done so."""


def main() -> None:
    """Call the function. A crash prints the stack of every thread to standard error."""
    function, payload, deadline_s = sys.argv[1:]
    faulthandler.enable()
    signal.alarm(math.ceil(float(deadline_s)) + ALARM_AFTER_S)  # the default action ends a hanging process, too
    # Libraries print to standard output: only answers may go to the parent's pipe.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def report(answer: Mapping[str, Any]) -> None:
        answers.write(json.dumps(dict(answer)) + "\n")
        answers.flush()

    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(json.loads(payload), report)


if __name__ == "__main__":
    main()
