"""The child of `run_child`: `python -m baton.runtime.child.child_main MODULE:NAME PAYLOAD DEADLINE_S`."""

import faulthandler
import importlib
import json
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

ALARM_AFTER_S = 5
"""Time after the deadline at which the child ends itself, because its parent has not done so."""


def main() -> None:
    """Call the function, then end the process.

    A crash prints the stack of every thread to standard error. The interpreter's cleanup is left out: it
    waits for threads and libraries, which may wait for a device that the function has broken.
    """
    function, payload, deadline_s = sys.argv[1:]
    faulthandler.enable()
    signal.alarm(math.ceil(float(deadline_s)) + ALARM_AFTER_S)  # the default action ends a hanging process, too
    # Libraries print to standard output: only answers may go to the parent's pipe.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def report(answer: Mapping[str, Any]) -> None:
        answers.write(json.dumps(dict(answer)) + "\n")
        answers.flush()

    code = _call(function, json.loads(payload), report)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _call(function: str, payload: Any, report: Callable[[Mapping[str, Any]], None]) -> int:
    """Call `function(payload, report)` and return the exit code that the interpreter would have given."""
    module, _, name = function.partition(":")
    try:
        getattr(importlib.import_module(module), name)(payload, report)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    main()
