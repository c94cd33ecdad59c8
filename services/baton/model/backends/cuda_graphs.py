"""Captures decode steps as CUDA graphs, one per batch size, and replays them.

With small batches, launching the kernels one by one takes longer than running them. Everything that differs
from step to step is first written into tensors at fixed addresses. A batch smaller than its graph is padded
with copies of its first sequence. The copies write the same KV to the same place, and their outputs are
dropped.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from baton.model.attention.graph_step import DecodeKernel, GraphStep
from baton.model.device.async_copy import upload
from baton.model.device.kv_tensors import KvCache
from baton.model.step.forward import ForwardOutput, ModelForward
from baton.model.step.step_inputs import PackedStep
from baton.runtime.logging import get_logger

log = get_logger(__name__)

BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Batch sizes that are captured. A larger decode step runs without a graph."""
WARMUP_RUNS = 2
"""Runs before a capture. They compile kernels and let libraries allocate memory, which a capture does not
allow."""
RECOVERABLE_ERROR_CODES = frozenset({2, *range(900, 909)})
"""CUDA error codes of failed allocations and of operations that a capture does not allow. The device keeps
working after these, and after no others."""


class CaptureGraph(Protocol):
    """Captures a function as a graph."""

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run `run` and return a function that replays it on the same tensors.

        Keeps no reference to `run`, so that the graph's memory is freed with the returned function.
        """
        ...


class _MemoryPool:
    """Memory that graphs share. CUDA frees it with the last graph, and its handle is then invalid."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle


class CudaGraphs:
    """Implements `CaptureGraph` with CUDA. All graphs share one memory pool, so only one of them may run at a
    time."""

    def __init__(self, new_handle: Callable[[], Any] = torch.cuda.graph_pool_handle) -> None:
        """`new_handle`: replaced in tests."""
        self._new_handle = new_handle
        self._pool: Callable[[], _MemoryPool | None] = lambda: None

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        pool = self.pool()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARMUP_RUNS):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Thread-local mode, because other threads such as the transport's may call CUDA during the capture.
        # The explicit stream context restores the current stream if the capture fails.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=pool.handle, capture_error_mode="thread_local"),
        ):
            run()
        graph.replay()  # a capture does not execute
        return partial(_replay, graph, pool)

    def pool(self) -> _MemoryPool:
        """Return the pool of the captured graphs, or a new one if all are gone.

        Their replay functions own it.
        """
        pool = self._pool()
        if pool is None:
            pool = _MemoryPool(self._new_handle())
            self._pool = weakref.ref(pool)
        return pool


def _replay(graph: torch.cuda.CUDAGraph, pool: _MemoryPool) -> None:
    """Replay the graph. `pool` is only held, so that it is not freed before its last graph."""
    graph.replay()


class _CapturedBatch:
    """The graph of one batch size over one KV memory."""

    def __init__(
        self,
        forward: ModelForward,
        cache: KvCache,
        kernel: DecodeKernel,
        capture: CaptureGraph,
        batch: int,
        max_blocks: int,
    ) -> None:
        self._batch = batch
        self._forward = forward
        self._capture = capture
        self._step = GraphStep(cache, kernel, batch, max_blocks)
        self._token_ids, self._position_ids = (
            torch.zeros(batch, dtype=torch.int64, device=cache.device) for _ in range(2)
        )
        self._sample_rows = torch.arange(batch, device=cache.device)
        self._outputs: tuple[torch.Tensor, torch.Tensor] | None = None
        self._replay: Callable[[], None] | None = None
        self._has_new_outputs = False

    def prepare(self, step: PackedStep) -> None:
        """Capture the graph if that has not been done. Raises RuntimeError if it cannot be captured.

        It needs a real step: capturing runs the kernels, and with zeros as input they would overwrite a block
        in use.
        """
        if self._replay is None:
            self._fill(step, step.token_ids.numel())
            self._replay = self._capture(self._run)
            self._has_new_outputs = True

    def __call__(self, step: PackedStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (logits, finite) of the step's own sequences, valid until the next call. Call `prepare`
        first."""
        count = step.token_ids.numel()
        assert self._replay is not None
        if not self._has_new_outputs:
            self._fill(step, count)
            self._replay()
        self._has_new_outputs = False
        assert self._outputs is not None
        logits, finite = self._outputs
        return logits[:count], finite[:count]

    def _run(self) -> None:
        self._outputs = self._forward.compute(self._token_ids, self._position_ids, self._sample_rows, self._step)

    def _fill(self, step: PackedStep, count: int) -> None:
        tables, decodes = step.attention.tables, self._step.decodes
        lengths = np.diff(tables.table_begin, append=tables.block_ids.shape[1])
        host = np.zeros((len(tables.block_ids), self._batch, lengths.max()), dtype=np.int32)
        for row, (begin, length) in enumerate(zip(tables.table_begin, lengths, strict=True)):
            host[:, row, :length] = tables.block_ids[:, begin : begin + length]
        host[:, count:] = host[:, :1]
        device = decodes.position.device
        self._copy_padded(decodes.position, upload(tables.context_len - 1, device), count)
        decodes.block_ids[:, :, : host.shape[2]].copy_(upload(host, device))
        self._copy_padded(self._token_ids, step.token_ids, count)
        self._copy_padded(self._position_ids, step.position_ids, count)
        for target, slots in zip(self._step.slots, step.attention.slots, strict=True):
            self._copy_padded(target.block_ids, slots.block_ids, count)
        self._copy_padded(self._step.slots[0].offsets, step.attention.slots[0].offsets, count)

    def _copy_padded(self, target: torch.Tensor, values: torch.Tensor, count: int) -> None:
        target[:count] = values
        target[count:] = target[:1]


class CudaGraphForward:
    """Implements `Forward`: replays decode steps as CUDA graphs and runs all other steps with the model's own
    code."""

    def __init__(
        self, eager: ModelForward, kernel: DecodeKernel, *, max_model_len: int, capture: CaptureGraph | None = None
    ) -> None:
        """`eager`: runs steps without a graph. `kernel`: attention inside a graph. `capture`: replaced in
        tests."""
        self._eager = eager
        self._kernel = kernel
        self._max_model_len = max_model_len
        self._capture = capture or CudaGraphs()
        self.is_disabled = False
        """True after a capture failed. All steps then run without graphs."""
        self.problem = ""
        """The reason for which the capture failed; empty if it did not."""
        self._graphs: dict[tuple[int, int], _CapturedBatch] = {}

    def __call__(self, step: PackedStep) -> ForwardOutput:
        count = step.token_ids.numel()
        if (
            self.is_disabled
            or count > BATCHES[-1]
            or len(step.attention.segments) != count
            or step.sample_rows.numel() != count
        ):
            return self._eager(step)
        graph = self._graph_for(step.attention.cache, count)
        try:
            graph.prepare(step)
        except RuntimeError as error:  # out of memory, or an operation that cannot be captured
            if (
                isinstance(error, torch.AcceleratorError)
                and getattr(error, "error_code", None) not in RECOVERABLE_ERROR_CODES
            ):
                raise  # a device error: later calls would fail, too
            hint = "each kernel of a decode step is launched separately, slower for small batches"
            log.warning("cuda_graphs_disabled", batch=count, problem=str(error), hint=hint)
            self.is_disabled, self.problem = True, str(error)
            self.release_graphs()
            return self._eager(step)
        logits, finite = graph(step)
        return ForwardOutput(logits=logits, finite=finite)

    def release_graphs(self) -> None:
        """Free the memory of all graphs. The next steps capture them again."""
        self._graphs.clear()

    def close(self) -> None:
        self._graphs.clear()
        self._eager.close()

    def _graph_for(self, cache: KvCache, count: int) -> _CapturedBatch:
        """Return the graph of the smallest batch size that holds `count` sequences.

        Graphs over another KV memory are dropped; the verification at start creates such graphs.
        """
        at = cache.memory.data_ptr()
        if any(other != at for other, _ in self._graphs):
            self._graphs.clear()
        batch = next(batch for batch in BATCHES if batch >= count)
        if (at, batch) not in self._graphs:
            max_blocks = -(-self._max_model_len // cache.block_size_tokens)
            self._graphs[at, batch] = _CapturedBatch(self._eager, cache, self._kernel, self._capture, batch, max_blocks)
        return self._graphs[at, batch]
