"""`Executor` over a real model: each step runs in one dedicated thread, packed, over paged KV memory.

A GPU is given the step that follows while it computes the one before: the tokens in between never leave it on
their way. On a CPU a step has ended when it has been launched.
"""

import asyncio
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedModel

from baton.core.errors import LayoutMismatch
from baton.core.kv.block_hash import num_blocks_for, token_ids
from baton.core.kv.kv_layout import KvLayout
from baton.core.request import Sampling
from baton.engine.scheduling.async_scheduling import LastResult
from baton.engine.state.step import DeviceFault, NothingToFollow, SampleRequest, StepPlan, StepResult, StepSequence
from baton.model.backends.backend_selection import Backend
from baton.model.device.kv_tensors import KvCache
from baton.model.step.forward import ModelForward
from baton.model.step.step_launch import Launched, Launcher

_WARM_SAMPLE = SampleRequest(
    sampling=Sampling(max_tokens=1, temperature=0.0),
    sample_indices=(0,),
    position=1,
    history=token_ids([0]),
    num_prompt_tokens=1,
)
_LOOK_S = 0.00005
_LOOK_PART = 0.02
"""How long the thread rests before it looks again whether a GPU has ended a step, or the one that follows has
come: at least, and as part of what the step has taken so far. Nothing can be waited for that tells of
both."""


@dataclass(eq=False, slots=True)
class _Job:
    """A step on its way through the thread. `behind`: one that had not ended when it came. `launched`: if the
    device was given it before its turn, behind the step that it follows."""

    plan: StepPlan
    behind: "_Job | None" = None
    result: Future[StepResult] = field(default_factory=Future)
    launched: Launched | None = None
    _has_begun: bool | None = None

    @property
    def has_ended(self) -> bool:
        return self.result.done()

    def begin(self) -> bool:
        """In the thread. False if it was withdrawn; afterwards it cannot be any more."""
        if self._has_begun is None:
            self._has_begun = self.result.set_running_or_notify_cancel()
            self.behind = None  # or all that ever ran would hang on one chain
        return self._has_begun


class TorchExecutor:
    """One model, one KV memory, one thread. Closing it ends the thread; the KV memory is its giver's."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KvCache,
        *,
        thread: ThreadPoolExecutor,
        way: Backend | None = None,
    ) -> None:
        """`model` as `load_model` makes it. `thread`: see `compute_thread`; the executor ends it. `way`: how
        the model is run; None: by its own code, with the reference attention. Raises LayoutMismatch if dtype
        or device differ."""
        if (model.dtype, model.device) != (cache.dtype, cache.device):
            raise LayoutMismatch(
                f"a {model.dtype} model on {model.device} cannot use {cache.dtype} KV memory on {cache.device}"
            )
        way = way or Backend(name="torch", forward=ModelForward(model))
        self._way = way
        self._cache = cache
        self._launcher = Launcher(way.forward, way.kernel, cache, int(model.config.vocab_size))
        self._thread = thread
        self._newest: _Job | None = None  # of those that were given to the thread
        self._waiting: _Job | None = None  # the newest, if there was one before it that had not ended
        self._last = LastResult()

    @property
    def layout(self) -> KvLayout:
        return self._cache.layout

    @property
    def num_blocks(self) -> int:
        return self._cache.num_blocks

    async def execute(self, plan: StepPlan) -> StepResult:
        """See `Executor`. A sequence whose inputs, logits or request are at fault is in `failures`."""
        before = self._newest if self._newest is not None and not self._newest.has_ended else None
        job = _Job(plan, before)
        newest, waiting = self._newest, self._waiting
        self._newest, self._waiting = job, job if before is not None else None  # before the thread can look
        try:
            self._thread.submit(self._do, job)
        except RuntimeError:  # it is closed
            self._newest, self._waiting = newest, waiting
            raise
        return await asyncio.wrap_future(job.result)

    def withdraw(self, step_id: int) -> bool:
        """See `Executor`."""
        waiting = self._waiting
        if waiting is None or waiting.plan.step_id != step_id:
            return False
        behind = waiting.behind  # which the thread may forget from now on
        if not waiting.result.cancel():
            return False
        self._newest, self._waiting = behind, None
        return True

    def warm(self, max_num_seqs: int) -> None:
        """In the calling thread, which should be the one that computes: run each kind of step once that takes
        long the first time, decodes for up to `max_num_seqs` sequences, so that no request waits for it.
        Before there are any: what it writes lands in block 0."""
        token = StepSequence(
            seq_id=0, token_ids=token_ids([0]), position_begin=0, kv_begin=0, block_table=(0,), sample=_WARM_SAMPLE
        )
        for count in self._way.warm_tokens:
            self.run(StepPlan(step_id=0, sequences=(replace(token, token_ids=token_ids([0] * count), sample=None),)))
        for context in self._way.warm_contexts:
            self.run(StepPlan(step_id=0, sequences=(_behind(token, context, self.layout.block_size_tokens),)))
        for below, batch in zip((0, *self._way.warm_batches), self._way.warm_batches, strict=False):
            if below < max_num_seqs:
                self.run(StepPlan(step_id=0, sequences=(token,) * batch))
        self._way.settle()

    async def aclose(self) -> None:
        """Wait for a step that still runs, then end the thread."""
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """As `aclose`, for a caller without an event loop."""
        self._thread.shutdown()
        self._way.forward.close()

    def run(self, plan: StepPlan) -> StepResult:
        """One step in the calling thread."""
        return self._run(_Job(plan))

    def _do(self, job: _Job) -> None:
        if job.begin():
            try:
                job.result.set_result(self._run(job))
            except BaseException as error:  # it is told whoever waits for the step; here nobody would see it
                job.result.set_exception(error)

    @torch.inference_mode()
    def _run(self, job: _Job) -> StepResult:
        try:
            try:
                plan = self._last.fill_in(job.plan)
            except NothingToFollow:
                if (
                    job.launched is not None
                ):  # it runs all the same, and has to end before anybody gets what it writes to
                    job.launched.mark.wait()
                raise
            launched = job.launched or self._launcher.launch(plan)
            self._launch_what_follows(launched)
            result = launched.result()
        except (
            torch.AcceleratorError
        ) as error:  # whatever has caused it, every later call to the device would fail, too
            raise DeviceFault(f"{self._cache.device}: {error}") from error
        return self._last.keep(
            result if job.launched is None else _only(result, {part.seq_id for part in plan.sequences})
        )

    def _launch_what_follows(self, launched: Launched) -> None:
        """Until this step has ended, or the one that follows it has been launched."""
        began_s = time.monotonic()
        while not launched.mark.is_reached():
            job = self._following(launched.step_id)
            if job is not None and job.begin():
                with suppress(Exception):  # whatever it is, it comes again in that step's own turn, or has passed
                    job.launched = self._launcher.launch(job.plan, launched)
                return
            time.sleep(max(_LOOK_S, _LOOK_PART * (time.monotonic() - began_s)))

    def _following(self, step_id: int) -> _Job | None:
        """What waits, if it can be launched behind that step."""
        job = self._waiting
        follows = job is not None and job.plan.follows == step_id and not job.has_ended
        return job if follows and job is not None and self._launcher.can_follow(job.plan) else None


def _behind(token: StepSequence, context: int, block_size_tokens: int) -> StepSequence:
    """A part of a prompt, the least that is no decode, behind a context that is one block again and again."""
    table = (0,) * num_blocks_for(context + 2, block_size_tokens)
    return replace(
        token, token_ids=token_ids([0, 0]), position_begin=context, kv_begin=context, block_table=table, sample=None
    )


def _only(result: StepResult, seq_ids: set[int]) -> StepResult:
    """Without the sequences that had failed in the step before, which the device did not know yet."""
    return replace(
        result,
        samples={seq_id: tokens for seq_id, tokens in result.samples.items() if seq_id in seq_ids},
        failures={seq_id: failure for seq_id, failure in result.failures.items() if seq_id in seq_ids},
    )
