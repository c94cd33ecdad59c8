"""What a worker finds out about its GPU before it loads a model."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from baton.core.errors import ConfigError, ModelError
from baton.engine.speculation.model_rounds import MAX_MISSING_TOKENS, MAX_PIECE_TOKENS
from baton.model.loading.model_source import DEMO_DIR
from baton.runtime.config.settings import WorkerConfig
from baton.worker.device import gpu_start
from baton.worker.device.draft_device import draft_config
from baton.worker.device.gpu_start import LOADING, GpuFindings, find_out_about_gpu
from baton.worker.device.gpu_use import step_tokens_of
from baton.worker.device.kv_memory.kv_path import KvPath, KvPathChoice
from baton.worker.device.worker_device import engine_config_of

if TYPE_CHECKING:
    from baton.model.gpu_check.check_backends import CheckedModel

pytestmark = pytest.mark.model

MEASURED = KvPathChoice(path=KvPath.STAGED, reason="measured")
ENOUGH_S = 60.0
REFUSED_STAGES = "baton.model.gpu_check.gpu_verdicts.refused_gpu_stages"
GPU_IS_AVAILABLE = "torch.cuda.is_available"
"""Names of what tests replace, so that the collection of tests imports no torch."""


@pytest.fixture(autouse=True)
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GPU_IS_AVAILABLE, lambda: True)
    monkeypatch.setattr(gpu_start, "path_facts", dict)
    monkeypatch.setattr(gpu_start, "share_compile_caches", lambda environ: None)
    monkeypatch.setattr(gpu_start, "kv_path_for", lambda setting, facts, say: MEASURED)
    monkeypatch.setattr(REFUSED_STAGES, lambda model, say: {"a part": "it crashed"})


def found(**settings: Any) -> GpuFindings:
    config = WorkerConfig(**settings)
    return find_out_about_gpu(config, draft_config(config), lambda text: None)


def test_the_path_is_measured_for_nixl_on_a_gpu_only() -> None:
    assert found(device="cuda").path == MEASURED
    assert found(device="auto").path == MEASURED
    for other in ({"device": "cpu"}, {"device": "cuda", "transfer": "local"}):
        assert found(**other).path == KvPathChoice(path=KvPath.DIRECT, reason="")


def test_expandable_segments_keep_a_worker_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(ConfigError, match="expandable_segments"):
        found(device="cuda")
    found(device="cuda", transfer="local")
    found(device="cpu")


def test_nothing_is_checked_where_no_gpu_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(device="cuda").refused == {"a part": "it crashed"}
    assert found(device="cuda", kernels="torch").refused == {}
    assert found(device="cpu").refused == {}
    monkeypatch.setattr(GPU_IS_AVAILABLE, lambda: False)
    assert found(device="auto") == GpuFindings()


def test_paths_are_measured_while_kernels_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun = {"path": threading.Event(), "check": threading.Event()}

    def meets_the_other(own: str, other: str) -> None:
        has_begun[own].set()
        assert has_begun[other].wait(ENOUGH_S), f"{other} waits for {own}"

    def measure(setting: str, facts: dict[str, str], say: Callable[[str], None]) -> KvPathChoice:
        meets_the_other("path", "check")
        return MEASURED

    def check(model: "CheckedModel", say: Callable[[str], None]) -> dict[str, str]:
        meets_the_other("check", "path")
        return {}

    monkeypatch.setattr(gpu_start, "kv_path_for", measure)
    monkeypatch.setattr(REFUSED_STAGES, check)
    assert found(device="cuda") == GpuFindings(path=MEASURED)


def test_each_part_of_a_start_on_a_gpu_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(model: "CheckedModel", say: Callable[[str], None]) -> dict[str, str]:
        say("checks")
        return {}

    def measure(setting: str, facts: dict[str, str], say: Callable[[str], None]) -> KvPathChoice:
        say("measures")
        return MEASURED

    monkeypatch.setattr(REFUSED_STAGES, check)
    monkeypatch.setattr(gpu_start, "kv_path_for", measure)
    said: list[str] = []
    find_out_about_gpu(WorkerConfig(device="cuda"), None, said.append)
    assert sorted(said[:2]) == ["checks", "measures"]
    assert said[2:] == [LOADING]
    find_out_about_gpu(WorkerConfig(device="cpu"), None, said.append)
    assert len(said) == 3


def test_errors_of_both_parts_keep_a_worker_from_starting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(setting: str, facts: dict[str, str], say: Callable[[str], None]) -> KvPathChoice:
        raise ConfigError("no such path")

    with pytest.raises(ModelError):
        found(device="cuda", model=str(tmp_path / "nowhere"))
    monkeypatch.setattr(gpu_start, "kv_path_for", fail)
    with pytest.raises(ConfigError, match="no such path"):
        found(device="cuda")


def test_the_default_token_budget_of_a_step_depends_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def budget(**settings: Any) -> int:
        return step_tokens_of(WorkerConfig(**settings))

    assert (budget(device="cuda"), budget(device="auto")) == (2048, 2048)
    assert (budget(device="cpu"), budget(device="emulated")) == (512, 512)
    assert budget(device="cuda", max_num_batched_tokens=300) == 300
    assert budget(device="cpu", max_num_seqs=600) == 600, "each running sequence needs one token of a step"
    monkeypatch.setattr(GPU_IS_AVAILABLE, lambda: False)
    assert budget(device="auto") == 512


def test_all_parts_of_a_worker_have_the_token_budget_of_its_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked: list[CheckedModel] = []

    def check(model: "CheckedModel", say: Callable[[str], None]) -> dict[str, str]:
        checked.append(model)
        return {}

    monkeypatch.setattr(REFUSED_STAGES, check)
    config = WorkerConfig(device="cuda", speculate=f"draft:{DEMO_DIR}", role="decode")
    find_out_about_gpu(config, draft_config(config), lambda text: None)
    drafts = MAX_PIECE_TOKENS + MAX_MISSING_TOKENS * config.max_num_seqs
    assert [model.max_num_batched_tokens for model in checked] == [2048, drafts]
    assert engine_config_of(config, 4096, ()).max_num_batched_tokens == 2048
