"""Compares Triton attention with a plain implementation.

`TRITON_INTERPRET=1` runs it on a CPU, slowly, if triton is installed.
"""

from contextlib import closing
from pathlib import Path
from random import Random

import pytest
import torch

from baton.model.backends.cuda_graphs import CudaGraphForward, CudaGraphs
from baton.model.loading.model_loader import load_model
from baton.model.loading.random_init import init_model
from baton.model.step.forward import ModelForward
from tests.integration.test_model_exactness import TINY_MODELS
from tests.unit.model.test_cuda_graphs import CountingCapture, answers
from tests.unit.model.test_paged_attention import check_step

pytestmark = [pytest.mark.gpu, pytest.mark.interpreted, pytest.mark.timeout(600)]


@pytest.fixture
def kernel():  # type: ignore[no-untyped-def]
    from baton.model.kernels.triton.triton_attention import triton_attention

    return triton_attention


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("window", [None, 1, 3, 9, 100])
def test_decodes_and_chunks_together(kernel, device: str, window: int | None) -> None:  # type: ignore[no-untyped-def]
    spans = [(0, 1), (1, 1), (3, 1), (4, 1), (7, 3), (0, 5), (19, 1), (20, 1), (40, 1), (5, 8), (0, 4), (31, 1)]
    check_step(spans, window, device=device, kernel=kernel)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 9])
def test_kv_in_int8(kernel, device: str, window: int | None, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    spans = [(0, 1), (3, 1), (4, 1), (7, 3), (0, 5), (19, 1), (40, 1), (5, 8), (700, 1)]
    check_step(spans, window, device=device, kernel=kernel, dtype=dtype, kv_dtype="int8")


@pytest.mark.parametrize("window", [None, 7, 700])
def test_long_decodes_are_split(kernel, device: str, window: int | None) -> None:  # type: ignore[no-untyped-def]
    check_step([(1500, 1), (3, 1), (700, 1)], window, device=device, kernel=kernel)


@pytest.mark.parametrize("window", [None, 9, 700])
def test_sinks(kernel, device: str, window: int | None) -> None:  # type: ignore[no-untyped-def]
    """Also with splits, of which only the first begins with the sink."""
    spans = [(0, 1), (7, 3), (19, 1), (0, 30)]
    check_step(spans, window, device=device, kernel=kernel, has_sinks=True)
    check_step([(1500, 1), (3, 1), (700, 1)], window, device=device, kernel=kernel, has_sinks=True)


@pytest.mark.parametrize("num_kv_heads", [1, 8, 32])
def test_warmup_compiles_every_split(num_kv_heads: int) -> None:
    """The contexts run at start must cover each split that a step could use."""
    from baton.model.kernels.triton.triton_attention import split_contexts, splits_for

    longest = 40_000
    ran = {splits_for(num_kv_heads, context + 2) for context in split_contexts(longest)}
    asked = {splits_for(tiles * num_kv_heads, context) for tiles in range(1, 300) for context in range(1, longest, 100)}
    assert asked - {1} == ran


@pytest.mark.parametrize("window", [None, 7, 70])
def test_chunks_longer_than_a_tile(kernel, device: str, window: int | None) -> None:  # type: ignore[no-untyped-def]
    check_step([(0, 141), (13, 64), (0, 65)], window, device=device, kernel=kernel)


@pytest.mark.parametrize("seed", range(4))
def test_random_steps(kernel, device: str, seed: int) -> None:  # type: ignore[no-untyped-def]
    rng = Random(seed)
    spans = [
        (rng.choice((0, rng.randint(0, 60))), rng.choice((1, 1, 1, rng.randint(1, 30))))
        for _ in range(rng.randint(1, 12))
    ]
    check_step(spans, rng.choice((None, rng.randint(1, 40))), seed=seed, device=device, kernel=kernel)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(kernel, device: str, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    check_step([(0, 1), (7, 3), (19, 1), (3, 1), (0, 30)], 8, dtype=dtype, device=device, kernel=kernel)


@pytest.mark.parametrize("name", ["qwen3", "mistral-window"])
def test_decodes_in_cuda_graphs(tmp_path: Path, device: str, name: str) -> None:
    """Uses real CUDA graphs on a GPU, also after all were released."""
    from baton.model.kernels.triton.triton_attention import triton_decode

    init_model(TINY_MODELS[name](), tmp_path / "model", seed=3)
    loaded = load_model(tmp_path / "model", dtype="float32", device=device)
    counts = [3, 3, 1, 4, 2, 9, 9, 3]
    with closing(ModelForward(loaded.model)) as own:
        expected = answers(loaded, own, counts)
    capture = CudaGraphs() if device == "cuda" else CountingCapture()
    with closing(
        CudaGraphForward(ModelForward(loaded.model), triton_decode, max_model_len=200, capture=capture)
    ) as forward:
        for _ in range(2):
            for actual, reference in zip(answers(loaded, forward, counts), expected, strict=True):
                torch.testing.assert_close(actual, reference, atol=1e-4, rtol=1e-4)
            assert not forward.is_disabled
            forward.release_graphs()
