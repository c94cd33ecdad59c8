"""Tests pool and kernels together: the KV of freed blocks is NaN, and no answer changes."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from transformers import MistralConfig

from baton.core.kv.kv_layout import KvLayout
from baton.engine.engine import Engine, EngineConfig
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.state.sequence import SequenceRequest
from baton.model.backends.backend_selection import (
    CPU_BACKENDS,
    FUSED_LAYERS,
    NATIVE_ATTENTION,
    NATIVE_DECODER,
    Backend,
    choose_backend,
)
from baton.model.device.compute_thread import compute_thread
from baton.model.device.kv_tensors import KvCache
from baton.model.loading.model_loader import LoadedModel, load_model
from baton.model.loading.random_init import init_model
from baton.model.torch_executor import TorchExecutor
from tests.builders import sequence_request
from tests.fake_executor import FakeGenerationTable
from tests.random_kv import poison
from tests.scale import sized
from tests.unit.model.conftest import TINY

SIZE, NUM_BLOCKS, WINDOW = 4, 200, 21
BACKENDS = {
    "torch": None,
    "native attention": NATIVE_ATTENTION,
    "fused layers": FUSED_LAYERS,
    "native decoder": NATIVE_DECODER,
}
CASES = sized(
    [
        ("torch", "float32", "auto"),
        ("native attention", "float32", "int8"),
        ("fused layers", "float32", "auto"),
        ("native decoder", "bfloat16", "auto"),
        ("native decoder", "bfloat16", "int8"),
    ],
    [(name, dtype, kv) for name in BACKENDS for dtype in ("float32", "bfloat16") for kv in ("auto", "int8")],
)


@pytest.fixture(scope="module")
def windowed_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model of which every layer has a window."""
    path = tmp_path_factory.mktemp("windowed") / "model"
    init_model(MistralConfig(**TINY, sliding_window=WINDOW), path, seed=1)
    return path


def requests() -> list[SequenceRequest]:
    """Return requests whose prompts and answers exceed the window."""
    lengths = (3, 70, 110, 33)
    prompts = [[(7 * i + 31 * seq) % 250 for i in range(length)] for seq, length in enumerate(lengths)]
    return [
        sequence_request(
            seq_id,
            prompt,
            max_tokens=30,
            sampling={"ignore_eos": True, "temperature": 0.0},
            sample_indices=(0, 1) if seq_id == 2 else (0,),
            block_size_tokens=SIZE,
        )
        for seq_id, prompt in enumerate(prompts, 1)
    ]


def answers(loaded: LoadedModel, backend: Backend, **limits: Any) -> tuple[dict[tuple[int, int], list[int]], int]:
    """Run all requests together. Returns each sample's tokens, and the blocks in use, added over all steps.

    Before each step, every block that no sequence refers to is filled with NaN. The prompts have nothing in
    common, so that none is found in the prefix cache.
    """
    config = EngineConfig(
        max_num_batched_tokens=37, max_num_seqs=8, max_model_len=300, block_size_tokens=SIZE, **limits
    )
    pool = BlockPool(NUM_BLOCKS, SIZE, FakeGenerationTable(NUM_BLOCKS))
    engine = Engine(config, pool, clock=lambda: 0.0)
    cache = KvCache.zeros(loaded.layout(SIZE), NUM_BLOCKS, dtype=loaded.dtype)
    executor = TorchExecutor(loaded.model, cache, thread=compute_thread(1), backend=backend)
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    used = 0
    for request in requests():
        engine.add(request)
    while not (plan := engine.plan()).is_empty:
        for block_id in range(NUM_BLOCKS):
            if not pool.num_refs(block_id):
                poison(cache, block_id)
        used += pool.counts().used
        for output in engine.apply(plan, executor.run(plan)).outputs:
            assert output.failure is None, output.failure
            found[output.seq_id, output.sample_index] += [token.token_id for token in output.tokens]
        engine.check()
    executor.close()
    assert pool.counts().used == 0
    return found, used


@pytest.mark.parametrize(("name", "dtype", "kv_dtype"), CASES)
def test_freed_blocks_are_never_read(windowed_dir: Path, name: str, dtype: str, kv_dtype: str) -> None:
    loaded = load_model(windowed_dir, dtype=dtype, kv_dtype=kv_dtype, device="cpu")
    only = BACKENDS[name]
    backend = choose_backend(
        loaded,
        kernels="torch" if only is None else "auto",
        num_threads=1,
        block_size_tokens=SIZE,
        cpu_backends=CPU_BACKENDS if only is None else type(CPU_BACKENDS)(fastest_first=(only,)),
    )
    assert {params.window for params in backend.attention_params} == {WINDOW}
    layout: KvLayout = loaded.layout(SIZE, tuple(params.window for params in backend.attention_params))
    assert layout.window == WINDOW
    (found, used), (right, used_without) = answers(loaded, backend, kv_window=layout.window), answers(loaded, backend)
    assert found == right
    assert used < 0.6 * used_without
