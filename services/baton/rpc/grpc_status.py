"""Converts errors to gRPC statuses and back, with the typed failure in the trailing metadata.

Services send each other the complete `Failure` (`baton-failure-bin`). Clients of baton.v1 get `baton-reason`
and `retry-after-s` as text.
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
"""Maximum characters of a message in a status.

HTTP/2 headers are limited, and a message may quote a client's complete prompt.
"""

Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]

_GRPC_CODES = {code: grpc.StatusCode[code.grpc] for code in Code}
# several core codes share a status; the first one wins
_CORE_CODES = {grpc_code: code for code, grpc_code in reversed(_GRPC_CODES.items())}


def service_metadata(failure: Failure) -> Metadata:
    """Return the trailing metadata for other services: the complete failure."""
    return ((FAILURE_KEY, to_failure(failure).SerializeToString()),)


def client_metadata(failure: Failure) -> Metadata:
    """Return the trailing metadata for clients: reason and retry delay, but no worker's address."""
    retry = () if failure.retry_after_s is None else ((RETRY_AFTER_KEY, f"{failure.retry_after_s:g}"),)
    return ((REASON_KEY, failure.reason.value), *retry)


class errors_as_status:  # noqa: N801 - used like a function
    """Context manager that converts an exception of its body to the status of the call.

    An unexpected exception is logged here; the caller gets only its type.
    """

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
    """End the call with `failure`. Raises grpc's AbortError, which the caller must not catch."""
    await context.abort(grpc_code(failure.code), failure.message[:MAX_DETAILS], metadata(truncated(failure)))


def failure_of(error: Exception) -> Failure:
    """Convert an exception to the failure to send; an unexpected exception is logged."""
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
        message=f"internal error ({type(error).__name__}); see the service's log",
    )


def malformed_message(error: DecodeError) -> Failure:
    """Return the failure for bytes that are not a valid message."""
    return Failure(code=Code.INVALID_ARGUMENT, reason=Reason.INVALID_REQUEST, message=str(error))


class RefuseMalformedMessages(grpc.aio.ServerInterceptor):
    """Refuses unary calls whose message cannot be decoded or converted with INVALID_ARGUMENT.

    grpc itself would report an unknown server error, and log a traceback for each such call. Request streams
    check their messages themselves.
    """

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        serve, decode = handler.unary_stream or handler.unary_unary, handler.request_deserializer

        def decode_or_error(raw: bytes) -> Any:
            """Return the message, or the error that `serve_or_refuse`, or a `ReceiveGate`, answers with."""
            try:
                return decode(raw)
            except DecodeError as error:
                return Refused(malformed_message(error))
            except Refused as refused:
                return refused

        async def serve_or_refuse(message: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            if isinstance(message, Refused):
                await abort(context, message.failure, client_metadata)
            return await serve(message, context)

        make = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
        return make(
            serve_or_refuse, request_deserializer=decode_or_error, response_serializer=handler.response_serializer
        )


def stream_error(error: grpc.aio.AioRpcError, address: str) -> StreamBroken:
    """Convert the error that ended a stream for its receiver."""
    return StreamBroken(f"{address}: {_describe(error)}", received_failure(error))


def call_error(error: grpc.aio.AioRpcError, address: str) -> BatonError:
    """Convert the error of a call: Refused with the sent failure, or StreamBroken without one."""
    failure = received_failure(error)
    return StreamBroken(f"{address}: {_describe(error)}") if failure is None else Refused(failure)


def received_failure(error: grpc.aio.AioRpcError) -> Failure | None:
    """Return the failure in the trailing metadata, in either form, or None if there is no valid one."""
    raw: Any = error.trailing_metadata()
    metadata: dict[str, str | bytes] = dict(raw or ())
    serialized = metadata.get(FAILURE_KEY)
    if isinstance(serialized, bytes):
        try:
            return from_failure(pb.Failure.FromString(serialized))
        except (DecodeError, Refused):
            return None
    code = _CORE_CODES.get(error.code())
    reason = next((reason for reason in Reason if reason.value == metadata.get(REASON_KEY)), None)
    if code is None or reason is None:
        return None
    return Failure(
        code=code,
        reason=reason,
        message=error.details() or "",
        retry_after_s=_parse_number(metadata.get(RETRY_AFTER_KEY)),
    )


def grpc_code(code: Code) -> grpc.StatusCode:
    """Return the gRPC status of a failure code."""
    return _GRPC_CODES[code]


def truncated(failure: Failure) -> Failure:
    """Return `failure` with its message cut to `MAX_DETAILS` characters."""
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


def _describe(error: grpc.aio.AioRpcError) -> str:
    return f"{error.details() or 'no answer'} ({error.code().name})"


def _parse_number(text: str | bytes | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
