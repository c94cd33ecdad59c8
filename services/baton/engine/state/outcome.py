"""Results of planning or applying a step, as the engine returns them to its worker."""

from dataclasses import dataclass, field

from baton.core.errors import Failure
from baton.core.kv.block_hash import NO_HASH, BlockHash
from baton.core.request import FinishReason, PromptLogprobs
from baton.engine.retention.content_owner import ContentOwner
from baton.engine.state.step import SampledToken

MEAN_OVER_SAMPLES = 64
"""The mean response length is a moving average over about this many samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedSequence:
    """A sequence was admitted to the batch and got its KV blocks. Sent once per sequence, not again after a
    preemption.

    block_table: its flat block table, see `StepSequence`.
    num_cached_blocks: leading blocks of each table whose KV is in the cache, or that no layer needs any more.
    cached_block_ids: the blocks that were found in the cache.
    receiving_block_ids: the blocks that the pull must fill, in the order of their entries. Empty unless the
        sequence is pulled.
    """

    seq_id: int
    block_table: tuple[int, ...]
    num_cached_blocks: int
    cached_block_ids: tuple[int, ...] = ()
    receiving_block_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GrownSequence:
    """A `prefill_only` sequence got the windowed blocks of its next chunk.

    block_table: its flat block table now. Entries before the window may have become NO_BLOCK.
    """

    seq_id: int
    block_table: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptedSequence:
    """A running sequence has lost its blocks, because too few were free. It is queued again.

    hashes: of its full blocks, whose content is still cached until the blocks are reallocated.
    """

    seq_id: int
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturningSequence:
    """A preempted sequence could be admitted again. It waits until `Engine.returned` is called with `key`.

    hashes: of the leading blocks that may come from a cache.
    tenant_root, owner: as in its `SequenceRequest`.
    """

    key: int
    hashes: tuple[BlockHash, ...]
    tenant_root: BlockHash = NO_HASH
    owner: ContentOwner | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillProgress:
    """Progress of a `prefill_only` sequence.

    The KV of its first `num_computed_tokens` tokens is written, and the hashes of its full blocks are
    published.
    """

    seq_id: int
    num_computed_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOutput:
    """New tokens of one sample, or its end.

    output_index: position of the first new token in the response, over all attempts of the request; starts at
        0.
    finish, failure: one of them is set in the last output of a sample. Every sample that is not cancelled
        gets exactly one. Exception: a `prefill_only` sequence ends with its first token, and has a `finish`
        only if that token ends the response.
    num_cached_tokens: prompt tokens that were found in the cache at the first admission.
    prompt_logprobs: see `TokenDelta`.
    num_draft_tokens: draft tokens that the step has verified. Then all of `tokens` but the last were drafts.
    num_preemptions, num_recomputed_tokens: since its last output; tokens that were computed again after them.
    """

    seq_id: int
    sample_index: int
    output_index: int
    tokens: tuple[SampledToken, ...] = ()
    finish: FinishReason | None = None
    failure: Failure | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None
    num_draft_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutcome:
    """Everything that has happened since the last outcome, each kind in order.

    May name sequences that were cancelled in the meantime.
    """

    admissions: tuple[AdmittedSequence, ...] = ()
    growths: tuple[GrownSequence, ...] = ()
    preemptions: tuple[PreemptedSequence, ...] = ()
    returns: tuple[ReturningSequence, ...] = ()
    progress: tuple[PrefillProgress, ...] = ()
    outputs: tuple[SequenceOutput, ...] = ()

    @property
    def is_empty(self) -> bool:
        """True if nothing has happened."""
        return not (self._moves or self.progress or self.outputs)

    @property
    def only_continues(self) -> bool:
        """True if it has only tokens of samples that neither start nor end with it."""
        return not (self._moves or self.progress) and all(
            out.output_index and out.finish is None and out.failure is None for out in self.outputs
        )

    @property
    def _moves(self) -> bool:
        """True if a sequence got blocks, has lost them, or waits for `Engine.returned`."""
        return bool(self.admissions or self.growths or self.preemptions or self.returns)


@dataclass(slots=True)
class DraftCounts:
    """Draft tokens of one drafter: those that steps have verified, and those of them that became output."""

    verified: int = 0
    accepted: int = 0


@dataclass(slots=True, kw_only=True)
class EngineCounters:
    """Totals since the engine was created.

    cached_tokens: prompt tokens found in the cache at first admission. Re-admission after preemption is not
        counted.
    lost_tokens, recomputed_tokens: tokens whose KV preempted sequences had, and those of them that were not
        in the cache when the sequence was admitted again.
    mean_output_tokens: moving average of the response length, over all attempts of a request; 0 before the
        first sample has ended. `prefill_only` sequences are not counted.
    drafts: draft tokens by the name of their drafter.
    """

    steps: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    lost_tokens: int = 0
    recomputed_tokens: int = 0
    block_copies: int = 0
    ended_samples: int = 0
    mean_output_tokens: float = 0.0
    drafts: dict[str, DraftCounts] = field(default_factory=dict)

    @property
    def draft_tokens(self) -> int:
        """Draft tokens that steps have verified, of all drafters."""
        return sum(counts.verified for counts in self.drafts.values())

    @property
    def accepted_draft_tokens(self) -> int:
        """Draft tokens that became output, of all drafters."""
        return sum(counts.accepted for counts in self.drafts.values())

    def drafts_verified(self, drafter: str, num_drafts: int, num_accepted: int) -> None:
        """Count draft tokens of one drafter that a step has verified."""
        counts = self.drafts.setdefault(drafter, DraftCounts())
        counts.verified += num_drafts
        counts.accepted += num_accepted

    def sample_ended(self, num_output_tokens: int) -> None:
        """Count an ended sample: the plain mean of the first samples, then an exponential moving average."""
        self.ended_samples += 1
        self.mean_output_tokens += (num_output_tokens - self.mean_output_tokens) / min(
            self.ended_samples, MEAN_OVER_SAMPLES
        )
