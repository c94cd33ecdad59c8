"""Runs one fuzz target, with libFuzzer's options and corpus folders, or with single inputs.

python -m tests.fuzz.run_target TARGET [OPTION ...] [FOLDER ... | FILE ...]
"""

import importlib
import sys
import time
from collections.abc import Callable

TARGETS = ("http_bytes", "json_body", "client_messages", "service_messages")
INSTRUMENTED = ["baton.gateway", "baton.rpc", "baton.core"]
MAX_INPUT_CPU_S = 5.0
"""CPU time of one input. Measuring coverage makes code some ten times slower."""


class TooExpensive(Exception):
    """An input took too much CPU time."""


def bounded(run_one: Callable[[bytes], None]) -> Callable[[bytes], None]:
    """Return a function that also checks the CPU time of each input."""

    def run(data: bytes) -> None:
        began_s = time.process_time()
        run_one(data)
        if (took_s := time.process_time() - began_s) > MAX_INPUT_CPU_S:
            raise TooExpensive(f"an input of {len(data)} bytes took {took_s:.1f} s of CPU time")

    return run


def main(name: str, options: list[str]) -> None:
    import atheris

    import baton.rpc  # noqa: F401 - must be loaded before grpc

    with atheris.instrument_imports(include=INSTRUMENTED):
        target = importlib.import_module(f"tests.fuzz.{name}")
    atheris.Setup([sys.argv[0], *options], bounded(target.run_one))
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
