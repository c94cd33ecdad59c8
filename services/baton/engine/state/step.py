"""The contract between `Engine` and `Executor`: the plan of one forward pass, and its result."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from baton.core.errors import BatonError, Failure
from baton.core.kv.block_hash import TokenIds
from baton.core.kv.kv_layout import KvLayout
from baton.core.request import PromptLogprobs, Sampling, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """Draws one token for each of `sample_indices` from the logits of the sequence's last scheduled token.

    With `drafts` it draws tokens of one sample at several positions (`engine.state.draft_rows`).

    position: position of the token to draw, counted from the first prompt token. Together with the seed and
        the sample index it selects the random noise.
    history: at least the `position` tokens before it, prompt and output. Shared with the engine, which may
        have appended to it: read `tokens_before`.
    num_prompt_tokens: how many of `history` are the prompt.
    banned_token_ids: end tokens that are not allowed because `min_tokens` is not reached.
    drafts: guesses of the tokens at `position` and after it. They are the last of the scheduled tokens, and
        none of them ends the response.
    """

    sampling: Sampling
    sample_indices: tuple[int, ...]
    position: int
    history: TokenIds
    num_prompt_tokens: int
    banned_token_ids: tuple[int, ...] = ()
    drafts: tuple[int, ...] = ()

    @property
    def tokens_before(self) -> TokenIds:
        """The tokens before `position`, read-only."""
        return self.history if len(self.history) == self.position else self.history[: self.position]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRequest:
    """Reports the logprobs of prompt tokens.

    targets: the token after each of the sequence's first scheduled tokens, as far as it is a prompt token.
    num_logprobs: number of most likely tokens to report beside each.
    """

    targets: TokenIds
    num_logprobs: int


def certain_prompt(request: PromptRequest) -> PromptLogprobs:
    """Return the logprobs of a prompt of which each token is certain, for devices without a model."""
    num_tokens = len(request.targets)
    top_ids = array("I", (token_id for token_id in request.targets for _ in range(min(1, request.num_logprobs))))
    return PromptLogprobs(
        num_top=min(1, request.num_logprobs),
        chosen=array("f", [0.0] * num_tokens),
        ranks=array("I", [1] * num_tokens),
        top_ids=top_ids,
        top_values=array("f", [0.0] * len(top_ids)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSequence:
    """The part of a step that belongs to one sequence.

    seq_id: `EngineSequence.key`.
    token_ids: [num_scheduled_tokens] tokens to compute; the last ones are the drafts of `sample`.
    position_begin: position of the first token.
    kv_begin: index in the sequence's KV at which the first token is written. A token attends to all indices
        up to its own, within the window of the layer.
    block_table: flat, see `core.kv.kv_tables`. With T tables, KV index i of table t is in block
        `block_table[i // block_size_tokens * T + t]`.
    sample: the tokens to draw; None while prompt tokens remain.
    prompt: the prompt tokens whose logprobs to report; None if there are none.
    """

    seq_id: int
    token_ids: TokenIds
    position_begin: int
    kv_begin: int
    block_table: tuple[int, ...]
    sample: SampleRequest | None = None
    prompt: PromptRequest | None = None

    @property
    def num_scheduled_tokens(self) -> int:
        """Number of tokens to compute, drafts included."""
        return len(self.token_ids)

    @property
    def num_drafts(self) -> int:
        """Number of draft tokens among them."""
        return 0 if self.sample is None else len(self.sample.drafts)

    @property
    def context_len(self) -> int:
        """KV entries that exist after this step, those of drafts included."""
        return self.kv_begin + len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The plan of one step.

    step_id: number of the step.
    sequences: the sequences in it.
    block_copies: (source, destination) blocks to copy before anything else.
    follows: id of the preceding step, if its result was unknown when this step was planned. The executor then
        replaces each placeholder token by the token that the preceding step draws
        (`engine.scheduling.async_scheduling.LastResult`).
    """

    step_id: int
    sequences: tuple[StepSequence, ...]
    block_copies: tuple[tuple[int, int], ...] = ()
    follows: int | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the step computes."""
        return sum(s.num_scheduled_tokens for s in self.sequences)

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to do."""
        return not self.sequences and not self.block_copies


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """One drawn token of one sample."""

    sample_index: int
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of one step.

    samples: `StepSequence.seq_id` -> new tokens, for each sequence with a `sample`: one per sample index, or,
        with drafts, one to `num_drafts + 1` successive tokens of its one sample. All but the last of these
        equal its drafts, and the KV of drafts that are not among them is meaningless.
    failures: `StepSequence.seq_id` -> failure of a sequence whose logits or request were invalid. It has no
        samples. The results of the other sequences are valid.
    deferred: sequences that draw their tokens in a later step, because their masks are not ready. Their KV is
        written, except in a step that was planned ahead. Their last token must be scheduled again.
    prompt_logprobs: `StepSequence.seq_id` -> logprobs of the targets of its `prompt`.
    forced: `StepSequence.seq_id` -> tokens with which a grammar makes its response continue after `samples`,
        as the tokenizer would write them. The model may write the same text with other tokens.
    """

    step_id: int
    samples: Mapping[int, tuple[SampledToken, ...]]
    failures: Mapping[int, Failure] = field(default_factory=dict)
    deferred: frozenset[int] = frozenset()
    prompt_logprobs: Mapping[int, PromptLogprobs] = field(default_factory=dict)
    forced: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


class DeviceFault(BatonError):
    """The device can run no further step of any sequence. Only a restart of the process helps."""


class NothingToFollow(BatonError):
    """The preceding step has failed, or is not the one that this step follows, so its tokens are missing.

    Work that the device has started for this step has ended when this is raised.
    """


class Executor(Protocol):
    """A device with a model and KV memory.

    It runs one step at a time. One more step may be queued, so that it starts without a pause.
    """

    @property
    def layout(self) -> KvLayout:
        """Layout of the KV memory."""
        ...

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the KV memory."""
        ...

    async def execute(self, plan: StepPlan) -> StepResult:
        """Run one step after the current one. The KV of the step is written when this returns.

        Raises DeviceFault if the device is known to be at fault, and NothingToFollow. Any other exception is
        attributed to a sequence of the step, which the loop finds by running them one by one. If several
        requests fail in a row, the loop attributes it to the device.
        """
        ...

    def withdraw(self, step_id: int) -> bool:
        """Cancel a queued step; its `execute` raises CancelledError.

        Returns False, and changes nothing, if the step is not waiting for another one to end.
        """
        ...

    async def aclose(self) -> None:
        """Release threads and memory after the current step has ended."""
        ...
