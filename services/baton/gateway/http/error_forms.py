"""The form of errors of each API, by path."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from baton.core.errors import Code, Failure
from baton.gateway.http.messages.message_errors import STATUSES, message_error
from baton.gateway.http.openai_errors import error_body

MESSAGES = "/v1/messages"
"""Path of Anthropic's API; all paths below it belong to it, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorForm:
    """Form of an API's errors.

    body: formats a failure, with the name of the invalid field, the request's id and the HTTP status.
    id_headers: headers that have the request's id.
    statuses: HTTP statuses of codes that differ from `Code.http`.
    """

    body: Callable[[Failure, str | None, str, int], bytes]
    id_headers: tuple[bytes, ...] = (b"x-request-id",)
    statuses: Mapping[Code, int] = field(default_factory=dict)

    def status(self, failure: Failure) -> int:
        """Return the HTTP status of a failure."""
        return self.statuses.get(failure.code, failure.code.http)


_OPENAI = ErrorForm(body=lambda failure, param, _, status: error_body(failure, param, status))
_ANTHROPIC = ErrorForm(
    body=lambda failure, param, request_id, _: message_error(failure, request_id, param),
    id_headers=(b"x-request-id", b"request-id"),
    statuses=STATUSES,
)


def error_form(path: str) -> ErrorForm:
    """Return the form of errors of the API to which a path belongs, whether the path exists or not."""
    is_messages = path == MESSAGES or path.startswith(f"{MESSAGES}/")
    return _ANTHROPIC if is_messages else _OPENAI
