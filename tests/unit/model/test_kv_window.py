"""Tests pool and kernels together: the KV of freed blocks is NaN, and no answer changes."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from transformers import Gemma3TextConfig, MistralConfig, PreTrainedConfig

from baton.core.kv.block_hash import NO_HASH
from baton.core.kv.kv_layout import KvLayout
from baton.core.kv.kv_tables import entries_from, hashes_of_entries
from baton.engine.engine import Engine, EngineConfig
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.state.outcome import EngineOutcome
from baton.engine.state.sequence import SequenceRequest
from baton.engine.state.step import SampledToken
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
from baton.model.linear.pack_model import holds_weight
from baton.model.loading.model_loader import LoadedModel, load_model
from baton.model.loading.random_init import init_model
from baton.model.torch_executor import TorchExecutor
from tests.builders import hashes_of, sequence_request
from tests.fake_executor import FakeGenerationTable
from tests.model_families import TINY
from tests.random_kv import poison
from tests.scale import sized

SIZE, NUM_BLOCKS, WINDOW = 4, 200, 21
BACKENDS = {
    "torch": None,
    "native attention": NATIVE_ATTENTION,
    "fused layers": FUSED_LAYERS,
    "native decoder": NATIVE_DECODER,
}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "all layers": lambda: MistralConfig(**TINY, sliding_window=WINDOW),
    "some layers": lambda: Gemma3TextConfig(
        **(TINY | {"num_hidden_layers": 4}),
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    ),
}
"""Models by which layers have a window."""
CASES = sized(
    [
        ("all layers", "torch", "float32", "auto"),
        ("all layers", "native decoder", "bfloat16", "int8"),
        ("some layers", "torch", "float32", "auto"),
        ("some layers", "native attention", "float32", "int8"),
        ("some layers", "fused layers", "float32", "auto"),
        ("some layers", "native decoder", "bfloat16", "auto"),
        ("some layers", "native decoder", "bfloat16", "int8"),
    ],
    [
        (which, name, dtype, kv)
        for which in CONFIGS
        for name in BACKENDS
        for dtype in ("float32", "bfloat16")
        for kv in ("auto", "int8")
    ],
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes a model of `CONFIGS`, once."""
    root = tmp_path_factory.mktemp("windowed")

    def write(which: str) -> Path:
        path = root / which.replace(" ", "-")
        if not path.exists():
            init_model(CONFIGS[which](), path, seed=1)
        return path

    return write


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


def answers(loaded: LoadedModel, backend: Backend, layout: KvLayout) -> tuple[dict[tuple[int, int], list[int]], int]:
    """Run all requests together. Returns each sample's tokens, and the bytes in use, added over all steps.

    Before each step, every block that no sequence refers to is filled with NaN. The prompts have nothing in
    common, so that none is found in the prefix cache.
    """
    config = EngineConfig(max_num_batched_tokens=37, max_num_seqs=8, max_model_len=300, block_size_tokens=SIZE)
    num_blocks = NUM_BLOCKS * layout.windows.num_tables
    pool = BlockPool(num_blocks, SIZE, FakeGenerationTable(num_blocks), layout.windows)
    engine = Engine(config, pool, clock=lambda: 0.0)
    cache = KvCache.zeros(layout, num_blocks, dtype=loaded.dtype)
    executor = TorchExecutor(loaded.model, cache, thread=compute_thread(1), backend=backend)
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    used, poisoned = 0, set[int]()
    for request in requests():
        engine.add(request)
    while not (plan := engine.plan()).is_empty:
        unused = {block_id for block_id in range(num_blocks) if not pool.num_refs(block_id)}
        for block_id in unused - poisoned:
            poison(cache, block_id)
        poisoned = unused
        used += pool.counts().used * layout.block_bytes
        for output in engine.apply(plan, executor.run(plan)).outputs:
            assert output.failure is None, output.failure
            found[output.seq_id, output.sample_index] += [token.token_id for token in output.tokens]
        engine.check()
    executor.close()
    assert pool.counts().used == 0
    return found, used


def verified_backend(loaded: LoadedModel, name: str) -> Backend:
    """Return the backend of `BACKENDS`, verified.

    The native decoder runs also where another is faster. Fused layers cannot run packed weights.
    """
    only = BACKENDS[name]
    if only is NATIVE_DECODER:
        only = replace(NATIVE_DECODER, serves=lambda loaded, form, kernels: True)
    backend = choose_backend(
        loaded,
        kernels="torch" if only is None else "auto",
        num_threads=1,
        block_size_tokens=SIZE,
        cpu_backends=CPU_BACKENDS if only is None else type(CPU_BACKENDS)(fastest_first=(only,)),
    )
    if name == "fused layers" and any(holds_weight(module) for module in loaded.model.modules()):
        pytest.skip("weights in this dtype are packed on this processor")
    assert backend.name == name
    return backend


@pytest.mark.parametrize(("which", "name", "dtype", "kv_dtype"), CASES)
def test_freed_blocks_are_never_read(
    model_dir: Callable[[str], Path], which: str, name: str, dtype: str, kv_dtype: str
) -> None:
    loaded = load_model(model_dir(which), dtype=dtype, kv_dtype=kv_dtype, device="cpu")
    backend = verified_backend(loaded, name)
    layout = loaded.layout(SIZE, tuple(params.window for params in backend.attention_params))
    windows = {"all layers": (WINDOW,), "some layers": (0, WINDOW, WINDOW, WINDOW)}[which]
    assert layout.windows.windows == windows
    (found, used), (right, used_without) = (
        answers(loaded, backend, layout),
        answers(loaded, backend, loaded.layout(SIZE)),
    )
    assert found == right
    assert used < {"all layers": 0.6, "some layers": 0.7}[which] * used_without


class OneWorker:
    """An engine with a model, a pool and KV memory that holds NaN where nothing was written."""

    def __init__(self, loaded: LoadedModel, backend: Backend, layout: KvLayout) -> None:
        num_blocks = 80 * layout.windows.num_tables
        config = EngineConfig(max_num_batched_tokens=37, max_num_seqs=8, max_model_len=300, block_size_tokens=SIZE)
        self.pool = BlockPool(num_blocks, SIZE, FakeGenerationTable(num_blocks), layout.windows)
        self.engine = Engine(config, self.pool, clock=lambda: 0.0)
        self.cache = KvCache.zeros(layout, num_blocks, dtype=loaded.dtype)
        self.cache.fill_with_nan()
        self.executor = TorchExecutor(loaded.model, self.cache, thread=compute_thread(1), backend=backend)
        self.tables: list[tuple[int, ...]] = []

    def run(self) -> list[SampledToken]:
        """Run until nothing is left to do. Returns the tokens."""
        tokens: list[SampledToken] = []
        while not (plan := self.engine.plan()).is_empty:
            tokens += self.note(self.engine.take_outcome())
            tokens += self.note(self.engine.apply(plan, self.executor.run(plan)))
        return tokens

    def note(self, outcome: EngineOutcome) -> list[SampledToken]:
        """Keep the block tables of `outcome`, and return its tokens."""
        self.tables += [each.block_table for each in (*outcome.admissions, *outcome.growths)]
        return [token for output in outcome.outputs for token in output.tokens]


@pytest.mark.parametrize("which", CONFIGS)
def test_a_decode_worker_needs_only_what_the_windows_reach(model_dir: Callable[[str], Path], which: str) -> None:
    """It gets the blocks that are seen after the prompt, and nothing else. The answer is that of one
    worker."""
    loaded = load_model(model_dir(which), dtype="float32", device="cpu")
    backend = verified_backend(loaded, "fused layers")
    layout = loaded.layout(SIZE, tuple(params.window for params in backend.attention_params))
    alone, prefill, decode = (OneWorker(loaded, backend, layout) for _ in range(3))
    prompt, sampling = [(7 * i) % 250 for i in range(110)], {"ignore_eos": True, "temperature": 0.0}
    request = partial(sequence_request, 1, prompt, max_tokens=30, sampling=sampling, block_size_tokens=SIZE)
    alone.engine.add(request())
    prefill.engine.add(request(prefill_only=True, for_reader=True))
    decode.engine.add(request(pulled=True))
    first = prefill.run()
    assert decode.engine.plan().is_empty
    (admission,) = decode.engine.take_outcome().admissions
    windows = layout.windows
    entries = entries_from(windows.first_blocks(len(prompt)), -(-len(prompt) // SIZE))
    hashes = hashes_of_entries(hashes_of(prompt, SIZE), entries, windows.num_tables)
    assert len(admission.receiving_block_ids) == len(entries) < 28 * windows.num_tables
    hashes += [NO_HASH] * (len(entries) - len(hashes))  # of the last block, which is not full
    for own, entry, block_hash in zip(admission.receiving_block_ids, entries, hashes, strict=True):
        decode.cache.memory[own] = prefill.cache.memory[prefill.tables[-1][entry]]
        decode.pool.mark_received(own, block_hash)
    decode.engine.received(1, first)
    tokens = decode.run()
    assert (tokens, tokens[:1]) == (alone.run(), first)
    for worker in (alone, prefill, decode):
        worker.executor.close()
