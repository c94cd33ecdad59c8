"""Writes regular expressions of JSON schemas, which have the syntax of ECMA 262, in that of Rust."""

import re

_PART = re.compile(r"\\u\{[0-9A-Fa-f]+\}|\\.|\[\^?|\]|[&~-](?=[&~-])|.", re.DOTALL)


def rust_pattern(pattern: str) -> str:
    """Return the pattern with the characters escaped that mean more in a Rust class than in an ECMA class.

    These are an inner bracket, and two hyphens, tildes or ampersands. The cost is linear.
    """
    parts: list[str] = []
    in_class = is_first = False
    for found in _PART.finditer(pattern):
        part = found.group()
        if in_class and part[0] == "[":
            part = r"\[" + part[1:]
        elif in_class and part == "]" and not is_first:
            in_class = False
        elif in_class and len(part) == 1 and part in "&~-" and found.end() < len(pattern):
            part = rf"\{part}" if pattern[found.end()] == part else part
        elif not in_class and part[0] == "[":
            in_class = is_first = True
            parts.append(part)
            continue
        is_first = False
        parts.append(part)
    return "".join(parts)
