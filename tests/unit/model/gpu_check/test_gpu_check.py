"""The verdict about the parts of a GPU backend, with backends for a CPU in their place."""

import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from transformers import Gemma3TextConfig, PreTrainedConfig, Qwen3MoeConfig

from baton.core.errors import ModelError
from baton.model.attention.paged_attention import paged_attention
from baton.model.backends import backend_selection
from baton.model.backends.backend_selection import (
    COMPILED,
    GPU_STAGES,
    GRAPHS,
    TRITON,
    Backend,
    build_compiled_backend,
    choose_backend,
)
from baton.model.backends.compiled_layers import CompiledForward
from baton.model.backends.cuda_graphs import CudaGraphForward
from baton.model.gpu_check.check_backends import (
    BackendBuilders,
    CheckedModel,
    check_parts,
    load_reduced,
    run_all_kinds_of_steps,
)
from baton.model.gpu_check.gpu_facts import model_facts
from baton.model.gpu_check.gpu_verdicts import CHECKING, WAITING, problems_of, refused_gpu_stages
from baton.model.gpu_check.reduced_config import MAX_VOCABULARY, reduced_config
from baton.model.loading.model_loader import LoadedModel, load_model
from baton.model.loading.model_shapes import shape_config
from baton.model.loading.random_init import init_model
from baton.model.step.forward import ModelForward
from baton.model.verification.verify_backend import Windows, verify_logits
from baton.runtime.child.stages import StageRun, StageRunner, StageVerdict
from baton.runtime.child.verdict_cache import VerdictCache
from tests.integration.test_model_exactness import TINY_MODELS
from tests.unit.model.test_cuda_graphs import CountingCapture, decode_kernel

SIZE = 16
PASSED = StageVerdict()


def checked(path: Path) -> CheckedModel:
    return CheckedModel(
        path=str(path),
        dtype="float32",
        kv_dtype="auto",
        max_model_len=None,
        block_size_tokens=SIZE,
        max_num_seqs=3,
        max_num_batched_tokens=40,
        device="cpu",
    )


@pytest.fixture
def model(tmp_path: Path) -> CheckedModel:
    init_model(TINY_MODELS["mistral-window"](), tmp_path / "model", seed=1)
    return checked(tmp_path / "model")


def cpu_triton(loaded: LoadedModel, block_size_tokens: int, windows: Windows) -> Backend:
    verify_logits(loaded, block_size_tokens, windows=windows)
    return Backend(name=TRITON, forward=ModelForward(loaded.model), kernel=paged_attention, warm_contexts=(32,))


class StandIn(ModelForward):
    """Takes the place of compiled layers, because tracing takes ten seconds of processor time."""


def cpu_compiled(loaded: LoadedModel, kernel: Any, name: str, block_size_tokens: int, windows: Windows) -> Backend:
    forward = StandIn(loaded.model)
    verify_logits(loaded, block_size_tokens, kernel=kernel, forward=forward, windows=windows)
    return Backend(name=f"{name}, compiled", forward=forward, kernel=kernel, warm_tokens=(1, 2))


def cpu_graphed(loaded: LoadedModel, backend: Backend, block_size_tokens: int, windows: Windows) -> Backend:
    assert isinstance(backend.forward, ModelForward)
    forward = CudaGraphForward(
        backend.forward, decode_kernel, max_model_len=loaded.max_model_len, capture=CountingCapture()
    )
    verify_logits(loaded, block_size_tokens, forward=forward, windows=windows)
    forward.release_graphs()
    return replace(backend, name=f"{backend.name}, {GRAPHS}", forward=forward, warm_batches=(1, 2, 4))


ON_CPU = BackendBuilders(
    triton=cpu_triton,
    compiled=cpu_compiled,
    compiled_before=StandIn,
    graphed=cpu_graphed,
)


def fail(*_arguments: object) -> NoReturn:
    raise ModelError("wrong numbers")


def reports(loaded: LoadedModel, model: CheckedModel, build: BackendBuilders, **known: str) -> list[Mapping[str, Any]]:
    """Return what a child reports."""
    said: list[Mapping[str, Any]] = []
    with suppress(SystemExit):
        check_parts(loaded, model, StageRunner(known, said.append), build)
    return said


def ends(said: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    return {each["end"]: each["problem"] for each in said if "end" in each}


def test_weights_of_a_reduced_model_are_not_hashed(
    model: CheckedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their directory is another one each time, so a kept digest would never be used again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    load_reduced(model, tmp_path / "reduced")
    assert not list(tmp_path.glob("cache/baton/digests/*"))


def test_all_parts_are_verified_on_a_reduced_model(model: CheckedModel, tmp_path: Path) -> None:
    loaded = load_reduced(model, tmp_path / "reduced")
    assert ends(reports(loaded, model, ON_CPU)) == dict.fromkeys(GPU_STAGES, "")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_layers_are_really_compiled(model: CheckedModel, tmp_path: Path) -> None:
    """The `eager` backend only traces."""
    loaded = load_reduced(model, tmp_path / "reduced")
    build = replace(
        ON_CPU,
        compiled=partial(build_compiled_backend, backend="eager"),
        compiled_before=partial(CompiledForward, backend="eager"),
    )
    assert ends(reports(loaded, model, build)) == dict.fromkeys(GPU_STAGES, "")
    assert ends(reports(loaded, model, build, **{TRITON: "", COMPILED: ""})) == {GRAPHS: ""}


def test_a_failed_part_ends_the_child_and_the_next_one_goes_on(model: CheckedModel, tmp_path: Path) -> None:
    loaded = load_reduced(model, tmp_path / "reduced")
    build = replace(ON_CPU, compiled=fail)
    first = reports(loaded, model, build)
    assert ends(first) == {TRITON: "", COMPILED: "wrong numbers"}
    second = reports(loaded, model, build, **ends(first))
    assert ends(second) == {GRAPHS: ""}


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_steps_that_write_nan_are_found(kv_dtype: str, model: CheckedModel, tmp_path: Path) -> None:
    model = replace(model, kv_dtype=kv_dtype)
    loaded = load_reduced(model, tmp_path / "reduced")
    backend = Backend(name="torch", forward=ModelForward(loaded.model), warm_tokens=(1,))
    run_all_kinds_of_steps(loaded, backend, model, ())
    base: Any = loaded.model.base_model
    base.layers[0].self_attn.k_proj.weight.fill_(float("nan"))
    with pytest.raises(ModelError, match="not finite"):
        run_all_kinds_of_steps(loaded, backend, model, ())


def test_nothing_runs_over_triton_attention_that_failed(model: CheckedModel, tmp_path: Path) -> None:
    loaded = load_reduced(model, tmp_path / "reduced")
    build = replace(ON_CPU, triton=fail)
    assert ends(reports(loaded, model, build)) == {TRITON: "wrong numbers"}
    assert not reports(loaded, model, build, **{TRITON: "wrong numbers"})


def test_graphs_are_captured_over_layers_that_were_compiled_before(model: CheckedModel, tmp_path: Path) -> None:
    loaded = load_reduced(model, tmp_path / "reduced")
    names = []

    def graphed(loaded: LoadedModel, backend: Backend, block_size_tokens: int, windows: Windows) -> Backend:
        names.append(type(backend.forward).__name__)
        return cpu_graphed(loaded, backend, block_size_tokens, windows)

    build = replace(ON_CPU, graphed=graphed)
    assert ends(reports(loaded, model, build, **{TRITON: "", COMPILED: ""})) == {GRAPHS: ""}
    assert ends(reports(loaded, model, build, **{TRITON: "", COMPILED: "crashed"})) == {GRAPHS: ""}
    assert names == ["StandIn", "ModelForward"]


def test_a_reduced_model_has_every_kind_of_layer() -> None:
    gemma = Gemma3TextConfig(num_hidden_layers=26, vocab_size=262_144)
    reduced = reduced_config(gemma)
    assert reduced.num_hidden_layers == len(reduced.layer_types) == 6
    assert set(reduced.layer_types) == set(gemma.layer_types)
    assert (reduced.hidden_size, reduced.head_dim) == (gemma.hidden_size, gemma.head_dim)
    assert reduced.vocab_size == MAX_VOCABULARY
    assert gemma.num_hidden_layers == len(gemma.layer_types) == 26, "the original is unchanged"


def test_a_reduced_model_has_few_experts_and_no_quantisation() -> None:
    config = Qwen3MoeConfig(num_hidden_layers=8, num_experts=128, num_experts_per_tok=8)
    config.quantization_config = {"quant_method": "fp8"}
    reduced = reduced_config(config)
    assert (reduced.num_experts, reduced.num_experts_per_tok, reduced.num_hidden_layers) == (32, 8, 2)
    assert getattr(reduced, "quantization_config", None) is None


@pytest.mark.parametrize("name", [*TINY_MODELS, "qwen3-0.6b", "llama3-8b"])
def test_every_family_can_be_reduced(name: str) -> None:
    config: PreTrainedConfig = TINY_MODELS[name]() if name in TINY_MODELS else shape_config(name)
    assert type(reduced_config(config)) is type(config)


class ScriptedJudge:
    """Takes the place of child processes."""

    def __init__(self, done: StageRun) -> None:
        self.done = done
        self.num_runs = 0

    def __call__(self, function: str, payload: Mapping[str, Any], stages: Sequence[str], deadline_s: float) -> StageRun:
        self.num_runs += 1
        return self.done


def refused(
    model: CheckedModel,
    judge: ScriptedJudge,
    directory: Path,
    say: Callable[[str], object] = lambda text: None,
    **facts: str,
) -> dict[str, str]:
    return refused_gpu_stages(
        model,
        say=say,
        cache=VerdictCache(directory),
        judge=judge,
        facts_of=lambda _device, model, config: {**facts, **model_facts(model, config.to_dict())},
    )


CRASHED = {TRITON: PASSED, COMPILED: PASSED, GRAPHS: StageVerdict(problem="ended by SIGABRT; its last lines: x")}


def test_a_verdict_is_reached_once_for_the_same_facts(model: CheckedModel, tmp_path: Path) -> None:
    judge = ScriptedJudge(StageRun(verdicts=CRASHED))
    for _ in range(3):
        assert refused(model, judge, tmp_path / "c", gpu="H100") == {GRAPHS: CRASHED[GRAPHS].problem}
    assert judge.num_runs == 1
    refused(model, judge, tmp_path / "c", gpu="H200")
    refused(replace(model, kv_dtype="int8"), judge, tmp_path / "c", gpu="H100")
    assert judge.num_runs == 3


def test_a_worker_that_starts_with_another_one_waits_for_its_verdict(model: CheckedModel, tmp_path: Path) -> None:
    """The judge of the first worker starts the second one, and returns once that waits."""
    first: list[str] = []
    second: list[str] = []
    is_waiting = threading.Event()
    other: list[Future[dict[str, str]]] = []

    def wait_there(text: str) -> None:
        second.append(text)
        is_waiting.set()

    class MeanwhileJudge(ScriptedJudge):
        def __call__(self, *arguments: Any) -> StageRun:
            other.append(pool.submit(refused, model, self, tmp_path / "c", wait_there))
            assert is_waiting.wait(60.0)
            return super().__call__(*arguments)

    judge = MeanwhileJudge(StageRun(verdicts=CRASHED))
    with ThreadPoolExecutor(1) as pool:
        expected = refused(model, judge, tmp_path / "c", first.append)
        assert other[0].result() == expected == {GRAPHS: CRASHED[GRAPHS].problem}
    assert (first, second, judge.num_runs) == ([CHECKING], [WAITING], 1)


@pytest.mark.parametrize(
    "done",
    [
        StageRun(verdicts={TRITON: StageVerdict(problem="no memory", is_lasting=False)}),
        StageRun(verdicts={TRITON: PASSED}, setup_problem="exited with code 1"),
        StageRun(verdicts={}, setup_problem="no time left of 200 s", is_safe=False),
    ],
)
def test_a_verdict_that_may_change_is_reached_again(model: CheckedModel, tmp_path: Path, done: StageRun) -> None:
    judge = ScriptedJudge(done)
    refused(model, judge, tmp_path / "c")
    refused(model, judge, tmp_path / "c")
    assert judge.num_runs == 2


def test_without_a_directory_the_worker_verifies_its_backends_itself(
    model: CheckedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full_disk(**_options: object) -> NoReturn:
        raise OSError("no space left on device")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", full_disk)
    judge = ScriptedJudge(StageRun(verdicts=CRASHED))
    assert refused(model, judge, tmp_path / "c") == {}
    assert judge.num_runs == 0
    assert "no space left" in caplog.text


def test_parts_that_a_crash_kept_from_being_reached_are_refused() -> None:
    crashed = StageRun(verdicts={TRITON: PASSED}, setup_problem="ended by SIGSEGV", is_safe=False)
    assert problems_of(crashed) == {TRITON: "", COMPILED: "ended by SIGSEGV", GRAPHS: "ended by SIGSEGV"}
    explained = StageRun(verdicts={}, setup_problem="exited with code 1")
    assert problems_of(explained) == {}, "the worker verifies them itself"


def test_a_refused_part_is_not_run_in_the_worker(
    model: CheckedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backend_selection, "triton_backend", cpu_triton)
    monkeypatch.setattr(backend_selection, "build_compiled_backend", cpu_compiled)
    monkeypatch.setattr(backend_selection, "graphed_backend", cpu_graphed)
    loaded = load_model(Path(model.path), dtype="float32", device="cpu")

    def name(*stages: str) -> str | None:
        chosen = backend_selection._gpu_backend(loaded, SIZE, (), dict.fromkeys(stages, "it crashed"))
        return None if chosen is None else chosen.name

    monkeypatch.setattr(backend_selection, "compiled_backend", lambda *arguments: cpu_compiled(*arguments))
    assert name() == f"{TRITON}, compiled, {GRAPHS}"
    assert name(GRAPHS) == f"{TRITON}, compiled"
    assert name(COMPILED) == f"{TRITON}, {GRAPHS}"
    assert name(COMPILED, GRAPHS) == TRITON
    assert name(TRITON) is None
    assert caplog.text.count("it crashed") == 5


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_real_child_finds_that_triton_is_missing_or_needs_a_gpu(model: CheckedModel, tmp_path: Path) -> None:
    """Without a GPU Triton attention fails in the child, and the worker goes on without it."""
    found = refused_gpu_stages(model, cache=VerdictCache(tmp_path), facts_of=lambda *_facts: {})
    assert set(found) == {TRITON} if not torch.cuda.is_available() else True


def test_kernels_setting_torch_needs_no_verdict(model: CheckedModel) -> None:
    loaded = load_model(Path(model.path), dtype="float32", device="cpu")
    everything = dict.fromkeys(GPU_STAGES, "refused")
    chosen = choose_backend(loaded, kernels="torch", num_threads=1, block_size_tokens=SIZE, gpu_refused=everything)
    assert chosen.name == "torch"
