"""Turns the errors of Ray into one line that says what happened. Pure functions.

Ray's own texts name ids, list possible causes and end with links, and each release words them differently.
What is not recognized is shown as Ray words it, shortened.
"""

import re

MAX_CHARS = 500
DEATHS = frozenset({"RayActorError", "ActorDiedError", "WorkerCrashedError", "OutOfMemoryError", "NodeDiedError"})
"""Classes of `ray.exceptions` which say that a process has ended."""
_OUT_OF_MEMORY = "running low on memory"
_NUMBERS = re.compile(r"Memory usage (\d+)B exceeded threshold of (\d+)B \(([\d.]+)% of (\d+)B limit\)")
_EXIT = re.compile(r"Worker exit detail: (.*)", re.DOTALL)
_GUESSES = re.compile(r"\s*Some common causes include.*", re.DOTALL)
_TRACEBACK = re.compile(r"^(Traceback |ray::|\x1b\[36mray::)", re.MULTILINE)


def is_death(error: BaseException) -> bool:
    """Return True if Ray reports with this error that the process of an actor has ended."""
    return any(kind.__name__ in DEATHS for kind in type(error).__mro__)


def is_memory_monitor(error: BaseException) -> bool:
    """Return True if Ray's memory monitor has ended the process."""
    return _OUT_OF_MEMORY in str(error)


def root_cause(error: BaseException) -> str:
    """Return the reason of a failed Ray call in one line.

    It is the message of the innermost error, without the traceback that Ray wraps around it. For a process
    that has ended, it is what Ray knows about its end.
    """
    inner, seen = error, {id(error)}
    while (cause := getattr(inner, "cause", None) or inner.__cause__) is not None and id(cause) not in seen:
        if not isinstance(cause, BaseException):
            break
        inner = cause
        seen.add(id(inner))
    text = str(inner).strip()
    if _OUT_OF_MEMORY in text:
        return _memory_monitor(text)
    if (found := _EXIT.search(text)) is not None:
        return f"its process ended: {_one_line(_GUESSES.sub('', found[1]))}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return type(inner).__name__
    return _one_line(lines[-1] if _TRACEBACK.search(text) else text)


def _memory_monitor(text: str) -> str:
    setting = "the limit is --ray-memory-limit, or RAY_memory_usage_threshold of an existing Ray cluster"
    if (found := _NUMBERS.search(text)) is None:
        return f"ended by Ray's memory monitor: {_one_line(text.splitlines()[0])}; {setting}"
    used, limit, total = (int(found[index]) for index in (1, 2, 4))
    return (
        f"ended by Ray's memory monitor: all processes of the machine used {used / 2**30:.1f} of {total / 2**30:.1f} "
        f"GiB, more than {float(found[3]):g} % ({limit / 2**30:.1f} GiB); {setting}"
    )


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_CHARS else f"{line[: MAX_CHARS - 1]}…"
