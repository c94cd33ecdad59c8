"""Steps in which every sequence gets one token, recorded once a batch size and replayed: on a GPU the
launches of a small batch's kernels take longer than the kernels.

What differs from step to step is written into tensors of fixed places first. A batch smaller than its
recording repeats its first sequence: the same keys and values are written to the same place again, and what
is computed twice is left out of the answer.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from baton.model.attention.recorded_step import DecodeKernel, StaticStep
from baton.model.device.async_copy import upload
from baton.model.device.kv_tensors import KvCache
from baton.model.step.forward import Forwarded, ModelForward
from baton.model.step.step_inputs import PackedStep
from baton.runtime.logging import get_logger

log = get_logger(__name__)

BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
WARM_RUNS = 2
"""Before a recording: kernels are compiled and libraries take their memory, which must not happen in it."""
NOT_RECORDED = frozenset({2, *range(900, 909)})
"""CUDA's error codes of memory that is not there, and of what must not happen in a recording. The device goes
on after them; after others it does not."""


class RecordGraph(Protocol):
    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run it, and return what runs it again on the same tensors, faster. Keeps nothing of `run`: the
        memory of a recording goes with who holds it."""
        ...


class CudaGraphs:
    """Implements `RecordGraph`. All share one memory pool: only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_RUNS):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as the transport's, may call the device meanwhile. A recording that fails leaves
        # its stream the current one.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            run()
        graph.replay()  # a recording computes nothing
        return graph.replay


class _Recording:
    """One batch size over one KV memory."""

    def __init__(
        self,
        forward: ModelForward,
        cache: KvCache,
        kernel: DecodeKernel,
        record: RecordGraph,
        batch: int,
        max_blocks: int,
    ) -> None:
        self._batch = batch
        self._forward = forward
        self._record = record
        self._step = StaticStep(cache, kernel, batch, max_blocks)
        self._token_ids, self._position_ids = (
            torch.zeros(batch, dtype=torch.int64, device=cache.device) for _ in range(2)
        )
        self._rows = torch.arange(batch, device=cache.device)
        self._outputs: tuple[torch.Tensor, torch.Tensor] | None = None
        self._replay: Callable[[], None] | None = None
        self._is_fresh = False

    def prepare(self, step: PackedStep) -> None:
        """Record, if that has not happened. Only with a step at hand: on zeros it would write into a block
        that is somebody's. Raises RuntimeError where it cannot."""
        if self._replay is None:
            self._fill(step, step.token_ids.numel())
            self._replay = self._record(self._run)
            self._is_fresh = True

    def __call__(self, step: PackedStep) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits, finite) of the step's own sequences, valid until the next call. `prepare` comes first."""
        count = step.token_ids.numel()
        assert self._replay is not None
        if not self._is_fresh:
            self._fill(step, count)
            self._replay()
        self._is_fresh = False
        assert self._outputs is not None
        logits, finite = self._outputs
        return logits[:count], finite[:count]

    def _run(self) -> None:
        self._outputs = self._forward.compute(self._token_ids, self._position_ids, self._rows, self._step)

    def _fill(self, step: PackedStep, count: int) -> None:
        tables, decodes = step.attention.tables, self._step.decodes
        lengths = np.diff(tables.table_begin, append=tables.block_ids.size)
        host = np.zeros((self._batch, 1 + lengths.max()), dtype=np.int32)
        host[:count, 0] = tables.context_len - 1
        for row, (begin, length) in enumerate(zip(tables.table_begin, lengths, strict=True)):
            host[row, 1 : 1 + length] = tables.block_ids[begin : begin + length]
        host[count:] = host[0]
        on_device = upload(host, decodes.position.device)
        decodes.position.copy_(on_device[:, 0])
        decodes.block_ids[:, : host.shape[1] - 1].copy_(on_device[:, 1:])
        self._put(self._token_ids, step.token_ids, count)
        self._put(self._position_ids, step.position_ids, count)
        rows = self._step.token_rows.view(-1, self._batch)
        rows[:, :count] = step.attention.token_rows.view(-1, count)
        rows[:, count:] = rows[:, :1]

    def _put(self, place: torch.Tensor, values: torch.Tensor, count: int) -> None:
        place[:count] = values
        place[count:] = place[:1]


class GraphedForward:
    """Implements `Forward`: decode steps as recordings, all others as the model's own code runs them."""

    def __init__(
        self, eager: ModelForward, kernel: DecodeKernel, *, max_model_len: int, record: RecordGraph | None = None
    ) -> None:
        self._eager = eager
        self._kernel = kernel
        self._max_model_len = max_model_len
        self._record = record or CudaGraphs()
        self.is_off = False
        """Something could not be recorded: all steps are launched kernel by kernel."""
        self._recordings: dict[tuple[int, int], _Recording] = {}

    def __call__(self, step: PackedStep) -> Forwarded:
        count = step.token_ids.numel()
        if (
            self.is_off
            or count > BATCHES[-1]
            or len(step.attention.segments) != count
            or step.sample_rows.numel() != count
        ):
            return self._eager(step)
        recording = self._recording(step.attention.cache, count)
        try:
            recording.prepare(step)
        except RuntimeError as error:  # no memory is left, or something in it cannot be recorded
            if isinstance(error, torch.AcceleratorError) and getattr(error, "error_code", None) not in NOT_RECORDED:
                raise  # the device's, whatever comes next
            log.warning(
                "not_recorded",
                batch=count,
                problem=str(error),
                hint="decode steps are launched kernel by kernel, slower",
            )
            self.is_off = True
            self.forget()
            return self._eager(step)
        logits, finite = recording(step)
        return Forwarded(logits=logits, finite=finite)

    def forget(self) -> None:
        """Give back the memory of all recordings; the next steps record anew."""
        self._recordings.clear()

    def close(self) -> None:
        self._recordings.clear()
        self._eager.close()

    def _recording(self, cache: KvCache, count: int) -> _Recording:
        """Of the smallest batch that holds them. Those of another KV memory, which the proof at start has,
        are forgotten."""
        at = cache.blocks.data_ptr()
        if any(other != at for other, _ in self._recordings):
            self._recordings.clear()
        batch = next(batch for batch in BATCHES if batch >= count)
        if (at, batch) not in self._recordings:
            max_blocks = -(-self._max_model_len // cache.block_size_tokens)
            self._recordings[at, batch] = _Recording(self._eager, cache, self._kernel, self._record, batch, max_blocks)
        return self._recordings[at, batch]
