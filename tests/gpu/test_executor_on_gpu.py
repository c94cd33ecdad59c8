"""Tests the executor on CUDA: exactness against transformers on the same device, and attention against the
CPU.

`tests/contract/test_executor.py` runs the contract of `Executor` on CUDA.
"""

from pathlib import Path
from random import Random

import pytest
import torch

from baton.core.errors import Reason
from baton.model.backends.backend_selection import choose_backend
from baton.model.device.compute_thread import compute_thread
from baton.model.device.kv_tensors import KvCache
from baton.model.loading.model_loader import LoadedModel, load_model
from baton.model.loading.model_source import DEMO_DIR
from baton.model.loading.random_init import init_model
from baton.model.torch_executor import TorchExecutor
from tests.exactness import ExactnessChecker
from tests.integration.test_model_exactness import (
    BACKENDS,
    TINY_MODELS,
    blocks_for,
    loaded_for,
    random_questions,
    worker_of,
)
from tests.scale import sized
from tests.unit.model.test_paged_attention import check_step
from tests.unit.model.test_torch_executor import GOOD, SIZE, assert_same, part, plan

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

DEVICE = "cuda"


@pytest.fixture(scope="module", params=["torch", "auto"])
def kernels(request: pytest.FixtureRequest) -> str:
    """Return the kernels setting: the reference, and what is served (Triton attention, compiled layers, CUDA
    graphs)."""
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module")
def demo(kernels: str) -> LoadedModel:
    loaded = loaded_for(DEMO_DIR, kernels, DEVICE)
    assert ("CUDA graphs" in BACKENDS[loaded].name) == (kernels == "auto")
    return loaded


def test_demo_is_exact(demo: LoadedModel) -> None:
    """Covers chunks, batches, shared prefixes and every kind of sampling."""
    questions = random_questions(1, demo, sized(30, 300), longest=sized(600, 3000), max_tokens=sized(20, 40))
    with worker_of(demo, num_blocks=sized(600, 3000)) as worker:
        assert worker.cache.device.type == DEVICE
        found = ExactnessChecker(DEMO_DIR, DEVICE).check(worker.answer(questions))
    assert found.num_tokens >= sized(100, 3000)


def test_preempted_and_several_samples_are_exact(demo: LoadedModel) -> None:
    """There are too few blocks for all, and samples share tail blocks until they write to them."""
    questions = random_questions(3, demo, sized(8, 60), longest=100, max_tokens=60, num_samples=2)
    with worker_of(demo, num_blocks=2 * blocks_for(questions, 3)) as worker:
        ExactnessChecker(DEMO_DIR, DEVICE).check(worker.answer(questions))
        assert worker.engine.counters.block_copies > 0
        assert worker.engine.counters.preemptions > 0


@pytest.mark.parametrize("name", TINY_MODELS)
def test_other_architectures_are_exact(name: str, kernels: str, tmp_path: Path) -> None:
    init_model(TINY_MODELS[name](), tmp_path / "model", seed=1)
    loaded = loaded_for(tmp_path / "model", kernels, DEVICE)
    questions = random_questions(2, loaded, sized(12, 60), longest=sized(200, 600), max_tokens=sized(16, 40))
    with worker_of(loaded, num_blocks=sized(150, 600)) as worker:
        ExactnessChecker(tmp_path / "model", DEVICE).check(worker.answer(questions))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_verified_backend_is_chosen(dtype: str) -> None:
    loaded = load_model(DEMO_DIR, dtype=dtype, device=DEVICE)
    assert choose_backend(loaded, kernels="torch", num_threads=1, block_size_tokens=16).name == "torch"


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("seed", range(4))
def test_paged_attention_equals_the_cpus(window: int | None, seed: int) -> None:
    rng = Random(seed)
    spans = [
        (rng.choice((0, rng.randint(0, 60))), rng.choice((1, 1, 1, rng.randint(1, 200))))
        for _ in range(rng.randint(2, 20))
    ]
    found = check_step(spans, window, seed=seed, device=DEVICE)
    torch.testing.assert_close(found, check_step(spans, window, seed=seed), atol=1e-5, rtol=1e-5)


@pytest.mark.fault("F-13")
def test_nan_fails_only_its_sequence(tmp_path: Path) -> None:
    init_model(TINY_MODELS["qwen3"](), tmp_path / "model", seed=1)
    loaded = load_model(tmp_path / "model", dtype="float32", device=DEVICE)
    executor = TorchExecutor(
        loaded.model, KvCache.zeros(loaded.layout(SIZE), 32, loaded.device), thread=compute_thread(1)
    )
    expected = executor.run(plan(GOOD[0], GOOD[2]))
    loaded.model.get_input_embeddings().weight[77] = float("nan")
    found = executor.run(plan(GOOD[0], part(1, [6, 77, 5]), GOOD[2]))
    executor.close()
    assert found.failures[1].reason is Reason.NUMERICAL_ERROR
    assert_same(found, expected, (0, 2))
