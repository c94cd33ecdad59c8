"""Common parts of the client scripts: arguments, a tool, a schema and the demo model's name.

The scripts run with the interpreter of the clients' virtual environment, so they import nothing of Baton.
"""

import sys
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

URL = sys.argv[1]
"""Base URL of the gateway, without `/v1`."""
KEY = sys.argv[2]
MODEL = "demo"
MAX_TOKENS = 600


class Weather(BaseModel):
    """The weather at a place."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Oslo"]
    degrees: int = Field(ge=-50, le=50)
    is_sunny: bool


WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Returns the weather at a place.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Oslo"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 14},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
QUESTION = "What does os.path.join do?"


E = TypeVar("E", bound=Exception)


def error_of(kind: type[E], call: Callable[..., object], **arguments: Any) -> E:
    """Return the exception that a call raises."""
    try:
        call(**arguments)
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} for {arguments}")


def get_weather(city: Literal["Paris", "Oslo"], days: Annotated[int, Field(ge=1, le=14)]) -> str:
    """Return the weather at a place."""
    assert city in ("Paris", "Oslo"), city
    assert isinstance(days, int), days
    return f"{city}: sunny for {days} days"
