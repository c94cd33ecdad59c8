"""Defines the numbers that the scheduler keeps of each worker.

They come in three groups: what the worker has reported, what is left after this scheduler's own placements,
and the seconds that are predicted from both.
"""

from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
"""One number per worker, sorted by worker id, unless stated otherwise."""
Mask: TypeAlias = npt.NDArray[np.bool_]
"""One truth value per worker, sorted by worker id."""

NO_COSTS, PEER_COSTS, MEASURED_COSTS = 0.0, 0.5, 1.0
"""Values of `ReportedState.cost_source`."""


N = TypeVar("N", Floats, float)


@dataclass(slots=True)
class ReportedState(Generic[N]):
    """Numbers taken from the workers' reports alone.

    Never changed after construction, like the next two classes.

    They are not `frozen`, because that would make their construction, twice per decision, three times as
    slow. The step costs are corrected by the live factors of the step kind that a prompt would meet at the
    worker: mixed if sequences decode there, prefill otherwise.
    """

    kv_group: N  # index into `WorkerTable.kv_groups`
    is_ready: N  # 1 or 0
    can_prefill: N  # 1 or 0, by role
    block_size_tokens: N
    total_blocks: N  # blocks of tokens of the longest sequence that fits
    max_prefill_tokens: N  # prompts must be shorter than this to be prefilled here; 0 if not ready or by role
    max_decode_tokens: N  # the same for decoding
    decoding_seqs: N  # running sequences that decode; 0 on prefill workers, where they end with the first token
    decoding_context_tokens: N  # sum of their contexts
    joining_seqs_unknown: N  # waiting sequences of unknown length: assumed to be as long as the new prompt
    max_chunk_tokens: N  # largest chunk of a prompt in one step
    target_step_s: N  # longest mean step that the running requests' TPOT targets allow; 0 if they limit nothing
    max_num_seqs: N
    mean_output_tokens: N
    recent_prefill_share: N  # share of the time of decoding steps that went to prompts; at most `MAX_PREFILL_SHARE`
    evicted_reuse: N  # evicted blocks that are computed again, per block that is stored
    tokens_per_step: N  # tokens of a decoding sequence in the time of a step without drafts; at least 1
    ttft_factor: N  # factor of the TTFT targets of requests without an SLO (`core.step_targets`)
    tpot_factor: N
    default_link_s_per_byte: N  # expected for a peer that was never read from
    host_reload_s_per_byte: N  # of KV that the worker reloads from host memory; 0 if not known
    disk_reload_s_per_byte: N  # of KV that it reloads from its disk; 0 if not known
    host_reload_start_s: N  # fixed time of a reload from host memory, and that of the reloads under way
    disk_reload_start_s: N  # the same from its disk
    default_link_exposed_s: N  # the same for what a pull takes beyond its bytes (`Links.exposed_s`)
    cost_source: N  # `NO_COSTS`, `PEER_COSTS` (estimated from other workers) or `MEASURED_COSTS`
    mixed_decode_s: N  # time that the decoding sequences add to a mixed step
    base_step_s: N  # fixed time of a step with prefill
    prefill_token_s: N
    prefill_attended_s: N
    decode_step_s: N  # fixed time of a step without prefill
    decode_seq_s: N
    decode_context_s: N
    mixed_to_decode_ratio: N  # correction factor of mixed steps over that of decode steps


@dataclass(slots=True)
class ReservedState(Generic[N]):
    """Numbers from the reports plus this scheduler's own placements that no report contains yet."""

    free_blocks: N  # blocks of tokens of the longest sequence that fits now
    free_tokens: N  # the same in tokens
    free_seqs: N  # free batch slots
    joining_seqs: N  # sequences placed here that do not run yet
    joining_context_tokens: N  # sum of their contexts; reported ones count with the mean of the decoding ones
    queued_tokens: N  # prompt tokens waiting for prefill
    queued_attended_tokens: N  # (query, context) pairs of these tokens
    tpot_slo_s: N  # strictest TPOT SLO of the requests placed there; 0 without any


@dataclass(slots=True)
class DerivedState(Generic[N]):
    """Predicted seconds that are the same for every new prompt."""

    mixed_step_s: N  # a step that decodes but computes nothing of the new prompt
    queued_prefill_s: N  # prefill compute of all queued prompts, without the decode part of those steps
    joined_step_s: N  # decode part of a mixed step once the joining sequences decode; 0 if there are none
    longest_step_s: N  # longest mean step that TPOT targets allow (`state.shared_steps`); inf if they limit nothing
    decode_drain_s: N  # time in which all but 1/e of the decoding sequences end
    queue_s: N  # time until all queued prompts are computed


@dataclass(slots=True)
class WorkerData(Generic[N]):
    """All numbers of one worker (`WorkerData[float]`) or of all workers (`WorkerTable`).

    Scalars exist because numpy takes ten times as long as Python for a single number.
    """

    reported: ReportedState[N]
    reserved: ReservedState[N]
    derived: DerivedState[N]


WorkerRow: TypeAlias = WorkerData[float]
