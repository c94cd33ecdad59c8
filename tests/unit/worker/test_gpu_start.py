"""What a worker finds out about its GPU before it loads a model."""

from typing import Any

import pytest
import torch

from baton.core.errors import ConfigError
from baton.engine.speculation.model_rounds import MAX_MISSING_TOKENS, MAX_PIECE_TOKENS
from baton.model.gpu_check import gpu_verdicts
from baton.model.gpu_check.check_backends import CheckedModel
from baton.model.loading.model_source import DEMO_DIR
from baton.runtime.config.settings import WorkerConfig
from baton.worker.device import gpu_start
from baton.worker.device.draft_device import draft_config
from baton.worker.device.gpu_start import kv_path_of, refused_on_gpu
from baton.worker.device.gpu_use import step_tokens_of
from baton.worker.device.kv_path import KvPath, KvPathChoice
from baton.worker.device.worker_device import engine_config_of

MEASURED = KvPathChoice(path=KvPath.STAGED, reason="measured")


@pytest.fixture(autouse=True)
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_start, "path_facts", dict)
    monkeypatch.setattr(gpu_start, "kv_path_for", lambda setting, facts: MEASURED)


def test_the_path_is_measured_for_nixl_on_a_gpu_only() -> None:
    assert kv_path_of(WorkerConfig(device="cuda")) == MEASURED
    assert kv_path_of(WorkerConfig(device="auto")) == MEASURED
    for config in (WorkerConfig(device="cpu"), WorkerConfig(device="cuda", transfer="local")):
        assert kv_path_of(config) == KvPathChoice(path=KvPath.DIRECT, reason="")


def test_expandable_segments_keep_a_worker_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(ConfigError, match="expandable_segments"):
        kv_path_of(WorkerConfig(device="cuda"))
    kv_path_of(WorkerConfig(device="cuda", transfer="local"))
    kv_path_of(WorkerConfig(device="cpu"))


def test_the_default_token_budget_of_a_step_depends_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def budget(**settings: Any) -> int:
        return step_tokens_of(WorkerConfig(**settings))

    assert (budget(device="cuda"), budget(device="auto")) == (2048, 2048)
    assert (budget(device="cpu"), budget(device="emulated")) == (512, 512)
    assert budget(device="cuda", max_num_batched_tokens=300) == 300
    assert budget(device="cpu", max_num_seqs=600) == 600, "each running sequence needs one token of a step"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert budget(device="auto") == 512


def test_all_parts_of_a_worker_have_the_token_budget_of_its_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked: list[CheckedModel] = []
    monkeypatch.setattr(gpu_verdicts, "refused_gpu_stages", checked.append)
    config = WorkerConfig(device="cuda", speculate=f"draft:{DEMO_DIR}", role="decode")
    refused_on_gpu(config)
    refused_on_gpu(draft_config(config))
    drafts = MAX_PIECE_TOKENS + MAX_MISSING_TOKENS * config.max_num_seqs
    assert [model.max_num_batched_tokens for model in checked] == [2048, drafts]
    assert engine_config_of(config, 4096, ()).max_num_batched_tokens == 2048


def test_nothing_is_checked_where_no_gpu_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused_on_gpu(WorkerConfig(device="cuda", kernels="torch")) == {}
    assert refused_on_gpu(WorkerConfig(device="cpu")) == {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refused_on_gpu(WorkerConfig(device="auto")) == {}
