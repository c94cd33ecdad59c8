"""Names fields in errors as the client sent them, if its body was translated."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from baton.gateway.input.client_call import InvalidField

_VALUE = re.compile(r"""((?<!\w)(?:'(?:[^'\\]|\\.)*?['…]|"(?:[^"\\]|\\.)*?["…]))""")
"""Matches a value in quotes, whose end may be cut off."""


class ClientNames(ABC):
    """The names that the fields of a translated body had in the client's request."""

    __slots__ = ()

    @abstractmethod
    def renamed(self, error: InvalidField) -> InvalidField:
        """Return an error about a field of the body as an error about the field that the client sent."""

    @contextmanager
    def in_errors(self) -> Iterator[None]:
        """Rename the field of an InvalidField that the block raises."""
        try:
            yield
        except InvalidField as error:
            raise self.renamed(error) from None  # it may be the same error, and its own cause would be a cycle


def replace_name(message: str, name: str, new: str, *, is_word: bool = False) -> str:
    """Return a message with another name for a field. Values in quotes stay, as do longer names that have it.

    is_word: the name may also be a word of the text, so only its first place counts.
    """
    is_field = re.compile(rf"(?<![\w.]){re.escape(name)}(?!\w)")
    pieces = _VALUE.split(message)
    for at in range(0, len(pieces), 2):  # values are between them
        pieces[at], num_places = is_field.subn(lambda _: new, pieces[at], count=int(is_word))
        if num_places and is_word:
            break
    return "".join(pieces)
