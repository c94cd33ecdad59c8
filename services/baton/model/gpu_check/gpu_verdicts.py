"""Decides which parts of a GPU backend a worker may run, by what a child process has found."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from baton.model.backends.backend_selection import GPU_STAGES
from baton.model.gpu_check.check_backends import CheckedModel
from baton.model.gpu_check.gpu_facts import gpu_facts
from baton.model.gpu_check.reduced_config import reduced_config
from baton.model.loading.model_loader import text_config_and_dtype
from baton.runtime.child.stages import StageRun, judge_stages
from baton.runtime.child.verdict_cache import VerdictCache
from baton.runtime.logging import get_logger

log = get_logger(__name__)

CHECK = "baton.model.gpu_check.check_backends:check"
CHECK_S = 200.0
"""Longest duration of all children. Most of it is compilation, which the worker then need not repeat."""

CHECKING = "checks GPU kernels in a child process, once per GPU, driver and source"
WAITING = "waits for another worker, which checks GPU kernels"

Judge = Callable[[str, Mapping[str, Any], Sequence[str], float], StageRun]


def refused_gpu_stages(
    model: CheckedModel,
    *,
    say: Callable[[str], object] = lambda text: None,
    cache: VerdictCache | None = None,
    judge: Judge = judge_stages,
    facts_of: Callable[..., Mapping[str, str]] = gpu_facts,
) -> dict[str, str]:
    """Return those of `GPU_STAGES` that a worker must not run, with the reason, for `choose_backend`.

    Call it before the model is loaded, because the child needs memory on the GPU. The child runs a reduced
    model with random weights, so its verdict is about crashes and kernels, and the worker still verifies its
    own model. The verdict is cached. Blocks for `CHECK_S` at most, twice if another worker has the lock.
    `say` is told when it begins to wait or to check, as this can take most of the start.
    """
    cache = cache or VerdictCache()
    try:
        config = reduced_config(text_config_and_dtype(Path(model.path), model.dtype)[0])
    except Exception as error:  # configuration classes check values in ways of their own
        _log_unchecked(f"its configuration cannot be reduced: {type(error).__name__}: {error}")
        return {}
    facts = facts_of(torch.device(model.device), model, config)
    with cache.locked("backends", CHECK_S, on_wait=lambda: say(WAITING)):
        kept = cache.find(facts)
        if kept is not None and all(isinstance(problem, str) for problem in kept.values()):
            return _logged({str(stage): problem for stage, problem in kept.items()}, cache.path(facts))
        say(CHECKING)
        try:
            with tempfile.TemporaryDirectory(prefix="baton-check-", ignore_cleanup_errors=True) as scratch:
                done = judge(CHECK, {"model": asdict(model), "scratch": scratch}, GPU_STAGES, CHECK_S)
        except OSError as error:
            done = StageRun(verdicts={}, setup_problem=f"there is no directory for a reduced model: {error}")
        if is_lasting(done):
            cache.keep(facts, {stage: verdict.problem for stage, verdict in done.verdicts.items()})
    if done.setup_problem and done.is_safe:
        _log_unchecked(done.setup_problem)
    return _logged(problems_of(done), cache.path(facts))


def problems_of(done: StageRun) -> dict[str, str]:
    """Return the problem of each stage, empty if it may run.

    Stages that were not reached may run if the child has said why and ended by itself: the worker then
    verifies them. They may not after a crash or a hang, which the worker would repeat.
    """
    problems = {stage: verdict.problem for stage, verdict in done.verdicts.items()}
    if done.setup_problem and not done.is_safe:
        problems.update({stage: done.setup_problem for stage in GPU_STAGES if stage not in problems})
    return problems


def is_lasting(done: StageRun) -> bool:
    """True if the next start would find the same, so that the verdict may be cached."""
    return not done.setup_problem and all(verdict.is_lasting for verdict in done.verdicts.values())


def _logged(problems: Mapping[str, str], file: Path) -> dict[str, str]:
    refused = {stage: problem for stage, problem in problems.items() if problem}
    for stage, problem in refused.items():
        hint = f"a slower way is used; remove {file} to check again"
        log.warning("gpu_backend_refused", backend=stage, problem=problem, hint=hint)
    return refused


def _log_unchecked(problem: str) -> None:
    hint = "backends of the GPU are verified in the worker itself, which a crash would end"
    log.warning("gpu_backends_not_checked", problem=problem, hint=hint)
