"""Finds the policy that `--policy` names, and refuses one that cannot work before any request is placed.

Only the operator's configuration names a policy. Neither a request nor a stored decision record can.
"""

import difflib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

from baton.core.errors import ConfigError
from baton.runtime.config.scheduler_settings import POLICY_OF_A_MODULE
from baton.scheduler.policies import POLICIES, Policy
from baton.scheduler.policy_loading.checked_policy import InvalidAnswer, checked, contained
from baton.scheduler.policy_loading.trial_placements import TRIALS, place_on_trial

ARGUMENTS = ("query", "cluster", "context")


def load_policy(name: str) -> Policy:
    """Return the policy called `name`, or the function of another module that `MODULE:FUNCTION` names.

    A function of another module is imported, called for a few trial placements, and from then on each of its
    answers is checked. If a later call fails, only that request does.

    Raises ConfigError if there is no such policy, or if it fails a trial placement.
    """
    if name in POLICIES:
        return POLICIES[name]
    if not POLICY_OF_A_MODULE.matches(name):
        raise ConfigError(f"policy: expected one of {', '.join(POLICIES)} or MODULE:FUNCTION, got {name!r}")
    module_name, _, function_name = name.partition(":")
    policy = checked(_function(name, _module(name, module_name), function_name))
    for trial in TRIALS:
        try:
            place_on_trial(name, policy, trial)
        except InvalidAnswer as error:
            raise ConfigError(f"policy {name} failed a trial placement ({trial.description}): {error}") from error
        except Exception as error:
            raise ConfigError(
                f"policy {name} failed a trial placement ({trial.description}): {_described(error)}"
            ) from error
    return contained(name, policy)


def _module(name: str, module_name: str) -> ModuleType:
    """Import a module from the Python path or, after that, from the current directory."""
    directory = os.getcwd()
    if directory not in sys.path and "" not in sys.path:
        sys.path.append(directory)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"policy {name}: there is no module {error.name!r} in {directory} or on the Python path; "
                "install it, or add its directory to PYTHONPATH"
            ) from error
        raise ConfigError(f"policy {name}: its import failed: {_described(error)}") from error
    except (Exception, SystemExit) as error:  # a script may exit when it is imported
        raise ConfigError(f"policy {name}: its import failed: {_described(error)}") from error


def _function(name: str, module: ModuleType, function_name: str) -> Callable[..., Any]:
    """Return the function, if it can be called as a policy."""
    found: Callable[..., Any] | None = getattr(module, function_name, None)
    if found is None:
        functions = [each for each, value in vars(module).items() if inspect.isfunction(value)]
        near = difflib.get_close_matches(function_name, functions, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        if hasattr(module, "__path__") and not hint:
            hint = f"; it is a package: name its module, such as {module.__name__}.MODULE:{function_name}"
        where = getattr(module, "__file__", None) or module.__name__
        raise ConfigError(f"policy {name}: {where} has no {function_name!r}{hint}")
    if inspect.isclass(found) or not callable(found):
        kind = "a class" if inspect.isclass(found) else f"of type {type(found).__name__}"
        raise ConfigError(f"policy {name}: {function_name!r} is {kind}; must be a function of {', '.join(ARGUMENTS)}")
    if inspect.iscoroutinefunction(found):
        raise ConfigError(
            f"policy {name}: {function_name!r} is async; a policy never waits, so it must be a plain function"
        )
    try:
        signature = inspect.signature(found)
    except ValueError:
        return found  # a function without a signature, such as one of a C extension; the trial calls it
    try:
        signature.bind(*ARGUMENTS)
    except TypeError as error:
        raise ConfigError(
            f"policy {name}: {function_name}{signature} does not take three arguments ({', '.join(ARGUMENTS)}): {error}"
        ) from error
    return found


def _described(error: BaseException) -> str:
    """Return the error and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f", at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
