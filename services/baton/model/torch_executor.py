"""Implements `Executor` with a real model: each step runs packed in one dedicated thread, over paged KV
memory.

A GPU is given the next step while it still computes the current one. The tokens that connect the two steps
stay on the device. On a CPU, launching a step already computes it.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedModel

from baton.core.errors import LayoutMismatch
from baton.core.kv.block_hash import num_blocks_for, token_ids
from baton.core.kv.kv_layout import KvLayout
from baton.core.request import Sampling
from baton.engine.constraints.token_constraints import TokenConstraints
from baton.engine.scheduling.async_scheduling import LastResult
from baton.engine.state.step import DeviceFault, NothingToFollow, SampleRequest, StepPlan, StepResult, StepSequence
from baton.model.backends.backend_selection import Backend
from baton.model.device.kv_tensors import KvCache
from baton.model.step.forward import ModelForward
from baton.model.step.step_launch import LaunchedStep, StepLauncher

_WARMUP_SAMPLE = SampleRequest(
    sampling=Sampling(max_tokens=1, temperature=0.0),
    sample_indices=(0,),
    position=1,
    history=token_ids([0]),
    num_prompt_tokens=1,
)
_POLL_INTERVAL_S = 0.00005
_POLL_FRACTION = 0.02
"""The compute thread polls for the end of a step and for the next step's plan, because nothing can wait for
both.
It sleeps `_POLL_FRACTION` of the step's time so far between polls, and at least `_POLL_INTERVAL_S`."""


@dataclass(eq=False, slots=True)
class _StepJob:
    """A step on its way through the compute thread.

    predecessor: the step before, if it had not ended when this one was submitted.
    launched: set if this step was launched early, while its predecessor still ran.
    """

    plan: StepPlan
    predecessor: "_StepJob | None" = None
    result: Future[StepResult] = field(default_factory=Future)
    launched: LaunchedStep | None = None
    _has_begun: bool | None = None

    @property
    def has_ended(self) -> bool:
        return self.result.done()

    def begin(self) -> bool:
        """Begin the step, in the compute thread. Return False if it was withdrawn; afterwards it cannot
        be."""
        if self._has_begun is None:
            self._has_begun = self.result.set_running_or_notify_cancel()
            self.predecessor = None  # else each job would keep all earlier jobs alive
        return self._has_begun


class TorchExecutor:
    """Runs the steps of one model over one KV memory, in one dedicated thread. Implements `Executor`.

    Closing it ends the thread. The KV memory belongs to the caller.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KvCache,
        *,
        thread: ThreadPoolExecutor,
        backend: Backend | None = None,
        constraints: TokenConstraints | None = None,
        new_launcher: Callable[..., StepLauncher] = StepLauncher,
    ) -> None:
        """`model`: from `load_model`. `thread`: from `compute_thread`; the executor shuts it down.
        `backend`: how the model is run; None: the model's own code with the reference attention.
        `constraints`: computes the masks of constrained sequences; None: grammars are refused.
        `new_launcher`: makes the `StepLauncher`, from the same arguments.
        Raises LayoutMismatch if dtype or device of the model and the KV memory differ.
        """
        if (model.dtype, model.device) != (cache.dtype, cache.device):
            raise LayoutMismatch(
                f"a {model.dtype} model on {model.device} cannot use {cache.dtype} KV memory on {cache.device}"
            )
        self._backend = backend or Backend(name="torch", forward=ModelForward(model))
        self._cache = cache
        vocab_size = int(model.config.vocab_size)
        self._launcher = new_launcher(
            self._backend.forward,
            self._backend.kernel,
            cache,
            vocab_size,
            constraints=constraints,
            find_best=self._backend.find_best,
        )
        self._thread = thread
        self._newest: _StepJob | None = None  # last job that was submitted
        self._queued: _StepJob | None = None  # the newest job, if another was unfinished when it was submitted
        self._last = LastResult()

    @property
    def layout(self) -> KvLayout:
        return self._cache.layout

    @property
    def num_blocks(self) -> int:
        return self._cache.num_blocks

    async def execute(self, plan: StepPlan) -> StepResult:
        """Run one step, see `Executor.execute`. A sequence with invalid inputs, logits or request is in
        `failures`."""
        predecessor = self._newest if self._newest is not None and not self._newest.has_ended else None
        job = _StepJob(plan, predecessor)
        newest, queued = self._newest, self._queued
        # Set before the thread can poll for it.
        self._newest, self._queued = job, job if predecessor is not None else None
        try:
            self._thread.submit(self._run_job, job)
        except RuntimeError:  # the thread was shut down
            self._newest, self._queued = newest, queued
            raise
        return await asyncio.wrap_future(job.result)

    def withdraw(self, step_id: int) -> bool:
        """Cancel a step that has not begun, see `Executor.withdraw`. Return False if it can no longer be
        cancelled."""
        queued = self._queued
        if queued is None or queued.plan.step_id != step_id:
            return False
        predecessor = queued.predecessor  # read first: the thread may clear it at any time
        if not queued.result.cancel():
            return False
        self._newest, self._queued = predecessor, None
        return True

    def warm(self, max_num_seqs: int) -> None:
        """Run each kind of step once that is slow the first time, so that no request waits for it.

        Decode steps are run for up to `max_num_seqs` sequences. Call it in the compute thread, before the
        first request: it writes to block 0.
        """
        token = StepSequence(
            seq_id=0,
            token_ids=token_ids([0]),
            position_begin=0,
            kv_begin=0,
            block_table=(0,) * self._cache.num_tables,
            sample=_WARMUP_SAMPLE,
        )
        # Two tokens are the shortest chunk that is not a decode.
        chunks = [*((count, 0) for count in self._backend.warm_tokens), *((2, c) for c in self._backend.warm_contexts)]
        for count, context in chunks:
            chunk = _prompt_chunk(token, count, context, self.layout.block_size_tokens)
            self.run(StepPlan(step_id=0, sequences=(chunk,)))
        for smaller, batch in zip((0, *self._backend.warm_batches), self._backend.warm_batches, strict=False):
            if smaller < max_num_seqs:
                self.run(StepPlan(step_id=0, sequences=(token,) * batch))
        self._backend.after_warmup()

    async def aclose(self) -> None:
        """Wait for a running step, then end the thread."""
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Do what `aclose` does, for a caller without an event loop."""
        self._thread.shutdown()
        self._backend.forward.close()

    def run(self, plan: StepPlan) -> StepResult:
        """Run one step in the calling thread and return its result."""
        return self._run(_StepJob(plan))

    def _run_job(self, job: _StepJob) -> None:
        if job.begin():
            try:
                job.result.set_result(self._run(job))
            except BaseException as error:  # passed to the caller of `execute`
                job.result.set_exception(error)

    @torch.inference_mode()
    def _run(self, job: _StepJob) -> StepResult:
        try:
            try:
                plan = self._last.fill_in(job.plan)
            except NothingToFollow:
                if job.launched is not None:  # the device still runs it: its blocks must not be reused before it ends
                    job.launched.done.wait()
                raise
            launched = job.launched or self._launcher.launch(plan)
            self._launch_successor(launched)
            result = launched.result()
        except torch.AcceleratorError as error:  # every later call to this device would fail, too
            raise DeviceFault(f"{self._cache.device}: {error}") from error
        if job.launched is not None:
            result = _restricted_to(result, {part.seq_id for part in plan.sequences})
        return self._last.keep(result)

    def _launch_successor(self, launched: LaunchedStep) -> None:
        """Poll until this step has ended, and launch the step that follows it if one is submitted
        meanwhile."""
        began_s = time.monotonic()
        while not launched.done.is_complete():
            job = self._successor_of(launched.step_id)
            if job is not None and job.begin():
                with suppress(Exception):  # an error that persists is raised again when the step itself is run
                    job.launched = self._launcher.launch(job.plan, launched)
                return
            time.sleep(max(_POLL_INTERVAL_S, _POLL_FRACTION * (time.monotonic() - began_s)))

    def _successor_of(self, step_id: int) -> _StepJob | None:
        """Return the queued job if it follows step `step_id` and can be launched before that step's
        result."""
        job = self._queued
        follows = job is not None and job.plan.follows == step_id and not job.has_ended
        return job if follows and job is not None and self._launcher.can_follow(job.plan) else None


def _prompt_chunk(token: StepSequence, num_tokens: int, context: int, block_size_tokens: int) -> StepSequence:
    """Return a prompt chunk after a context. All of its KV is in the block of `token`."""
    return replace(
        token,
        token_ids=token_ids([0] * num_tokens),
        position_begin=context,
        kv_begin=context,
        block_table=token.block_table * num_blocks_for(context + num_tokens, block_size_tokens),
        sample=None,
    )


def _restricted_to(result: StepResult, seq_ids: set[int]) -> StepResult:
    """Return the result without the sequences that failed in the step before, of which the device did not
    know yet."""
    return replace(
        result,
        samples={seq_id: tokens for seq_id, tokens in result.samples.items() if seq_id in seq_ids},
        failures={seq_id: failure for seq_id, failure in result.failures.items() if seq_id in seq_ids},
    )
