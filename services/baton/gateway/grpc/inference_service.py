"""Implements the client and operator APIs of `core.client_api` on top of a `GatewayService`.

The gRPC server uses both APIs. The HTTP application uses only the operator API.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import baton
from baton.core.client_api import (
    Caller,
    ChoiceDelta,
    ClusterStatus,
    GenerateChunk,
    ModelInfo,
    ProcessInfo,
    WorkerStatus,
)
from baton.core.cluster.cache_stats import CacheStats
from baton.core.cluster.decision_record import DecisionRecord
from baton.core.cluster.prefix_files import ExportedPrefix, ImportedPrefix
from baton.core.cluster.worker_report import WorkerReport, present_links
from baton.core.errors import Code, Failure, Reason, Refused, StreamBroken
from baton.core.kv.block_hash import TokenIds
from baton.core.request_limits import printable
from baton.gateway.gateway_service import CallOutcome, GatewayService
from baton.gateway.grpc.message_fields import FIELDS_JSON, read_message
from baton.gateway.input.client_call import ClientCall, Endpoint, Identity, InvalidField
from baton.gateway.input.ignored_fields import UnknownFields
from baton.gateway.input.response_size import ids_bytes, text_bytes
from baton.gateway.input.strict_json import parse_body
from baton.gateway.input.tokenize_calls import detokenize_body, tokenize_body
from baton.runtime.logging import get_logger
from baton.runtime.network.addresses import is_this_machine

log = get_logger(__name__)

_CHOICE_BYTES, _TOKEN_BYTES, _LOGPROB_BYTES, _RAW_LOGPROB_BYTES = 128, 36, 112, 8
"""Memory of a choice, of a token id and of a (token id, logprob) pair as Python objects, and of a pair in
arrays."""

_RESPONSE_ID = re.compile(r"(?:chatcmpl-|cmpl-|resp_|msg_)?([0-9a-fA-F]+)")
"""The id of a response over HTTP, which ends with the id of its request."""


class InferenceService:
    """Implements `InferenceApi`."""

    def __init__(self, service: GatewayService) -> None:
        self._service = service

    async def generate(self, body: Mapping[str, Any], caller: Caller) -> "RunningCall":
        try:
            identity = self._service.admit_caller(caller.authorization)
            received_s = asyncio.get_running_loop().time()
            texts = (body.get(name) for name in (FIELDS_JSON, "prompt"))
            num_characters = sum(len(text) for text in texts if isinstance(text, str))
            with self._service.hold_slot(identity):
                fields = await read_message(body)
                with fields.in_errors():
                    call = await self._service.validator.call(
                        Endpoint.GRPC,
                        fields.body,
                        caller,
                        received_s=received_s,
                        size=num_characters,
                        identity=identity,
                    )
        except Refused as refused:
            self._service.count_result(Endpoint.GRPC.value, refused.failure)
            raise
        self._service.count_ignored(call.ignored_fields)
        return RunningCall(call, self._service, caller.cut_off)

    @asynccontextmanager
    async def tokenize(self, body: Mapping[str, Any], caller: Caller) -> AsyncIterator[TokenIds]:
        with self._service.hold_slot(self._service.admit_caller(caller.authorization)):
            validator = self._service.validator
            unknown = validator.unknown_fields()
            fields = await read_message(body)
            with fields.in_errors():
                ids = await tokenize_body(validator, fields.body, unknown, size=fields.size)
            self._service.count_ignored(unknown.names)
            with self._service.unsent_answer(ids_bytes(ids), lambda _: caller.cut_off()):
                yield ids

    @asynccontextmanager
    async def detokenize(self, body: Mapping[str, Any], caller: Caller) -> AsyncIterator[str]:
        with self._service.hold_slot(self._service.admit_caller(caller.authorization)):
            text = await detokenize_body(self._service.validator, body, UnknownFields(), "token_ids")
            with self._service.unsent_answer(text_bytes(text), lambda _: caller.cut_off()):
                yield text

    async def models(self, caller: Caller) -> tuple[ModelInfo, ...]:
        self._service.keys.identify(caller.authorization)
        return self._service.models


class RunningCall:
    """One running call of `generate`. Implements `GenerateStream` and `ChoiceSink`."""

    def __init__(self, call: ClientCall, service: GatewayService, cut_off: Callable[[], None]) -> None:
        """Start the call. `cut_off`: see `Caller`."""
        self._call = call
        self._service = service
        self._choices: list[ChoiceDelta] = []
        self._num_bytes = 0
        self._num_sent = 0
        self._cut: Failure | None = None
        self._unread = service.unread.open(self._cut_off)
        self._end_connection = cut_off
        self._changed = asyncio.Event()
        self._is_over = False
        self._run: asyncio.Future[CallOutcome] = asyncio.create_task(service.run(call, self))
        self._run.add_done_callback(self._ended)

    @property
    def request_id(self) -> str:
        return self._call.request_id.hex()

    @property
    def ignored_fields(self) -> Sequence[str]:
        return self._call.ignored_fields

    async def begin(self) -> None:
        """Do nothing: chunks have no fixed parts."""

    def put(self, choice: ChoiceDelta) -> None:
        """Collect new output for `receive`. Raises Refused (slow_reader) if too much is unread."""
        num_logprobs = sum(1 + len(position.top) for position in choice.logprobs)
        num_bytes = (
            _CHOICE_BYTES * (1 + len(choice.parts))
            + len(choice.text)
            + sum(len(part.text) for part in choice.parts)
            + _TOKEN_BYTES * len(choice.token_ids)
            + _LOGPROB_BYTES * num_logprobs
            + _prompt_logprobs_bytes(choice)
        )
        self._unread.add(num_bytes)
        self._num_bytes += num_bytes
        self._choices.append(choice)
        self._changed.set()

    async def receive(self) -> GenerateChunk:
        """Wait for new output and return all of it in one chunk. Raises StreamBroken after the last chunk.

        The chunk counts as unread until the next call, since the caller is still sending it.
        """
        self._unread.remove(self._num_sent)
        self._num_sent = 0
        if self._is_over:
            raise StreamBroken("the call has ended")
        await self._changed.wait()
        self._changed.clear()
        choices, self._choices = tuple(self._choices), []
        self._num_sent, self._num_bytes = self._num_bytes, 0
        if self._cut is not None:
            self._is_over = True
            raise Refused(self._cut)
        if not self._run.done():
            return GenerateChunk(choices=choices)
        if choices and (self._run.cancelled() or self._run.exception() is not None):
            self._changed.set()  # deliver the output from before the failure first; the next call raises the failure
            return GenerateChunk(choices=choices)
        self._is_over = True
        outcome = self._run.result()  # raises the error of a failed call
        return GenerateChunk(
            choices=choices, usage=outcome.usage, timeline=outcome.timeline[0] if outcome.timeline else None
        )

    async def aclose(self) -> None:
        """Cancel the call if it still runs, and wait for its end."""
        self._is_over = True
        self._run.cancel()
        try:
            await asyncio.wait((self._run,))
            # Its error has a traceback with this object: without the cycle, both are freed at once.
            self._run = asyncio.get_running_loop().create_future()
        finally:
            self._unread.close()  # also if grpc cancels the call now, because its client has left

    def _cut_off(self, failure: Failure) -> None:
        """End the call because its client left too much unread."""
        self._cut = failure
        self._choices = []
        self._run.cancel()
        self._end_connection()

    def _ended(self, run: asyncio.Future[CallOutcome]) -> None:
        error = None if run.cancelled() else run.exception()
        cancelled = Failure(code=Code.CANCELLED, reason=Reason.CANCELLED, message="the client has disconnected")
        failure = error.failure if isinstance(error, Refused) else cancelled if run.cancelled() else None
        failure = self._cut or failure
        if error is not None and failure is None:
            failure = Failure(code=Code.INTERNAL, reason=Reason.INTERNAL, message=str(error))
        self._service.count_result(Endpoint.GRPC.value, failure)
        self._changed.set()


def _prompt_logprobs_bytes(choice: ChoiceDelta) -> int:
    """Return the memory of the logprobs of a prompt, which every choice has in its own message."""
    logprobs = choice.prompt_logprobs
    return 0 if logprobs is None else _RAW_LOGPROB_BYTES * len(logprobs) * (1 + logprobs.num_top)


class AdminService:
    """Implements `AdminApi`."""

    def __init__(self, service: GatewayService, process: ProcessInfo) -> None:
        self._service = service
        self._process = process

    async def status(self, caller: Caller) -> ClusterStatus:
        self._check(caller)
        return self.cluster_status()

    def cluster_status(self) -> ClusterStatus:
        """Return the state of the cluster as this gateway knows it, to anyone."""
        view = self._service.view
        return ClusterStatus(
            version=baton.__version__,
            model=self._service.rules.model,
            gateway=self._process,
            scheduler=view.scheduler,
            workers=_worker_statuses(view.reports),
            open_requests=self._service.num_open,
        )

    async def explain(self, request_id: str | None, caller: Caller) -> tuple[DecisionRecord, ...]:
        self._check(caller)
        records = await self._service.schedulers.explain(None if request_id is None else _request_id(request_id))
        if not records:
            what = (
                "no request has been placed yet"
                if request_id is None
                else f"no decision is stored for request {request_id}"
            )
            raise Refused(Failure(code=Code.NOT_FOUND, reason=Reason.INVALID_REQUEST, message=what))
        return records

    async def drain(self, worker_id: str, caller: Caller, *, node_shutting_down: bool = False) -> None:
        identity = self._check_operator(caller, "drain workers")
        log.info("drain_requested", worker=worker_id, node_shutting_down=node_shutting_down, key=identity.name)
        if not await self._service.schedulers.drain(worker_id, node_shutting_down=node_shutting_down):
            known = ", ".join(report.worker.worker_id for report in self._service.view.reports) or "none"
            message = f"worker {worker_id!r} is unknown; known are: {known}"
            raise Refused(Failure(code=Code.NOT_FOUND, reason=Reason.INVALID_REQUEST, message=message))

    async def clear_tenant(self, tenant: str, caller: Caller) -> tuple[str, ...]:
        identity = self._check_operator(caller, "clear caches")
        salt = self._salt_of(tenant, "clear its cache before its last key is removed")
        log.info("clear_requested", tenant=tenant, key=identity.name)
        return await self._service.schedulers.clear_tenant(salt)

    async def cache_stats(self, caller: Caller) -> CacheStats:
        self._check(caller)
        return await self._service.schedulers.cache_stats()

    async def export_cache(
        self,
        tenant: str,
        prompt_json: str,
        write: Callable[[ExportedPrefix | bytes], Awaitable[None]],
        caller: Caller,
    ) -> None:
        identity = self._check_operator(caller, "export caches")
        salt = self._salt_of(tenant, "name another tenant, or add a key")
        with self._service.hold_slot(identity):
            body = await parse_body(prompt_json.encode(), "the prompt")
            ids = await tokenize_body(self._service.validator, body, UnknownFields(), size=len(prompt_json))
        log.info("export_requested", tenant=tenant, key=identity.name, num_prompt_tokens=len(ids))
        await self._service.prefixes.export_file(ids, salt, write)

    async def check_import(self, caller: Caller) -> None:
        self._check_operator(caller, "import caches")

    async def import_cache(
        self, tenant: str, worker_id: str, parts: AsyncIterator[bytes], caller: Caller
    ) -> ImportedPrefix:
        identity = self._check_operator(caller, "import caches")
        salt = self._salt_of(tenant, "name the tenant that the file was exported for, or add a key")
        log.info("import_requested", tenant=tenant, key=identity.name, worker=worker_id)
        return await self._service.prefixes.import_file(worker_id, salt, parts)

    def _salt_of(self, tenant: str, remedy: str) -> bytes:
        """Return the cache salt of a tenant. Raises Refused if it has none."""
        salt = self._service.keys.salt_of(tenant)
        if salt is None:
            message = f"no API key belongs to tenant {tenant!r}; {remedy}"
            raise Refused(Failure(code=Code.NOT_FOUND, reason=Reason.INVALID_REQUEST, message=message))
        return salt

    def _check_operator(self, caller: Caller, what: str) -> Identity:
        """Return the caller's identity. Raises Refused unless it is an admin's, or without keys one of this
        machine."""
        identity = self._check(caller)
        if not self._service.keys.has_keys and not is_this_machine(caller.address):
            message = f"without API keys only processes of the gateway's machine may {what}; set --api-keys"
            raise Refused(Failure(code=Code.PERMISSION_DENIED, reason=Reason.FORBIDDEN, message=message))
        return identity

    def _check(self, caller: Caller) -> Identity:
        """Return the caller's identity. Raises Refused unless it is an admin's."""
        identity = self._service.keys.identify(caller.authorization)
        self._service.keys.check_admin(identity)
        return identity


def _worker_statuses(reports: Sequence[WorkerReport]) -> tuple[WorkerStatus, ...]:
    """Return the status of each worker, with its links to the present workers."""
    workers = {report.worker.worker_id: report.worker for report in reports}
    return tuple(
        WorkerStatus.of(replace(report, links=tuple(present_links(report.links, workers).values())))
        for report in reports
    )


def _request_id(text: str) -> bytes:
    """Parse a request id as in the header x-request-id, or the id of a response, which contains it."""
    match = _RESPONSE_ID.fullmatch(text)
    if match is None or len(match[1]) % 2:
        raise InvalidField(
            "request_id",
            f"request_id is {printable(text)}; must be 32 hex digits, as in the header x-request-id, or the id of a "
            "response (chatcmpl-..., cmpl-..., resp_..., msg_...)",
        )
    return bytes.fromhex(match[1])
