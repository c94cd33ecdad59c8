"""`PrefixCopies`: serves the exports and imports of one worker, one at a time."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from baton.core.errors import QUEUE_FULL_RETRY_S, Code, Failure, Reason, Refused, StreamBroken, invalid
from baton.core.kv.kv_layout import KvLayout
from baton.core.messages.prefix_messages import ExportPrefix, ImportPrefix, NextPart, PrefixOffer
from baton.engine.engine import Engine
from baton.engine.tiers.kv_tier import KvTier
from baton.runtime.logging import get_logger
from baton.worker.prefix_files.file_parts import PartReader, PartWriter, Stream, next_message
from baton.worker.prefix_files.prefix_export import PrefixExport
from baton.worker.prefix_files.prefix_format import file_bytes
from baton.worker.prefix_files.prefix_import import PrefixImport
from baton.worker.prefix_files.staged_blocks import StagedBlocks
from baton.worker.tiers.slower_tiers import SlowerTiers

log = get_logger(__name__)

MAX_COPY_S = 3600.0
"""Longest export or import: it keeps blocks from being evicted."""


class PrefixCopies:
    """The exports and imports of one worker. Used from one event loop."""

    def __init__(
        self,
        *,
        engine: Engine,
        tiers: Sequence[KvTier],
        blocks: StagedBlocks | None,
        layout: KvLayout,
        on_changed: Callable[[], None],
    ) -> None:
        """`blocks`: None on a device that cannot copy blocks as bytes. on_changed: called when content was
        cached."""
        self._engine, self._tiers = engine, SlowerTiers(tiers)
        self._blocks, self._layout = blocks, layout
        self._on_changed = on_changed
        self._is_busy = False
        self._serving: set[asyncio.Task[None]] = set()

    async def serve(self, stream: Stream) -> None:
        """Serve one stream. Raises Refused with the reason why an export or import is not possible."""
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            async with asyncio.timeout(MAX_COPY_S):
                await self._serve(stream)
        except TimeoutError:
            message = f"the copy took longer than {MAX_COPY_S:g} s; copy a shorter prefix"
            raise Refused(Failure(code=Code.DEADLINE_EXCEEDED, reason=Reason.DEADLINE, message=message)) from None
        finally:
            self._serving.discard(task)

    async def aclose(self) -> None:
        """Cancel what runs, and wait for its end."""
        for task in self._serving:
            task.cancel()
        if self._serving:
            await asyncio.wait(list(self._serving))

    async def _serve(self, stream: Stream) -> None:
        if self._blocks is None:
            message = "this worker's device cannot copy KV blocks as bytes; use another --device"
            raise Refused(Failure(code=Code.INVALID_ARGUMENT, reason=Reason.INVALID_REQUEST, message=message))
        match await next_message(stream):
            case ExportPrefix() as asked:
                await self._export(stream, asked, self._blocks)
            case ImportPrefix() as asked:
                await self._import(stream, asked, self._blocks)
            case _:
                raise invalid("the first message must be ExportPrefix or ImportPrefix")
        with suppress(StreamBroken):  # until the other end has read all, and closes
            while True:
                await next_message(stream)

    async def _export(self, stream: Stream, asked: ExportPrefix, blocks: StagedBlocks) -> None:
        pool = self._engine.pool
        export = PrefixExport(asked, pool=pool, tiers=self._tiers, blocks=blocks, layout=self._layout)
        num_bytes = file_bytes(self._layout, export.chain) if export.chain else 0
        stream.send(PrefixOffer(num_blocks=len(export.chain), num_bytes=num_bytes))
        if not export.chain or not isinstance(await next_message(stream), NextPart):
            return
        with self._only_one():
            await export.send(PartWriter(stream, 1))
        log.info("prefix_exported", num_blocks=len(export.chain), num_bytes=num_bytes)

    async def _import(self, stream: Stream, asked: ImportPrefix, blocks: StagedBlocks) -> None:
        with self._only_one():
            copy = PrefixImport(asked, engine=self._engine, blocks=blocks, layout=self._layout)
            imported = await copy.receive(PartReader(stream))
        self._on_changed()
        stream.send(imported)
        log.info("prefix_imported", num_blocks=imported.num_blocks, num_file_blocks=imported.num_file_blocks)

    @contextmanager
    def _only_one(self) -> Iterator[None]:
        """Hold the only place for a copy. Raises Refused if it is taken."""
        if self._is_busy:
            failure = Failure(
                code=Code.RESOURCE_EXHAUSTED,
                reason=Reason.QUEUE_FULL,
                message="the worker exports or imports another prefix; retry when that has ended",
                retry_after_s=QUEUE_FULL_RETRY_S,
            )
            raise Refused(failure)
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False
