"""`Executor` over a real model: each step runs in one dedicated thread, packed, over paged KV memory."""

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from transformers import PreTrainedModel

from baton.core.blocks import token_ids
from baton.core.errors import Code, Failure, LayoutMismatch, Reason
from baton.core.kv_layout import KvLayout
from baton.core.request import Sampling
from baton.engine.ahead import known
from baton.engine.model.attention_step import CausalMasks
from baton.engine.model.forward import ModelForward
from baton.engine.model.kv_cache import KvCache
from baton.engine.model.sampler import numerical_error, sample
from baton.engine.model.step_inputs import Part, pack, prepare
from baton.engine.model.ways import Way
from baton.engine.step import DeviceFault, SampleRequest, StepPlan, StepResult, StepSequence
from baton.runtime import failpoints

_WARM_SAMPLE = SampleRequest(
    sampling=Sampling(max_tokens=1, temperature=0.0), sample_indices=(0,), position=1, history=token_ids([0]), num_prompt_tokens=1
)


class TorchExecutor:
    """One model, one KV memory, one thread. Closing it ends the thread; the KV memory is its giver's."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KvCache,
        *,
        thread: ThreadPoolExecutor,
        way: Way | None = None,
    ) -> None:
        """`model` as `load_model` makes it. `thread`: see `compute_thread`; the executor ends it. `way`: how the model is run; None: by its
        own code, with the reference attention. Raises LayoutMismatch if dtype or device differ."""
        if (model.dtype, model.device) != (cache.dtype, cache.device):
            raise LayoutMismatch(f"a {model.dtype} model on {model.device} cannot use {cache.dtype} KV memory on {cache.device}")
        way = way or Way(name="torch", forward=ModelForward(model))
        self._forward, self._kernel, self._warm_batches = way.forward, way.kernel, way.warm_batches
        self._cache = cache
        self._masks = CausalMasks(cache.dtype, cache.device)
        self._vocab_size = int(model.config.vocab_size)
        self._failpoints_armed = bool(os.environ.get(failpoints.VARIABLE))
        self._thread = thread
        self._last: Future[StepResult] | None = None  # of the steps that were handed to the thread
        self._waiting: tuple[int, Future[StepResult]] | None = None
        self._before: StepResult | None = None
        """Of the last step, where that has ended well."""

    @property
    def layout(self) -> KvLayout:
        return self._cache.layout

    @property
    def num_blocks(self) -> int:
        return self._cache.num_blocks

    async def execute(self, plan: StepPlan) -> StepResult:
        """See `Executor`. A sequence whose inputs, logits or request are at fault is in `failures`."""
        has_to_wait = self._last is not None and not self._last.done()
        self._last = self._thread.submit(self.run, plan)
        self._waiting = (plan.step_id, self._last) if has_to_wait else None
        return await asyncio.wrap_future(self._last)

    def withdraw(self, step_id: int) -> bool:
        """See `Executor`."""
        if self._waiting is None or self._waiting[0] != step_id:
            return False
        (_, waiting), self._waiting = self._waiting, None
        return waiting.cancel()

    def warm(self, max_num_seqs: int) -> None:
        """In the calling thread, which should be the one that computes: run each kind of decode step once that takes long the first time,
        for up to `max_num_seqs` sequences, so that no request waits for it. Before there are any: what it writes lands in block 0."""
        token = StepSequence(seq_id=0, token_ids=token_ids([0]), position_begin=0, kv_begin=0, block_table=(0,), sample=_WARM_SAMPLE)
        for below, batch in zip((0, *self._warm_batches), self._warm_batches, strict=False):
            if below < max_num_seqs:
                self.run(StepPlan(step_id=0, sequences=(token,) * batch))

    async def aclose(self) -> None:
        """Wait for a step that still runs, then end the thread."""
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """As `aclose`, for a caller without an event loop."""
        self._thread.shutdown()
        self._forward.close()

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """One step in the calling thread."""
        before, self._before = self._before, None
        try:
            result = self._run(known(plan, before))
            if self._cache.device.type == "cuda":
                torch.cuda.synchronize(self._cache.device)  # peers read the KV on streams of their own as soon as it is announced
        except torch.AcceleratorError as error:  # whatever has caused it, every later call to the device would fail, too
            raise DeviceFault(f"{self._cache.device}: {error}") from error
        self._before = result
        return result

    def _run(self, plan: StepPlan) -> StepResult:
        failpoints.hit("executor_step", step=plan.step_id)
        self._cache.copy_blocks(plan.block_copies)
        failures: dict[int, Failure] = {}
        parts: list[Part] = []
        for sequence in plan.sequences:
            try:
                if self._failpoints_armed:
                    for token in dict.fromkeys(sequence.token_ids):
                        failpoints.hit("sequence_step", seq=sequence.seq_id, token=token)
                parts.append(prepare(sequence, self._cache, self._vocab_size))
            except Exception as error:  # whatever it is, it is this sequence's: nothing of the others has been touched yet
                message = f"this request's step cannot be prepared: {error}"
                failures[sequence.seq_id] = Failure(code=Code.INTERNAL, reason=Reason.INTERNAL, message=message)
        if not parts:
            return StepResult(step_id=plan.step_id, samples={}, failures=failures)
        forwarded = self._forward(pack(parts, self._cache, self._masks, self._kernel))
        logits, bad_seq_ids = forwarded.logits, forwarded.bad_seq_ids(parts)
        failures.update((seq_id, numerical_error("hidden states that are not numbers")) for seq_id in bad_seq_ids)
        sampling = [part for part in parts if part.sample is not None]
        if self._failpoints_armed:
            logits = self._poisoned(logits, sampling)
        # A sequence already failed is left out by name, not by row: rows of `logits` are those of `sampling`.
        keep = [row for row, part in enumerate(sampling) if part.seq_id not in failures]
        requests = [(sampling[row].seq_id, sampling[row].sample) for row in keep]
        drawn = sample(logits[keep], [(seq_id, request) for seq_id, request in requests if request is not None])
        return StepResult(step_id=plan.step_id, samples=drawn.samples, failures={**failures, **drawn.failures})

    def _poisoned(self, logits: torch.Tensor, sampling: Sequence[Part]) -> torch.Tensor:
        """A failpoint at `logits` that raises makes that sequence's logits NaN, so that the real check is what finds them."""
        for row, part in enumerate(sampling):
            try:
                failpoints.hit("logits", seq=part.seq_id, token=int(part.token_ids[-1]))
            except failpoints.FailpointError:
                logits[row] = float("nan")
        return logits
