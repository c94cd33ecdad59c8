"""What the engine tells its worker after planning or applying a step."""

from dataclasses import dataclass

from baton.core.errors import Failure
from baton.core.request import FinishReason
from baton.engine.state.step import SampledToken

MEAN_OVER_SAMPLES = 64
"""About so many are remembered in the mean length of an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedSequence:
    """The sequence has all blocks of its `token_ids`, in order; sent once, not again after a preemption. The
    first `num_cached_blocks` hold their KV already; `receiving_block_ids` (pulled sequences only) are the
    rest, which the pull is to fill."""

    seq_id: int
    block_table: tuple[int, ...]
    num_cached_blocks: int
    receiving_block_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillProgress:
    """A `prefill_only` sequence has advanced: the KV of its first `num_computed_tokens` tokens is written,
    full blocks are hashed."""

    seq_id: int
    num_computed_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOutput:
    """New tokens of one sample, `output_index` that of the first (0 = the sample's first output, over all
    attempts). `finish` or `failure` ends the sample: every sample that is not cancelled gets exactly one,
    except that a `prefill_only` one ends with its first token and carries a `finish` only if that token ended
    the sample."""

    seq_id: int
    sample_index: int
    output_index: int
    tokens: tuple[SampledToken, ...] = ()
    finish: FinishReason | None = None
    failure: Failure | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutcome:
    """In the order in which things happened, each kind for itself. May name sequences that were cancelled
    since."""

    admissions: tuple[AdmittedSequence, ...] = ()
    progress: tuple[PrefillProgress, ...] = ()
    outputs: tuple[SequenceOutput, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.admissions or self.progress or self.outputs)

    @property
    def only_continues(self) -> bool:
        """Nothing begins or ends with it: there are tokens of samples that have had some, and will have
        more."""
        begins = self.admissions or self.progress
        return not begins and all(
            out.output_index and out.finish is None and out.failure is None for out in self.outputs
        )


@dataclass(slots=True, kw_only=True)
class EngineCounters:
    """Totals since the start. `cached_tokens` were not computed because another sequence had; what a
    preempted one finds again does not count. `mean_output_tokens`: of the samples that ended here lately (0
    before the first), all attempts counted, without those that ended with a prefill."""

    steps: int = 0
    scheduled_tokens: int = 0
    sampled_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    block_copies: int = 0
    ended_samples: int = 0
    mean_output_tokens: float = 0.0

    def sample_ended(self, num_output_tokens: int) -> None:
        """The first few weigh alike; then each moves the mean by a fixed part."""
        self.ended_samples += 1
        self.mean_output_tokens += (num_output_tokens - self.mean_output_tokens) / min(
            self.ended_samples, MEAN_OVER_SAMPLES
        )
