"""Verdicts about a real GPU: an illegal access in a child, the parts of a backend, and the paths of KV."""

import os
from pathlib import Path

import pytest
import torch

from baton.core.errors import ConfigError
from baton.model.backends.backend_selection import GPU_STAGES
from baton.model.gpu_check.check_backends import CheckedModel
from baton.model.gpu_check.gpu_verdicts import refused_gpu_stages
from baton.model.loading.model_source import DEMO_DIR
from baton.runtime.child.stages import judge_stages
from baton.runtime.child.verdict_cache import VerdictCache
from baton.runtime.config.worker_settings import GPU_STEP_TOKENS
from baton.worker.device.gpu_allocator import require_plain_memory
from baton.worker.device.kv_memory.kv_path import KvPath, measure_path, path_facts

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def tests_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)


def test_an_illegal_access_ends_the_child_and_not_this_process() -> None:
    stages = {"first": "pass", "second": "illegal on the gpu", "third": "pass"}
    found = judge_stages("tests.child_checks:judge", {"stages": stages}, list(stages), 120.0)
    assert {name: verdict.has_passed for name, verdict in found.verdicts.items()} == {
        "first": True,
        "second": False,
        "third": True,
    }
    assert found.verdicts["second"].is_lasting
    assert int(torch.arange(10, device="cuda").sum()) == 45


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_all_parts_of_the_backend_pass_and_the_verdict_is_kept(kv_dtype: str, tmp_path: Path) -> None:
    model = CheckedModel(
        path=str(DEMO_DIR),
        dtype="bfloat16",
        kv_dtype=kv_dtype,
        max_model_len=None,
        block_size_tokens=16,
        max_num_seqs=64,
        max_num_batched_tokens=GPU_STEP_TOKENS,
    )
    assert refused_gpu_stages(model, cache=VerdictCache(tmp_path)) == {}
    (kept,) = tmp_path.glob("*.json")
    assert all(stage in kept.read_text() for stage in GPU_STAGES)


@pytest.mark.parametrize("path", list(KvPath))
def test_the_paths_of_kv_are_measured(path: KvPath) -> None:
    found = measure_path(path)
    assert not found.problem
    assert found.bytes_per_s > 1e6
    assert path_facts()["kv path"]


def test_torch_says_whether_memory_is_in_an_expandable_segment() -> None:
    memory = torch.zeros(32 << 20, dtype=torch.uint8, device="cuda")
    require_plain_memory(torch.cuda.memory_snapshot(), memory.data_ptr())
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        expandable = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
        with pytest.raises(ConfigError, match="expandable segment"):
            require_plain_memory(torch.cuda.memory_snapshot(), expandable.data_ptr())
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")
