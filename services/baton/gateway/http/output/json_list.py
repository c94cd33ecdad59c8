"""A JSON list that grows."""

import json
from collections.abc import Iterator
from typing import Any


class JsonList:
    """A JSON list that grows. Holds its text."""

    __slots__ = ("_items",)

    def __init__(self) -> None:
        self._items = bytearray()

    def extend(self, items: list[Any]) -> None:
        """Append items."""
        if items:
            if self._items:
                self._items += b", "
            self._items += json.dumps(items, ensure_ascii=False)[1:-1].encode()

    def join(self, other: "JsonList") -> None:
        """Append the items of another list."""
        if other._items:
            self._items += b", " + other._items if self._items else other._items

    @property
    def num_bytes(self) -> int:
        """Length of the items' text."""
        return len(self._items)

    @property
    def text(self) -> bytearray:
        """Text of the items, without the brackets."""
        return self._items

    def parts(self) -> Iterator[bytes | bytearray]:
        """Yield the text of the list."""
        yield b"["
        yield self._items
        yield b"]"

    def joined(self, after: "JsonList") -> Iterator[bytes | bytearray]:
        """Yield the text of this list with the items of another one behind its own."""
        yield b"["
        yield self._items
        yield b", " if self._items and after._items else b""
        yield after._items
        yield b"]"
