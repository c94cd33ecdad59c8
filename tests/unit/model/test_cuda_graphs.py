"""Tests CUDA graphs on a CPU, with captures that simply run the function again.

This shows which inputs are in tensors and what was computed only during the capture.
"""

import gc
import weakref
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from baton.model.attention.attention_inputs import AttentionStep, CausalMasks
from baton.model.attention.graph_step import GraphStep
from baton.model.attention.paged_attention import paged_attention
from baton.model.backends.backend_selection import Backend
from baton.model.backends.cuda_graphs import BATCHES, CudaGraphForward, CudaGraphs
from baton.model.device.compute_thread import compute_thread
from baton.model.device.kv_tensors import KvCache
from baton.model.loading.model_loader import LoadedModel, load_model
from baton.model.loading.random_init import init_model
from baton.model.step.forward import Forward, ModelForward
from baton.model.step.step_inputs import PreparedSequence, pack
from baton.model.torch_executor import TorchExecutor
from baton.model.verification.verify_backend import verify_logits
from tests.integration.test_model_exactness import TINY_MODELS
from tests.random_kv import all_nan, numbers_of

SIZE = 16
PROMPT_TOKENS = 45


class CountingCapture:
    """Implements `CaptureGraph`; counts captures and replays."""

    def __init__(self) -> None:
        self.num_captured = 0
        self.num_replayed = 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        self.num_captured += 1
        run()

        def replay() -> None:
            self.num_replayed += 1
            run()

        return replay


def test_memory_pool_is_shared_until_the_last_graph_is_gone() -> None:
    """CUDA frees a pool with its last graph. A capture into a freed pool fails."""
    captures = CudaGraphs(new_handle=lambda: (0, 1))
    graphs = [captures.pool(), captures.pool()]
    assert graphs[0] is graphs[1]
    first = weakref.ref(graphs.pop())
    assert captures.pool() is first()
    graphs.clear()
    assert first() is None
    assert captures.pool() is not None


WINDOWS = (None, 5, 9)
"""Of the layers, as far as the layout of KV is concerned: each has a block table of its own."""


def decode_kernel(
    query: torch.Tensor, layer: int, step: GraphStep, scaling: float, window: int | None, *_sinks: object
) -> torch.Tensor:
    """Compute decode attention with plain operations, one sequence after the other."""
    kv = step.cache.layers[layer]
    group = query.shape[0] // kv.num_kv_heads
    logits = []
    for row, position in enumerate(step.decodes.position.tolist()):
        own = numbers_of(kv)[:, step.decodes.block_ids[step.cache.table_of[layer], row, : position // SIZE + 1].long()]
        keys, values = own.transpose(1, 2).flatten(2, 3)[
            :, :, max(0, position + 1 - (window or position + 1)) : position + 1
        ]
        scores = torch.einsum("hd,htd->ht", query[:, row].float(), keys.float().repeat_interleave(group, 0)) * scaling
        logits.append(torch.einsum("ht,htd->hd", scores.softmax(-1), values.float().repeat_interleave(group, 0)))
    return torch.stack(logits).to(query.dtype)


@pytest.fixture(params=["qwen3", "mistral-window"])
def loaded(request: pytest.FixtureRequest, tmp_path: Path) -> LoadedModel:
    init_model(TINY_MODELS[request.param](), tmp_path / "model", seed=3)
    return load_model(tmp_path / "model", dtype="float32", device="cpu")


def graph_forward(loaded: LoadedModel, capture: CountingCapture) -> CudaGraphForward:
    return CudaGraphForward(ModelForward(loaded.model), decode_kernel, max_model_len=200, capture=capture)


def answers(loaded: LoadedModel, forward: Forward, counts: list[int]) -> list[torch.Tensor]:
    """Return the logits of one decode step per entry of `counts`, with that many of the sequences.

    Checks that nothing but their own blocks is written.
    """
    rng = np.random.default_rng(0)
    num_seqs, steps_each = max(counts), len(counts)
    tokens = rng.integers(0, loaded.vocab_size, (num_seqs, PROMPT_TOKENS + steps_each))
    num_blocks = -(-(PROMPT_TOKENS + steps_each) // SIZE)
    layout = loaded.layout(SIZE, WINDOWS)
    num_tables, num_ids = layout.windows.num_tables, num_seqs * num_blocks * layout.windows.num_tables
    tables = rng.permutation(num_ids + 3)[:num_ids].reshape(num_seqs, num_blocks * num_tables)
    cache = KvCache.zeros(layout, num_ids + 3, loaded.device, loaded.dtype)
    cache.fill_with_nan()
    masks = CausalMasks(cache.dtype, cache.device)
    done = [0] * num_seqs

    def step(seqs: range, num_tokens: int) -> torch.Tensor:
        parts = [
            PreparedSequence(
                seq_id=i,
                token_ids=tokens[i, done[i] : done[i] + num_tokens],
                position_begin=done[i],
                kv_begin=done[i],
                block_ids=tables[i, : -(-(done[i] + num_tokens) // SIZE) * num_tables].astype(np.int64),
                sample=SAMPLES,  # type: ignore[arg-type]  # only compared with None
            )
            for i in seqs
        ]
        with torch.inference_mode():
            forwarded = forward(pack(parts, cache, masks, paged_attention))
        assert forwarded.finite.all()
        for i in seqs:
            done[i] += num_tokens
        return forwarded.logits.clone().cpu()

    step(range(num_seqs), PROMPT_TOKENS)
    logits = [step(range(count), 1) for count in counts]
    untouched = set(range(cache.num_blocks)) - set(tables.flatten().tolist())
    assert all(all_nan(cache, block) for block in untouched)
    return logits


SAMPLES = SimpleNamespace(drafts=())


def test_graphs_compute_the_same_as_the_models_own_code(loaded: LoadedModel) -> None:
    counts = [3, 3, 1, 4, 2, 9, 9, 3, 8]
    capture = CountingCapture()
    with closing(ModelForward(loaded.model)) as own:
        expected = answers(loaded, own, counts)
    with closing(graph_forward(loaded, capture)) as forward:
        logits = answers(loaded, forward, counts)
    for actual, reference in zip(logits, expected, strict=True):
        torch.testing.assert_close(actual, reference, atol=1e-5, rtol=1e-5)
    assert (capture.num_captured, capture.num_replayed) == (5, 4), "one capture each for 4, 1, 2, 16 and 8"


def test_batch_above_the_largest_graph_runs_without_graph(loaded: LoadedModel) -> None:
    capture = CountingCapture()
    with closing(graph_forward(loaded, capture)) as forward:
        answers(loaded, forward, [BATCHES[-1] + 1])
    assert capture.num_captured == 0


def test_failed_capture_disables_graphs(loaded: LoadedModel) -> None:
    """The capture may run out of memory at any time."""
    counts = [2, 2, 4, 2]
    tried = []

    def capture(run: Callable[[], None]) -> Callable[[], None]:
        tried.append(run)
        raise RuntimeError("CUDA out of memory")

    with closing(ModelForward(loaded.model)) as own:
        expected = answers(loaded, own, counts)
    with closing(
        CudaGraphForward(ModelForward(loaded.model), decode_kernel, max_model_len=200, capture=capture)
    ) as forward:
        for actual, reference in zip(answers(loaded, forward, counts), expected, strict=True):
            torch.testing.assert_close(actual, reference, atol=1e-5, rtol=1e-5)
        assert forward.is_disabled
    assert len(tried) == 1


@pytest.mark.parametrize("code", [2, 901])
def test_recoverable_cuda_error_disables_graphs(loaded: LoadedModel, code: int) -> None:
    def capture(run: Callable[[], None]) -> Callable[[], None]:
        error = torch.AcceleratorError("operation failed due to a previous error during capture")
        error.error_code = code  # type: ignore[attr-defined]  # torch sets it in the same way
        raise error

    with closing(
        CudaGraphForward(ModelForward(loaded.model), decode_kernel, max_model_len=200, capture=capture)
    ) as forward:
        answers(loaded, forward, [2, 2])
        assert forward.is_disabled


def test_release_graphs_frees_memory_without_garbage_collection(loaded: LoadedModel) -> None:
    """KV memory is sized right afterwards, before any garbage collection."""

    def capture(run: Callable[[], None]) -> Callable[[], None]:
        run()
        return lambda: None

    with closing(
        CudaGraphForward(ModelForward(loaded.model), decode_kernel, max_model_len=200, capture=capture)
    ) as forward:
        answers(loaded, forward, [2])
        graph = weakref.ref(next(iter(forward._graphs.values())))
        gc.disable()
        try:
            forward.release_graphs()
            assert graph() is None
        finally:
            gc.enable()


def test_other_device_errors_are_raised(loaded: LoadedModel) -> None:
    def capture(run: Callable[[], None]) -> Callable[[], None]:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    forward = CudaGraphForward(ModelForward(loaded.model), decode_kernel, max_model_len=200, capture=capture)
    with closing(forward), pytest.raises(torch.AcceleratorError):
        answers(loaded, forward, [2])


def test_warmup_captures_all_batch_sizes(loaded: LoadedModel) -> None:
    capture = CountingCapture()
    forward = graph_forward(loaded, capture)
    backend = Backend(name="CUDA graphs", forward=forward, warm_batches=BATCHES)
    executor = TorchExecutor(
        loaded.model, KvCache.zeros(loaded.layout(SIZE, WINDOWS), 3), thread=compute_thread(1), backend=backend
    )
    executor.warm(max_num_seqs=20)
    assert capture.num_captured == BATCHES.index(24) + 1, "the batch size above 20 must be captured, too"
    executor.close()


@pytest.mark.parametrize("block_size", [1, SIZE])
def test_warmup_runs_chunks_of_each_size_and_after_each_context(loaded: LoadedModel, block_size: int) -> None:
    seen = set()

    def kernel(
        query: torch.Tensor, layer: int, step: AttentionStep, scaling: float, window: int | None, *_sinks: object
    ) -> torch.Tensor:
        seen.add((query.shape[1], int(step.tables.context_len.max())))
        return paged_attention(query, layer, step, scaling, window)

    forward = ModelForward(loaded.model)
    backend = Backend(name="split", forward=forward, kernel=kernel, warm_tokens=(1, 2), warm_contexts=(32, 64))
    executor = TorchExecutor(
        loaded.model, KvCache.zeros(loaded.layout(block_size, WINDOWS), 1), thread=compute_thread(1), backend=backend
    )
    executor.warm(max_num_seqs=20)
    assert seen == {(1, 1), (2, 2), (2, 34), (2, 66)}
    executor.close()


def test_verification_replays_graphs(loaded: LoadedModel) -> None:
    capture = CountingCapture()
    with closing(graph_forward(loaded, capture)) as forward:
        verify_logits(loaded, SIZE, forward=forward)
    assert capture.num_captured
    assert capture.num_replayed > capture.num_captured
