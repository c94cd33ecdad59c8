"""The error for a schema that the format of a model's calls cannot enforce, and the place of its rule."""

from collections.abc import Mapping
from typing import Any

from baton.gateway.constraints.gbnf import GrammarTextError

_MAX_STEPS = 20_000
_MAX_POINTER = 80
_INLINE = ("$defs", "definitions")


class UnsupportedSchema(GrammarTextError):
    """The format of the model's calls cannot enforce a schema. The message gives the rule and the remedy.

    keyword, rule: the keyword that cannot be enforced, and its value, which tells its place; empty if it is
    the whole schema.
    """

    def __init__(self, message: str, keyword: str = "", rule: Any = None) -> None:
        super().__init__(message)
        self.keyword = keyword
        self.rule = rule

    def pointer(self, root: Any) -> str:
        """Return the JSON pointer of the keyword in `root`, as it was read; empty if it is not found."""
        if not self.keyword:
            return ""
        waiting: list[tuple[str, Any]] = [("", root)]
        for _ in range(_MAX_STEPS):
            if not waiting:
                break
            pointer, value = waiting.pop(0) if len(waiting) < _MAX_POINTER else waiting.pop()
            if isinstance(value, Mapping):
                comment = value.get("$comment")
                if isinstance(comment, str) and pointer.rpartition("/")[0].removeprefix("/") in _INLINE:
                    pointer = comment
                if self.keyword in value and value[self.keyword] is self.rule:
                    return _short(f"{pointer}/{self.keyword}")
                waiting += [(f"{pointer}/{_step(name)}", item) for name, item in value.items() if _is_nested(item)]
            elif isinstance(value, list):
                waiting += [(f"{pointer}/{number}", item) for number, item in enumerate(value) if _is_nested(item)]
        return ""


def _is_nested(value: Any) -> bool:
    return isinstance(value, Mapping | list)


def _step(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _short(pointer: str) -> str:
    half = _MAX_POINTER // 2
    return ascii(pointer if len(pointer) <= _MAX_POINTER else f"{pointer[:half]}...{pointer[-half:]}")[1:-1]
