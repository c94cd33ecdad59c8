"""A draft model on torch: answers equal those without it, and a worker opens one beside its model."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from baton.core.errors import ModelError
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.speculation.draft_model import DraftModel
from baton.engine.state.step import StepPlan, StepResult
from baton.model.backends.backend_selection import TRITON, choose_backend
from baton.model.device.compute_thread import compute_thread
from baton.model.device.kv_tensors import KvCache
from baton.model.gpu_check import gpu_verdicts
from baton.model.gpu_check.check_backends import CheckedModel
from baton.model.loading.model_loader import LoadedModel, load_model
from baton.model.loading.model_source import DEMO_DIR
from baton.model.loading.random_init import init_model
from baton.model.torch_executor import TorchExecutor
from baton.runtime.config.settings import WorkerConfig
from baton.worker.device import gpu_start
from baton.worker.device.draft_device import draft_config, load_draft
from baton.worker.device.gpu_start import Say, find_out_about_gpu
from baton.worker.device.open_device import open_device
from tests import builders
from tests.fake_executor import FakeGenerationTable
from tests.model_families import FAMILIES, TINY, save_random
from tests.scale import sized
from tests.unit.engine.speculation.byte_grammars import EOS, VOCAB_SIZE, new_constraints
from tests.unit.engine.speculation.drafted_run import assert_same_answers, random_requests, reference
from tests.unit.engine.speculation.fake_draft_model import DRAFT_COSTS

SIZE = 4
NUM_REQUESTS, NUM_SEEDS = 8, sized(1, 10)


@pytest.fixture(scope="module")
def loaded(tiny_dir: Path) -> LoadedModel:
    return load_model(tiny_dir, device="cpu")


@pytest.fixture(scope="module")
def smaller_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a one-layer model with the same tokenizer and other weights."""
    path = tmp_path_factory.mktemp("smaller") / "model"
    init_model(Qwen3Config(**{**TINY, "num_hidden_layers": 1}, head_dim=16), path, seed=2)
    return path


@pytest.fixture
def executors(loaded: LoadedModel) -> Iterator[list[TorchExecutor]]:
    """Collect executors that are closed after the test."""
    opened: list[TorchExecutor] = []
    yield opened
    for executor in opened:
        executor.close()


def open_executor(loaded: LoadedModel, executors: list[TorchExecutor], **parts: Any) -> TorchExecutor:
    cache = KvCache.zeros(loaded.layout(SIZE), 64)
    cache.fill_with_nan()  # a read of unwritten KV fails the sequence
    backend = choose_backend(loaded, kernels="torch", num_threads=1, block_size_tokens=SIZE)
    executors.append(TorchExecutor(loaded.model, cache, thread=compute_thread(1), backend=backend, **parts))
    return executors[-1]


@pytest.mark.parametrize("is_same", [True, False])
async def test_answers_with_a_draft_model_equal_those_without(
    is_same: bool, loaded: LoadedModel, smaller_dir: Path, executors: list[TorchExecutor]
) -> None:
    """The model itself as its draft model is right for requests without rules, also for sampled ones."""
    executor = open_executor(loaded, executors, constraints=new_constraints())
    drafting = loaded if is_same else load_model(smaller_dir, device="cpu")
    device = open_executor(drafting, executors)

    async def run_step(plan: StepPlan) -> StepResult:
        return executor.run(plan)

    num_drafts = num_accepted = 0
    for seed in range(NUM_SEEDS):
        rng = Random(seed)
        requests = random_requests(rng, NUM_REQUESTS)
        expected = await reference(run_step, requests)
        model = DraftModel(
            device,
            BlockPool(64, SIZE, FakeGenerationTable(64)),
            vocab_size=VOCAB_SIZE,
            max_model_len=60,
            eos_token_ids=(EOS,),
            costs=lambda: DRAFT_COSTS,
            clock=lambda: 0.0,
        )
        run = await assert_same_answers("model", run_step, requests, expected, rng, tolerance=1e-3, model=model)
        assert model.costs is not None, "a step of the draft model failed"
        num_drafts += run.engine.counters.draft_tokens
        num_accepted += run.engine.counters.accepted_draft_tokens
    assert num_drafts > 10
    assert num_accepted > 3 or not is_same


async def test_worker_opens_a_draft_model_in_the_thread_and_memory_of_its_model(
    tiny_dir: Path, smaller_dir: Path
) -> None:
    settings: dict[str, Any] = {
        "model": str(tiny_dir), "device": "cpu", "dtype": "float32", "kernels": "torch", "threads_per_worker": 1,
        "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_memory": 1 << 20,
        "transfer": "local", "role": "decode",
    }  # fmt: skip
    speculate = f"draft:{smaller_dir}"
    alone = open_device(WorkerConfig(**settings | {"role": "prefill"}, speculate=speculate), builders.worker_ref("w"))
    await alone.aclose()
    assert alone.draft is None, "a prefill worker decodes nothing"
    device = open_device(WorkerConfig(**settings, speculate=speculate), builders.worker_ref("w"))
    try:
        assert device.draft is not None
        assert device.draft.pool.num_blocks == device.pool.num_blocks < alone.pool.num_blocks
        used = device.pool.num_blocks * sum(
            executor.layout.block_bytes for executor in (device.executor, device.draft.executor)
        )
        assert used <= settings["kv_memory"]
        assert device.draft.costs_key != device.costs_key
        assert "drafts by model" in device.summary
    finally:
        await device.aclose()
    with pytest.raises(ModelError):
        open_device(WorkerConfig(**settings, speculate="draft:/nowhere/model"), builders.worker_ref("w"))


def test_a_draft_model_is_served_up_to_the_context_of_the_model_that_verifies(tiny_dir: Path, tmp_path: Path) -> None:
    """Without a longest context, this one is refused: its rotary embedding changes with the context."""
    phi = save_random(FAMILIES["phi 4 mini"].config(), tmp_path / "phi")
    settings: dict[str, Any] = {"kernels": "torch", "max_num_seqs": 2, "role": "decode", "speculate": f"draft:{phi}"}
    own = draft_config(WorkerConfig(**settings))
    assert own is not None
    verifying = load_model(tiny_dir, device="cpu", max_model_len=100)
    assert load_draft(own, verifying, 1, {}).engine_config.max_model_len == 100
    with pytest.raises(ModelError, match="longrope"):
        load_draft(own, load_model(tiny_dir, device="cpu"), 1, {})


def test_a_draft_model_is_checked_as_it_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[CheckedModel] = []

    def nothing(model: CheckedModel, say: Say) -> dict[str, str]:
        checked.append(model)
        return {TRITON: "refused"} if model.dtype == "auto" else {}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_verdicts, "refused_gpu_stages", nothing)
    monkeypatch.setattr(gpu_start, "share_compile_caches", lambda environ: None)
    values: dict[str, Any] = {"device": "cuda", "dtype": "float16", "kv_dtype": "int8", "max_model_len": 64}
    config = WorkerConfig(**values, speculate="draft:demo", transfer="local")
    gpu = find_out_about_gpu(config, draft_config(config), lambda text: None)
    assert (gpu.refused, gpu.draft_refused) == ({}, {TRITON: "refused"})
    _, found = checked
    assert (found.path, found.dtype, found.kv_dtype, found.max_model_len) == (str(DEMO_DIR), "auto", "auto", None)
    assert found.max_num_batched_tokens != checked[0].max_num_batched_tokens
    for other in (replace(config, speculate="auto"), replace(config, role="prefill")):
        assert find_out_about_gpu(other, draft_config(other), lambda text: None).draft_refused == {}
    assert len(checked) == 4
