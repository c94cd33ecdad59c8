"""One line for each of Ray's errors. The texts are those of Ray 2.60."""

import pytest

from baton.core.errors import ConfigError
from baton.fleet.ray.ray_errors import is_death, is_memory_monitor, root_cause


class RayActorError(Exception):
    pass


class ActorDiedError(RayActorError):
    pass


class RayTaskError(Exception):
    def __init__(self, text: str, cause: Exception | None = None) -> None:
        super().__init__(text)
        self.cause = cause


MONITOR = (
    "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.2, ID: c46d) was "
    "1.23GB used / 23.54GB limit (0.052415)\nOOM kill reason: Memory usage 1324752896B exceeded threshold of "
    "505530272B (2.0% of 25276514304B limit)\nObject store memory usage: [- objects spillable: 0\n"
    "Refer to the documentation on how to address the out of memory issue: https://docs.ray.io/. To disable worker "
    "killing, set the environment variable `RAY_memory_monitor_refresh_ms` to zero."
)
DIED = (
    "The actor died unexpectedly before finishing this task.\n\tclass_name: WorkerActor\n\tpid: 20570\n"
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker "
    "unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the process was "
    "killed by the OOM killer due to high memory usage, (2) ray stop --force was called, or (3) the worker crashed."
)
TRACEBACK = (
    '\x1b[36mray::WorkerActor.start()\x1b[39m (pid=7, ip=1.2.3.4)\n  File "x.py", line 1, in f\n'
    "ValueError: no such model"
)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            ActorDiedError(MONITOR),
            "ended by Ray's memory monitor: all processes of the machine used 1.2 of 23.5 GiB, more than 2 % "
            "(0.5 GiB); the limit is --ray-memory-limit, or RAY_memory_usage_threshold of an existing Ray cluster",
        ),
        (
            ActorDiedError(DIED),
            "its process ended: Worker unexpectedly exits with a connection error code 2. End of file.",
        ),
        (RayTaskError(TRACEBACK), "ValueError: no such model"),
        (RayTaskError(TRACEBACK, ConfigError("kv_memory: too large\nset less")), "kv_memory: too large set less"),
        (ActorDiedError("x" * 900), "x" * 499 + "…"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_reason_is_one_line(error: Exception, reason: str) -> None:
    assert root_cause(error) == reason


def test_innermost_cause_is_found_through_several_layers() -> None:
    outer = RuntimeError("outer")
    outer.__cause__ = RayTaskError(TRACEBACK, ConfigError("inner"))
    assert root_cause(outer) == "inner"
    outer.__cause__.__cause__ = outer  # a cycle must not hang
    assert root_cause(outer) == "inner"


def test_deaths_and_the_memory_monitor_are_recognized() -> None:
    assert is_death(ActorDiedError(DIED))
    assert not is_death(RayTaskError(TRACEBACK))
    assert is_memory_monitor(ActorDiedError(MONITOR))
    assert not is_memory_monitor(ActorDiedError(DIED)), "its list of guesses mentions memory, too"
