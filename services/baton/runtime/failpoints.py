"""Injects faults at named points of the code, for tests; enabled only by `BATON_FAILPOINTS`.

BATON_FAILPOINTS='engine.step[worker=w0]=exit:9@3; transfer.read_posted[token=123]=sleep:2.5'

A rule has the form `name[key=value,…]=action:argument@n`; rules are separated by `;`. Brackets, argument and
`@n` are optional. A rule fires at every hit of its name whose context contains each `key=value`, or with `@n`
only at the n-th such hit. Each firing is logged first. Actions:

    exit:CODE        end the process without cleanup (default 137, the status after kill -9)
    stop             send SIGSTOP to this process; the test must continue it
    sleep:SECONDS    block the calling thread
    raise:TEXT       raise FailpointError
"""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from baton.core.errors import BatonError, ConfigError
from baton.runtime.logging import get_logger

VARIABLE = "BATON_FAILPOINTS"
_RULE = re.compile(
    r"(?P<name>[\w.]+)(?:\[(?P<context>[^\]]*)\])?=(?P<action>\w+)(?::(?P<argument>[^@]*))?(?:@(?P<nth>[1-9]\d*))?"
)

log = get_logger(__name__)


class FailpointError(BatonError):
    """Raised by a failpoint with the action `raise`."""


def _exit(argument: str) -> None:
    sys.stderr.flush()
    os._exit(int(argument or 137))


def _stop(_argument: str) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _sleep(argument: str) -> None:
    time.sleep(float(argument))


def _raise(argument: str) -> None:
    raise FailpointError(argument or "failpoint")


_ACTIONS: Mapping[str, Callable[[str], None]] = {"exit": _exit, "stop": _stop, "sleep": _sleep, "raise": _raise}


@dataclass(slots=True)
class _Rule:
    text: str
    action: str
    argument: str
    context: Mapping[str, str]
    nth: int | None
    matches: int = field(default=0)

    def is_due(self, context: Mapping[str, object]) -> bool:
        """Count this hit if its context matches, and return True if the rule fires."""
        if any(str(context.get(key)) != value for key, value in self.context.items()):
            return False
        self.matches += 1
        return self.nth is None or self.matches == self.nth


class Failpoints:
    """Set of failpoint rules. The module's functions use `PROCESS_FAILPOINTS`."""

    def __init__(self, text: str = "") -> None:
        """Parse the rules in `text`. Raises ConfigError if a rule is malformed."""
        self._rules: dict[str, list[_Rule]] = {}
        self._identity: dict[str, object] = {}
        self._lock = threading.Lock()
        for part in filter(None, (part.strip() for part in text.split(";"))):
            name, rule = _parse(part)
            self._rules.setdefault(name, []).append(rule)

    @property
    def is_armed(self) -> bool:
        """True if there is at least one rule."""
        return bool(self._rules)

    def identify(self, **context: object) -> None:
        """Add context to every later hit of this process, such as `worker="w0"`."""
        self._identity.update(context)

    def hit(self, name: str, **context: object) -> None:
        """Run the actions of the rules for `name` that match. Costs almost nothing if there are no rules."""
        if not self._rules:
            return
        rules = self._rules.get(name, ())
        with self._lock:
            due = [rule for rule in rules if rule.is_due({**self._identity, **context})]
        for rule in due:
            log.warning("failpoint_fired", rule=rule.text, **context)
            _ACTIONS[rule.action](rule.argument)


def _parse(text: str) -> tuple[str, _Rule]:
    match = _RULE.fullmatch(text)
    pairs = [pair.split("=", 1) for pair in match["context"].split(",")] if match and match["context"] else []
    if match is None or any(len(pair) != 2 for pair in pairs):
        raise ConfigError(f"{VARIABLE}: expected name[key=value,…]=action:argument@n, got {text!r}")
    action, argument = match["action"], match["argument"] or ""
    if action not in _ACTIONS:
        raise ConfigError(f"{VARIABLE}: unknown action {action!r} in {text!r}; use one of {', '.join(_ACTIONS)}")
    try:
        if action == "sleep":
            float(argument)
        if action == "exit" and argument:
            int(argument)
    except ValueError as error:
        raise ConfigError(f"{VARIABLE}: {action} needs a number, got {argument!r} in {text!r}") from error
    context = {key.strip(): value.strip() for key, value in pairs}
    nth = int(match["nth"]) if match["nth"] else None
    return match["name"], _Rule(text, action, argument, context, nth)


PROCESS_FAILPOINTS = Failpoints(os.environ.get(VARIABLE, ""))
"""The rules that this process was started with."""
hit = PROCESS_FAILPOINTS.hit
identify = PROCESS_FAILPOINTS.identify
