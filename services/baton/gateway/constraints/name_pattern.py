"""Matches names of properties with patterns of JSON schemas, at a bounded cost."""

import re

_MAX_PATTERN = 200
_MAX_NAME = 64
_QUANTIFIER = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|([*+?]|\{[0-9,]+\})", re.DOTALL)


def name_matches(pattern: str, name: str) -> bool | None:
    """Return whether a pattern matches anywhere in a name; None if finding that out could take long.

    The standard library's matcher is quadratic at most for what it gets here: no group is repeated, and there
    are two repetitions, or one if the pattern can match anywhere.
    """
    if len(pattern) > _MAX_PATTERN or len(name) > _MAX_NAME:
        return None
    quantifiers = [found for found in _QUANTIFIER.finditer(pattern) if found[1]]
    is_repeated_group = any(pattern[found.start() - 1 : found.start()] == ")" for found in quantifiers)
    if is_repeated_group or len(quantifiers) > (2 if pattern.startswith("^") and "|" not in pattern else 1):
        return None
    try:
        return re.search(pattern, name) is not None
    except (re.error, OverflowError, RecursionError):
        return None
