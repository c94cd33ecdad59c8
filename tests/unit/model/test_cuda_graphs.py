"""Recorded decode steps, with recordings that are simply run again: what is in tensors, and what was computed
at the first time only."""

import gc
import weakref
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.model.attention.attention_inputs import AttentionStep, CausalMasks
from baton.model.attention.graph_step import GraphStep
from baton.model.attention.paged_attention import paged_attention
from baton.model.backends.backend_selection import Backend
from baton.model.backends.cuda_graphs import BATCHES, CudaGraphForward
from baton.model.device.compute_thread import compute_thread
from baton.model.device.kv_tensors import KvCache
from baton.model.loading.model_loader import LoadedModel, load_model
from baton.model.loading.random_init import init_model
from baton.model.step.forward import Forward, ModelForward
from baton.model.step.step_inputs import PreparedSequence, pack
from baton.model.torch_executor import TorchExecutor
from baton.model.verification.verify_backend import verify_logits
from tests.integration.test_model_exactness import TINY_MODELS

SIZE = 16
PROMPT_TOKENS = 45


class Recorded:
    """Counts what is recorded and run again."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replayed = 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        self.num_recorded += 1
        run()

        def again() -> None:
            self.num_replayed += 1
            run()

        return again


def decode_kernel(query: torch.Tensor, layer: int, step: GraphStep, scaling: float, window: int | None) -> torch.Tensor:
    """Written out, one sequence after the other."""
    group = query.shape[0] // step.cache.num_kv_heads
    blocks = step.cache.layer(layer)
    found = []
    for row, position in enumerate(step.decodes.position.tolist()):
        kv = blocks[step.decodes.block_ids[row, : position // SIZE + 1].long()]  # [blocks, 2, heads, tokens, dim]
        keys, values = kv.permute(1, 2, 0, 3, 4).flatten(2, 3)[
            :, :, max(0, position + 1 - (window or position + 1)) : position + 1
        ]
        scores = torch.einsum("hd,htd->ht", query[:, row].float(), keys.float().repeat_interleave(group, 0)) * scaling
        found.append(torch.einsum("ht,htd->hd", scores.softmax(-1), values.float().repeat_interleave(group, 0)))
    return torch.stack(found).to(query.dtype)


@pytest.fixture(params=["qwen3", "mistral-window"])
def loaded(request: pytest.FixtureRequest, tmp_path: Path) -> LoadedModel:
    init_model(TINY_MODELS[request.param](), tmp_path / "model", seed=3)
    return load_model(tmp_path / "model", dtype="float32", device="cpu")


def graphed(loaded: LoadedModel, record: Recorded) -> CudaGraphForward:
    return CudaGraphForward(ModelForward(loaded.model), decode_kernel, max_model_len=200, capture=record)


def answers(loaded: LoadedModel, forward: Forward, counts: list[int]) -> list[torch.Tensor]:
    """Logits of steps of so many sequences each, the first ones of those that there are; then nothing but
    their own blocks is written."""
    rng = np.random.default_rng(0)
    num_seqs, steps_each = max(counts), len(counts)
    tokens = rng.integers(0, loaded.vocab_size, (num_seqs, PROMPT_TOKENS + steps_each))
    num_blocks = -(-(PROMPT_TOKENS + steps_each) // SIZE)
    tables = rng.permutation(num_seqs * num_blocks + 3)[: num_seqs * num_blocks].reshape(num_seqs, num_blocks)
    cache = KvCache.zeros(loaded.layout(SIZE), num_seqs * num_blocks + 3, loaded.device)
    cache.blocks.fill_(float("nan"))
    masks = CausalMasks(cache.dtype, cache.device)
    done = [0] * num_seqs

    def step(seqs: range, num_tokens: int) -> torch.Tensor:
        parts = [
            PreparedSequence(
                seq_id=i,
                token_ids=tokens[i, done[i] : done[i] + num_tokens],
                position_begin=done[i],
                kv_begin=done[i],
                block_ids=tables[i, : -(-(done[i] + num_tokens) // SIZE)].astype(np.int64),
                sample=SAMPLES,  # type: ignore[arg-type]  # asked only whether it is None
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
    found = [step(range(count), 1) for count in counts]
    untouched = set(range(cache.num_blocks)) - set(tables.flatten().tolist())
    assert all(cache.blocks[block].isnan().all() for block in untouched)
    return found


SAMPLES = object()


def test_answers_are_those_of_the_models_own_code(loaded: LoadedModel) -> None:
    counts = [3, 3, 1, 4, 2, 9, 9, 3, 8]
    record = Recorded()
    with closing(ModelForward(loaded.model)) as own:
        wanted = answers(loaded, own, counts)
    with closing(graphed(loaded, record)) as forward:
        found = answers(loaded, forward, counts)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert (record.num_recorded, record.num_replayed) == (5, 4), "for 4, 1, 2, 16 and 8"


def test_more_than_the_largest_recording_runs_as_ever(loaded: LoadedModel) -> None:
    record = Recorded()
    with closing(graphed(loaded, record)) as forward:
        answers(loaded, forward, [BATCHES[-1] + 1])
    assert record.num_recorded == 0


def test_what_cannot_be_recorded_runs_as_ever(loaded: LoadedModel) -> None:
    """No memory may be left for it at any time."""
    counts = [2, 2, 4, 2]
    tried = []

    def record(run: Callable[[], None]) -> Callable[[], None]:
        tried.append(run)
        raise RuntimeError("CUDA out of memory")

    with closing(ModelForward(loaded.model)) as own:
        wanted = answers(loaded, own, counts)
    with closing(
        CudaGraphForward(ModelForward(loaded.model), decode_kernel, max_model_len=200, capture=record)
    ) as forward:
        for ours, theirs in zip(answers(loaded, forward, counts), wanted, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        assert forward.is_disabled
    assert len(tried) == 1


@pytest.mark.parametrize("code", [2, 901])
def test_what_cuda_will_not_record_runs_as_ever(loaded: LoadedModel, code: int) -> None:
    def record(run: Callable[[], None]) -> Callable[[], None]:
        error = torch.AcceleratorError("operation failed due to a previous error during capture")
        error.error_code = code  # type: ignore[attr-defined]  # as torch sets it
        raise error

    with closing(
        CudaGraphForward(ModelForward(loaded.model), decode_kernel, max_model_len=200, capture=record)
    ) as forward:
        answers(loaded, forward, [2, 2])
        assert forward.is_disabled


def test_a_forgotten_recording_gives_its_memory_back_at_once(loaded: LoadedModel) -> None:
    """KV memory is sized next, and no garbage is collected before."""

    def record(run: Callable[[], None]) -> Callable[[], None]:
        run()
        return lambda: None

    with closing(
        CudaGraphForward(ModelForward(loaded.model), decode_kernel, max_model_len=200, capture=record)
    ) as forward:
        answers(loaded, forward, [2])
        recording = weakref.ref(next(iter(forward._graphs.values())))
        gc.disable()
        try:
            forward.release_graphs()
            assert recording() is None
        finally:
            gc.enable()


def test_a_fault_of_the_device_is_not_taken_for_a_lack_of_memory(loaded: LoadedModel) -> None:
    def record(run: Callable[[], None]) -> Callable[[], None]:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    forward = CudaGraphForward(ModelForward(loaded.model), decode_kernel, max_model_len=200, capture=record)
    with closing(forward), pytest.raises(torch.AcceleratorError):
        answers(loaded, forward, [2])


def test_all_are_recorded_before_the_first_request(loaded: LoadedModel) -> None:
    record = Recorded()
    forward = graphed(loaded, record)
    backend = Backend(name="recorded", forward=forward, warm_batches=BATCHES)
    executor = TorchExecutor(
        loaded.model, KvCache.zeros(loaded.layout(SIZE), 3), thread=compute_thread(1), backend=backend
    )
    executor.warm(max_num_seqs=20)
    assert record.num_recorded == BATCHES.index(24) + 1, "of 20 sequences the next larger one, too"
    executor.close()


def test_what_takes_long_behind_a_context_has_run_before_the_first_request(loaded: LoadedModel) -> None:
    seen = set()

    def kernel(
        query: torch.Tensor, layer: int, step: AttentionStep, scaling: float, window: int | None
    ) -> torch.Tensor:
        seen.add((query.shape[1], int(step.tables.context_len.max())))
        return paged_attention(query, layer, step, scaling, window)

    backend = Backend(name="split", forward=ModelForward(loaded.model), kernel=kernel, warm_contexts=(32, 64))
    executor = TorchExecutor(
        loaded.model, KvCache.zeros(loaded.layout(SIZE), 1), thread=compute_thread(1), backend=backend
    )
    executor.warm(max_num_seqs=20)
    assert seen == {(2, 34), (2, 66)}
    executor.close()


def test_the_proof_at_start_replays(loaded: LoadedModel) -> None:
    record = Recorded()
    with closing(graphed(loaded, record)) as forward:
        verify_logits(loaded, SIZE, forward=forward)
    assert record.num_recorded
    assert record.num_replayed > record.num_recorded
