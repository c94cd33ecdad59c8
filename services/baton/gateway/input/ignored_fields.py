"""Unknown request fields: ignored and reported, or refused with `--strict-fields`."""

import difflib
import re
from collections.abc import Callable
from urllib.parse import quote

from baton.core.errors import Reason
from baton.core.request_limits import printable
from baton.gateway.input.client_call import InvalidField
from baton.gateway.input.field_table import FieldTable

MAX_FIELDS = 1024
"""Different unknown fields of one request. A field of several items in a list counts once."""
MAX_NAMES = 16
"""Ignored fields of one request that are named in its response."""
MAX_NAME_CHARS = 64
"""Characters of a name in the response. A longer one is cut off."""
MAX_KNOWN_NAMES = 64
"""Names that one process logs and counts by themselves. Further names are counted as `OTHER`."""
OTHER = "other"
_INDEX = re.compile(r"\[\d+\]")


class UnknownFields:
    """Collects the unknown fields of one request, or refuses the first of them.

    names: fields that were ignored, in the order of the request. A field of an item in a list has
        empty brackets instead of the item's number. Names are printable ASCII without commas and spaces.
    """

    __slots__ = ("_is_strict", "_seen", "names")

    def __init__(self, *, is_strict: bool = False) -> None:
        self._is_strict = is_strict
        self._seen: set[tuple[str, int]] = set()
        self.names: list[str] = []

    def add(self, name: str, table: FieldTable, prefix: str) -> None:
        """Report a field that is not in `table`.

        Raises InvalidField if unknown fields are refused, or if there are too many.
        """
        if self._is_strict:
            full = prefix + name
            near = difflib.get_close_matches(name, table, n=1) if len(name) <= MAX_NAME_CHARS else []
            hint = f"; did you mean {prefix}{near[0]}?" if near else "; remove it"
            message = f"unknown field {printable(full)}{hint}"
            raise InvalidField(printable(full)[1:-1], message, Reason.UNSUPPORTED_FIELD)
        key = (name, id(table))  # the same field of other items of a list costs no more than this
        if key in self._seen:
            return
        if len(self._seen) >= MAX_FIELDS:
            full = printable(prefix + name)
            message = f"the request has more than {MAX_FIELDS:,} unknown fields, such as {full}; remove them"
            raise InvalidField(full[1:-1], message, Reason.UNSUPPORTED_FIELD)
        self._seen.add(key)
        if len(self.names) < MAX_NAMES:
            self.names.append(_header_text(_INDEX.sub("[]", prefix), name))


def _header_text(prefix: str, name: str) -> str:
    """Return a field's name as printable ASCII; other characters are percent-encoded."""
    text = quote(prefix + name[:MAX_NAME_CHARS], safe="[]$@/:", errors="replace")
    return text if len(text) <= MAX_NAME_CHARS else f"{text[: MAX_NAME_CHARS - 3]}..."


class IgnoredFieldNames:
    """Names of ignored fields that this process has seen, for its log and its metric.

    Their number is bounded, whatever clients send.
    """

    def __init__(self, log: Callable[[str], None]) -> None:
        """Start with no names. `log` is called with each name once."""
        self._log = log
        self._names: set[str] = set()

    def label(self, name: str) -> str:
        """Return the metric label of an ignored field, and log it the first time."""
        if name in self._names:
            return name
        if len(self._names) >= MAX_KNOWN_NAMES:
            return OTHER
        self._names.add(name)
        self._log(name)
        return name
