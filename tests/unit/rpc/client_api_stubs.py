"""Stubs of the gateway's inference and admin APIs with answers set by the test."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from baton.core.client_api import Caller, ClusterStatus, GenerateChunk, ModelInfo
from baton.core.cluster.cache_stats import CacheStats, TokenReuse
from baton.core.cluster.decision_record import DecisionRecord
from baton.core.cluster.prefix_files import ExportedPrefix, ImportedPrefix
from baton.core.errors import Code, Failure, Reason, Refused
from baton.core.kv.block_hash import TokenIds, token_ids
from baton.runtime.network.mailbox import Mailbox

CACHE_STATS = CacheStats(
    since_s=7.5,
    total=TokenReuse(num_requests=3, num_prompt_tokens=300, cached_tokens={"device": 64, "disk": 32}),
    workers=(TokenReuse(worker_id="w0", num_requests=1, num_prompt_tokens=100, cached_tokens={"disk": 32}),),
    ceiling_tokens=120.5,
    sampled_share=0.5,
)


class StubGenerateStream:
    """A generation whose chunks are put by the test. An exception among them ends it."""

    def __init__(self, request_id: str = "req-1") -> None:
        self.request_id = request_id
        self.ignored_fields: tuple[str, ...] = ()
        self.is_closed = False
        self._mailbox: Mailbox[GenerateChunk | Exception] = Mailbox(10_000)

    def put(self, *chunks: GenerateChunk | Exception) -> None:
        for chunk in chunks:
            self._mailbox.put(chunk)

    async def receive(self) -> GenerateChunk:
        chunk = await self._mailbox.get()
        if isinstance(chunk, Exception):
            raise chunk
        return chunk

    async def aclose(self) -> None:
        self.is_closed = True
        self._mailbox.close("closed")


class StubInference:
    """Records calls. `generate` returns `answer`, but if it is an exception, all methods raise it."""

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer
        self.calls: list[tuple[Mapping[str, Any], Caller]] = []

    async def generate(self, body: Mapping[str, Any], caller: Caller) -> StubGenerateStream:
        return self._answer(body, caller)  # type: ignore[no-any-return]

    @asynccontextmanager
    async def tokenize(self, body: Mapping[str, Any], caller: Caller) -> AsyncIterator[TokenIds]:
        self._answer(body, caller)
        yield token_ids(map(ord, body["prompt"]))

    @asynccontextmanager
    async def detokenize(self, body: Mapping[str, Any], caller: Caller) -> AsyncIterator[str]:
        self._answer(body, caller)
        yield "".join(map(chr, body["tokens"]))

    async def models(self, caller: Caller) -> tuple[ModelInfo, ...]:
        self._answer({}, caller)
        return (ModelInfo(model_id="demo", max_model_len=1024), ModelInfo(model_id="other"))

    def _answer(self, body: Mapping[str, Any], caller: Caller) -> Any:
        self.calls.append((dict(body), caller))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class StubAdmin:
    """Returns the given status and records, and records all calls. Its only worker is w0."""

    def __init__(self, status: ClusterStatus, records: tuple[DecisionRecord, ...] = ()) -> None:
        self._status = status
        self._records = records
        self.calls: list[Any] = []
        self.callers: list[Caller] = []

    async def status(self, caller: Caller) -> ClusterStatus:
        self.callers.append(caller)
        return self._status

    async def explain(self, request_id: str | None, caller: Caller) -> tuple[DecisionRecord, ...]:
        self.calls.append(request_id)
        return self._records

    async def drain(self, worker_id: str, caller: Caller, *, node_shutting_down: bool = False) -> None:
        self.calls.append((worker_id, node_shutting_down))
        if worker_id != "w0":
            raise Refused(
                Failure(code=Code.NOT_FOUND, reason=Reason.INVALID_REQUEST, message=f"there is no worker {worker_id}")
            )

    async def clear_tenant(self, tenant: str, caller: Caller) -> tuple[str, ...]:
        self.calls.append(tenant)
        return ("w0", "w1")

    async def cache_stats(self, caller: Caller) -> CacheStats:
        return CACHE_STATS

    async def export_cache(self, tenant: str, prompt_json: str, write: Any, caller: Caller) -> None:
        self.calls.append((tenant, prompt_json))
        parts = [b"one", b"", b"three" * 1000]
        num_bytes = sum(map(len, parts))
        await write(ExportedPrefix(worker_id="w0", num_tokens=32, num_prompt_tokens=40, num_bytes=num_bytes))
        for part in parts:
            await write(part)

    async def check_import(self, caller: Caller) -> None:
        """Let everyone import."""

    async def import_cache(
        self, tenant: str, worker_id: str, parts: AsyncIterator[bytes], caller: Caller
    ) -> ImportedPrefix:
        self.calls.append((tenant, worker_id, b"".join([part async for part in parts])))
        return ImportedPrefix(worker_id="w0", num_tokens=32, num_cached_before=16, num_file_tokens=48)
