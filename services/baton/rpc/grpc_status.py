"""Errors over gRPC: a status with a message for people, and the typed failure in the trailing metadata.

Between services that is the whole `Failure` (`baton-failure-bin`); clients of baton.v1 get `baton-reason` and
`retry-after-s` as text.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from baton.core.errors import BatonError, Code, Failure, LayoutMismatch, Reason, Refused, StoreUnavailable, StreamBroken
from baton.rpc.mappers.common_mapper import from_failure, to_failure
from baton.runtime.logging import get_logger
from baton.wire.v1 import common_pb2 as pb

log = get_logger(__name__)

FAILURE_KEY = "baton-failure-bin"
REASON_KEY = "baton-reason"
RETRY_AFTER_KEY = "retry-after-s"
MAX_DETAILS = 1000
"""Characters of a message that travel in a status: HTTP/2 headers are bounded, and a client's whole prompt
may stand in a message."""

Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]

_GRPC_CODES = {code: grpc.StatusCode[code.grpc] for code in Code}
_CORE_CODES = {
    grpc_code: code for code, grpc_code in reversed(_GRPC_CODES.items())
}  # the first core code with that status


def service_metadata(failure: Failure) -> Metadata:
    """What another service needs: everything."""
    return ((FAILURE_KEY, to_failure(failure).SerializeToString()),)


def client_metadata(failure: Failure) -> Metadata:
    """What a client may know: the reason and when to come back; no worker's address."""
    retry = () if failure.retry_after_s is None else ((RETRY_AFTER_KEY, f"{failure.retry_after_s:g}"),)
    return ((REASON_KEY, failure.reason.value), *retry)


class reported:  # noqa: N801 - reads as a verb: `async with status.reported(context)`
    """What the body raises becomes the call's status. An error that is not ours is logged; the other side
    learns only that it happened."""

    def __init__(
        self, context: grpc.aio.ServicerContext[Any, Any], metadata: Callable[[Failure], Metadata] = service_metadata
    ) -> None:
        self._context = context
        self._metadata = metadata

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, grpc.aio.AbortError):
            await abort(self._context, failure_of(error), self._metadata)


async def abort(
    context: grpc.aio.ServicerContext[Any, Any],
    failure: Failure,
    metadata: Callable[[Failure], Metadata] = service_metadata,
) -> None:
    """End the call with `failure`. Raises grpc's AbortError, which must reach grpc."""
    await context.abort(grpc_code(failure.code), failure.message[:MAX_DETAILS], metadata(shortened(failure)))


def failure_of(error: Exception) -> Failure:
    """What to tell the other side about `error`."""
    match error:
        case Refused():
            return error.failure
        case StreamBroken():
            return error.failure or Failure(
                code=Code.UNAVAILABLE, reason=Reason.INTERNAL, message=str(error), retriable=True
            )
        case StoreUnavailable():
            return Failure(code=Code.UNAVAILABLE, reason=Reason.STORE_UNAVAILABLE, message=str(error), retriable=True)
        case LayoutMismatch():
            return Failure(code=Code.INVALID_ARGUMENT, reason=Reason.LAYOUT_MISMATCH, message=str(error))
        case BatonError():
            return Failure(code=Code.INTERNAL, reason=Reason.INTERNAL, message=str(error))
        case TimeoutError():
            return Failure(
                code=Code.DEADLINE_EXCEEDED, reason=Reason.DEADLINE, message="the call took too long", retriable=True
            )
    log.error("call_failed", exc_info=error)
    return Failure(
        code=Code.INTERNAL,
        reason=Reason.INTERNAL,
        message=f"internal error ({type(error).__name__}); the service's log has it",
    )


def garbage(error: DecodeError) -> Failure:
    """Bytes that are no message of ours."""
    return Failure(code=Code.INVALID_ARGUMENT, reason=Reason.INVALID_REQUEST, message=str(error))


class RefuseGarbage(grpc.aio.ServerInterceptor):
    """Calls whose one message cannot be read are refused as invalid. By itself grpc would call that the
    server's own, unknown error, with a traceback in the log for every attempt. Streams of messages see to it
    themselves."""

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        answer, read = handler.unary_stream or handler.unary_unary, handler.request_deserializer

        def read_or_keep(raw: bytes) -> Any:
            try:
                return read(raw)
            except DecodeError as error:
                return error

        async def answer_or_refuse(message: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            if isinstance(message, DecodeError):
                await abort(context, garbage(message), client_metadata)
            return await answer(message, context)

        make = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
        return make(
            answer_or_refuse, request_deserializer=read_or_keep, response_serializer=handler.response_serializer
        )


def broken(error: grpc.aio.AioRpcError, where: str) -> StreamBroken:
    """A stream's end as its receiver sees it."""
    return StreamBroken(f"{where}: {_said(error)}", sent_failure(error))


def raised(error: grpc.aio.AioRpcError, where: str) -> BatonError:
    """What a failed call raises at its caller: Refused where the other side said why, StreamBroken where it
    cannot be reached."""
    failure = sent_failure(error)
    return StreamBroken(f"{where}: {_said(error)}") if failure is None else Refused(failure)


def sent_failure(error: grpc.aio.AioRpcError) -> Failure | None:
    """The failure that the other side sent, in either form, or None where it sent none that we understand."""
    raw: Any = error.trailing_metadata()
    metadata: dict[str, str | bytes] = dict(raw or ())
    whole = metadata.get(FAILURE_KEY)
    if isinstance(whole, bytes):
        try:
            return from_failure(pb.Failure.FromString(whole))
        except (DecodeError, Refused):
            return None
    code = _CORE_CODES.get(error.code())
    reason = next((reason for reason in Reason if reason.value == metadata.get(REASON_KEY)), None)
    if code is None or reason is None:
        return None
    return Failure(
        code=code, reason=reason, message=error.details() or "", retry_after_s=_number(metadata.get(RETRY_AFTER_KEY))
    )


def grpc_code(code: Code) -> grpc.StatusCode:
    return _GRPC_CODES[code]


def shortened(failure: Failure) -> Failure:
    """With a message that fits into a header."""
    if len(failure.message) <= MAX_DETAILS:
        return failure
    return Failure(
        code=failure.code,
        reason=failure.reason,
        message=failure.message[:MAX_DETAILS],
        retry_after_s=failure.retry_after_s,
        retriable=failure.retriable,
        blamed=failure.blamed,
    )


def _said(error: grpc.aio.AioRpcError) -> str:
    return f"{error.details() or 'no answer'} ({error.code().name})"


def _number(text: str | bytes | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
