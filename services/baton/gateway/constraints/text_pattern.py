"""Converts a JSON schema's `pattern` to a regular expression for a whole text."""

import re

_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()|^$]|[^\\\[()|^$]+", re.DOTALL)
_UNSUPPORTED = re.compile(r"\(\?(?!:)|\\[1-9bBAzZGpPk]")


def whole_text_pattern(pattern: str) -> str | None:
    """Return a regular expression that matches a text as a whole if `pattern` matches anywhere in it.

    None if the pattern has look-around, references, flags, or anchors at other places than the ends of its
    alternatives.
    """
    if _UNSUPPORTED.search(pattern):
        return None
    branches: list[list[str]] = [[]]
    depth = position = 0
    for found in _PIECE.finditer(pattern):
        if found.start() != position:
            return None
        position = found.end()
        piece = found.group()
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and depth == 0:
            branches.append([])
        else:
            branches[-1].append(piece)
    wholes = [_whole(branch) for branch in branches]
    if position != len(pattern) or depth or None in wholes:
        return None
    return "|".join(f"(?:{whole})" for whole in wholes)


def _whole(branch: list[str]) -> str | None:
    """Return one alternative with any text where it has no anchor; None if it has other anchors."""
    begins, ends = branch[:1] == ["^"], branch[-1:] == ["$"]
    inner = branch[int(begins) : len(branch) - ends if len(branch) > begins else None]
    if "^" in inner or "$" in inner:
        return None
    any_text = "(?s:.*)"
    return f"{'' if begins else any_text}(?:{''.join(inner)}){'' if ends else any_text}"
