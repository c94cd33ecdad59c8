"""A request body that was translated to a chat, and the names that its fields had before."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.gateway.input.client_call import InvalidField
from baton.gateway.input.translations.client_names import ClientNames, replace_name

_ITEM = re.compile(r"(\w+)\[(\d+)\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslatedBody(ClientNames):
    """A request body with the fields of `/v1/chat/completions`.

    echo: fields that the response repeats.
    names: name of a field in the client's API, by its name in a chat.
    places: places in the client's body of the items of a chat's list, by the name of the list.
    """

    chat: Mapping[str, Any]
    echo: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    places: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def renamed(self, error: InvalidField) -> InvalidField:
        failure, param = error.failure, self._name(error.param)
        message = replace_name(failure.message, error.param, param)
        for name, theirs in self.names.items():
            if "_" in name and name != param:  # a word of the text has none
                message = replace_name(message, name, theirs)
        return InvalidField(param, message, failure.reason, failure.code)

    def _name(self, param: str) -> str:
        match = _ITEM.match(param)
        if match is not None and (places := self.places.get(match[1])) and int(match[2]) < len(places):
            rest = param[match.end() :]
            for name, theirs in self.names.items():  # such as tools[].function
                begin, _, end = name.partition("[]")
                if begin == match[1] and end and (rest + ".").startswith(end + "."):
                    rest = theirs + rest[len(end) :]
            return places[int(match[2])] + rest
        for name, theirs in self.names.items():
            if param == name or param.startswith((f"{name}.", f"{name}[")):
                return theirs + param[len(name) :]
        return param


class ListPlaces:
    """Collects the items of a chat's list with their places in the client's body."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.places: list[str] = []

    def add(self, place: str, item: dict[str, Any]) -> dict[str, Any]:
        """Append an item and return it."""
        self.items.append(item)
        self.places.append(place)
        return item
