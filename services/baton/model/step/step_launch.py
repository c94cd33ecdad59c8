"""Launches a step on the device and reads its result later.

The two halves are separate so that the device can be given the next step before this one has ended.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from baton.core.errors import Code, Failure, Reason
from baton.engine.constraints.matcher_executor import MaskClocks
from baton.engine.constraints.token_constraints import TokenConstraints
from baton.engine.state.draft_rows import row_requests
from baton.engine.state.step import SampledToken, StepPlan, StepResult, StepSequence
from baton.model.attention.attention_inputs import CausalMasks
from baton.model.attention.paged_attention import PagedKernel
from baton.model.device.async_copy import DeviceEvent, download, record_event, upload
from baton.model.device.kv_tensors import KvCache
from baton.model.sampling.best_tokens import FindBest, find_best
from baton.model.sampling.prompt_logprobs import PendingPromptLogprobs, prompt_logprobs
from baton.model.sampling.sampler import PendingSamples, numerical_error, sample
from baton.model.step.forward import Forward
from baton.model.step.step_inputs import BlockTables, PreparedSequence, pack, prepare_sequence
from baton.runtime.failpoints import PROCESS_FAILPOINTS, FailpointError, Failpoints

MASK_CLOCKS = MaskClocks(wall_s=time.monotonic, cpu_s=time.thread_time)
"""Clocks by which slow masks are found and deferred."""


@dataclass(frozen=True, kw_only=True)
class LaunchedStep:
    """A step that was given to the device and may still run.

    sequences: those in the batch, in order.
    failures: the sequences that could not be put into the batch, by `seq_id`.
    draws: the tokens being sampled; None if the batch is empty.
    prompt: the logprobs of prompt tokens; None if no sequence reports them.
    constraints: finds the tokens that grammars force after those that were drawn.
    finite: bool [num_tokens], see `ForwardOutput`; on the host, valid once `done` is complete.
    done: complete when the device has computed the step.
    """

    step_id: int
    sequences: Sequence[PreparedSequence]
    failures: Mapping[int, Failure]
    draws: PendingSamples | None
    finite: torch.Tensor
    done: DeviceEvent
    prompt: PendingPromptLogprobs | None = None
    constraints: TokenConstraints | None = None

    def result(self) -> StepResult:
        """Wait for the device and return the step's result. Raises torch.AcceleratorError if the device
        failed."""
        self.done.wait()
        failures = dict(self.failures)
        if self.draws is None:
            return StepResult(step_id=self.step_id, samples={}, failures=failures)
        sampled = self.draws.result()
        failures.update(sampled.failures)
        num_valid = self._num_valid_tokens()
        failures.update(
            (seq_id, numerical_error("NaN or infinite KV or hidden states"))
            for seq_id, number in num_valid.items()
            if not number
        )
        samples = sampled.samples
        if failures or num_valid:
            samples = {
                seq_id: tokens[: num_valid.get(seq_id)] for seq_id, tokens in samples.items() if seq_id not in failures
            }
        deferred = frozenset(seq_id for seq_id in sampled.deferred if seq_id not in failures)
        return StepResult(
            step_id=self.step_id,
            samples=samples,
            failures=failures,
            deferred=deferred,
            prompt_logprobs={} if self.prompt is None else self.prompt.result(),
            forced=self._forced_after(samples),
        )

    @cached_property
    def first_draw(self) -> Mapping[int, int]:
        """Index of each sampling sequence's first token in `draws.token_ids`, by `seq_id`."""
        if self.draws is None:
            return {}
        return {
            seq_id: draws.start
            for (seq_id, _), draws in zip(self.draws.row_requests, self.draws.draws_of_row, strict=True)
        }

    def last_tokens_of(self, sequences: Sequence[PreparedSequence]) -> torch.Tensor:
        """Return the token drawn for each sequence, int64 [len(sequences)], on the device.

        All sequences must be in `first_draw`. Does not wait for the device.
        """
        assert self.draws is not None
        token_ids = self.draws.token_ids
        index = np.array([self.first_draw[sequence.seq_id] for sequence in sequences], dtype=np.int64)
        return token_ids[upload(index, token_ids.device)]

    def _num_valid_tokens(self) -> dict[int, int]:
        """Return how many drawn tokens are valid, of each sequence of which a token is not finite, by
        `seq_id`.

        0 unless only drafts are not finite: then the tokens that were drawn before the first of these.
        """
        finite = self.finite.numpy()
        if finite.all():
            return {}
        found: dict[int, int] = {}
        end = 0
        for sequence in self.sequences:
            begin, end = end, end + sequence.token_ids.size
            if not finite[begin:end].all():
                num_tokens = int(np.argmin(finite[begin:end]))
                found[sequence.seq_id] = max(0, num_tokens - (end - begin - sequence.num_sample_rows))
        return found

    def _forced_after(self, samples: Mapping[int, tuple[SampledToken, ...]]) -> dict[int, tuple[int, ...]]:
        """Return the tokens that grammars force after these, by `seq_id`."""
        if self.constraints is None:
            return {}
        return self.constraints.forced_after(
            (one.seq_id, one.sample, samples.get(one.seq_id, ())) for one in self.sequences if one.sample is not None
        )


class StepLauncher:
    """Launches steps of one model over one KV memory. Only one thread may use it, and no other launches
    steps."""

    def __init__(
        self,
        forward: Forward,
        kernel: PagedKernel,
        cache: KvCache,
        vocab_size: int,
        *,
        constraints: TokenConstraints | None = None,
        find_best: FindBest = find_best,
        record_event: Callable[[torch.device], DeviceEvent] = record_event,
        failpoints: Failpoints = PROCESS_FAILPOINTS,
    ) -> None:
        """`constraints`: prepares grammars and computes masks; None: grammars are refused.
        `find_best`: finds the most likely tokens.
        `record_event`: marks the current end of the device's queue; tests replace it to imitate a slow
        device. `failpoints`: faults to inject into steps."""
        self._forward, self._kernel, self._cache, self._vocab_size = forward, kernel, cache, vocab_size
        self._constraints = constraints or TokenConstraints(vocab_size=vocab_size)
        self._find_best = find_best
        self._record_event = record_event
        self._masks = CausalMasks(cache.dtype, cache.device)
        self._tables = BlockTables(cache.num_blocks, cache.num_tables)
        self._failpoints = failpoints

    def launch(self, plan: StepPlan, after: LaunchedStep | None = None) -> LaunchedStep:
        """Give one step to the device and return without waiting for it.

        `after`: the step that `plan` follows; its tokens are then read on the device, see `can_follow`.
        Sequences that cannot be put into the batch are reported in `failures`. If this raises, it first waits
        until the device has finished everything it was given.
        """
        try:
            return self._launch(plan, after)
        except Exception:
            self._record_event(self._cache.device).wait()
            raise

    def can_follow(self, plan: StepPlan) -> bool:
        """True if `plan` can be launched before the tokens of the step before it are known on the host.

        Penalties, grammars, bad words and failpoints read those tokens on the host, so they prevent it.
        """
        return not self._failpoints.is_armed and not any(
            part.sample and part.sample.sampling.reads_outputs for part in plan.sequences
        )

    def _launch(self, plan: StepPlan, after: LaunchedStep | None) -> LaunchedStep:
        self._failpoints.hit("executor_step", step=plan.step_id)
        self._cache.copy_blocks(plan.block_copies)
        sequences, failures = self._prepared(
            part for part in plan.sequences if after is None or part.seq_id in after.first_draw
        )
        draws, prompt, finite = None, None, torch.ones(0, dtype=torch.bool)
        if sequences:
            sampling = [sequence for sequence in sequences if sequence.sample is not None]
            rows = row_requests((one.seq_id, one.sample) for one in sampling if one.sample is not None)
            self._constraints.begin(rows)  # masks are computed while the forward pass runs
            step = pack(sequences, self._cache, self._masks, self._kernel)
            output = self._forward(step if after is None else replace(step, token_ids=after.last_tokens_of(sequences)))
            finite = download(output.finite)
            logits, prompt = _prompt_apart(output.logits, sequences)
            logits = self._with_failpoints(logits, sampling) if self._failpoints.is_armed else logits
            masks = self._constraints.masks(rows)
            draws = sample(logits, rows, masks=masks, find_best=self._find_best)
        return LaunchedStep(
            step_id=plan.step_id,
            sequences=sequences,
            failures=failures,
            draws=draws,
            prompt=prompt,
            finite=finite,
            done=self._record_event(self._cache.device),
            constraints=self._constraints,
        )

    def _prepared(self, parts: Iterable[StepSequence]) -> tuple[list[PreparedSequence], dict[int, Failure]]:
        failures: dict[int, Failure] = {}
        sequences: list[PreparedSequence] = []
        self._tables.next_step()
        for part in parts:
            try:
                if self._failpoints.is_armed:
                    for token in dict.fromkeys(part.token_ids[: part.num_scheduled_tokens - part.num_drafts]):
                        self._failpoints.hit("sequence_step", seq=part.seq_id, token=token)
                sequences.append(prepare_sequence(part, self._tables, self._cache.block_size_tokens, self._vocab_size))
            except Exception as error:
                # Nothing of the other sequences has been touched, so only this sequence fails.
                message = f"this request's step cannot be prepared: {error}"
                failures[part.seq_id] = Failure(code=Code.INTERNAL, reason=Reason.INTERNAL, message=message)
        return sequences, failures

    def _with_failpoints(self, logits: torch.Tensor, sampling: Sequence[PreparedSequence]) -> torch.Tensor:
        """Set a sequence's logits to NaN if failpoint `logits` raises for it, so that the real check finds
        them."""
        tokens = ((one.seq_id, token) for one in sampling for token in one.token_ids[-one.num_sample_rows :].tolist())
        for row, (seq_id, token) in enumerate(tokens):
            try:
                self._failpoints.hit("logits", seq=seq_id, token=token)
            except FailpointError:
                logits[row] = float("nan")
        return logits


def _prompt_apart(
    logits: torch.Tensor, sequences: Sequence[PreparedSequence]
) -> tuple[torch.Tensor, PendingPromptLogprobs | None]:
    """Return (the logits of the rows that sample, the logprobs of prompt tokens)."""
    requests = [(one.seq_id, one.prompt) for one in sequences if one.prompt is not None]
    if not requests:
        return logits, None
    is_target = np.concatenate(
        [
            [True] * (0 if one.prompt is None else len(one.prompt.targets)) + [False] * one.num_sample_rows
            for one in sequences
        ]
    ).astype(bool)
    of_prompt, of_samples = np.flatnonzero(is_target), np.flatnonzero(~is_target)
    return logits[upload(of_samples, logits.device)], prompt_logprobs(
        logits[upload(of_prompt, logits.device)], requests
    )
