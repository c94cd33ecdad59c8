"""What one forward pass is asked to do and what it answers: the contract between the integers (`Engine`) and
a device (`Executor`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from baton.core.errors import BatonError, Failure
from baton.core.kv.block_hash import TokenIds
from baton.core.kv.kv_layout import KvLayout
from baton.core.request import Sampling, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """Draw one token for each of `sample_indices` from the logits of the sequence's last scheduled token.

    `position`: that of the token to be drawn, counted from the first prompt token; with the seed and the
    sample index it keys the noise. `history`: prompt and outputs so far (`num_prompt_tokens` of them prompt),
    for penalties; shared with the engine, not to be written. `banned_token_ids`: ends of text that
    `min_tokens` forbids yet.
    """

    sampling: Sampling
    sample_indices: tuple[int, ...]
    position: int
    history: TokenIds
    num_prompt_tokens: int
    banned_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSequence:
    """One sequence's part of a step. `token_ids` [num_scheduled_tokens] stand at positions `position_begin`,
    …; their KV is written at indices `kv_begin`, … of the sequence's cache: index i lies in block
    `block_table[i // block_size_tokens]`. Each token attends to every index up to its own (within the layer's
    window). `sample` is None while prompt tokens remain."""

    seq_id: int
    token_ids: TokenIds
    position_begin: int
    kv_begin: int
    block_table: tuple[int, ...]
    sample: SampleRequest | None = None

    @property
    def num_scheduled_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def context_len(self) -> int:
        """KV entries that exist once this step is done."""
        return self.kv_begin + len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step. `block_copies` (source, destination) are done before anything else. `follows`: the step
    before it, whose result was not known when this one was planned: each of its sequences goes on by the one
    token that step draws for it (`ahead.LastResult`)."""

    step_id: int
    sequences: tuple[StepSequence, ...]
    block_copies: tuple[tuple[int, int], ...] = ()
    follows: int | None = None

    @property
    def num_tokens(self) -> int:
        return sum(s.num_scheduled_tokens for s in self.sequences)

    @property
    def is_empty(self) -> bool:
        return not self.sequences and not self.block_copies


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    sample_index: int
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """`samples` has, for each sequence with a `sample`, its new tokens in order (one for each sample index).
    A sequence in `failures` has none: its logits or its request were at fault, the others' results stand."""

    step_id: int
    samples: Mapping[int, tuple[SampledToken, ...]]
    failures: Mapping[int, Failure] = field(default_factory=dict)


class DeviceFault(BatonError):
    """The device will run no step any more, whosever it is: only a new process helps."""


class NothingToFollow(BatonError):
    """The step that this one was to follow has failed, or was another: what it was to go on from does not
    exist. Whatever the device was given of it has ended."""


class Executor(Protocol):
    """A device with a model and KV memory. It runs one step at a time, and one more may wait meanwhile, to
    begin without a pause."""

    @property
    def layout(self) -> KvLayout: ...

    @property
    def num_blocks(self) -> int: ...

    async def execute(self, plan: StepPlan) -> StepResult:
        """Run one step, after the one that runs now; when it returns, the step's KV is written. Raises
        DeviceFault where the device is known to be at fault, and NothingToFollow. Whatever else it raises is
        a sequence's, which the loop finds; or the device's after all, if different requests fail in a row."""
        ...

    def withdraw(self, step_id: int) -> bool:
        """That step is not to be run: its `execute` is cancelled. False, and nothing has changed, unless it
        waits for another to end."""
        ...

    async def aclose(self) -> None: ...
