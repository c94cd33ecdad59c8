"""Relays files of cached prefixes between operators and workers: exports and imports."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from baton.core.cluster.prefix_files import ExportedPrefix, ImportedPrefix
from baton.core.cluster.worker_report import WorkerReport, WorkerState
from baton.core.errors import Code, Failure, Reason, Refused, StreamBroken, invalid
from baton.core.interfaces import Duplex, Network
from baton.core.kv.block_hash import TokenIds, tenant_root
from baton.core.kv.kv_layout import KvLayout
from baton.core.messages.prefix_messages import (
    MAX_PART_BYTES,
    MAX_PREFIX_BLOCKS,
    WINDOW_PARTS,
    ExportPrefix,
    FilePart,
    ImportedBlocks,
    ImportPrefix,
    NextPart,
    PrefixOffer,
    PrefixReply,
    PrefixRequest,
)
from baton.gateway.cluster.cluster_view import ClusterView
from baton.gateway.request.attempt import prompt_hashes

MAX_ASKED = 16
"""Workers that are asked at a time which blocks they hold."""
ANSWER_S = 5.0
"""Longest wait for a worker's answer to that."""
STALL_S = 40.0
"""Longest wait for the next message during a copy. A worker gives up before, and says why."""

Stream = Duplex[PrefixRequest, PrefixReply]


class PrefixRelay:
    """Exports and imports of one gateway. It keeps no more than `WINDOW_PARTS` parts of each."""

    def __init__(self, network: Network, view: ClusterView, model: str) -> None:
        self._network, self._view, self._model = network, view, model

    async def export_file(
        self, token_ids: TokenIds, tenant_salt: bytes, write: Callable[[ExportedPrefix | bytes], Awaitable[None]]
    ) -> None:
        """Pass the longest cached prefix of a prompt to `write`.

        Raises Refused, see `AdminApi.export_cache`.
        """
        layout = self._layout()
        hashes = (await prompt_hashes(token_ids, tenant_salt, layout))[:MAX_PREFIX_BLOCKS]
        asked = ExportPrefix(hashes=hashes, tenant_root=_tenant_root(layout, tenant_salt))
        if not hashes:
            raise invalid(
                f"the prompt has {len(token_ids)} tokens; an export needs at least the {layout.block_size_tokens} of a "
                "block"
            )
        report, stream, offer = await self._best_offer(asked, layout)
        try:
            exported = ExportedPrefix(
                worker_id=report.worker.worker_id,
                num_tokens=offer.num_blocks * layout.block_size_tokens,
                num_prompt_tokens=len(token_ids),
                num_bytes=offer.num_bytes,
            )
            await write(exported)
            for _ in range(WINDOW_PARTS):
                await _send(stream, NextPart(), report)
            is_over = False
            while not is_over:
                part = await _received(stream, report, STALL_S)
                if not isinstance(part, FilePart):
                    raise _unexpected(report)
                await write(part.data)
                is_over = part.is_last
                if not is_over:
                    await _send(stream, NextPart(), report)
        finally:
            await stream.aclose()

    async def import_file(self, worker_id: str, tenant_salt: bytes, parts: AsyncIterator[bytes]) -> ImportedPrefix:
        """Load a file into the cache of a worker. Raises Refused, see `AdminApi.import_cache`."""
        report = self._importer(worker_id)
        layout = report.layout
        stream = await self._opened(report)
        try:
            await _send(stream, ImportPrefix(tenant_root=_tenant_root(layout, tenant_salt)), report)
            is_over = False
            while isinstance(reply := await _received(stream, report, STALL_S), NextPart):
                if is_over:
                    continue
                part = await anext(parts, None)
                is_over = part is None
                if part is not None and len(part) > MAX_PART_BYTES:
                    raise invalid(f"a part of the file has {len(part)} bytes; at most {MAX_PART_BYTES} are allowed")
                await _send(stream, FilePart(part or b"", is_over), report)
        finally:
            await stream.aclose()
        if not isinstance(reply, ImportedBlocks):
            raise _unexpected(report)
        return ImportedPrefix(
            worker_id=report.worker.worker_id,
            num_tokens=reply.num_blocks * layout.block_size_tokens,
            num_cached_before=reply.num_cached_before * layout.block_size_tokens,
            num_file_tokens=reply.num_file_blocks * layout.block_size_tokens,
        )

    async def _best_offer(self, asked: ExportPrefix, layout: KvLayout) -> tuple[WorkerReport, Stream, PrefixOffer]:
        """Ask all workers, and return the open stream of the one with the longest prefix."""
        reports = [each for each in self._reports() if each.layout == layout]
        turns, offers = asyncio.Semaphore(MAX_ASKED), dict[Stream, tuple[WorkerReport, PrefixOffer]]()
        problems: list[Refused] = []

        async def ask(report: WorkerReport) -> None:
            async with turns:
                try:
                    stream, offer = await self._offer(asked, report)
                except Refused as refused:
                    problems.append(refused)
                    return
                offers[stream] = (report, offer)
                worst = min(offers, key=lambda each: offers[each][1].num_blocks)
                if len(offers) > 1 or not offer.num_blocks:
                    del offers[worst]
                    await worst.aclose()

        try:
            async with asyncio.TaskGroup() as group:
                for report in reports:
                    group.create_task(ask(report))
        except BaseException:
            for stream in offers:
                await stream.aclose()
            raise
        if offers:
            (stream, (report, offer)), *_ = offers.items()
            return report, stream, offer
        if problems:
            raise problems[0]
        message = "no worker has a block of this prompt cached for this tenant; send it as a request first"
        raise Refused(Failure(code=Code.NOT_FOUND, reason=Reason.INVALID_REQUEST, message=message))

    async def _offer(self, asked: ExportPrefix, report: WorkerReport) -> tuple[Stream, PrefixOffer]:
        stream = await self._opened(report)
        try:
            await _send(stream, asked, report)
            offer = await _received(stream, report, ANSWER_S)
            if not isinstance(offer, PrefixOffer):
                raise _unexpected(report)
        except BaseException:
            await stream.aclose()
            raise
        return stream, offer

    async def _opened(self, report: WorkerReport) -> Stream:
        try:
            return await self._network.open_prefix_copy(report.worker.address)
        except StreamBroken as broken:
            raise _refused(broken, report) from broken

    def _importer(self, worker_id: str) -> WorkerReport:
        """Return the worker that imports. Raises Refused if there is none."""
        reports = [each for each in self._reports() if each.state is WorkerState.READY]
        if worker_id:
            found = [each for each in reports if each.worker.worker_id == worker_id]
        else:
            found = [each for each in reports if each.role.can_prefill]
        if not found:
            known = ", ".join(each.worker.worker_id for each in reports) or "none"
            wanted = f"worker {worker_id!r}" if worker_id else "prefill worker"
            message = f"no ready {wanted} serves {self._model}; ready are: {known}"
            raise Refused(Failure(code=Code.NOT_FOUND, reason=Reason.INVALID_REQUEST, message=message))
        return max(found, key=lambda each: (each.blocks.free, each.blocks.cached, each.worker.worker_id))

    def _reports(self) -> list[WorkerReport]:
        return [each for each in self._view.reports if each.model == self._model]

    def _layout(self) -> KvLayout:
        if self._view.layout is None:
            message = f"no worker serves {self._model} yet; retry when `baton status` lists one"
            raise Refused(Failure(code=Code.UNAVAILABLE, reason=Reason.NO_WORKERS, message=message, retry_after_s=1.0))
        return self._view.layout


async def _received(stream: Stream, report: WorkerReport, within_s: float) -> PrefixReply:
    """Return the next message. Raises Refused with the worker's reason if there is none."""
    try:
        async with asyncio.timeout(within_s):
            return await stream.receive()
    except StreamBroken as broken:
        raise _refused(broken, report) from broken
    except TimeoutError:
        message = f"worker {report.worker.worker_id} did not answer within {within_s:g} s; retry"
        raise Refused(Failure(code=Code.DEADLINE_EXCEEDED, reason=Reason.DEADLINE, message=message)) from None


async def _send(stream: Stream, message: PrefixRequest, report: WorkerReport) -> None:
    """Send a message. Raises Refused with the worker's reason if the stream has ended."""
    try:
        stream.send(message)
    except StreamBroken:
        while True:  # the reason follows what was received before
            await _received(stream, report, ANSWER_S)


def _refused(broken: StreamBroken, report: WorkerReport) -> Refused:
    message = f"worker {report.worker.worker_id} was lost, or is of another release: {broken}; retry"
    lost = Failure(code=Code.UNAVAILABLE, reason=Reason.WORKER_LOST, message=message, retry_after_s=1.0)
    return Refused(broken.failure or lost)


def _unexpected(report: WorkerReport) -> Refused:
    message = f"worker {report.worker.worker_id} sent an unexpected message; it may be of another release"
    return Refused(Failure(code=Code.UNAVAILABLE, reason=Reason.PROTOCOL_VERSION, message=message))


def _tenant_root(layout: KvLayout, tenant_salt: bytes) -> bytes:
    return tenant_root(
        model_fingerprint=layout.model_fingerprint,
        cache_salt=tenant_salt,
        block_size_tokens=layout.block_size_tokens,
    )
