"""One step, from its plan to a device that has it, and from there to its result: two halves, so that a device
can be given the next step before this one has ended."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from baton.core.errors import Code, Failure, Reason
from baton.engine.state.step import StepPlan, StepResult, StepSequence
from baton.model.attention.attention_inputs import CausalMasks
from baton.model.attention.paged_attention import PagedKernel
from baton.model.device.async_copy import Mark, download, mark, upload
from baton.model.device.kv_tensors import KvCache
from baton.model.sampling.sampler import Draws, numerical_error, sample
from baton.model.step.forward import Forward
from baton.model.step.step_inputs import BlockTables, Part, pack, prepare
from baton.runtime import failpoints


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A step that the device has been given. `failures`: of sequences that are not in it. `draws`: None if
    `parts` is empty. `finite` [num_tokens], on the host once `mark` is reached: see `Forwarded`."""

    step_id: int
    parts: Sequence[Part]
    failures: Mapping[int, Failure]
    draws: Draws | None
    finite: torch.Tensor
    mark: Mark

    def result(self) -> StepResult:
        """Waits until the device is done. Raises torch.AcceleratorError if it has failed."""
        self.mark.wait()
        failures = dict(self.failures)
        if self.draws is None:
            return StepResult(step_id=self.step_id, samples={}, failures=failures)
        drawn = self.draws.result()
        failures.update(drawn.failures)
        failures.update(
            (seq_id, numerical_error("KV or hidden states that are not numbers")) for seq_id in self._bad_seq_ids()
        )
        samples = {seq_id: tokens for seq_id, tokens in drawn.samples.items() if seq_id not in failures}
        return StepResult(step_id=self.step_id, samples=samples, failures=failures)

    @cached_property
    def drawn_at(self) -> Mapping[int, int]:
        """Of each sequence that samples, where its first token is in `draws.token_ids`."""
        if self.draws is None:
            return {}
        return {seq_id: own.start for (seq_id, _), own in zip(self.draws.asking, self.draws.of_row, strict=True)}

    def drawn_for(self, parts: Sequence[Part]) -> torch.Tensor:
        """The token that each of these, which are in `drawn_at`, goes on from: int64 [len(parts)], on the
        device."""
        assert self.draws is not None
        token_ids = self.draws.token_ids
        return token_ids[
            upload(np.array([self.drawn_at[part.seq_id] for part in parts], dtype=np.int64), token_ids.device)
        ]

    def _bad_seq_ids(self) -> list[int]:
        """Sequences that left something that is not a number."""
        finite = self.finite.numpy()
        if finite.all():
            return []
        ends = np.cumsum([part.token_ids.size for part in self.parts])
        return [
            part.seq_id
            for part, end in zip(self.parts, ends, strict=True)
            if not finite[end - part.token_ids.size : end].all()
        ]


class Launcher:
    """Gives steps to the device of one model and one KV memory, in the calling thread, which is the only one
    that does."""

    def __init__(self, forward: Forward, kernel: PagedKernel, cache: KvCache, vocab_size: int) -> None:
        self._forward, self._kernel, self._cache, self._vocab_size = forward, kernel, cache, vocab_size
        self._masks = CausalMasks(cache.dtype, cache.device)
        self._tables = BlockTables(cache.num_blocks)
        self._failpoints_armed = bool(os.environ.get(failpoints.VARIABLE))

    def launch(self, plan: StepPlan, after: Launched | None = None) -> Launched:
        """`after`: the step that `plan` follows, whose tokens only the device knows; see `can_follow`. A
        sequence that cannot be in a step is in `failures`. Whatever it raises, the device has done by then
        what it was given."""
        try:
            return self._launch(plan, after)
        except Exception:
            mark(self._cache.device).wait()
            raise

    def can_follow(self, plan: StepPlan) -> bool:
        """Whether `plan` can be launched before the tokens that it goes on from are known here: nothing but
        the model asks for them."""
        return not self._failpoints_armed and not any(
            part.sample and part.sample.sampling.has_penalties for part in plan.sequences
        )

    def _launch(self, plan: StepPlan, after: Launched | None) -> Launched:
        failpoints.hit("executor_step", step=plan.step_id)
        self._cache.copy_blocks(plan.block_copies)
        sequences = [one for one in plan.sequences if after is None or one.seq_id in after.drawn_at]
        parts, failures = self._prepared(sequences)
        draws, finite = None, torch.ones(0, dtype=torch.bool)
        if parts:
            step = pack(parts, self._cache, self._masks, self._kernel)
            forwarded = self._forward(step if after is None else replace(step, token_ids=after.drawn_for(parts)))
            finite = download(forwarded.finite)
            sampling = [part for part in parts if part.sample is not None]
            logits = self._poisoned(forwarded.logits, sampling) if self._failpoints_armed else forwarded.logits
            draws = sample(logits, [(part.seq_id, part.sample) for part in sampling if part.sample is not None])
        return Launched(
            step_id=plan.step_id,
            parts=parts,
            failures=failures,
            draws=draws,
            finite=finite,
            mark=mark(self._cache.device),
        )

    def _prepared(self, sequences: Iterable[StepSequence]) -> tuple[list[Part], dict[int, Failure]]:
        failures: dict[int, Failure] = {}
        parts: list[Part] = []
        self._tables.next_step()
        for sequence in sequences:
            try:
                if self._failpoints_armed:
                    for token in dict.fromkeys(sequence.token_ids):
                        failpoints.hit("sequence_step", seq=sequence.seq_id, token=token)
                parts.append(prepare(sequence, self._tables, self._cache.block_size_tokens, self._vocab_size))
            except (
                Exception
            ) as error:  # whatever it is, it is this sequence's: nothing of the others has been touched yet
                message = f"this request's step cannot be prepared: {error}"
                failures[sequence.seq_id] = Failure(code=Code.INTERNAL, reason=Reason.INTERNAL, message=message)
        return parts, failures

    def _poisoned(self, logits: torch.Tensor, sampling: Sequence[Part]) -> torch.Tensor:
        """A failpoint at `logits` that raises makes that sequence's logits NaN, so that the real check is
        what finds them."""
        for row, part in enumerate(sampling):
            try:
                failpoints.hit("logits", seq=part.seq_id, token=int(part.token_ids[-1]))
            except failpoints.FailpointError:
                logits[row] = float("nan")
        return logits
